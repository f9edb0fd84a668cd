"""Fetching files over HTTP into the cache: resumed where the last try stopped, checked, put in place in one rename."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import json
import os
import re
import shutil
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from ...errors import ModelError
from .cache import file_sha256, storage_error

BLOCK_BYTES = 1 << 20
TIMEOUT_S = 30.0
TRIES = 5  # in a row without a byte of progress


class Progress:
    """A bar on stderr that counts bytes, or nothing at all."""

    def __init__(self, title: str, total_bytes: int | None, *, shown: bool, done_bytes: int = 0) -> None:
        self._bar: Any = None
        if shown:
            from tqdm import tqdm  # type: ignore[import-untyped]

            self._bar = tqdm(
                total=total_bytes, initial=done_bytes, desc=title, unit="B", unit_scale=True, unit_divisor=1000
            )

    def add(self, count: int) -> None:
        if self._bar is not None:
            self._bar.update(count)

    def reach(self, count: int) -> None:
        if self._bar is not None:
            self._bar.update(max(0, min(count, self._bar.total or count) - self._bar.n))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Make the folder and hold its lock, so that two processes do not fetch the same thing twice.

    Raises `ModelError` if it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = open(folder / ".lock", "a+b")
    except OSError as error:
        raise storage_error(error, folder, "cannot keep the model") from None
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def need_space(folder: Path, needed_bytes: int) -> None:
    """Raise `ModelError` if the disk under an existing folder has less room than a download needs."""
    free = shutil.disk_usage(folder).free
    if needed_bytes > free:
        raise ModelError(
            f"the disk is full: {needed_bytes / 1e6:.0f} MB are needed, {free / 1e6:.0f} MB are free; make room or set "
            "OCTAVO_CACHE to a folder on another disk",
            file=folder,
        )


@dataclass(eq=False)
class HttpFailure(Exception):
    """A refusal by the server (`status`), or none at all (`status` 0): callers turn it into a typed error."""

    status: int
    reason: str
    code: str = ""  # the hub's X-Error-Code
    url: str = ""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows to another host without the token, and remembers what the hub said about the file on the way."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        self.headers.update({key.lower(): value for key, value in headers.items() if key.lower().startswith("x-")})
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None and urllib.parse.urlsplit(newurl).netloc != urllib.parse.urlsplit(req.full_url).netloc:
            new.remove_header("Authorization")
        return new


@lru_cache(maxsize=4)
def _context(bundle: str | None) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=bundle if bundle and Path(bundle).is_file() else None)


@contextlib.contextmanager
def http_get(url: str, headers: Mapping[str, str]) -> Iterator[tuple[int, dict[str, str], IO[bytes]]]:
    """(status, headers with small letters, body). Raises `HttpFailure`; proxies come from the environment."""
    redirects = _Redirects()
    bundle = os.environ.get("SSL_CERT_FILE") or os.environ.get("REQUESTS_CA_BUNDLE")
    opener = urllib.request.build_opener(redirects, urllib.request.HTTPSHandler(context=_context(bundle)))
    request = urllib.request.Request(url, headers={"User-Agent": "octavo", **headers})
    try:
        response = opener.open(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        with error:
            raise HttpFailure(error.code, str(error.reason), error.headers.get("X-Error-Code", ""), url) from None
    except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
        raise HttpFailure(0, str(getattr(error, "reason", error)), url=url) from None
    with response:
        found = {key.lower(): value for key, value in response.headers.items()}
        yield response.status, {**found, **redirects.headers}, response


def fetch_file(url: str, target: Path, *, headers: Mapping[str, str], progress: bool, title: str) -> dict[str, str]:
    """Download to `target`, continuing a former try of the same version. Returns the response's headers.

    A file whose server names its SHA-256 (the hub's `X-Linked-Etag`) is checked against it. Raises `HttpFailure`
    for refusals and lost connections, `ModelError` for a full or read-only disk and for wrong content.
    """
    partial, note = target.with_name(target.name + ".incomplete"), target.with_name(target.name + ".incomplete.json")
    failures = 0
    while True:
        before = partial.stat().st_size if partial.exists() else 0
        try:
            found = _fetch_once(url, partial, note, dict(headers), progress, title)
            break
        except HttpFailure as failure:
            after = partial.stat().st_size if partial.exists() else 0
            failures = 0 if after > before else failures + 1
            if failure.status in (0, 408, 429, 500, 502, 503, 504) and failures < TRIES and (after or failure.status):
                time.sleep(min(4.0, 0.25 * 2**failures))
                continue
            raise
        except OSError as error:
            raise storage_error(error, target, "cannot keep the model") from None
    digest = found.get("x-linked-etag", "").strip('"')
    if re.fullmatch(r"[0-9a-f]{64}", digest) and file_sha256(partial) != digest:
        partial.unlink()
        raise ModelError(f"downloaded, but its SHA-256 is not {digest}; try again", file=target)
    os.replace(partial, target)
    note.unlink(missing_ok=True)
    return found


def _fetch_once(
    url: str, partial: Path, note: Path, headers: dict[str, str], progress: bool, title: str
) -> dict[str, str]:
    have, version = (partial.stat().st_size, _read_note(note)) if partial.exists() else (0, "")
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        with http_get(url, headers) as (status, found, body):
            etag = found.get("x-linked-etag") or found.get("etag", "")
            if status == 206 and version and etag != version:  # another version now: what is here does not belong to it
                partial.unlink()
                raise HttpFailure(503, "the file changed on the server while it was fetched", url=url)
            start = have if status == 206 else 0
            length = found.get("content-length")
            total = start + int(length) if length is not None and length.isdigit() else None
            if total is not None:
                need_space(partial.parent, total - start)
            note.write_text(json.dumps({"etag": etag}))
            with open(partial, "r+b" if start else "wb") as out:
                out.seek(start)
                bar = Progress(title, total, shown=progress, done_bytes=start)
                try:
                    end = start + _copy(body, out, bar, url)
                finally:
                    bar.close()
            if total is not None and end < total:
                raise HttpFailure(0, f"the connection closed after {end} of {total} bytes", url=url)
            return found
    except HttpFailure as failure:
        if failure.status == 416:  # nothing is left to send, or what is here is longer than the file
            partial.unlink()
            raise HttpFailure(503, "the part that was kept does not fit the file", url=url) from None
        raise


def _copy(body: IO[bytes], out: IO[bytes], bar: Progress, url: str) -> int:
    done = 0
    while True:
        try:
            block = body.read(BLOCK_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise HttpFailure(0, f"the connection broke: {error}", url=url) from None
        if not block:
            return done
        out.write(block)
        done += len(block)
        bar.add(len(block))


def _read_note(note: Path) -> str:
    try:
        return str(json.loads(note.read_text()).get("etag", ""))
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""


def copy_checked(source: IO[bytes], target: Path, sha256: str, what: str) -> None:
    """Write a stream to `target` in one rename if its SHA-256 is right; else raise `ModelError` and leave nothing."""
    temporary = target.with_name(f"{target.name}.writing")
    digest = hashlib.sha256()
    try:
        with open(temporary, "wb") as out:
            while block := source.read(BLOCK_BYTES):
                digest.update(block)
                out.write(block)
        if digest.hexdigest() != sha256:
            raise ModelError(
                f"{what}: SHA-256 is {digest.hexdigest()}, expected {sha256}; nothing was kept", file=target
            )
        os.replace(temporary, target)
    except OSError as error:
        raise storage_error(error, target, "cannot keep the model") from None
    finally:
        temporary.unlink(missing_ok=True)
