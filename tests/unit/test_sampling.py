"""Processors against transformers' own, the sampler against its distribution, rows against company."""

from __future__ import annotations

import pytest
import torch
from transformers.generation import logits_process as hf

from octavo.ops import processors
from octavo.ops.random_bits import hash64, host_mix, request_seed, signed64, uniform53
from octavo.ops.sampling import SamplingState, flags_of, logprobs
from octavo.params import SamplingParams

V = 977  # odd on purpose: vector tails


def make_logits(m: int, seed: int = 0, vocab: int = V, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(m, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def run(state: SamplingState, logits: torch.Tensor, rows: list[int], positions: list[int], **kw) -> torch.Tensor:
    flags = state.flags(rows)
    r, p = torch.tensor(rows), torch.tensor(positions)
    kw.setdefault("max_tokens", max(positions))
    return state.process(logits, r, p, flags, **kw)


def one_row(params: SamplingParams, prompt: list[int], output: list[int], vocab: int = V, **kw) -> SamplingState:
    state = SamplingState(4, 64, vocab, "cpu")
    state.set_row(2, params, seed=kw.pop("seed", 7), prompt_tokens=len(prompt), tokens=prompt + output, **kw)
    return state


PROMPT, OUTPUT = [5, 9, 9, 30, 976], [9, 0, 11, 0, 0]


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_is_transformers(penalty: float) -> None:
    logits = make_logits(1)
    state = one_row(SamplingParams(repetition_penalty=penalty), PROMPT, OUTPUT)
    got = run(state, logits, [2], [10])
    penalty32 = SamplingParams(repetition_penalty=penalty).repetition_penalty
    want = hf.RepetitionPenaltyLogitsProcessor(penalty32)(torch.tensor([PROMPT + OUTPUT]), logits.clone())
    assert torch.equal(got, want)
    assert not torch.equal(got, logits)


def test_presence_and_frequency_count_output_only() -> None:
    logits = make_logits(1)
    state = one_row(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), PROMPT, OUTPUT)
    got = run(state, logits, [2], [10])
    want = logits.clone()
    for token, count in ((9, 1), (0, 3), (11, 1)):
        want[0, token] -= 0.5 + 0.25 * count
    assert torch.equal(got, want)


def test_history_stops_at_the_position_asked_for() -> None:
    """A row with a stale tail (a run that was rolled back) must not see it."""
    logits = make_logits(1)
    state = one_row(SamplingParams(frequency_penalty=1.0), PROMPT, OUTPUT)
    got = run(state, logits, [2], [7])  # only 9 and 0 are committed
    want = logits.clone()
    want[0, 9] -= 1
    want[0, 0] -= 1
    assert torch.equal(got, want)


def test_logit_bias_is_transformers() -> None:
    logits = make_logits(1)
    bias = {3: 2.5, 0: -4.0, 976: 100.0}
    got = run(one_row(SamplingParams(logit_bias=bias), PROMPT, []), logits, [2], [5])
    sequence_bias = {(token,): value for token, value in bias.items()}
    want = hf.SequenceBiasLogitsProcessor(sequence_bias)(torch.tensor([PROMPT]), logits.clone())
    assert torch.equal(got, want)


@pytest.mark.parametrize("temperature", [0.3, 0.8, 2.0])
def test_temperature_is_transformers(temperature: float) -> None:
    logits = make_logits(1)
    params = SamplingParams(temperature=temperature)
    got = run(one_row(params, PROMPT, []), logits, [2], [5])
    assert torch.equal(got, hf.TemperatureLogitsWarper(params.temperature)(None, logits.clone()))


@pytest.mark.parametrize("k", [1, 2, 40, 500, V - 1, V, 10_000])
def test_top_k_is_transformers(k: int) -> None:
    logits = make_logits(3)
    got = processors.top_k(logits, torch.tensor([k] * 3), min(k, V))
    want = hf.TopKLogitsWarper(k)(None, logits.clone())
    assert torch.equal(got, want)


@pytest.mark.parametrize("k", [1, 2, 40, 1024])
def test_top_k_that_all_rows_share_needs_no_mask_and_changes_nothing(k: int) -> None:
    logits = torch.randn(5, 1500, generator=torch.Generator().manual_seed(k)).round(decimals=1)  # with ties
    rows = torch.full((5,), k)
    assert torch.equal(processors.top_k(logits, rows, k, k), processors.top_k(logits, rows, k))


def test_top_k_above_a_thousand_uses_histograms_and_agrees() -> None:
    logits = make_logits(2, vocab=5000)
    got = processors.top_k(logits, torch.tensor([1500, 3]), 1500)
    assert torch.equal(got[:1], hf.TopKLogitsWarper(1500)(None, logits[:1].clone()))
    assert torch.equal(got[1:], hf.TopKLogitsWarper(3)(None, logits[1:].clone()))


@pytest.mark.parametrize("p", [0.01, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
def test_top_p_is_transformers(p: float, scale: float) -> None:
    logits = make_logits(4, scale=scale)
    params = SamplingParams(top_p=p)
    got = processors.top_p(logits, torch.full((4,), params.top_p))
    want = hf.TopPLogitsWarper(params.top_p)(None, logits.clone())
    # transformers adds up to 977 float32 numbers: where its sum lies within rounding of p the last id may differ
    assert (got != want).sum(dim=1).max() <= 1
    assert torch.equal(got.isfinite().sum(dim=1).clamp_min(1), got.isfinite().sum(dim=1))


@pytest.mark.parametrize("p", [0.05, 0.5, 1.0])
def test_min_p_is_transformers(p: float) -> None:
    logits = make_logits(4)
    params = SamplingParams(min_p=p)
    got = processors.min_p(logits, torch.full((4,), params.min_p))
    assert torch.equal(got, hf.MinPLogitsWarper(params.min_p)(None, logits.clone()))


def test_all_processors_in_order_are_transformers() -> None:
    logits = make_logits(1, seed=3)
    params = SamplingParams(
        repetition_penalty=1.2, logit_bias={4: 3.0, 9: 1.0}, temperature=0.7, top_k=50, top_p=0.9, min_p=0.02
    )
    got = run(one_row(params, PROMPT, OUTPUT), logits, [2], [10])
    ids, want = torch.tensor([PROMPT + OUTPUT]), logits.clone()
    chain = [
        hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
        hf.SequenceBiasLogitsProcessor({(t,): v for t, v in params.logit_bias.items()}),
        hf.TemperatureLogitsWarper(params.temperature),
        hf.TopKLogitsWarper(params.top_k),
        hf.TopPLogitsWarper(params.top_p),
        hf.MinPLogitsWarper(params.min_p),
    ]
    for processor in chain:
        want = processor(ids, want)
    assert torch.equal(got, want)
    assert 1 < got.isfinite().sum() < 50


def test_min_tokens_bans_until_reached_and_counts_drafted_ancestors() -> None:
    logits = make_logits(3)
    state = one_row(SamplingParams(min_tokens=3), PROMPT, [], ban_ids=[1, 2])
    ancestors = torch.tensor([[-1, -1, -1], [8, 8, -1], [8, 8, 8]])
    got = run(state, logits, [2, 2, 2], [5, 7, 8], ancestors=ancestors)
    assert got[0, 1] == got[0, 2] == got[1, 1] == float("-inf")
    assert torch.equal(got[2], logits[2])
    assert torch.equal(got[0, 3:], logits[0, 3:])


def test_a_ban_that_would_leave_nothing_is_not_applied() -> None:
    """A grammar that allows only the end token, before min_tokens."""
    state = one_row(SamplingParams(min_tokens=3, json_object=True), PROMPT, [], ban_ids=[33])
    bitmask = torch.zeros((1, (V + 31) // 32), dtype=torch.int32)
    bitmask[0, 1] = 2
    got = run(state, make_logits(1), [2], [5], bitmask=bitmask)
    assert got.isfinite().nonzero().tolist() == [[0, 33]]


def test_bitmask_bits() -> None:
    allowed = [0, 31, 32, 63, 64, V - 1]
    mask = torch.zeros((2, (V + 31) // 32 + 1), dtype=torch.int64)
    for token in allowed:
        mask[0, token // 32] |= 1 << (token % 32)
    mask[1] = -1
    logits = make_logits(2)
    got = processors.apply_bitmask(logits, mask.to(torch.int32))
    assert got[0].isfinite().nonzero().flatten().tolist() == allowed
    assert torch.equal(got[1], logits[1])


def test_drafted_ancestors_count_like_committed_tokens() -> None:
    logits = make_logits(1)
    params = SamplingParams(repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2)
    drafted = run(one_row(params, PROMPT, OUTPUT[:2]), logits, [2], [10], ancestors=torch.tensor([[11, 0, 0, -1]]))
    committed = run(one_row(params, PROMPT, OUTPUT), logits, [2], [10])
    assert torch.equal(drafted, committed)


def test_history_written_on_the_device_is_history_given_at_the_start() -> None:
    params = SamplingParams(frequency_penalty=1.0)
    state = one_row(params, PROMPT, [])
    rows, positions = torch.tensor([[2] * 6]), torch.arange(5, 11).unsqueeze(0)
    state.write_history(rows, positions, torch.tensor([[9, 0, 11, 0, 0, -1]]))
    state.write_history(torch.tensor([2]), torch.tensor([64]), torch.tensor([3]))  # past the context: ignored
    logits = make_logits(1)
    assert torch.equal(run(state, logits, [2], [10]), run(one_row(params, PROMPT, OUTPUT), logits, [2], [10]))


def test_a_row_forgets_its_former_owner() -> None:
    state = one_row(
        SamplingParams(temperature=0.5, top_k=3, logit_bias={1: 9.0}, repetition_penalty=2.0, min_tokens=5),
        PROMPT, OUTPUT, ban_ids=[4, 5],
    )  # fmt: skip
    state.set_row(2, SamplingParams(frequency_penalty=1.0, min_tokens=1), seed=1, prompt_tokens=1, tokens=[3])
    logits = make_logits(1)
    assert torch.equal(run(state, logits, [2], [1]), logits)


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(3, V)
    logits[1, 800] = logits[1, 70] = 1.0
    logits[2, 976] = 1.0
    state = one_row(SamplingParams(temperature=0), PROMPT, [])
    flags = state.flags([2])
    assert flags.plain_greedy
    tokens = state.sample(logits, torch.tensor([2, 2, 2]), torch.tensor([5, 6, 7]), flags)
    assert tokens.tolist() == [0, 70, 976]


def test_tiny_temperature_and_top_k_one_are_greedy() -> None:
    assert SamplingParams(temperature=1e-6).greedy and SamplingParams(top_k=1).greedy
    assert not SamplingParams(temperature=1e-4).greedy
    state = one_row(SamplingParams(temperature=1e-4), PROMPT, [])
    logits = make_logits(1)
    got = state.sample(run(state, logits, [2], [5]), torch.tensor([2]), torch.tensor([5]), state.flags([2]))
    assert got.item() == logits.argmax()


def test_hash_is_integer_arithmetic() -> None:
    def reference(seed: int, choice: int, position: int) -> int:
        h = host_mix(seed & (2**64 - 1))
        h = host_mix((h ^ choice) & (2**64 - 1))
        return signed64(host_mix((h ^ position) & (2**64 - 1)))

    cases = [(0, 0, 0), (1, 0, 0), (-1, 3, 77), (2**62 + 12345, 127, 131071), (-(2**63), 0, 2**31)]
    got = hash64(*(torch.tensor(column) for column in zip(*cases, strict=True)))
    assert got.tolist() == [reference(*case) for case in cases]
    assert len(set(got.tolist())) == len(cases)
    assert 0 <= request_seed(5, "cmpl-1") < 2**63
    assert len({request_seed(s, i) for s in (0, 1, -1) for i in ("a", "b", "ab", "ba", "")}) == 15


def test_uniforms_are_uniform_over_every_argument() -> None:
    n = 50_000
    index, zero = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    for arguments in ((index, zero, zero), (zero, index, zero), (zero, zero, index)):
        u = uniform53(*arguments)
        assert 0 <= u.min() and u.max() < 1
        counts = torch.histc(u.float(), 50, 0, 1)
        chi2 = ((counts - n / 50) ** 2 / (n / 50)).sum()
        assert chi2 < 95  # 49 degrees of freedom: p < 1e-4
        assert abs(torch.corrcoef(torch.stack((u[:-1], u[1:])))[0, 1]) < 0.02


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.5, top_k=4),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.15, logit_bias={3: 1.0}),
    ],
)
def test_samples_follow_the_processed_distribution(params: SamplingParams) -> None:
    """χ² over 200,000 draws of a vocabulary of 9."""
    n, vocab = 200_000, 9
    state = SamplingState(1, 8, vocab, "cpu")
    state.set_row(0, params, seed=11, prompt_tokens=1, tokens=[0])
    logits = make_logits(1, seed=5, vocab=vocab, scale=1.0)
    flags = state.flags([0])
    processed = state.process(logits, torch.tensor([0]), torch.tensor([1]), flags, max_tokens=1)
    rows, positions = torch.zeros(n, dtype=torch.int64), torch.arange(n)
    tokens = state.sample(processed.expand(n, vocab), rows, positions, flags)
    p = torch.softmax(processed[0].double(), dim=0)
    counts = torch.bincount(tokens, minlength=vocab).double()
    assert counts[p == 0].sum() == 0
    live = p > 0
    chi2 = ((counts - n * p)[live] ** 2 / (n * p)[live]).sum()
    assert chi2 < 33  # at most 8 degrees of freedom: p < 1e-4
    wrong = torch.softmax(processed[0].double() * 1.05, dim=0)  # the test must notice a temperature off by 5 %
    assert ((counts - n * wrong)[live] ** 2 / (n * wrong)[live]).sum() > 33


def test_choices_seeds_and_positions_give_different_samples() -> None:
    state = SamplingState(8, 8, V, "cpu")
    for row, (seed, choice) in enumerate([(1, 0), (1, 1), (2, 0), (1, 0)]):
        state.set_row(row, SamplingParams(), seed=seed, choice=choice, prompt_tokens=1, tokens=[0])
    logits = torch.zeros(4, V)
    draws = []
    for position in range(1, 9):
        rows, positions = torch.arange(4), torch.full((4,), position)
        draws.append(state.sample(logits, rows, positions, state.flags(range(4))).tolist())
    columns = list(zip(*draws, strict=True))
    assert columns[0] == columns[3]
    assert len({columns[0], columns[1], columns[2]}) == 3
    assert len(set(columns[0])) > 4


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = make_logits(2)
    chosen, ids, values = logprobs(logits, torch.tensor([4, 900]), 5)
    want = torch.log_softmax(logits.double(), dim=-1)
    assert torch.allclose(chosen.double(), want[[0, 1], [4, 900]], atol=1e-5)
    assert torch.equal(ids, want.topk(5).indices)
    assert torch.allclose(values.double(), want.topk(5).values, atol=1e-5)
    assert logprobs(logits, torch.tensor([4, 900]), 0)[1].shape == (2, 0)


def test_flags_carry_the_statistics_of_top_k() -> None:
    state = SamplingState(4, 8, V, "cpu")
    state.set_row(0, SamplingParams(top_k=40), seed=0, prompt_tokens=1)
    state.set_row(1, SamplingParams(top_k=0), seed=0, prompt_tokens=1)
    state.set_row(2, SamplingParams(top_k=40, temperature=0.5), seed=0, prompt_tokens=1)
    assert state.flags([0, 2]).uniform_top_k == 40 and state.flags([0, 2]).max_top_k == 40
    assert state.flags([0, 1]).uniform_top_k is None
    assert state.flags([1]).uniform_top_k == V and not state.flags([1]).top_k
    assert flags_of(SamplingParams(temperature=0, logprobs=3), V).logprobs == 3
    assert not flags_of(SamplingParams(temperature=0, logprobs=0), V).plain_greedy
    assert state.flags([]).plain_greedy
