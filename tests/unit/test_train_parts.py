"""Parts of draft training: corpus, filters, batches, features, and dense networks that equal the served ones."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.errors import ConfigError, ModelError
from octavo.model.registry import build_network
from octavo.spec.checkpoint import random_draft
from octavo.train.corpus import Corpus, Filter, Sample, benchmark_ngrams, loops, word_ngrams
from octavo.train.data import Batch, choose_vocabulary, plan_batches
from octavo.train.features import FeatureStore, target_features
from octavo.train.nets import DFlashNet, EagleNet, rope_for
from octavo.train.objectives import Frozen, dflash_outcome, eagle_outcome, pick_anchors, products_in
from octavo.train.options import TrainOptions
from tests.tiny import loaded_model
from tests.unit import spec_reference as ref


def samples(count: int, seed: int = 0, vocab: int = 96) -> list[Sample]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        n = rng.randint(10, 40)
        made.append(Sample(tuple(rng.randrange(vocab) for _ in range(n)), 2, rng.randint(4, n - 4)))
    return made


# -- corpus ----------------------------------------------------------------------------------------------------------


def test_a_corpus_survives_the_disk(tmp_path: Path) -> None:
    corpus = Corpus(samples(7), {"seed": 3})
    path = tmp_path / "corpus.npz"
    corpus.save(path)
    assert Corpus.load(path) == corpus
    with np.load(path) as data:
        assert data["tokens"].dtype == np.uint16
    wide = Corpus([Sample((70_000, 1, 2), 0, 1)])
    wide.save(path)
    assert Corpus.load(path) == wide
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ModelError, match="not a corpus"):
        Corpus.load(path)


def test_loops_are_seen() -> None:
    rng = random.Random(1)
    text = [rng.randrange(500) for _ in range(120)]
    assert not loops(text)
    assert loops([*text, *[7] * 12])
    assert loops([*text, *([1, 2, 3, 4, 5] * 3)])
    assert loops(([*range(40)] * 6)[:200] + [501, 502, 503])
    assert not loops([1, 2, 3])


def test_benchmark_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text('{"prompt": "Why does bread dough rise when it is left in a warm kitchen?"}\n')
    grams = benchmark_ngrams(tmp_path)
    assert len(grams) == len(word_ngrams("Why does bread dough rise when it is left in a warm kitchen?")) == 6
    check = Filter(grams)
    assert not check.question([1, 2, 3], "He asked why does bread dough rise when it is left")
    assert check.question([1, 2, 3], "Why does bread rise?")
    assert not check.question([1, 2, 3], "Why does bread rise?"), "a copy"
    assert not check.answer(list(range(40)), "bread dough rise when it is left in a warm")
    assert not check.answer([1, 2], "short")
    assert check.dropped == {"benchmark text": 2, "copy of a question": 1, "short answer": 1}


def test_options_name_what_is_wrong() -> None:
    for change in ({"algorithm": "medusa"}, {"epochs": 0}, {"block_size": 1}, {"minutes": 0.0}, {"learning_rate": 2.0}):
        values: dict[str, Any] = {"algorithm": "eagle3", "out": Path("x"), **change}
        with pytest.raises(ConfigError, match=next(iter(change))):
            TrainOptions(**values)


def test_batches_hold_every_sample_once_and_stay_in_budget() -> None:
    lengths = [random.Random(i).randint(5, 80) for i in range(300)]
    batches = plan_batches(lengths, 256, random.Random(4))
    assert sorted(i for b in batches for i in b) == list(range(300))
    assert all(len(b) * max(lengths[i] for i in b) <= 256 for b in batches)
    assert batches == plan_batches(lengths, 256, random.Random(4))
    assert batches != plan_batches(lengths, 256, random.Random(5))


def test_the_vocabulary_is_the_most_frequent_answer_tokens() -> None:
    corpus = Corpus([Sample((9, 9, 9, 5, 5, 1, 3, 3, 3), 0, 3)])
    chosen = choose_vocabulary(corpus, 2, 10)
    assert chosen.token_ids.tolist() == [3, 5] and chosen.coverage == pytest.approx(5 / 6)
    with pytest.raises(ConfigError, match="draft_vocab"):
        choose_vocabulary(corpus, 11, 10)


# -- features --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_features_do_not_depend_on_company_and_come_back_from_disk(kind: str, tmp_path: Path) -> None:
    loaded = loaded_model(kind)
    network = build_network(loaded, use_native=False, max_positions=128)
    texts = [list(range(20)), list(range(50, 90))]
    together = target_features(network, texts, (1, 3))
    for text, (features, hidden) in zip(texts, together, strict=True):
        alone, alone_hidden = target_features(network, [text], (1, 3))[0]
        torch.testing.assert_close(features, alone)
        torch.testing.assert_close(hidden, alone_hidden)
    corpus = Corpus([Sample(tuple(t), 0, 4) for t in texts])
    store = FeatureStore(tmp_path / "f", corpus, (1, 3), 64, "key")
    assert store.missing() == [0]
    store.build(network)
    again = FeatureStore(tmp_path / "f", corpus, (1, 3), 64, "key")
    assert again.missing() == []
    features, hidden = again.sample(1, (3,))
    torch.testing.assert_close(features, together[1][0][:, 64:], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(hidden, together[1][1], rtol=2e-3, atol=2e-3)
    assert FeatureStore(tmp_path / "f", corpus, (1, 3), 64, "another target").missing() == [0]


# -- dense networks --------------------------------------------------------------------------------------------------

EAGLE_FLAGS: list[dict[str, Any]] = [
    {}, {"fc_norm": True}, {"norm_before_fc": True}, {"norm_before_residual": True}, {"feed_normed": True},
    {"norm_logits": False},
]  # fmt: skip


@pytest.mark.parametrize("flags", EAGLE_FLAGS, ids=str)
def test_unrolled_steps_equal_chained_pairs(flags: dict[str, Any]) -> None:
    """Step k of the training-time test at position i is the k-th step of a chain that starts at pair i."""
    config = ref.eagle_config(**flags)
    weights = random_draft(config, seed=2)
    _, network = ref.bind()
    net = EagleNet(weights, rope_for(config, ref.TARGET.rope, 64))
    tokens = [random.Random(8).randrange(ref.VOCAB) for _ in range(16)]
    features = ref.features_of(tokens, 3)
    embeds = network.table[torch.tensor(tokens)].unsqueeze(0)
    outputs = net.unroll(features.unsqueeze(0), embeds, 3)
    reference = ref.EagleReference(weights, network)
    head = weights.tensors["lm_head.weight"]
    for i in (0, 5, 11):
        pairs = [(reference.fuse(features[j]), tokens[j + 1]) for j in range(i + 1)]
        for k in range(3):
            state, log_probs = reference.last(pairs)
            ours = torch.log_softmax(outputs[k][0, i] @ head.T, dim=0)
            torch.testing.assert_close(ours, log_probs, rtol=1e-4, atol=1e-4)
            pairs = [*pairs, (state, tokens[i + 2 + k])]


@pytest.mark.parametrize(
    "flags", [{}, {"windows": (None, 7), "causal": (False, True)}, {"windows": (7, 7)}], ids=str
)
def test_blocks_at_many_anchors_equal_single_blocks(flags: dict[str, Any]) -> None:
    config = ref.dflash_config(**flags)
    weights = random_draft(config, seed=2)
    _, network = ref.bind()
    net = DFlashNet(weights, rope_for(config, ref.TARGET.rope, 64))
    tokens = [random.Random(9).randrange(ref.VOCAB) for _ in range(24)]
    features = ref.features_of(tokens, 2)
    anchors = torch.tensor([[20, 3, 11]])
    embeds = network.table[torch.tensor(tokens)[anchors]]
    hidden = net.blocks(features.unsqueeze(0), anchors, embeds, network.table[config.mask_token_id])
    reference = ref.DFlashReference(weights, network)
    for a, anchor in enumerate(anchors[0].tolist()):
        expected = reference.block(tokens[: anchor + 1], features)
        assert (hidden[0, a, 1:] @ network.head.T).argmax(dim=1).tolist() == expected


def batch_of(count: int, taps: int, seed: int = 3) -> tuple[Batch, Frozen]:
    _, network = ref.bind()
    made = samples(count, seed, ref.VOCAB)
    longest = max(len(s.tokens) for s in made)
    tokens = torch.zeros(count, longest, dtype=torch.int64)
    for i, s in enumerate(made):
        tokens[i, : len(s.tokens)] = torch.tensor(s.tokens)
    generator = torch.Generator().manual_seed(seed)
    batch = Batch(
        tokens,
        torch.randn(count, longest, taps * ref.HIDDEN, generator=generator),
        torch.randn(count, longest, ref.HIDDEN, generator=generator),
        torch.tensor([s.answer_start for s in made]),
        torch.tensor([len(s.tokens) for s in made]),
    )
    return batch, Frozen(network.table, network.head, torch.arange(ref.VOCAB))


def test_what_is_behind_the_end_and_before_the_answer_does_not_count() -> None:
    config = ref.eagle_config()
    batch, frozen = batch_of(3, 3)
    net = EagleNet(random_draft(config, seed=1), rope_for(config, ref.TARGET.rope, 64))
    before = eagle_outcome(net, frozen, batch, 3)
    hidden = batch.hidden.clone()
    for b in range(3):
        hidden[b, : int(batch.answers[b]) - 1] = 5.0
        hidden[b, int(batch.lengths[b]) - 1 :] = -5.0
    after = eagle_outcome(net, frozen, Batch(batch.tokens, batch.features, hidden, batch.answers, batch.lengths), 3)
    torch.testing.assert_close(before.loss, after.loss)
    assert before.proposals == int((batch.lengths - batch.answers).sum())


def test_anchors_are_answer_positions_with_a_future() -> None:
    batch, _ = batch_of(4, 2)
    anchors, valid = pick_anchors(batch, 50, torch.Generator().manual_seed(0))
    for b in range(4):
        chosen = sorted(anchors[b][valid[b]].tolist())
        assert chosen == list(range(int(batch.answers[b]), int(batch.lengths[b]) - 1))


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_products_in_bfloat16_give_nearly_the_same_loss_and_float32_gradients(algorithm: str) -> None:
    batch, frozen = batch_of(3, 3 if algorithm == "eagle3" else 2)
    losses, gradients = [], []
    for dtype in ("float32", "bfloat16"):
        config: Any = ref.eagle_config() if algorithm == "eagle3" else ref.dflash_config()
        kind: Any = EagleNet if algorithm == "eagle3" else DFlashNet
        net = kind(random_draft(config, seed=1), rope_for(config, ref.TARGET.rope, 64))
        with products_in(dtype):
            outcome = (
                eagle_outcome(net, frozen, batch, 3)
                if algorithm == "eagle3"
                else dflash_outcome(net, frozen, batch, 12, torch.Generator().manual_seed(5))
            )
        outcome.loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(outcome.loss.detach()))
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
    assert losses[0] != losses[1]  # the products did run in another type
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert gradients[1].dtype == torch.float32
    assert torch.cosine_similarity(gradients[0], gradients[1], dim=0) > 0.98


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_a_net_learns_a_batch_by_heart(algorithm: str) -> None:
    """Loss falls and drafts become right when one batch is shown again and again."""
    taps = 3 if algorithm == "eagle3" else 2
    batch, frozen = batch_of(2, taps)
    hot = frozen.head[batch.tokens.roll(-1, 1)]  # a target that always says the next token
    batch = Batch(batch.tokens, batch.features, 4.0 * hot, batch.answers, batch.lengths)
    generator = torch.Generator()
    net: Any
    if algorithm == "eagle3":
        config: Any = ref.eagle_config()
        net = EagleNet(random_draft(config, seed=1), rope_for(config, ref.TARGET.rope, 64))
    else:
        config = ref.dflash_config()
        net = DFlashNet(random_draft(config, seed=1), rope_for(config, ref.TARGET.rope, 64))
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    first = last = None
    for _ in range(60):
        generator.manual_seed(1)
        last = (
            eagle_outcome(net, frozen, batch, 2)
            if algorithm == "eagle3"
            else dflash_outcome(net, frozen, batch, 12, generator)
        )
        first = last if first is None else first
        optimizer.zero_grad()
        last.loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert first is not None and last is not None
    assert float(last.loss.detach()) < 0.3 * float(first.loss.detach())
    assert last.accept_length > 2
