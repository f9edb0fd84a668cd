"""Models by name: the known ones, and repositories of a Hugging Face hub ("org/name").

The hub is spoken to directly (HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE mean what they mean to other tools), because a
download of gigabytes has to go on where it stopped, also in the next process. What other tools have already put
into the hub's own cache is used from there.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ModelError, ModelNotFound
from .cache import cache_folder, write_atomic
from .download import HttpFailure, fetch_file, http_get, locked_folder
from .hf_config import architecture_of, read_json
from .packages import KNOWN_MODELS, fetch_known, is_cached, known_path

HUB_ID = re.compile(r"^(?P<repo>[\w][\w.-]*/[\w][\w.-]*?)(?:/(?P<file>[\w./-]+\.gguf)|:(?P<quant>[\w.-]+))?$", re.ASCII)
COMPLETE = ".octavo-complete.json"
COMPLETE_FORMAT = 1
_OPTIONAL = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja", "chat_template.json")
_SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class ListedModel:
    """One line of `octavo models`."""

    name: str
    title: str
    path: Path | None  # where it is, or None if it has yet to be fetched
    size_bytes: int  # on disk, or what a fetch brings
    licence: str


def pull(
    name: str,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    accept_license: bool = False,
    progress: bool = True,
    verify: bool = False,
) -> Path:
    """The local file or folder of a known name or a hub id, fetched if it is not in the cache yet.

    `verify` hashes what is in the cache and fetches it again if it is wrong. Raises `ModelNotFound` for a name that
    nobody knows, `LicenseNotAccepted`, or `ModelError`.
    """
    cache = cache_folder(cache_dir)
    known = KNOWN_MODELS.get(name.lower())
    if known is not None:
        return fetch_known(known, cache, accept_license=accept_license, progress=progress, verify=verify)
    match = HUB_ID.match(name)
    if match is None or ".." in name:
        raise unknown(name)
    return Repository(match["repo"], cache, progress=progress).fetch(match["file"], match["quant"], fresh=verify)


def unknown(name: str) -> ModelNotFound:
    return ModelNotFound(
        f"unknown model {name!r}: no such file or folder, and no known name; known names are "
        f"{', '.join(KNOWN_MODELS)}; or pass a .gguf file, a safetensors folder or a hub id like org/name"
    )


def list_models(cache_dir: str | os.PathLike[str] | None = None) -> list[ListedModel]:
    """The known names, cached or not, and every hub repository in the cache folder."""
    cache = cache_folder(cache_dir)
    out = []
    for model in KNOWN_MODELS.values():
        path = known_path(model, cache) if is_cached(model, cache) else None
        out.append(ListedModel(model.name, model.title, path, model.size_bytes, model.licence))
    for note in sorted((cache / "hub").glob(f"*/*/{COMPLETE}")):
        folder = note.parent
        size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        name = f"{folder.parent.name}/{folder.name}"
        out.append(ListedModel(name, "from the hub", folder, size, "see the hub"))
    return out


class Repository:
    """One repository of the hub and its folder in the cache."""

    def __init__(self, repo: str, cache: Path, *, progress: bool) -> None:
        self.repo, self.progress = repo, progress
        self.folder = cache / "hub" / repo
        self.endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        self._revision = "main"

    def fetch(self, file: str | None, quant: str | None, *, fresh: bool = False) -> Path:
        """The folder (safetensors) or the file (GGUF), from the cache if it is complete there."""
        kept = self._kept(file, quant)
        if kept is not None and not fresh:
            return kept
        if _offline():
            raise ModelError(f"{self.repo} is not in the cache and HF_HUB_OFFLINE is set; unset it to fetch the model, "
                             "or pass a local path", file=self.folder)  # fmt: skip
        with locked_folder(self.folder):
            kept = self._kept(file, quant)
            if kept is not None and not fresh:
                return kept
            try:
                return self._fetch(file, quant)
            except HttpFailure as failure:
                error = self._explain(failure)
        if isinstance(error, ModelNotFound):
            self._forget()
        raise error

    def _forget(self) -> None:
        """Leave nothing behind for a repository that does not exist."""
        with suppress(OSError):
            (self.folder / ".lock").unlink()
            self.folder.rmdir()
            self.folder.parent.rmdir()

    # -- cache -------------------------------------------------------------------------------------------------------

    def _kept(self, file: str | None, quant: str | None) -> Path | None:
        note = _note(self.folder)
        names = [str(name) for name in note.get("files", [])]
        if names and note.get("format") == COMPLETE_FORMAT and all((self.folder / name).exists() for name in names):
            if file is None and quant is None:
                return _main_path(self.folder, names)
            wanted = [name for name in names if name == file or (quant is not None and _is_quant(name, quant))]
            if wanted:
                return self.folder / sorted(wanted)[0]
        return self._foreign_cache(file, quant)

    def _foreign_cache(self, file: str | None, quant: str | None) -> Path | None:
        """A complete snapshot in the hub's own cache, made by another tool."""
        root = os.environ.get("HF_HUB_CACHE") or str(_hf_home() / "hub")
        base = Path(root).expanduser() / f"models--{self.repo.replace('/', '--')}"
        with suppress(OSError):
            snapshot = base / "snapshots" / (base / "refs" / "main").read_text().strip()
            names = [p.relative_to(snapshot).as_posix() for p in snapshot.rglob("*") if p.is_file()]
            if file is not None or quant is not None:
                wanted = [n for n in names if n == file or (quant is not None and _is_quant(n, quant))]
                complete = [n for n in wanted if all(part in names for part in _all_parts(n))]
                return snapshot / sorted(complete)[0] if complete else None
            return snapshot if _complete_folder(snapshot, names) else None
        return None

    def _finish(self, names: list[str]) -> None:
        former = [n for n in _note(self.folder).get("files", []) if n.endswith(".gguf") and (self.folder / n).exists()]
        files = sorted({*names, *(former if all(n.endswith(".gguf") for n in names) else [])})
        note = {"format": COMPLETE_FORMAT, "repo": self.repo, "revision": self._revision, "files": files}
        write_atomic(self.folder / COMPLETE, [json.dumps(note, indent=1).encode()])

    # -- network -----------------------------------------------------------------------------------------------------

    def _fetch(self, file: str | None, quant: str | None) -> Path:
        if file is not None or quant is not None:
            return self._fetch_gguf(file, quant)
        if not self._get("config.json", optional=True):
            if self._get("adapter_config.json", optional=True):
                raise ModelError("a LoRA adapter (adapter_config.json) is not supported; merge it into its base model",
                                 file=self.repo)  # fmt: skip
            return self._fetch_gguf(None, None)
        config_path = self.folder / "config.json"
        values = read_json(config_path)
        if self._get("model.safetensors.index.json", optional=True):
            weight_map = read_json(self.folder / "model.safetensors.index.json").get("weight_map")
            shards = sorted(set(weight_map.values())) if isinstance(weight_map, Mapping) else []
            if not shards or any(Path(shard).name != shard for shard in shards):
                raise ModelError(
                    "weight_map is missing or malformed", file=self.folder / "model.safetensors.index.json"
                )
            names = ["model.safetensors.index.json"]
        else:
            shards, names = ["model.safetensors"], []
        architecture_of(values, config_path)  # refuse what is not supported before gigabytes are fetched
        if not self._get("tokenizer.json", optional=True):
            if not names and self._ggufs():
                return self._fetch_gguf(None, None)
            raise ModelError("missing on the hub: a model needs its tokenizer", file=f"{self.repo}/tokenizer.json")
        for shard in shards:
            if not self._get(shard, optional=shard == "model.safetensors"):
                if self._ggufs():
                    return self._fetch_gguf(None, None)
                raise ModelError("no safetensors and no GGUF file in this repository", file=self.repo)
        extra = [name for name in _OPTIONAL if self._get(name, optional=True)]
        self._finish(["config.json", "tokenizer.json", *names, *shards, *extra])
        return self.folder

    def _fetch_gguf(self, file: str | None, quant: str | None) -> Path:
        if file is None:
            file = self._choose(self._ggufs(), quant)
        parts = _all_parts(file)
        for part in parts:
            self._get(part)
        self._finish(parts)
        return self.folder / parts[0]

    def _ggufs(self) -> list[str]:
        """First files of the repository's GGUF models (of a split one, the first part)."""
        url = f"{self.endpoint}/api/models/{self.repo}"
        with http_get(url, _auth()) as (_, _, body):
            try:
                siblings = json.loads(body.read()).get("siblings", [])
                names = [str(row["rfilename"]) for row in siblings]
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise ModelError(f"the hub's answer at {url} is not a file list", file=self.repo) from None
        found = [n for n in names if n.endswith(".gguf") and "mmproj" not in n.lower()]
        return [n for n in found if not _SPLIT.search(n) or re.search(r"-00001-of-\d{5}\.gguf$", n)]

    def _choose(self, names: list[str], quant: str | None) -> str:
        wanted = names if quant is None else [n for n in names if _is_quant(n, quant)]
        if len(wanted) == 1:
            return wanted[0]
        if not names:
            raise ModelError("no config.json and no GGUF file in this repository", file=self.repo)
        what = f"no GGUF file matches {quant!r}" if not wanted else f"{len(wanted)} GGUF files match"
        raise ModelError(
            f"{what}; allowed: {', '.join(f'{self.repo}/{name}' for name in sorted(names))}", file=self.repo
        )

    def _get(self, name: str, *, optional: bool = False) -> bool:
        """Fetch one file into the folder. False if it is optional and the repository does not have it."""
        target = self.folder / name
        url = f"{self.endpoint}/{self.repo}/resolve/{self._revision}/{name}"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            found = fetch_file(url, target, headers=_auth(), progress=self.progress and not name.endswith(".json"),
                               title=name)  # fmt: skip
        except HttpFailure as failure:
            if optional and failure.status == 404 and failure.code in ("", "EntryNotFound"):
                return False
            raise
        commit = found.get("x-repo-commit", "")
        if re.fullmatch(r"[0-9a-f]{40}", commit):  # all files of one version, even if the branch moves meanwhile
            self._revision = commit
        return True

    def _explain(self, failure: HttpFailure) -> ModelError:
        if failure.status in (401, 403):
            said = "the token was refused" if _token() else "no token was given"
            return ModelError(
                f"the hub answered {failure.status} ({failure.code or failure.reason}): {self.repo} is gated or "
                f"private, or does not exist, and {said}. Accept its terms at {self.endpoint}/{self.repo}, make a "
                f"token at {self.endpoint}/settings/tokens and set HF_TOKEN"
            )
        if failure.status == 404:
            return ModelNotFound(
                f"the hub at {self.endpoint} has nothing at {failure.url.removeprefix(self.endpoint)}; "
                f"known names are {', '.join(KNOWN_MODELS)}"
            )
        if failure.status == 0:
            return ModelError(
                f"{failure.url}: {failure.reason}; the hub could not be reached or hung up. What has arrived is kept: "
                "try again to go on, or pass a local path"
            )
        return ModelError(f"{failure.url}: the hub answered {failure.status} ({failure.reason}); try again later")


