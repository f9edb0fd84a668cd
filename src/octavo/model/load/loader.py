"""`load_model`: from what the user typed to a validated checkpoint."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ...errors import ModelError, ModelNotFound
from ..config import ModelConfig
from .cache import cache_folder, file_sha256
from .hub import HUB_ID, pull, unknown
from .packages import KNOWN_MODELS
from .source import TensorSource
from .tokenizer import Tokenizer


@dataclass
class LoadedModel:
    """A checkpoint that passed every check. Weights stay on disk until `tensors` is asked for them."""

    config: ModelConfig
    tensors: TensorSource
    tokenizer: Tokenizer
    name: str  # what a server lists: the known name, the hub id, or the file's stem
    path: Path  # the .gguf file or the folder
    format: str  # one line for the start-up print: "GGUF Q4_1"
    weight_bytes: int  # as stored
    weight_files: tuple[Path, ...] = ()  # all parts or shards, in order

    @property
    def chat_template(self) -> str | None:
        return self.tokenizer.chat_template

    @cached_property
    def sha256(self) -> str | None:
        """Hash of the file that holds the weights, or of the hashes of several. Reads them whole, once.

        A draft names the target it is for by it. None for a model that is in no file.
        """
        hashes = [file_sha256(path) for path in self.weight_files]
        if len(hashes) < 2:
            return hashes[0] if hashes else None
        return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def load_model(
    spec: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    accept_license: bool = False,
    progress: bool = True,
    chat_template: str | os.PathLike[str] | None = None,
) -> LoadedModel:
    """Load a known name ("smollm2"), a `.gguf` file, a safetensors folder or a hub id ("org/name").

    Fetches what is not in the cache folder yet. `chat_template` is a file that replaces the model's own template.
    Raises `ModelNotFound` or `ModelError` naming file and tensor; nothing is allocated before every check has passed.
    """
    path, name = resolve(spec, cache_dir=cache_dir, accept_license=accept_license, progress=progress)
    loaded = _load_path(path, name, cache_folder(cache_dir))
    if chat_template is not None:
        loaded.tokenizer = loaded.tokenizer.with_template(read_template(Path(chat_template)))
    return loaded


def load_tokenizer(
    spec: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    accept_license: bool = False,
    progress: bool = True,
    chat_template: str | os.PathLike[str] | None = None,
) -> tuple[Tokenizer, ModelConfig]:
    """Tokenizer and configuration only (no torch): what the HTTP process needs. Same arguments as `load_model`."""
    loaded = load_model(
        spec, cache_dir=cache_dir, accept_license=accept_license, progress=progress, chat_template=chat_template
    )
    return loaded.tokenizer, loaded.config


def resolve(
    spec: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    accept_license: bool = False,
    progress: bool = True,
) -> tuple[Path, str]:
    """(local file or folder, name to show) for what the user typed."""
    text = os.fspath(spec)
    if not text.strip():
        raise unknown(text)
    path = Path(text).expanduser()
    if path.exists():
        return path, (path.stem if path.is_file() else path.resolve().name)
    looks_local = isinstance(spec, os.PathLike) or text.startswith((".", "/", "~"))
    if looks_local or (HUB_ID.match(text) is None and text.endswith((".gguf", ".safetensors"))):
        raise ModelNotFound("no such file or folder", file=path)
    found = pull(text, cache_dir=cache_dir, accept_license=accept_license, progress=progress)
    return found, text.lower() if text.lower() in KNOWN_MODELS else text


def read_template(path: Path) -> str:
    """A chat template file's text. Raises `ModelError` naming the file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ModelError("the chat template is not UTF-8 text", file=path) from None
    except OSError as error:
        raise ModelError(f"the chat template cannot be read: {error.strerror}", file=path) from None


def _load_path(path: Path, name: str, cache: Path) -> LoadedModel:
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if (path / "config.json").exists() or (path / "adapter_config.json").exists() or not ggufs:
            return _load_folder(path, name)
        if len({_split_stem(p) for p in ggufs}) > 1:
            raise ModelError(
                f"the folder holds {len(ggufs)} GGUF models ({', '.join(p.name for p in ggufs)}); name the file",
                file=path,
            )
        path = ggufs[0]
    if path.suffix in (".bin", ".pt", ".pth"):
        raise ModelError("pickled weights are not read; pass a .gguf file or a safetensors folder", file=path)
    if path.suffix == ".safetensors":
        raise ModelError("pass the folder that holds this file, its config.json and its tokenizer.json", file=path)
    return _load_gguf(path, name, cache)


def _split_stem(path: Path) -> str:
    return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)


def _load_folder(folder: Path, name: str) -> LoadedModel:
    from .safetensors import SafetensorsSource
    from .tokenizer_folder import folder_tokenizer

    source = SafetensorsSource(folder)
    tokenizer = folder_tokenizer(folder, source.config)
    _check_vocabulary(tokenizer, source.config, folder / "tokenizer.json")
    config = replace(source.config, eos_token_ids=tuple(sorted(tokenizer.eos_ids)))
    return LoadedModel(
        config, source, tokenizer, name, folder, f"safetensors {_main_kind(source)}", source.nbytes(), source.paths()
    )


def _load_gguf(path: Path, name: str, cache: Path) -> LoadedModel:
    from .gguf import GGUFSource
    from .tokenizer_gguf import gguf_tokenizer

    source = GGUFSource(path)
    tokenizer = gguf_tokenizer(source.files[0], cache)
    _check_vocabulary(tokenizer, source.config, source.path)
    config = replace(source.config, eos_token_ids=tuple(sorted(tokenizer.eos_ids)))
    files = tuple(file.path for file in source.files)
    kind = f"GGUF {_main_kind(source)}"
    return LoadedModel(config, source, tokenizer, name, source.path, kind, source.nbytes(), files)


def _check_vocabulary(tokenizer: Tokenizer, config: ModelConfig, path: Path) -> None:
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the embedding {config.vocab_size} rows", file=path
        )


def _main_kind(source: TensorSource) -> str:
    """The type that most weights of the layers are stored in."""
    sizes: Counter[str] = Counter()
    for name in source.names():
        shape = source.shape(name)
        if len(shape) == 2 and name.startswith("model.layers."):
            sizes[source.kind(name)] += shape[0] * shape[1]
    return sizes.most_common(1)[0][0] if sizes else "empty"
