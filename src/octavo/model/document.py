"""docs/models.md, written from the registry, the loaders' tables and the known names."""

from __future__ import annotations

from octavo.model.load.gguf_file import SUPPORTED_TYPES
from octavo.model.load.packages import KNOWN_MODELS
from octavo.model.registry import ARCHITECTURES
from octavo.options import format_size

_HEAD = """# Models

Written by `make docs` from the registry in `src/octavo/model/registry.py`; `make check` fails where this file is out of
step.

A model is a name from the list below, a `.gguf` file, a folder of safetensors (sharded or not) with its `config.json`
and `tokenizer.json`, or a hub id such as `org/name` (`org/name/file.gguf` or `org/name:Q4_K_M` picks a file).
"""

_TAIL = """## What is refused

GPTQ, AWQ and FP8 checkpoints, mixtures of experts, vision inputs, LoRA adapters and pickled weights: the error names
what was found. A truncated file, an unknown tensor type, a missing tensor or a wrong shape is an error that names file
and tensor, before anything is allocated.
"""

_TESTED = {
    "real weights": "real weights against transformers: {}",
    "random weights": "random weights against transformers",
    "no": "not tested",
}


def markdown() -> str:
    """The whole document."""
    lines = [
        _HEAD,
        "## Architectures\n",
        "| architecture | checkpoint classes | features | tested |",
        "|---|---|---|---|",
    ]
    for entry in ARCHITECTURES.values():
        tested = _TESTED[entry.tested].format(entry.tested_on)
        classes = ", ".join(f"`{name}`" for name in entry.hf_names)
        lines.append(f"| {entry.title} (`{entry.name}`) | {classes} | {entry.features} | {tested} |")
    lines += ["\n## Names\n", "| name | model | download | licence |", "|---|---|---|---|"]
    for known in KNOWN_MODELS.values():
        lines.append(f"| `{known.name}` | {known.title} | {format_size(known.size_bytes)} | {known.licence} |")
    types = ", ".join(sorted(SUPPORTED_TYPES))
    lines += ["\n## Tensor types\n", f"GGUF: {types}.\n", "Safetensors: F32, F16, BF16.\n", _TAIL]
    return "\n".join(lines)