def _note(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        value = json.loads((folder / COMPLETE).read_text())
        return value if isinstance(value, dict) else {}
    return {}


def _main_path(folder: Path, names: list[str]) -> Path | None:
    if "config.json" in names:
        return folder
    firsts = [n for n in names if n.endswith(".gguf") and (not _SPLIT.search(n) or "-00001-of-" in n)]
    return folder / firsts[0] if len(firsts) == 1 else None


def _complete_folder(folder: Path, names: list[str]) -> bool:
    if "config.json" not in names or "tokenizer.json" not in names:
        return False
    if "model.safetensors.index.json" in names:
        with suppress(ModelError, AttributeError):
            shards = read_json(folder / "model.safetensors.index.json").get("weight_map", {}).values()
            return bool(shards) and set(shards) <= set(names)
        return False
    return "model.safetensors" in names


def _is_quant(name: str, quant: str) -> bool:
    return (
        name.endswith(".gguf") and re.search(rf"(^|[._/-]){re.escape(quant)}([._-]|$)", name, re.IGNORECASE) is not None
    )


def _all_parts(name: str) -> list[str]:
    match = _SPLIT.search(name)
    if match is None:
        return [name]
    stem = name[: match.start()]
    return [f"{stem}-{part:05d}-of-{match[1]}.gguf" for part in range(1, int(match[1]) + 1)]


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def _hf_home() -> Path:
    return Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface")).expanduser()


def _token() -> str | None:
    token = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    if not token:
        with suppress(OSError):
            token = Path(os.environ.get("HF_TOKEN_PATH", _hf_home() / "token")).read_text()
    return token.strip() or None if token else None


def _auth() -> dict[str, str]:
    token = _token()
    return {"Authorization": f"Bearer {token}"} if token else {}
