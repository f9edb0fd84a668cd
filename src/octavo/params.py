"""What one request asks of the sampler: checked on arrival, frozen afterwards.

Every float is rounded to float32 here, so that a value which passed through a router (0.8 → 0.800000011920929)
and one which did not give the same text.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from octavo.errors import RequestError

GREEDY_BELOW_TEMPERATURE: Final = 1e-5  # below this, dividing logits only overflows: the arg-max it tends to is taken
MAX_LOGPROBS: Final = 20
MAX_LOGIT_BIAS: Final = 1024
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
STRUCTURED_FIELDS: Final = ("json_object", "json_schema", "regex", "grammar")


def _fail(param: str, value: object, allowed: str) -> RequestError:
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return RequestError(f"{param}: got {shown}; {allowed}", param=param)


def _float32(param: str, value: object, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _fail(param, value, f"a number is needed: {allowed}")
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", float(value)))[0]
    except OverflowError:
        raise _fail(param, value, allowed) from None
    if not math.isfinite(rounded):
        raise _fail(param, value, f"a finite number is needed: {allowed}")
    return rounded


def _integer(param: str, value: object, lowest: int, highest: int, allowed: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise _fail(param, value, allowed)
    return int(value)


def _stop_strings(value: object) -> tuple[str, ...]:
    allowed = "a non-empty string or a list of them is allowed"
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, Sequence):
        raise _fail("stop", value, allowed)
    for item in items:
        if not isinstance(item, str) or not item:
            raise _fail("stop", value, allowed)
    return tuple(dict.fromkeys(items))


def _token_ids(param: str, value: object) -> tuple[int, ...]:
    allowed = "a list of token ids (integers from 0) is allowed"
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence | set | frozenset):
        raise _fail(param, value, allowed)
    return tuple(dict.fromkeys(_integer(param, item, 0, _INT64_MAX, allowed) for item in value))


def _logit_bias(value: object) -> dict[int, float]:
    allowed = f"a mapping of at most {MAX_LOGIT_BIAS} token ids to numbers from -100 to 100 is allowed"
    if value is None:
        return {}
    if not isinstance(value, Mapping) or len(value) > MAX_LOGIT_BIAS:
        raise _fail("logit_bias", value, allowed)
    bias: dict[int, float] = {}
    for key, number in value.items():
        if isinstance(key, str):  # JSON objects have string keys
            if not key.isascii() or not key.isdigit() or len(key) > 18:
                raise _fail("logit_bias", key, allowed)
            key = int(key)
        token = _integer("logit_bias", key, 0, _INT64_MAX, allowed)
        rounded = _float32("logit_bias", number, allowed)
        if not -100 <= rounded <= 100:
            raise _fail("logit_bias", number, allowed)
        bias[token] = rounded
    return bias


@dataclass(frozen=True)
class SamplingParams:
    """How tokens of one request are chosen and when it ends. Raises `RequestError` naming field and value.

    n                   how many independent answers (choice indices 0 … n-1)
    temperature         0 (or below 1e-5): greedy, ties to the lowest id
    top_p, top_k, min_p 1.0, -1 (or 0) and 0.0 change nothing
    repetition_penalty  counts prompt and output; presence_/frequency_penalty count output only
    logit_bias          token id → number added to its logit
    seed                None: the engine draws one from its own seed and the request id
    stop                text that ends the answer; cut off unless `include_stop_str_in_output`
    max_tokens          None: the rest of the context. 0: an empty answer with finish reason "length"
    min_tokens          end tokens and stops are ignored before
    logprobs            None, or how many alternatives (0 … 20) are reported beside each chosen token.
                        They are log-softmax of the model's own logits, before any processor
    prompt_logprobs     the same for the tokens of the prompt, given what stands before each. The prefix cache is
                        not used then
    json_object, json_schema, regex, grammar   at most one; `grammar` is Lark text
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    json_object: bool = False
    json_schema: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:  # normalised values; frozen for everybody else
            object.__setattr__(self, name, value)

        put("n", _integer("n", self.n, 1, 128, "an integer from 1 to 128 is allowed"))
        self._check_floats(put)
        put("top_k", _integer("top_k", self.top_k, -1, _INT64_MAX, "an integer from 1, or 0 or -1 for no limit"))
        if self.seed is not None:
            put("seed", _integer("seed", self.seed, _INT64_MIN, _INT64_MAX, "a 64-bit integer is allowed"))
        put("logit_bias", _logit_bias(self.logit_bias))
        put("stop", _stop_strings(self.stop))
        put("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        self._check_lengths(put)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "json_object"):
            if not isinstance(getattr(self, name), bool):
                raise _fail(name, getattr(self, name), "true or false is allowed")
        self._check_structured()

    def _check_floats(self, put: Callable[[str, object], None]) -> None:
        bounds = {
            "temperature": (0.0, math.inf, "a number from 0 is allowed"),
            "min_p": (0.0, 1.0, "a number from 0 to 1 is allowed"),
            "presence_penalty": (-2.0, 2.0, "a number from -2 to 2 is allowed"),
            "frequency_penalty": (-2.0, 2.0, "a number from -2 to 2 is allowed"),
        }
        for name, (lowest, highest, allowed) in bounds.items():
            value = _float32(name, getattr(self, name), allowed)
            if not lowest <= value <= highest:
                raise _fail(name, getattr(self, name), allowed)
            put(name, value)
        top_p = _float32("top_p", self.top_p, "a number above 0 and at most 1 is allowed")
        if not 0 < top_p <= 1:
            raise _fail("top_p", self.top_p, "a number above 0 and at most 1 is allowed")
        put("top_p", top_p)
        penalty = _float32("repetition_penalty", self.repetition_penalty, "a number above 0 is allowed")
        if penalty <= 0:
            raise _fail("repetition_penalty", self.repetition_penalty, "a number above 0 is allowed")
        put("repetition_penalty", penalty)

    def _check_lengths(self, put: Callable[[str, object], None]) -> None:
        if self.max_tokens is not None:
            allowed = "an integer from 0, or nothing for the rest of the context, is allowed"
            put("max_tokens", _integer("max_tokens", self.max_tokens, 0, _INT64_MAX, allowed))
        put("min_tokens", _integer("min_tokens", self.min_tokens, 0, _INT64_MAX, "an integer from 0 is allowed"))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _fail("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens}) is allowed")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                allowed = f"an integer from 0 to {MAX_LOGPROBS} is allowed"
                put(name, _integer(name, getattr(self, name), 0, MAX_LOGPROBS, allowed))

    def _check_structured(self) -> None:
        given = [name for name in STRUCTURED_FIELDS if getattr(self, name) not in (None, False)]
        if self.json_schema is False:
            raise _fail("json_schema", False, "a schema that matches nothing cannot be answered")
        if len(given) > 1:
            raise RequestError(f"{' and '.join(given)} exclude each other: give one", param=given[1])
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise _fail(name, value, "a non-empty string is allowed")
        if self.json_schema is not None and not isinstance(self.json_schema, str | dict | bool):
            raise _fail("json_schema", self.json_schema, "a JSON schema (an object, or its text) is allowed")

    def check(self, vocab_size: int) -> None:
        """Raise `RequestError` where a token id is not in the model's vocabulary."""
        allowed = f"the model's token ids are 0 to {vocab_size - 1}"
        for token in self.logit_bias or ():
            if token >= vocab_size:
                raise _fail("logit_bias", token, allowed)
        for token in self.stop_token_ids or ():
            if token >= vocab_size:
                raise _fail("stop_token_ids", token, allowed)

    @property
    def greedy(self) -> bool:
        """No random number is needed: the arg-max of the processed logits is taken."""
        return self.temperature < GREEDY_BELOW_TEMPERATURE or self.top_k == 1

    @property
    def structured(self) -> tuple[str, str | dict[str, Any] | bool] | None:
        """(kind, specification) of constrained output, or None."""
        for name in STRUCTURED_FIELDS:
            value = getattr(self, name)
            if value is not None and value is not False:
                return name, value
        return None

    def top_k_of(self, vocab_size: int) -> int:
        """`top_k` with "no limit" spelled out as the vocabulary size."""
        return vocab_size if self.top_k < 1 else min(self.top_k, vocab_size)

    def with_changes(self, **changes: Any) -> SamplingParams:
        """A checked copy with some fields replaced."""
        return replace(self, **changes)
