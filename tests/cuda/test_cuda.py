"""On a CUDA device: tiny models and, where it is in the cache, SmolLM2. `make test-cuda` runs this.

Text on a GPU need not be the CPU's bit for bit. What must hold: the books close, drafts do not change greedy text in
float32, overlap does not change it, and the reference's logits agree with the chosen tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.params import SamplingParams
from tests.tiny import engine

pytestmark = pytest.mark.cuda

KINDS = ("llama", "gemma3", "sliding")
PROMPTS = [[(7 * i + j) % 250 for j in range(3 + 11 * i)] for i in range(4)]


def texts(kind: str, params: SamplingParams, **options: Any) -> list[list[int]]:
    """Token ids of every prompt, all in company, books checked after every step."""
    from octavo.engine.request import EngineRequest

    core = engine(kind, **{"device": "cuda", "dtype": "float32", **options})
    for number, prompt in enumerate(PROMPTS):
        core.add_request(EngineRequest(str(number), list(prompt), params, 0.0))
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    while core.has_work():
        for output in core.step():
            assert output.error is None
            tokens[int(output.request_id)] += output.token_ids
    core.close()
    return tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_greedy_text_is_the_same_with_and_without_overlap_and_drafts(kind: str, page_size: int) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    plain = texts(kind, greedy, page_size=page_size, overlap=False)
    assert all(len(t) == 40 for t in plain)
    assert texts(kind, greedy, page_size=page_size, overlap=True) == plain
    assert texts(kind, greedy, page_size=page_size, draft="ngram") == plain


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_agrees_with_the_cpu(kind: str) -> None:
    """Nearly always the same tokens: a tie broken by rounding may differ, a wrong kernel differs at once."""
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    cuda, cpu = texts(kind, greedy), texts(kind, greedy, device="cpu")
    assert all(a[:4] == b[:4] for a, b in zip(cuda, cpu, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_seeded_sampling_repeats(kind: str) -> None:
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=24, ignore_eos=True, repetition_penalty=1.2)
    assert texts(kind, sampled) == texts(kind, sampled)


def test_bfloat16_runs_and_the_books_close() -> None:
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    assert all(len(t) == 24 for t in texts("llama", greedy, dtype="bfloat16"))


def _smollm2_is_here() -> bool:
    from octavo.model.load.hub import list_models

    return any(model.name == "smollm2" and model.path is not None for model in list_models())


if _smollm2_is_here():  # a GPU machine may reach nothing to fetch it from; scripts/test_cuda.sh says so then

    def test_smollm2_answers() -> None:
        from octavo import LLM

        torch.cuda.reset_peak_memory_stats()
        with LLM("smollm2", device="cuda", kv_memory="1GiB", draft="none") as llm:
            question = [{"role": "user", "content": "What is the capital of France?"}]
            result = llm.chat(question, SamplingParams(temperature=0, max_tokens=48))[0]
        assert "Paris" in result.text
        print(f"peak {torch.cuda.max_memory_allocated() >> 20} MiB, {result.metrics.decode_tokens_per_s} tokens/s")
