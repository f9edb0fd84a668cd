"""Self-prompting: the target writes questions behind its own chat template, then answers them. No corpus needed.

Source: Z. Xu et al., "Magpie: alignment data synthesis from scratch by prompting aligned LLMs with nothing" (2024).
Some questions are started with a few neutral words, so that all kinds of requests occur.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from octavo.errors import ConfigError
from octavo.params import SamplingParams
from octavo.train.corpus import Corpus, Filter, Sample

_MARK = "\u2063octavo-question\u2063"
STARTS = (
    "Explain", "Explain why", "How does", "How do I", "What is", "What are", "Why do", "Can you", "Describe",
    "Write a", "Write a short story about", "Write an email", "Write a poem", "Give me", "List", "Compare",
    "Write a Python function", "Write a function that", "In Python, how", "Fix this code:\n```python\n",
    "Summarize the following text:\n", "Rewrite this", "Rewrite the following paragraph", "Translate",
    "Make this sentence", "Correct the grammar", "Turn the following notes into", "Extract", "I have", "My",
)  # fmt: skip


class Generator(Protocol):
    """`octavo.LLM`, as far as it is used here."""

    tokenizer: Any

    def generate(self, prompts: Any, params: Any) -> Sequence[Any]: ...


def question_prefix(tokenizer: Any) -> list[int]:
    """Ids of everything the chat template puts before a user's words. Raises ConfigError without a template."""
    if tokenizer.chat_template is None:
        raise ConfigError("target", "a model without chat template", "self-prompting needs a chat model")
    text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], add_generation_prompt=False)
    if _MARK not in text:
        raise ConfigError("target", "its chat template", "the template must show the user's words unchanged")
    return list(tokenizer.encode_rendered(text[: text.index(_MARK)]))


class SelfPrompter:
    """Fills a corpus with question-answer pairs of one target, in batches; deterministic for a seed."""

    def __init__(
        self,
        llm: Generator,
        *,
        seed: int,
        filter_: Filter,
        batch: int = 32,
        max_question_tokens: int = 160,
        max_answer_tokens: int = 256,
        greedy_share: float = 0.4,
        temperature: float = 0.8,
    ) -> None:
        self.llm, self.seed, self.filter, self.batch = llm, seed, filter_, batch
        self.max_question_tokens, self.max_answer_tokens = max_question_tokens, max_answer_tokens
        self.greedy_share, self.temperature = greedy_share, temperature
        self.prefix = question_prefix(llm.tokenizer)

    def recipe(self) -> dict[str, Any]:
        return {
            "method": "self-prompting",
            "seed": self.seed,
            "batch": self.batch,
            "max_question_tokens": self.max_question_tokens,
            "max_answer_tokens": self.max_answer_tokens,
            "question": {"temperature": 1.0, "top_p": 0.95, "started_share": 0.5},
            "answer": {"temperature": self.temperature, "top_p": 0.95, "greedy_share": self.greedy_share},
            "dropped": dict(self.filter.dropped),
        }

    def fill(
        self,
        corpus: Corpus,
        answer_tokens: int,
        *,
        save: Path | None = None,
        progress: Callable[[int], None] = lambda tokens: None,
        minutes: float | None = None,
    ) -> None:
        """Add samples until the corpus has `answer_tokens` of them, or `minutes` were spent on it in all runs.

        Saved after every round, so that an interrupted run goes on.
        """
        self.filter.remember(corpus.samples)
        rounds = int(corpus.recipe.get("rounds", 0))
        spent = float(corpus.recipe.get("minutes", 0.0))
        started = time.monotonic()
        while corpus.answer_tokens < answer_tokens:
            total = spent + (time.monotonic() - started) / 60
            if minutes is not None and total >= minutes:
                break
            before = corpus.answer_tokens
            corpus.samples.extend(self.round(rounds))
            rounds += 1
            total = spent + (time.monotonic() - started) / 60
            corpus.recipe = {**self.recipe(), "rounds": rounds, "minutes": round(total, 3)}
            if save is not None:
                corpus.save(save)
            progress(corpus.answer_tokens - before)

    def round(self, number: int) -> list[Sample]:
        """One batch of questions and their answers."""
        rng = random.Random(self.seed * 1_000_003 + number)
        questions = self._questions(rng)
        prompts, starts = [], []
        for ids in questions:
            text = self.llm.tokenizer.decode(ids)
            if self.filter.question(ids, text):
                message = [{"role": "user", "content": text.strip()}]
                prompts.append(list(self.llm.tokenizer.encode_chat(message, add_generation_prompt=True)))
                starts.append(len(self.prefix))
        if not prompts:
            return []
        params = [self._answer_params(rng) for _ in prompts]
        samples = []
        for prompt, first, out in zip(prompts, starts, self.llm.generate(prompts, params), strict=True):
            answer = self._finished(list(out.token_ids), out.finish_reason)
            if self.filter.answer(answer, self.llm.tokenizer.decode(answer)):
                samples.append(Sample((*prompt, *answer), min(first, len(prompt)), len(prompt)))
        return samples

    def _questions(self, rng: random.Random) -> list[list[int]]:
        started = []
        for _ in range(self.batch):
            words = rng.choice(STARTS) if rng.random() < 0.5 else ""
            started.append(list(self.llm.tokenizer.encode(words, add_special_tokens=False)) if words else [])
        params = [
            SamplingParams(temperature=1.0, top_p=0.95, max_tokens=self.max_question_tokens, seed=rng.getrandbits(31))
            for _ in started
        ]
        outputs = self.llm.generate([[*self.prefix, *s] for s in started], params)
        ends = self.llm.tokenizer.eos_ids
        return [
            [*s, *(t for t in out.token_ids if t not in ends)]
            for s, out in zip(started, outputs, strict=True)
            if out.finish_reason == "stop"
        ]

    def _answer_params(self, rng: random.Random) -> SamplingParams:
        greedy = rng.random() < self.greedy_share
        return SamplingParams(
            temperature=0.0 if greedy else self.temperature,
            top_p=1.0 if greedy else 0.95,
            max_tokens=self.max_answer_tokens,
            seed=rng.getrandbits(31),
        )

    def _finished(self, answer: list[int], reason: str | None) -> list[int]:
        """The answer with its end token: a draft must learn to predict it too."""
        end = self.llm.tokenizer.eos_id
        ends = self.llm.tokenizer.eos_ids
        if reason == "stop" and end is not None and (not answer or answer[-1] not in ends):
            return [*answer, int(end)]
        return answer
