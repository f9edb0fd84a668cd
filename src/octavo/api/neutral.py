"""Request fields that other servers know and that change nothing here, each with the values it may take.

A client written for OpenAI, vLLM, SGLang or llama.cpp sends some of these at their defaults: that is accepted.
Any other value would silently not do what it asks for, so it is refused (400 naming the field).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.errors import RequestError


@dataclass(frozen=True)
class Neutral:
    """A field without effect: `accepts` says which values are harmless, `allowed` says it in words."""

    accepts: Callable[[Any], bool]
    allowed: str


def _only(*values: Any) -> Neutral:
    shown = ", ".join("null" if v is None else repr(v).lower() if isinstance(v, bool) else repr(v) for v in values)

    def accepts(value: Any) -> bool:
        return any(type(value) is type(v) and value == v or _same_number(value, v) for v in values)

    return Neutral(accepts, f"it has no effect here; allowed: {shown}")


def _same_number(a: Any, b: Any) -> bool:
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b))
    return numbers and bool(a == b)


def _typed(kind: type, words: str) -> Neutral:
    return Neutral(lambda value: isinstance(value, kind), f"it has no effect here; allowed: {words}")


NEUTRAL: dict[str, Neutral] = {
    # OpenAI
    "best_of": _only(1),
    "metadata": _typed(dict, "an object"),
    "modalities": _only(["text"]),
    "audio": _only(None),
    "prediction": _only(None),
    "reasoning_effort": _only("none", "medium"),
    "verbosity": _only("medium"),
    "service_tier": _only("auto", "default"),
    "store": _only(False),
    "suffix": _only(""),
    "web_search_options": _only(None),
    "safety_identifier": _typed(str, "a string"),
    "prompt_cache_key": _typed(str, "a string"),
    "prompt_cache_retention": _only("in-memory", "in_memory"),
    "functions": _only([]),
    "function_call": _only("none", "auto"),
    # SGLang and its router
    "no_stop_trim": _only(False),
    "separate_reasoning": _typed(bool, "true or false"),
    "stream_reasoning": _typed(bool, "true or false"),
    "return_hidden_states": _only(False),
    "return_routed_experts": _only(False),
    "require_reasoning": _only(False),
    "lora_path": _only(None),
    "session_params": _only(None),
    "stop_regex": _only([], ""),
    "custom_logit_processor": _only(None),
    "custom_params": _only(None),
    "extra_key": _only(None),
    "ebnf": _only(None),
    # vLLM
    "use_beam_search": _only(False),
    "length_penalty": _only(1.0),
    "truncate_prompt_tokens": _only(None),
    "prompt_logprobs": _only(None),
    "allowed_token_ids": _only(None),
    "bad_words": _only([]),
    "spaces_between_special_tokens": _only(True),
    "documents": _only(None),
    "chat_template": _only(None),
    "return_tokens_as_token_ids": _only(False),
    "return_token_ids": _only(False),
    "include_reasoning": _typed(bool, "true or false"),
    "structured_outputs": _only(None),
    "guided_json": _only(None),
    "guided_regex": _only(None),
    "guided_choice": _only(None),
    "guided_grammar": _only(None),
    "cache_salt": _only(None),
    "kv_transfer_params": _only(None),
    "mm_processor_kwargs": _only(None),
    # llama.cpp
    "cache_prompt": _only(True),
    "id_slot": _only(-1),
    "typical_p": _only(1.0),
    "mirostat": _only(0),
    "timings_per_token": _only(False),
}

def split_neutral(data: dict[str, Any], *, taken: frozenset[str] = frozenset()) -> dict[str, Any]:
    """`data` without its neutral fields. Raises `RequestError` where one has a value that would change something.

    `taken` are neutral names that this endpoint gives a meaning of its own.
    """
    rest = {}
    for name, value in data.items():
        neutral = NEUTRAL.get(name)
        if neutral is None or name in taken:
            rest[name] = value
        elif value is not None and not neutral.accepts(value):
            raise RequestError(f"{name}: got {shown(value)}; {neutral.allowed}", param=name, code="unsupported_value")
    return rest


def shown(value: Any, limit: int = 80) -> str:
    """`value` as it appears in an error message: short, and always encodable."""
    text = repr(value)
    text = text if len(text) <= limit else text[: limit - 3] + "..."
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
