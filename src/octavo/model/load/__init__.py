"""Checkpoints: a name, a path or a hub id becomes a configuration, weights and a tokenizer.

Nothing here imports torch until a weight is read, so the server's HTTP process can use the tokenizer alone.
"""

from __future__ import annotations

from .hub import ListedModel, list_models, pull
from .loader import LoadedModel, load_model, load_tokenizer
from .source import Groups32, TensorSource
from .tokenizer import Tokenizer

__all__ = [
    "Groups32",
    "ListedModel",
    "LoadedModel",
    "TensorSource",
    "Tokenizer",
    "list_models",
    "load_model",
    "load_tokenizer",
    "pull",
]
