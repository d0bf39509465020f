"""Who may import whom (DESIGN §3): the build fails with the offending line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "duplexd"
ROOTS = {"units", "ids", "errors", "clock", "config", "messages", "channel", "weights"}
ALLOWED = {
    "root": set(),
    "memory": set(),
    "streams": {"memory"},
    "media": set(),
    "engine": {"streams", "memory", "media"},
    "webrtc": {"media"},
    "models": {"streams", "memory", "media"},
    # A second world around the core, and a model that only it runs.
    "simulation": {"engine", "streams", "memory", "media"},
    # Benches of a whole daemon need only its sounds; benches of the engine's insides measure them directly.
    "bench": {"engine", "streams", "memory", "media", "simulation"},
}
#: Modules of the core may import none of these: time, effects and tensors come from the world.
FORBIDDEN_IN_CORE = {"torch", "asyncio", "threading", "socket", "time", "random", "select", "subprocess"}
CORE_PACKAGES = {"engine": {"live", "process", "simulator", "trace"}, "memory": {"arena", "tiers"}}
CORE_MODULES = {
    ("streams", "stage"),
    ("streams", "graph"),
    ("streams", "fence"),
    ("media", "playout"),
    ("media", "line"),
}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of everything a file imports while it runs; imports for type checkers do not count."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for child in block.body
        for node in ast.walk(child)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            if node.module == "duplexd":
                yield from ((node.lineno, f"duplexd.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module or ""


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else "root"


def place(path: Path) -> tuple[str, str]:
    return package_of(path), path.stem


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    package = package_of(path)
    if place(path) in {("root", name) for name in ("__main__", "doctor", "plan", "drawing", "top")}:
        return  # The command line may import anything public.
    for line, name in imports(path):
        if not name.startswith("duplexd."):
            continue
        target = name.split(".")[1]
        fine = target in ROOTS or target == package or target in ALLOWED[package] or target == "__version__"
        assert fine, f"{path}:{line} imports {name}: {package} may import {sorted(ALLOWED[package])} and the root"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_core_has_no_clock_no_socket_and_no_tensor(path: Path) -> None:
    package, module = place(path)
    core = (package in CORE_PACKAGES and module not in CORE_PACKAGES[package]) or (package, module) in CORE_MODULES
    if not core:
        return
    for line, name in imports(path):
        assert name.split(".")[0] not in FORBIDDEN_IN_CORE, f"{path}:{line} imports {name}: this module is pure"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_time_is_imported_in_one_file(path: Path) -> None:
    if path == ROOT / "clock.py":
        return
    for line, name in imports(path):
        assert name.split(".")[0] != "time", f"{path}:{line} imports time: take `now` as an argument, or use clock"


def test_the_front_end_is_free_of_torch() -> None:
    """The media process must not pay for, or wait for, tensors."""
    for path in modules():
        if package_of(path) in {"webrtc", "media"}:
            for line, name in imports(path):
                assert name.split(".")[0] != "torch", f"{path}:{line} imports torch"
