"""The cache folder: $OCTAVO_CACHE, or ~/.cache/octavo. Everything in it can be made again."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from ...errors import ModelError


def cache_folder(override: str | os.PathLike[str] | None = None) -> Path:
    """The folder that downloads and conversions are kept in; it need not exist yet."""
    if override is not None:
        return Path(override).expanduser()
    named = os.environ.get("OCTAVO_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "octavo"


def storage_error(error: OSError, path: Path, doing: str) -> ModelError:
    """A typed error for a folder that cannot be written, saying which and what helps."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelError(
            f"{doing}: the disk is full ({error.strerror}); free some space or set OCTAVO_CACHE to a folder "
            "on another disk",
            file=path,
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ModelError(
            f"{doing}: the folder cannot be written ({error.strerror}); set OCTAVO_CACHE to one that can", file=path
        )
    return ModelError(
        f"{doing}: {error.strerror or error}; set OCTAVO_CACHE to another folder if this one is at fault", file=path
    )


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_atomic(path: Path, blocks: Iterable[bytes]) -> None:
    """Write a file so that readers see all of it or none: temporary file beside it, then rename. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            for block in blocks:
                out.write(block)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
