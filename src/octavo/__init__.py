"""Octavo: an LLM inference engine whose KV memory is exact to the page.

    from octavo import LLM, SamplingParams

Names load on first use, so that `import octavo` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo._version import __version__

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.engine.output import CompletionOutput, RequestOutput
    from octavo.engine.request import ChoiceOutput
    from octavo.errors import OctavoError
    from octavo.llm import LLM
    from octavo.params import SamplingParams

_HOMES = {
    "LLM": "octavo.llm",
    "AsyncLLM": "octavo.async_llm",
    "SamplingParams": "octavo.params",
    "RequestOutput": "octavo.engine.output",
    "CompletionOutput": "octavo.engine.output",
    "ChoiceOutput": "octavo.engine.request",
    "OctavoError": "octavo.errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "ChoiceOutput",
    "CompletionOutput",
    "OctavoError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
