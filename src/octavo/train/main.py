"""`octavo train-draft`: corpus → features → training → checkpoint → served acceptance, each step resumable.

A table of phrases takes the corpus alone: it is counted in seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo import hardware
from octavo.errors import ConfigError
from octavo.train.options import TrainOptions, add_arguments, from_args

if TYPE_CHECKING:
    import torch

    from octavo.train.corpus import Corpus
    from octavo.train.features import FeatureStore
    from octavo.train.objectives import Outcome

HELP = "distil an EAGLE-3 or DFlash draft from a model, or count its phrases, on a CPU"
EXAMPLES = [
    "octavo train-draft --algorithm eagle3 --target smollm2 --out drafts/my-eagle3",
    "octavo train-draft --algorithm dflash --target smollm2 --out drafts/my-dflash --minutes 40",
    "octavo train-draft --algorithm table --target smollm2 --out drafts/my-table --answer-tokens 100000",
]
__all__ = ["EXAMPLES", "HELP", "add_arguments", "run", "train_draft"]


def run(args: argparse.Namespace) -> int:
    """Entry of the command line."""
    report = train_draft(from_args(args))
    print(json.dumps(report, indent=1))
    return 0


def train_draft(
    options: TrainOptions, *, loaded: Any = None, llm_factory: Callable[..., Any] | None = None
) -> dict[str, Any]:
    """Train a draft and write it to `options.out`; returns figures (also kept in the draft's config).

    `loaded` and `llm_factory` replace the target and `octavo.LLM` (tests). Interrupted runs go on where they were
    when called again with the same options.
    """
    from octavo.model.load.loader import load_model

    _threads(options)
    target = load_model(options.target, cache_dir=None) if loaded is None else loaded
    factory = _default_llm(options, target.config.context_tokens) if llm_factory is None else llm_factory
    work = _cache(options) / _short(target.sha256 or target.name)
    corpus = make_corpus(options, target, factory, work)
    _threads(options)  # an engine beside compiled operations leaves torch one thread; training wants them all
    started = time.monotonic()
    figures = _count(options, target, corpus) if options.algorithm == "table" else _train(options, target, corpus, work)
    figures["training_hours"] = round((time.monotonic() - started) / 3600, 3)
    if options.measure:
        figures["served"] = _measure(options, corpus, factory)
        _amend(options.out / "config.json", figures)
    return figures


# -- corpus ----------------------------------------------------------------------------------------------------------


def make_corpus(options: TrainOptions, target: Any, factory: Callable[..., Any], work: Path) -> Corpus:
    """Load the corpus and let the target write what is missing. Refuses benchmark text."""
    from octavo.train.corpus import Corpus, Filter, benchmark_ngrams
    from octavo.train.generate import SelfPrompter

    path = options.data if options.data is not None else work / "corpus.npz"
    corpus = Corpus.load(path) if path.is_file() else Corpus()
    forbidden = benchmark_ngrams(options.prompts) if options.prompts is not None else set()
    limit = options.generate_minutes
    time_left = limit is None or float(corpus.recipe.get("minutes", 0.0)) < limit
    if corpus.answer_tokens < options.answer_tokens and time_left:
        path.parent.mkdir(parents=True, exist_ok=True)
        filter_ = Filter(forbidden)
        with factory(draft="none") as llm, _bar("corpus", options.answer_tokens, corpus.answer_tokens) as bar:
            prompter = SelfPrompter(
                llm,
                seed=options.seed,
                filter_=filter_,
                batch=options.generate_batch,
                max_question_tokens=options.max_question_tokens,
                max_answer_tokens=options.max_answer_tokens,
            )
            prompter.fill(corpus, options.answer_tokens, save=path, progress=bar.update, minutes=limit)
    if not corpus.samples:
        raise ConfigError("answer_tokens", options.answer_tokens, "the target wrote no usable answer")
    corpus.recipe["target_sha256"] = target.sha256
    return corpus


# -- counting --------------------------------------------------------------------------------------------------------


def _count(options: TrainOptions, target: Any, corpus: Corpus) -> dict[str, Any]:
    """A table of phrases instead of a network."""
    from octavo.spec.choose import NGRAM_DRAFT_TOKENS
    from octavo.spec.table import NgramTable, save_table
    from octavo.train.table import accept_length, count_phrases

    train, held = corpus.split(options.held_out)
    phrases = count_phrases(
        (s.tokens for s in train),
        order=options.order,
        min_count=options.min_count,
        vocab_size=target.config.vocab_size,
        min_probability=options.min_probability,
    )
    figures = _card(options, target, corpus)
    if len(held):
        walked = accept_length(NgramTable(phrases), held, NGRAM_DRAFT_TOKENS)
        figures["held_out"] = {"accept_length": round(walked, 4)}
    figures["phrases"] = len(phrases.next)
    save_table(
        options.out,
        phrases,
        hidden_size=target.config.hidden_size,
        target_sha256=target.sha256,
        card=figures,
    )
    return figures


def _card(options: TrainOptions, target: Any, corpus: Corpus) -> dict[str, Any]:
    """What every draft keeps of how it was made."""
    return {
        "algorithm": options.algorithm,
        "target": target.name,
        "target_sha256": target.sha256,
        "corpus": {"samples": len(corpus), "answer_tokens": corpus.answer_tokens, "recipe": corpus.recipe},
        "options": options.card(),
        "licence": f"derived from {target.name}; its licence applies (Apache-2.0 for SmolLM2)",
        "default": options.default,
    }


# -- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Setup:
    """What a training loop needs beside its net."""

    store: FeatureStore
    train: Corpus
    outcome: Callable[[list[int], torch.Generator], Outcome]
    net: Any
    config: Any
    coverage: float
    start: str  # which earlier draft it goes on from, if any


def _train(options: TrainOptions, target: Any, corpus: Corpus, work: Path) -> dict[str, Any]:
    from octavo.spec.checkpoint import save_draft
    from octavo.train.loop import LoopOptions, Trainer, evaluate

    setup = _setup(options, target, corpus, work)
    fingerprint = _fingerprint(options, setup.store.key, start_from=setup.start)
    lengths = [min(len(s.tokens), options.max_tokens) for s in setup.train.samples]
    loop = LoopOptions(
        epochs=options.epochs,
        batch_tokens=options.batch_tokens,
        learning_rate=options.learning_rate,
        seed=options.seed,
        minutes=options.minutes,
    )
    checkpoint = work / f"{options.algorithm}-{fingerprint[:12]}.pt"
    trainer = Trainer(setup.net, lengths, setup.outcome, loop, checkpoint=checkpoint, fingerprint=fingerprint)
    seen = trainer.progress.epoch * sum(lengths)
    with _bar(options.algorithm, options.epochs * sum(lengths), seen) as bar:

        def report(progress: Any, outcome: Outcome, tokens: int) -> None:
            bar.update(tokens)
            bar.set_postfix(loss=f"{float(outcome.loss.detach()):.3f}", accept=f"{outcome.accept_length:.2f}")

        progress = trainer.run(report)
    held = list(range(len(setup.train), len(corpus)))
    batches = [held[i : i + 4] for i in range(0, len(held), 4)]
    figures: dict[str, Any] = {
        **_card(options, target, corpus),
        "went_on_from": setup.start or None,
        "draft_vocab_coverage": round(setup.coverage, 4),
        "steps": progress.step,
        "epochs_done": progress.epoch,
        "trained_minutes": round(progress.elapsed_s / 60, 2),
        "held_out": evaluate(setup.net, batches, setup.outcome) if batches else {},
        "history": progress.history[:: max(1, len(progress.history) // 40)],
    }
    weights = setup.net.weights(setup.config)
    figures["parameters"] = sum(t.numel() for t in weights.tensors.values())
    save_draft(options.out, weights, card=figures)
    return figures


def _setup(options: TrainOptions, target: Any, corpus: Corpus, work: Path) -> _Setup:
    from octavo.train.data import choose_vocabulary, covered_by, make_batch
    from octavo.train.nets import DFlashNet, EagleNet, rope_for
    from octavo.train.objectives import Frozen, dflash_outcome, eagle_outcome, products_in
    from octavo.train.start import earlier_draft, head_name

    config, source = target.config, target.tensors
    train, _ = corpus.split(options.held_out)
    if options.init is not None:  # read before the long pass over the target
        start = earlier_draft(options.init, config, options.algorithm, target.sha256)
        vocabulary = covered_by(train, start.token_ids, config.vocab_size)
    else:
        vocabulary = choose_vocabulary(train, min(options.draft_vocab, config.vocab_size), config.vocab_size)
        start = _new_draft(options, target, corpus, vocabulary.token_ids)
    draft: Any = start.config
    store = _features(options, target, corpus, work, draft.taps)
    table = source.tensor("model.embed_tokens.weight").float()
    head = source.tensor(head_name(source)).float().index_select(0, vocabulary.token_ids)
    frozen = Frozen(table, head, vocabulary.token_ids, config.final_logit_softcap)
    positions = options.max_tokens + max(options.unroll, options.block_size) + 1
    net: Any = (EagleNet if options.algorithm == "eagle3" else DFlashNet)(
        start, rope_for(draft, config.rope, positions)
    )

    def outcome(indices: list[int], generator: torch.Generator) -> Outcome:
        batch = make_batch(store, indices, draft.taps, options.max_tokens)
        with products_in(options.train_dtype):
            if options.algorithm == "eagle3":
                return eagle_outcome(net, frozen, batch, options.unroll)
            return dflash_outcome(net, frozen, batch, options.anchors, generator)

    earlier = start.fingerprint if options.init is not None else ""
    return _Setup(store, train, outcome, net, draft, vocabulary.coverage, earlier)


def _new_draft(options: TrainOptions, target: Any, corpus: Corpus, token_ids: torch.Tensor) -> Any:
    """A draft of the options' shape with the weights that training starts from."""
    from octavo.train.start import initial_weights, new_dflash_config, new_eagle_config, unused_token

    config = target.config
    if options.algorithm == "eagle3":
        draft: Any = new_eagle_config(config, token_ids, target.sha256, options.intermediate)
    else:
        seen = {t for s in corpus for t in s.tokens}
        draft = new_dflash_config(
            config,
            token_ids,
            layers=options.layers,
            features=options.features,
            block_size=options.block_size,
            mask_token_id=unused_token(target.tokenizer, config.vocab_size, seen),
            sha256=target.sha256,
            intermediate=options.intermediate,
        )
    return initial_weights(draft, target.tensors, token_ids, options.seed)


def _features(options: TrainOptions, target: Any, corpus: Corpus, work: Path, taps: tuple[int, ...]) -> FeatureStore:
    """The target's hidden states over the corpus; one pass serves both algorithms with their usual layers."""
    from octavo.spec.draft_config import default_dflash_layers, default_eagle_taps
    from octavo.train.features import FeatureStore

    config = target.config
    wanted = {*taps, *default_eagle_taps(config.num_layers)}
    wanted |= {i + 1 for i in default_dflash_layers(config.num_layers, options.features)}
    key = f"{target.sha256}{options.quantization}"
    store = FeatureStore(work / "features", corpus, tuple(sorted(wanted)), config.hidden_size, key)
    if store.missing():
        network = _network(options, target)
        with _bar("features", sum(len(s.tokens) for s in corpus), 0) as bar:
            store.build(network, bar.update)
    return store


def _network(options: TrainOptions, target: Any) -> Any:
    """The target as it is served, for its features."""
    import torch

    from octavo.config import EngineConfig
    from octavo.model.registry import build_network

    config = EngineConfig.from_options(_engine_options(options))
    dtype = torch.bfloat16 if config.compute_dtype in ("bfloat16", "bf16") else torch.float32
    return build_network(
        target,
        dtype=dtype,
        quantization=options.quantization,  # type: ignore[arg-type]
        kv_dtype=torch.float32,
        max_positions=options.max_tokens + 1024,
    )


# -- served acceptance -----------------------------------------------------------------------------------------------


def _measure(options: TrainOptions, corpus: Corpus, factory: Callable[..., Any]) -> dict[str, Any]:
    from octavo.train.served import chat_prompts, measure_acceptance

    _, held = corpus.split(options.held_out)
    questions = [s.tokens[: s.answer_start] for s in held]
    results: dict[str, Any] = {}
    with factory(draft=options.algorithm, draft_model=str(options.out), draft_adaptive=False) as llm:
        sets = {"held_out": questions}
        if options.prompts is not None:
            sets["benchmark"] = [tuple(p) for p in chat_prompts(options.prompts, llm.tokenizer)]
        for name, prompts in sets.items():
            for temperature in (0.0, 0.8):
                if prompts:
                    measured = measure_acceptance(llm, prompts, temperature=temperature)
                    results[f"{name} T={temperature}"] = measured.to_dict()
    return results


def _amend(file: Path, figures: dict[str, Any]) -> None:
    data = json.loads(file.read_text())
    data["octavo"] = figures
    partial = file.with_suffix(".part")
    partial.write_text(json.dumps(data, indent=1) + "\n")
    partial.replace(file)


# -- small things ----------------------------------------------------------------------------------------------------


def _engine_options(options: TrainOptions) -> dict[str, Any]:
    given: dict[str, Any] = {"model": options.target, "quantization": options.quantization}
    if options.dtype is not None:
        given["dtype"] = options.dtype
    if options.threads is not None:
        given["threads"] = options.threads
    return given


def _default_llm(options: TrainOptions, context_tokens: int) -> Callable[..., Any]:
    def factory(**extra: Any) -> Any:
        from octavo import LLM

        # room for a question, its answer and the benchmark's prompts: no more KV than needed
        given = {"max_running": options.generate_batch, "max_model_len": min(1024, context_tokens)}
        return LLM(**{**_engine_options(options), **given, **extra})

    return factory


def _threads(options: TrainOptions) -> None:
    import torch

    torch.set_num_threads(hardware.physical_cores() if options.threads is None else options.threads)


def _cache(options: TrainOptions) -> Path:
    from octavo.model.load.cache import cache_folder

    return (options.cache_dir if options.cache_dir is not None else cache_folder(None)) / "train"


def _short(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:12]


def _fingerprint(options: TrainOptions, store_key: str, *, start_from: str) -> str:
    card = options.shaping()
    made_of = ("answer_tokens", "generate_batch", "generate_minutes", "max_question_tokens", "max_answer_tokens")
    for name in made_of:  # how the corpus came about is in its key
        del card[name]
    return hashlib.sha256(json.dumps([card, store_key, start_from], sort_keys=True).encode()).hexdigest()


def _bar(title: str, total: int, done: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, initial=min(done, total), desc=title, unit="tok", unit_scale=True, file=sys.stderr)
