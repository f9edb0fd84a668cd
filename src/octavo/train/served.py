"""Served acceptance: the finished draft in the engine, on questions it was not trained on. The figure that counts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.params import SamplingParams
from octavo.train.corpus import loops


@dataclass(frozen=True)
class Acceptance:
    """Mean tokens per decode step (bonus included), over all answers and over those that do not loop."""

    accept_length: float
    accept_length_without_loops: float
    answers: int
    looping: int

    def to_dict(self) -> dict[str, float]:
        return {k: round(float(v), 4) for k, v in vars(self).items()}


def chat_prompts(folder: Path, tokenizer: Any) -> list[list[int]]:
    """Token ids of the benchmark's chat prompts."""
    prompts = []
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            if line.strip():
                message = [{"role": "user", "content": json.loads(line)["prompt"]}]
                prompts.append(list(tokenizer.encode_chat(message, add_generation_prompt=True)))
    return prompts


def measure_acceptance(
    llm: Any, prompts: Sequence[Sequence[int]], *, temperature: float, max_tokens: int = 128, batch: int = 8
) -> Acceptance:
    """Generate from each prompt with the engine's draft and count tokens per decode step."""
    tokens = steps = clean_tokens = clean_steps = looping = answers = 0
    for first in range(0, len(prompts), batch):
        part = [list(p) for p in prompts[first : first + batch]]
        params = [
            SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=first + i) for i in range(len(part))
        ]
        for out in llm.generate(part, params):
            metrics = out.outputs[0].metrics
            if not metrics.decode_steps:
                continue
            answers += 1
            tokens += metrics.output_tokens - 1
            steps += metrics.decode_steps
            if loops(out.token_ids):
                looping += 1
            else:
                clean_tokens += metrics.output_tokens - 1
                clean_steps += metrics.decode_steps
    return Acceptance(tokens / max(1, steps), clean_tokens / max(1, clean_steps), answers, looping)
