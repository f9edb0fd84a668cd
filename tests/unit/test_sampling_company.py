"""A request's tokens do not depend on its company: any mixture of settings, any batch, drafted or not, any device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.ops import processors
from octavo.ops.sampling import SamplingState, logprobs
from octavo.params import SamplingParams
from tests.fake_cuda import fake_cuda

V, CONTEXT, ROWS = 331, 40, 6

some_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 1, 5, 60, 330]),
    top_p=st.sampled_from([1.0, 0.95, 0.4]),
    min_p=st.sampled_from([0.0, 0.1]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([None, {0: 2.0}, {7: -5.0, 330: 4.0, 12: 1.0}]),
    min_tokens=st.sampled_from([0, 9]),
    regex=st.sampled_from([None, "a*"]),
)


class Request:
    """One request's settings, history and random logits, drawn by hypothesis."""

    def __init__(self, data: st.DataObject, row: int) -> None:
        self.row = row
        self.params = data.draw(some_params)
        self.seed = data.draw(st.integers(-(2**63), 2**63 - 1))
        self.choice = data.draw(st.integers(0, 5))
        self.prompt = data.draw(st.integers(1, 8))
        self.tokens = data.draw(st.lists(st.integers(0, V - 1), min_size=self.prompt, max_size=20))
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
        self.logits = torch.randn(V, generator=generator) * 3
        self.mask = torch.full(((V + 31) // 32,), -1, dtype=torch.int32)
        if self.params.structured:
            self.mask = torch.randint(-(2**31), 2**31, self.mask.shape, generator=generator).to(torch.int32)

    @property
    def position(self) -> int:
        return len(self.tokens)

    def enter(self, state: SamplingState) -> None:
        params, ban = self.params, [3, 9, 200][: 1 + self.seed % 3]
        state.set_row(
            self.row, params, seed=self.seed, choice=self.choice, prompt_tokens=self.prompt, tokens=self.tokens,
            ban_ids=ban,
        )  # fmt: skip


def step(state: SamplingState, requests: list[Request]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.tensor([r.row for r in requests])
    positions = torch.tensor([r.position for r in requests])
    flags = state.flags([r.row for r in requests])
    bitmask = torch.stack([r.mask for r in requests]) if flags.grammar else None
    logits = torch.stack([r.logits for r in requests])
    processed = state.process(logits, rows, positions, flags, max_tokens=CONTEXT, bitmask=bitmask)
    return processed, state.sample(processed, rows, positions, flags)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_mixture_gives_each_row_what_it_gets_alone(data: st.DataObject) -> None:
    rows = data.draw(st.permutations(range(ROWS)))[: data.draw(st.integers(2, ROWS))]
    requests = [Request(data, row) for row in rows]
    together = SamplingState(ROWS, CONTEXT, V, "cpu")
    for request in requests:
        request.enter(together)
    processed, tokens = step(together, requests)
    for i, request in enumerate(requests):
        alone = SamplingState(ROWS, CONTEXT, V, "cpu")
        request.enter(alone)
        own, token = step(alone, [request])
        assert token.item() == tokens[i].item()
        # arg-max rows alone skip what cannot change an arg-max
        if not request.params.greedy:
            assert torch.equal(own[0], processed[i])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_verify_row_gets_what_plain_decode_gets(data: st.DataObject) -> None:
    """m rows of one request, the drafted tokens as ancestors, against one row a step with them committed."""
    request = Request(data, 2)
    draft = data.draw(st.lists(st.integers(0, V - 1), min_size=1, max_size=5))
    state = SamplingState(ROWS, CONTEXT, V, "cpu")
    request.enter(state)
    flags = state.flags([2])
    m, start = len(draft) + 1, request.position
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(m, V, generator=generator) * 3
    ancestors = torch.tensor([[draft[j] if j < i else -1 for j in range(len(draft))] for i in range(m)])
    rows, positions = torch.full((m,), 2), torch.arange(start, start + m)
    bitmask = request.mask.expand(m, -1) if flags.grammar else None
    kw: dict[str, Any] = {"max_tokens": CONTEXT}
    verified = state.process(logits, rows, positions, flags, ancestors=ancestors, bitmask=bitmask, **kw)
    tokens = state.sample(verified, rows, positions, flags)
    for i in range(m):
        one, at = rows[:1], positions[i : i + 1]
        mask = bitmask[:1] if bitmask is not None else None
        plain = state.process(logits[i : i + 1], one, at, flags, bitmask=mask, **kw)
        assert torch.equal(plain[0], verified[i])
        assert state.sample(plain, one, at, flags).item() == tokens[i].item()
        if i < len(draft):
            state.write_history(one, at, torch.tensor([draft[i]]))


@pytest.mark.parametrize("vocab", [977, 49_152, 50_257])
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_are_bit_equal_in_any_batch(vocab: int, threads: int) -> None:
    """The sums of softmax and of the CDF must not depend on how many rows share the call, nor on their alignment."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(1)) * 4
        p = torch.full((9,), 0.9)
        tokens = torch.arange(9)
        whole = (torch.softmax(logits, -1), processors.top_p(logits, p), logprobs(logits, tokens, 5))
        uniforms = torch.rand(9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        drawn = processors.draw(logits, uniforms)
        for size in (1, 2, 3, 8):
            for start in {0, 1, 9 - size}:
                cut = slice(start, start + size)
                part = logits[cut].clone()
                assert torch.equal(torch.softmax(part, -1), whole[0][cut])
                assert torch.equal(processors.top_p(part, p[cut]), whole[1][cut])
                assert torch.equal(processors.draw(part, uniforms[cut]), drawn[cut])
                for got, want in zip(logprobs(part, tokens[cut], 5), whole[2], strict=True):
                    assert torch.equal(got, want[cut])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
def test_top_p_keeps_what_a_sort_keeps(scale: float, native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the definition on sorted integers, exactly, ties included."""
    monkeypatch.setenv("OCTAVO_NATIVE", native)
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(6, 2000, generator=generator) * scale * 8).round() / 8  # many ties
    for value in (1e-9, 0.2, 0.77, 0.999999, 1.0):
        p = torch.full((6,), value)
        kept = processors.top_p(logits, p).isfinite().numpy()
        mass = processors.integer_mass(logits).numpy()
        for row in range(6):
            wanted = max(1, int(np.ceil(float(p[row].double()) * float(mass[row].sum()))))
            levels = np.unique(mass[row])[::-1]
            sums = [mass[row][mass[row] >= level].sum() for level in levels]
            floor = next((level for level, total in zip(levels, sums, strict=True) if total >= wanted), 0)
            want = mass[row] >= floor if value < 1 else np.ones(2000, dtype=bool)
            # ids of equal integer mass may have different probabilities: never less than the set, never more mass
            assert (kept[row] <= want).all()
            assert mass[row][kept[row]].sum() >= wanted or value == 1
            probabilities = torch.softmax(logits[row], -1).numpy()
            assert probabilities[kept[row]].min() > probabilities[~kept[row]].max(initial=-1.0)


@pytest.mark.parametrize("vocab", [1, 17, 2000, 49_152])
def test_the_compiled_module_cuts_and_draws_what_torch_does(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(12, vocab, generator=generator) * torch.linspace(0.0, 30.0, 12).unsqueeze(1)
    logits[::2] = (logits[::2] * 4).round() / 4  # ties
    logits[3, 1:] = float("-inf")
    values = torch.tensor([1e-9, 0.2, 0.5, 0.77, 0.9, 0.95, 0.99, 0.9999, 0.9999999, 1.0, 0.3, 0.6])
    uniforms = torch.rand(12, dtype=torch.float64, generator=generator)
    uniforms[:2] = torch.tensor([0.0, 1.0 - 2.0**-53])
    results = []
    for native in ("0", "1"):
        monkeypatch.setenv("OCTAVO_NATIVE", native)
        kept = processors.top_p(logits, values)
        whole = processors.top_p(logits.t().contiguous().t(), values)  # strides are no matter
        results.append((kept, whole, processors.draw(logits, uniforms), processors.draw(kept, uniforms)))
    for torch_made, compiled in zip(*results, strict=True):
        assert torch.equal(torch_made, compiled)


@pytest.mark.parametrize("value", [1e-9, 0.2, 0.9, 0.999999, 1.0])
def test_a_short_list_keeps_what_histograms_keep(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_NATIVE", "0")  # both are torch's: the compiled module needs neither
    generator = torch.Generator().manual_seed(4)
    logits = (torch.randn(9, 2000, generator=generator) * 16).round() / 8  # ties beyond the list too
    p = torch.full((9,), value)
    for k in (1, 2, 17, 300):
        limited = processors.top_k(logits, torch.full((9,), k), k)
        assert torch.equal(processors.top_p(limited, p, k), processors.top_p(limited, p))
        longer = processors.top_p(limited, p, 900)  # a neighbour's larger k
        assert torch.equal(longer, processors.top_p(limited, p))


def test_everything_runs_on_a_cuda_device_without_a_read_back() -> None:
    params = SamplingParams(
        temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, presence_penalty=0.5, frequency_penalty=0.5,
        repetition_penalty=1.2, logit_bias={3: 1.0}, min_tokens=4, seed=1, regex="a", logprobs=3,
    )  # fmt: skip
    with fake_cuda() as device:
        state = SamplingState(8, CONTEXT, 49_152, device)
        state.set_row(1, params, seed=5, prompt_tokens=3, tokens=[1, 2, 3, 4], ban_ids=[2, 7])
        state.set_row(4, SamplingParams(temperature=0), seed=5, prompt_tokens=3, tokens=[1, 2, 3])
        state.set_row(5, SamplingParams(top_k=5000), seed=5, prompt_tokens=3, tokens=[1, 2, 3])
        rows = torch.zeros(6, dtype=torch.int64, device=device)
        positions = torch.zeros(6, dtype=torch.int64, device=device)
        logits = torch.zeros(6, 49_152, device=device)
        ancestors = torch.zeros(6, 4, dtype=torch.int64, device=device)
        bitmask = torch.zeros(6, 1536, dtype=torch.int32, device=device)
        for host_rows, kw in (
            ([4], {}),
            ([1, 4, 5], {"ancestors": ancestors, "bitmask": bitmask}),
            ([5, 1], {"bitmask": bitmask}),
        ):
            flags = state.flags(host_rows)
            processed = state.process(logits, rows, positions, flags, max_tokens=CONTEXT, **kw)
            tokens = state.sample(processed, rows, positions, flags)
            assert tokens.shape == (6,) and tokens.device.type == "cuda" and tokens.dtype == torch.int64
            chosen, ids, values = logprobs(logits, tokens, 3)
            assert (chosen.shape, ids.shape, values.shape) == ((6,), (6, 3), (6, 3))
            state.write_history(rows, positions, tokens)
        state.clear_row(1)
