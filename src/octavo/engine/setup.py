"""From a configuration to the parts of an engine: model, books, KV tensors, drafter, runner. What does not fit is
refused here, before weights are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from octavo import hardware
from octavo.backend.host_tier import TierMover
from octavo.backend.runner import Runner
from octavo.backend.sampler import Sampler
from octavo.config import EngineConfig
from octavo.engine.grammar import GrammarCompiler
from octavo.engine.setup_pools import explicit_pools
from octavo.engine.setup_tiers import TierPlan, make_tiers, plan_tiers, tier_line
from octavo.engine.tiers import TierControl
from octavo.errors import ConfigError
from octavo.kv.ledger import Ledger, LedgerConfig
from octavo.kv.policy import load_policy
from octavo.kv.saving import Capacity, PageBytes, longest_requests, two_pool_saving
from octavo.kv.sizing import DecodeReserve, PoolSizes, pool_sizes, row_width_pages
from octavo.model.load.loader import LoadedModel, load_model
from octavo.model.registry import build_network, kv_page_bytes, make_kv
from octavo.ops import native
from octavo.options import format_size
from octavo.spec.adaptive import AdaptiveLength
from octavo.spec.choose import Bound, DraftPlan, plan_draft
from octavo.spec.columns import ColumnChooser
from octavo.spec.drafter import Drafter
from octavo.spec.lookup_first import LookupFirstDrafter, TwoSources
from octavo.spec.ngram import NgramDrafter
from octavo.spec.table import TableDrafter

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}


@dataclass
class Parts:
    """Everything an engine core is made of. Tests build one from a tiny model."""

    ledger: Ledger
    runner: Runner
    tokenizer: Any
    model_name: str
    max_model_len: int
    vocab_size: int
    reserve: DecodeReserve
    drafter: Drafter | None = None
    adaptive: AdaptiveLength | ColumnChooser | TwoSources | None = None
    grammars: Any = None
    startup_lines: list[str] = field(default_factory=list)
    trace: Any = None
    info: dict[str, Any] = field(default_factory=dict)
    chunk_tokens: int | None = None  # longest prompt chunk; None: the configuration's
    tiers: TierControl | None = None
    page_bytes: PageBytes = PageBytes(0, 0)
    capacity: Capacity | None = None  # with sliding layers: what the two pools hold at most


def build(
    config: EngineConfig,
    loaded: LoadedModel | None = None,
    *,
    device: torch.device | None = None,
    draft: DraftPlan | None = None,
) -> Parts:
    """Load `config.model` (or take `loaded`) and build the parts. Raises ConfigError or ModelError.

    `device` overrides `config.device` without looking whether it exists; `draft` is a plan made before.
    """
    device = _device(config) if device is None else device
    torch.set_num_threads(config.num_threads)
    if loaded is None:
        loaded = load_model(
            config.model,
            cache_dir=config.cache_dir,
            accept_license=config.accept_license,
            chat_template=config.chat_template,
        )
    draft = plan_draft(config, loaded) if draft is None else draft
    kv_dtype = _kv_dtype(config)
    dense_layers = config.sparse_dense_layers if config.hisparse else None
    full_bytes, swa_bytes = kv_page_bytes(loaded.config, config.page_size, kv_dtype, draft.kv_layers, dense_layers)
    plan: TierPlan | None = None
    if config.hisparse:
        plan = plan_tiers(config, loaded, draft.reserve, kv_dtype, draft.kv_layers, (full_bytes, swa_bytes))
        sizes, max_model_len = plan.sizes, plan.max_model_len
    else:
        sizes, max_model_len = size_pools(config, loaded, draft.reserve, full_bytes, swa_bytes)
    chunk_tokens = config.prefill_chunk_tokens if plan is None else plan.chunk_tokens
    network = build_network(
        loaded,
        dtype=DTYPES[config.compute_dtype],
        quantization=config.quantization,
        device=device,
        use_native=plan is None or (config.page_selector == "bounds" and _sparse_native()),
        draft_kv_layers=draft.kv_layers,
        page_size=config.page_size,
        kv_dtype=kv_dtype,
        max_positions=max_model_len + draft.reserve.tokens,
        threads=config.num_threads,
        sparse_dense_layers=dense_layers,
    )
    if network.kernels.startswith("native"):
        torch.set_num_threads(1)  # the compiled operations have threads of their own; two pools would fight
    max_rows = _rows(config)
    trace = _trace(config)
    ledger = Ledger(
        LedgerConfig(
            page_size=config.page_size,
            full_pages=sizes.full_pages,
            swa_pages=sizes.swa_pages,
            window_tokens=loaded.config.window_tokens or 0,
            max_rows=max_rows,
            context_tokens=max_model_len,
            largest_reserve_tokens=draft.reserve.tokens,
            key_mode=draft.key_mode,
            prefix_cache=config.prefix_cache,
            chunk_tokens=chunk_tokens,
            overlap=config.overlap_on,
            tiers=None if plan is None else plan.config,
        ),
        evict_policy=None if config.evict_policy == "lru" else load_policy(config.evict_policy),
        trace=trace,
    )
    tier, sparse = None, None
    if plan is not None:
        tier, sparse = make_tiers(
            config, plan, network, draft.reserve, max_rows=max_rows, width_pages=ledger.width_pages, device=device
        )
    page_bytes = PageBytes(full_bytes, swa_bytes)
    capacity = _capacity(config, ledger.config, draft.reserve) if sizes.swa_pages else None
    kv = make_kv(network, sizes, max_rows=max_rows, width_pages=ledger.width_pages, device=device, sparse=sparse)
    drafter = draft.make(Bound(network, max_rows, max_model_len + draft.reserve.tokens, device))
    sampler = Sampler(network, max_rows, max_model_len, loaded.config.vocab_size, device)
    runner = Runner(network, kv, sampler, drafter, ledger, device=device, context_tokens=max_model_len)
    return Parts(
        ledger=ledger,
        runner=runner,
        tokenizer=loaded.tokenizer,
        model_name=loaded.name,
        max_model_len=max_model_len,
        vocab_size=loaded.config.vocab_size,
        reserve=draft.reserve,
        drafter=drafter,
        adaptive=_adaptive(config, drafter),
        grammars=GrammarCompiler(loaded.tokenizer, loaded.config.vocab_size),
        startup_lines=[
            *_startup_lines(config, loaded, network, ledger, draft, page_bytes, capacity),
            *([] if plan is None else [tier_line(config, plan)]),
        ],
        trace=trace,
        info=_info(config, loaded, network),
        chunk_tokens=chunk_tokens,
        tiers=None if tier is None or plan is None else TierControl(
            ledger, runner, TierMover(tier, kv, device), plan.max_draft_tokens
        ),
        page_bytes=page_bytes,
        capacity=capacity,
    )


def _sparse_native() -> bool:
    """Whether the compiled operations know sparse layers; else they run in torch."""
    supports = getattr(native, "supports_sparse", None)
    return supports is not None and bool(supports())


def _info(config: EngineConfig, loaded: LoadedModel, network: Any) -> dict[str, Any]:
    info: dict[str, Any] = {
        "format": loaded.format,
        "formats": network.formats,
        "weight_bytes": network.weight_bytes,
    }
    if config.role != "both":
        from octavo.disagg.layout import arithmetic, fingerprint

        info["fingerprint"] = fingerprint(loaded)
        info["arithmetic"] = arithmetic(loaded, config.quantization, DTYPES[config.compute_dtype])
    return info


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "cuda", "this torch finds no CUDA device; allowed here: cpu")
    return torch.device(config.device)


def _trace(config: EngineConfig) -> Any:
    if config.record_trace is None:
        return None
    from octavo.kv.trace import TraceWriter

    return TraceWriter(config.record_trace)


def _adaptive(config: EngineConfig, drafter: Drafter | None) -> AdaptiveLength | ColumnChooser | TwoSources | None:
    """The chooser of draft lengths; without it every step drafts as much as it may."""
    if drafter is None or not config.draft_adaptive:
        return None
    if isinstance(drafter, (NgramDrafter, TableDrafter, LookupFirstDrafter)):
        return drafter.adapt()
    return AdaptiveLength(drafter.max_draft_tokens, max_depth=drafter.max_depth)


def _kv_dtype(config: EngineConfig) -> torch.dtype:
    return DTYPES[config.compute_dtype if config.kv_dtype == "auto" else config.kv_dtype]


def _rows(config: EngineConfig) -> int:
    """Rows of the ledger: a row whose last step is in flight under overlap is not free yet."""
    return config.max_running * (2 if config.overlap_on else 1)


def size_pools(
    config: EngineConfig, loaded: LoadedModel, reserve: DecodeReserve, full_bytes: int, swa_bytes: int
) -> tuple[PoolSizes, int]:
    """Pages of each pool and the longest request they can hold.

    Without --max-model-len the context is cut to what the pools hold; with it, what does not fit is refused.
    """
    context = loaded.config.context_tokens
    wanted = config.max_model_len
    if wanted is not None and wanted > context:
        raise ConfigError("max_model_len", wanted, f"the model's context is {context} tokens")
    longest = wanted or context
    window = loaded.config.window_tokens or 0
    common: dict[str, Any] = {
        "full_page_bytes": full_bytes,
        "swa_page_bytes": swa_bytes,
        "window_tokens": window,
        "page_size": config.page_size,
        "largest_reserve_tokens": reserve.tokens,
        "chunk_tokens": config.prefill_chunk_tokens,
        "request_slots": config.max_running,
        "context_tokens": longest,
        "overlap": config.overlap_on,
    }
    row_pages = row_width_pages(longest, reserve.tokens, config.page_size)
    if config.num_pages is not None or config.num_swa_pages is not None:
        sizes = explicit_pools(
            config, row_pages * config.max_running, window_tokens=window, swa_page_bytes=swa_bytes,
            reserve_tokens=reserve.tokens, chunk_tokens=config.prefill_chunk_tokens,
        )  # fmt: skip
    else:
        available = hardware.available_memory_bytes() - loaded.weight_bytes
        cap = config.max_running * row_pages * (full_bytes + swa_bytes)
        memory = min(available // 2, cap) if config.kv_memory is None else config.kv_memory
        if config.kv_memory is not None and memory > available:
            raise ConfigError(
                "kv_memory",
                format_size(memory),
                f"{format_size(max(0, available))} are available beside the weights; lower --kv-memory",
            )
        try:
            sizes = pool_sizes(memory, **common)
        except ConfigError as error:  # its argument is our option, whose value people gave as a size
            raise ConfigError("kv_memory", format_size(memory), error.allowed) from None
    held = sizes.full_pages * config.page_size - reserve.tokens + 1
    if held < 2:
        raise ConfigError(
            "kv_memory" if config.num_pages is None else "num_pages",
            config.kv_memory if config.num_pages is None else config.num_pages,
            f"one request needs at least {row_width_pages(1, reserve.tokens, config.page_size)} pages"
            f" of {config.page_size} tokens ({format_size(full_bytes)} each); raise --kv-memory or --num-pages",
        )
    if held < longest:
        if wanted is not None:
            raise ConfigError(
                "max_model_len",
                wanted,
                f"the KV pages hold {held} tokens of one request; raise --kv-memory or --num-pages,"
                f" or lower --max-model-len",
            )
        longest = held
    return sizes, longest


def _startup_lines(
    config: EngineConfig,
    loaded: LoadedModel,
    network: Any,
    ledger: Ledger,
    draft: DraftPlan,
    page_bytes: PageBytes,
    capacity: Capacity | None,
) -> list[str]:
    books = ledger.config
    p = books.page_size
    pools = [_pool_line("full", books.full_pages, p, page_bytes.full)]
    if books.swa_pages:
        pools.append(_pool_line("sliding window", books.swa_pages, p, page_bytes.swa))
    longest = row_width_pages(books.context_tokens - 1, draft.reserve.tokens, p)
    kv_dtype = config.compute_dtype if config.kv_dtype == "auto" else config.kv_dtype
    fits = books.full_pages // longest
    return [
        f"model    {loaded.name} ({loaded.config.architecture}, {loaded.format})",
        f"kernels  {network.kernels}, {config.num_threads} threads",
        f"weights  {format_size(network.weight_bytes)} ({network.formats})",
        f"KV       {'; '.join(pools)} (page {p} tokens, {kv_dtype})",
        f"fits     {fits} requests of {books.context_tokens} tokens; at most {config.max_running} run together"
        + ("" if capacity is None else _saving_words(capacity, page_bytes)),
        f"draft    {draft.description}",
    ]


def _capacity(config: EngineConfig, books: LedgerConfig, reserve: DecodeReserve) -> Capacity:
    return longest_requests(
        PoolSizes(books.full_pages, books.swa_pages),
        window_tokens=books.window_tokens,
        page_size=books.page_size,
        reserve=reserve,
        chunk_tokens=books.chunk_tokens,
        request_slots=config.max_running,
        context_tokens=books.context_tokens,
        overlap=books.overlap,
    )


def _saving_words(capacity: Capacity, page_bytes: PageBytes) -> str:
    saving = two_pool_saving(capacity.pages, page_bytes)
    return (
        f"; {capacity.requests} of them take {format_size(saving.two_pools_bytes)} in two pools, "
        f"{format_size(saving.one_pool_bytes)} in one for all layers ({format_size(saving.saved_bytes)} saved)"
    )


def _pool_line(name: str, pages: int, page_size: int, page_bytes: int) -> str:
    return f"{name} {pages} pages, {pages * page_size} tokens, {format_size(pages * page_bytes)}"
