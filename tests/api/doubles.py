"""A stand-in for the engine core, for protocol work: it answers with its prompt, one token a step, endlessly."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from octavo.engine.detokenizer import Detokenizer
from octavo.engine.output import RequestMetrics, RequestOutputState, TokenLogprob
from octavo.engine.request import ChoiceOutput, EngineRequest
from octavo.errors import ContextLengthExceeded, QueueFull
from octavo.model.load.tokenizer import Tokenizer

VOCAB, EOS, CONTEXT = 288, 256, 512


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.add_tokens([f"<{i}>" for i in range(VOCAB - 257)])
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return Tokenizer(backend, eos_ids=[EOS], eos_id=EOS, chat_template=template)


@dataclass
class Choice:
    request: EngineRequest
    index: int
    state: RequestOutputState
    started_s: float = field(default_factory=time.monotonic)
    at: int = 0


class EchoCore:
    def __init__(self, config: Any) -> None:
        self.config = config
        self.tokenizer = byte_tokenizer()
        self.model_name, self.max_model_len, self.vocab_size = "echo", CONTEXT, VOCAB
        self.parts = SimpleNamespace(info={}, startup_lines=["echo core"])
        self.ledger = SimpleNamespace(full_pool=SimpleNamespace(total=100))
        self._detokenizer = Detokenizer(self.tokenizer)
        self._choices: list[Choice] = []
        self._step_s = float(os.environ.get("OCTAVO_TEST_STEP_S", "0"))
        self._generated = 0

    def add_request(self, request: EngineRequest) -> None:
        room = CONTEXT - len(request.prompt_token_ids)
        if room < 1:
            raise ContextLengthExceeded(f"the prompt has {len(request.prompt_token_ids)} tokens", param="prompt")
        if len(self._choices) >= self.config.max_running + getattr(self.config, "max_queue", 256):
            raise QueueFull("the queue is full")
        limit = room if request.params.max_tokens is None else min(room, request.params.max_tokens)
        for index in range(request.params.n):
            state = RequestOutputState(self._detokenizer, request.params, max_tokens=limit, eos_ids=[EOS])
            self._choices.append(Choice(request, index, state))

    def abort(self, request_id: str) -> None:
        self._choices = [c for c in self._choices if c.request.request_id != request_id]

    def has_work(self) -> bool:
        return bool(self._choices)

    def step(self) -> list[ChoiceOutput]:
        time.sleep(self._step_s)
        out = [self._advance(choice) for choice in self._choices]
        self._choices = [c for c in self._choices if not c.state.output.finished]
        return out

    def _advance(self, choice: Choice) -> ChoiceOutput:
        prompt = choice.request.prompt_token_ids
        if choice.request.params.max_tokens == 0:
            delta = choice.state.finish("length")
        else:
            token = prompt[choice.at % len(prompt)]
            choice.at += 1
            self._generated += 1
            wanted = choice.request.params.logprobs
            top = tuple((t, -1.0) for t in range(wanted or 0))
            delta = choice.state.append([token], [TokenLogprob(token, -0.5, top)] if wanted is not None else None)
        metrics = RequestMetrics(
            choice.request.arrival_s, choice.started_s, choice.started_s, time.monotonic(), len(prompt), choice.at
        )
        return ChoiceOutput(
            choice.request.request_id, choice.index, delta.text, list(delta.token_ids),
            None if delta.logprobs is None else list(delta.logprobs), delta.finished, delta.finish_reason,
            delta.stop_reason, len(prompt), 0, metrics if delta.finished else None,
        )  # fmt: skip

    def stats(self) -> dict[str, Any]:
        pools = {"full": {"total": 100, "free": 100, "cached": 0, "held": 0, "leased": 0, "quarantined": 0}}
        return {"running": len(self._choices), "waiting": 0, "pools": pools, "generation_tokens": self._generated}

    def report(self) -> dict[str, Any]:
        return {"page_size": 16, "pools": self.stats()["pools"], "rows": [], "requests": [], "speculation": {}}

    def flush_cache(self) -> bool:
        return not self._choices

    def close(self) -> None:
        self._choices = []
