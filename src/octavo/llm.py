"""`LLM`: the engine in this process, for scripts and notebooks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from octavo.config import EngineConfig
from octavo.engine import collect
from octavo.engine.collect import Prompt
from octavo.engine.core import EngineCore
from octavo.engine.output import RequestOutput
from octavo.engine.request import ChoiceOutput, EngineRequest
from octavo.errors import EngineDead
from octavo.params import SamplingParams

Message = Mapping[str, Any]


class LLM:
    """A model, its KV books and a scheduler. Use as a context manager, or call `close()`.

    Keyword arguments are the options of `EngineConfig` (`octavo generate --help` lists them).
    Raises ConfigError or ModelError.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        given = {**options, **({"model": model} if model is not None else {})}
        self.config = EngineConfig.from_options(given)
        self._attach(EngineCore(self.config))

    def _attach(self, core: EngineCore) -> None:
        """Use this core from now on."""
        self._core: EngineCore | None = core
        self._numbers = itertools.count()
        self._interrupted = False
        self._inbox: dict[str, list[ChoiceOutput]] = {}  # by open request: what a step said that nobody has read yet

    @property
    def core(self) -> EngineCore:
        if self._core is None:
            raise EngineDead("this LLM is closed")
        return self._core

    @property
    def tokenizer(self) -> Any:
        return self.core.tokenizer

    def startup_lines(self) -> list[str]:
        """What the command line prints at start: model, kernels, weights, KV, capacity, draft."""
        return self.core.parts.startup_lines

    # -- generation ----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts. A prompt is text or a list of token ids; no template is applied."""
        return self._run([self._tokens(p) for p in collect.listed(prompts)], params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers of conversations, through the model's chat template. `template`: extra template arguments."""
        talks = collect.conversations(messages)
        return self._run([self.tokenizer.encode_chat(talk, **template) for talk in talks], params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[ChoiceOutput]:
        """Pieces of one answer as they come (`text` is the new part). Leaving the loop early aborts the request."""
        self._interrupted = False
        (setting,) = collect.one_each(params, 1)
        request_id = self._submit(self._tokens(collect.checked(prompt)), setting, time.monotonic())
        left = setting.n
        try:
            while left:
                for output in self._news([request_id]):
                    if output.error is not None:
                        raise output.error
                    left -= output.finished
                    yield output
        finally:
            self._leave([request_id], finished=not left)

    def chat_stream(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any
    ) -> Iterator[ChoiceOutput]:
        """`stream` for one conversation."""
        return self.stream(self.tokenizer.encode_chat(collect.conversation(messages), **template), params)

    def interrupt(self) -> None:
        """End what is being generated after the step in progress: `generate` and `stream` return what there is,
        finish reason "abort". Only sets a flag, so a signal handler may call it and the books still close."""
        self._interrupted = True

    def _news(self, request_ids: list[str]) -> list[ChoiceOutput]:
        """What there is to know about requests: from steps that others made, else from one more engine step.

        Behind an `interrupt` it is the step that ends them.
        """
        if self._interrupted:
            self._interrupted = False
            for request_id in request_ids:
                self.core.abort(request_id)
        if not any(self._inbox[request_id] for request_id in request_ids):
            self._step()
        news: list[ChoiceOutput] = []
        for request_id in request_ids:
            news.extend(self._inbox[request_id])
            self._inbox[request_id].clear()
        return news

    def _step(self) -> None:
        """One engine step. It moves every open request, so each gets its own news (two streams may take turns)."""
        for output in self.core.step():
            if output.request_id in self._inbox:
                self._inbox[output.request_id].append(output)

    def _tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt))
        return [int(t) for t in prompt]

    def _submit(self, tokens: list[int], params: SamplingParams, arrival_s: float) -> str:
        request_id = f"llm-{next(self._numbers)}"
        self.core.add_request(EngineRequest(request_id, tokens, params, arrival_s))
        self._inbox[request_id] = []
        return request_id

    def _leave(self, request_ids: list[str], *, finished: bool) -> None:
        """Nobody reads these requests any more. If they have not finished they are aborted, and the step in flight
        ends, so that the books close; requests that others read go on when those ask."""
        for request_id in request_ids:
            self._inbox.pop(request_id, None)
        if finished or self._core is None:
            return
        for request_id in request_ids:
            self.core.abort(request_id)
        while self.core.has_work() and not self._inbox:
            self._step()

    def _run(
        self, prompts: list[list[int]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[RequestOutput]:
        settings = collect.one_each(params, len(prompts))
        ids: list[str] = []
        self._interrupted = False
        arrival_s = time.monotonic()
        finished = False
        try:
            for tokens, setting in zip(prompts, settings, strict=True):
                ids.append(self._submit(tokens, setting, arrival_s))
            results = self._collect(ids, prompts, settings)
            finished = True
            return results
        finally:
            self._leave(ids, finished=finished)

    def _collect(
        self, ids: list[str], prompts: list[list[int]], settings: list[SamplingParams]
    ) -> list[RequestOutput]:
        results = [collect.empty(i, p, s.n) for i, p, s in zip(ids, prompts, settings, strict=True)]
        by_id = {result.request_id: result for result in results}
        left = sum(s.n for s in settings)
        while left:
            for output in self._news(ids):
                if output.error is not None:
                    raise output.error
                collect.add(by_id[output.request_id], output)
                left -= output.finished
        return results

    # -- books ---------------------------------------------------------------------------------------------------

    def kv_report(self) -> dict[str, Any]:
        """The books: per pool total/free/cached/held/leased/quarantined pages, per request its lengths in tokens; with
        sliding layers also `sliding`, what their pool saves in bytes against one full-length pool for all layers."""
        return self.core.report()

    def close(self) -> None:
        """End everything and check that the books close. Raises LawViolation if they do not. Safe to call twice."""
        core, self._core = self._core, None
        if core is not None:
            core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
