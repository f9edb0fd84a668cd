"""The one configuration. Every option is declared here once.

Flags, `OCTAVO_…` environment names, `LLM(...)` keyword arguments, validation and docs/cli.md come from these
declarations. A flag or keyword wins over the environment, the environment over the default.

`EngineConfig` is what an engine needs; `ServerConfig` adds what HTTP needs. Both are frozen. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from octavo import hardware
from octavo.errors import ConfigError
from octavo.options import (
    Option,
    choice,
    class_path,
    integer,
    merge,
    names,
    option,
    options_of,
    seconds,
    size,
    switch,
    text,
)

DRAFTS = (
    "auto", "none", "ngram", "table", "eagle3", "dflash", "ngram+table", "ngram+eagle3", "ngram+dflash", "scripted"
)  # fmt: skip
MAX_PAGE_SIZE_TOKENS = 1024


def _power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


@dataclass(frozen=True)
class EngineConfig:
    """Options of an engine. Values are validated and parsed on construction ("2GiB" becomes bytes).

    Raises ConfigError naming the option, the value and what is allowed. `None` means "decided at start".
    """

    model: str = option(
        "smollm2",
        text("a model name (`octavo models`), a .gguf file, a safetensors folder or a hub id", metavar="MODEL"),
        "what to run: a name (`octavo models` lists them), a .gguf file, a safetensors folder or a hub id",
        group="model",
    )
    dtype: str = option(
        "auto",
        choice("auto", "float32", "bfloat16"),
        "type of activations and of weights that are not quantised; auto is float32 on a CPU, bfloat16 on CUDA",
        group="model",
    )
    quantization: str = option(
        "auto",
        choice("auto", "none", "int8", "int4"),
        "weight format; auto keeps the file's own where a fast kernel for it exists on this machine",
        group="model",
    )
    device: str = option("cpu", choice("cpu", "cuda"), "where the model runs", group="model")
    chat_template: str | None = option(
        None,
        text("a file that holds a Jinja template", metavar="FILE", optional=True),
        "chat template to use instead of the model's own",
        group="model",
        shown_default="the model's",
    )
    accept_license: bool = option(
        False, switch(), "accept the terms of a model whose terms must be accepted (Gemma)", group="model"
    )
    cache_dir: str | None = option(
        None,
        text("a folder", metavar="FOLDER", optional=True),
        "where fetched models are kept",
        group="model",
        shown_default="~/.cache/octavo",
    )
    max_model_len: int | None = option(
        None,
        integer(1, optional=True, metavar="TOKENS"),
        "longest prompt plus answer, in tokens",
        group="model",
        shown_default="the model's context",
    )

    page_size: int = option(
        16,
        integer(
            1,
            MAX_PAGE_SIZE_TOKENS,
            check=_power_of_two,
            metavar="TOKENS",
            allowed=f"a power of two from 1 to {MAX_PAGE_SIZE_TOKENS}",
        ),
        "tokens in a KV page",
        group="memory",
    )
    kv_memory: int | None = option(
        None,
        size(optional=True),
        "memory for KV pages, all pools together",
        group="memory",
        shown_default="half of what is available after the weights",
    )
    num_pages: int | None = option(
        None,
        integer(1, optional=True),
        "pages of the full-attention pool; overrides --kv-memory",
        group="memory",
        shown_default="from --kv-memory",
    )
    num_swa_pages: int | None = option(
        None,
        integer(1, optional=True),
        "pages of the sliding-window pool; overrides --kv-memory",
        group="memory",
        shown_default="from --kv-memory",
    )
    kv_dtype: str = option(
        "auto",
        choice("auto", "bf16", "float32"),
        "type of keys and values; auto is float32 for float32 activations, bf16 for bfloat16",
        group="memory",
    )
    prefix_cache: bool = option(True, switch(), "reuse the KV of prompts that begin alike", group="memory")
    evict_policy: str = option(
        "lru",
        choice("lru", also="module:Class", accept=class_path),
        "which cached pages go first when a pool is full",
        group="memory",
    )

    hisparse: bool = option(
        False,
        switch(),
        "keep whole KV in a host tier; decode steps of long requests attend to selected pages (docs/hisparse.md)",
        group="tiers",
    )
    device_pages: int | None = option(
        None,
        integer(1, optional=True),
        "device buffer of a request; what fits it is attended to as without --hisparse",
        group="tiers",
        metavar="PAGES",
        shown_default="enough for the selected pages of a step's rows",
    )
    topk_pages: int = option(32, integer(1), "pages a query of a long request selects", group="tiers", metavar="PAGES")
    recent_tokens: int = option(
        64,
        integer(1),
        "newest positions that always count; at least the reserve of the draft in use",
        group="tiers",
        metavar="TOKENS",
    )
    host_memory: int | None = option(
        None,
        size(optional=True),
        "size of the host tier: memory, or the file of --host-tier-path",
        group="tiers",
        shown_default="half of what is available after the weights, at most what --max-running requests can use",
    )
    host_tier_path: str | None = option(
        None,
        text("a file that is made anew and may be overwritten", metavar="FILE", optional=True),
        "keep the host tier in this file, mapped into memory, instead of in memory",
        group="tiers",
    )
    page_selector: str = option(
        "bounds",
        choice("bounds", also="module:Class", accept=class_path),
        "what scores pages: bounds of their keys, or a class of yours (docs/hisparse.md)",
        group="tiers",
    )
    sparse_dense_layers: int = option(
        2, integer(0), "first layers of the model that attend to everything", group="tiers", metavar="LAYERS"
    )

    max_running: int = option(32, integer(1, 65536), "requests that decode together", group="schedule")
    max_batched_tokens: int = option(
        512,
        integer(1),
        "tokens one step may compute: decode rows first, the rest is prefill",
        group="schedule",
        metavar="TOKENS",
    )
    prefill_chunk: int | None = option(
        None,
        integer(1, optional=True, metavar="TOKENS"),
        "longest piece of one prompt computed in one step",
        group="schedule",
        shown_default="--max-batched-tokens",
    )
    threads: int | None = option(
        None,
        integer(1, 1024, optional=True),
        "threads that compute",
        group="schedule",
        shown_default="the physical cores this process may use",
    )
    overlap: bool | None = option(
        None,
        switch(optional=True),
        "prepare the next step before the result of this one is known",
        group="schedule",
        shown_default="on with CUDA, off on a CPU",
    )
    deterministic: bool | None = option(
        None,
        switch(optional=True),
        "a request's text does not depend on its company, chunking, drafts or page size, bit for bit",
        group="schedule",
        shown_default="on with a CPU, off with CUDA",
    )
    seed: int = option(0, integer(0, 2**63 - 1), "seed of requests that give none", group="schedule")

    draft: str = option(
        "auto",
        choice(*DRAFTS, also="module:Class", accept=class_path),
        "how tokens are drafted; ngram+…: looked up first, drafted by weights or a table of phrases where nothing "
        "matches; auto takes the fastest that exists for the model, else ngram",
        group="draft",
    )
    draft_model: str | None = option(
        None,
        text("a draft folder or file", metavar="PATH", optional=True),
        "an EAGLE-3 or DFlash draft or a table of phrases; for ngram a text that is looked up too",
        group="draft",
        shown_default="the one shipped for the model",
    )
    draft_tokens: int | None = option(
        None,
        integer(1, 64, optional=True),
        "tokens verified together, the root included (DFlash: block size)",
        group="draft",
        shown_default="by algorithm",
    )
    draft_steps: int | None = option(
        None, integer(1, 63, optional=True), "EAGLE-3 steps", group="draft", shown_default="by algorithm"
    )
    draft_topk: int | None = option(
        None,
        integer(1, 64, optional=True),
        "EAGLE-3 branches a step; 1 is a chain",
        group="draft",
        shown_default="1",
    )
    draft_adaptive: bool = option(
        True, switch(), "let the draft length follow measured acceptance and cost, down to zero", group="draft"
    )

    role: str = option(
        "both",
        choice("both", "prefill", "decode"),
        "both: a server of its own; prefill and decode: one half of a pair behind a router",
        group="disagg",
    )
    bootstrap_host: str = option(
        "127.0.0.1",
        text("an address of this machine", metavar="HOST"),
        "address of this machine that the other half reaches, for the control connection and for KV",
        group="disagg",
    )
    bootstrap_port: int = option(
        8998,
        integer(0, 65535, metavar="PORT"),
        "port a prefill server listens on for decode servers; the router names it to them",
        group="disagg",
    )
    transport: str = option("mooncake", choice("mooncake"), "what moves KV between servers", group="disagg")
    transport_protocol: str = option(
        "tcp", choice("tcp", "rdma"), "how Mooncake moves it; rdma needs a device", group="disagg"
    )
    transport_device: str = option(
        "", text("a device name", metavar="DEVICE", optional=True), "RDMA device of Mooncake", group="disagg",
        shown_default="none",
    )
    room_timeout_s: float = option(
        60.0,
        seconds(),
        "how long one request may wait for the other half, its transfer included",
        group="disagg",
        shown_default="60",
    )
    quarantine_after_s: float = option(
        60.0,
        seconds(),
        "when pages whose transfer never ends are written off until the server is restarted",
        group="disagg",
        shown_default="60",
    )

    check_books: bool = option(False, switch(), "check every law of the KV books after every step", group="debug")
    record_trace: str | None = option(
        None,
        text("a file", metavar="FILE", optional=True),
        "write every ledger call as JSON lines for `octavo replay`",
        group="debug",
    )

    def __post_init__(self) -> None:
        for opt in options_of(type(self)):
            object.__setattr__(self, opt.name, opt.convert(getattr(self, opt.name), opt.name))
        if self.prefill_chunk is not None and self.prefill_chunk > self.max_batched_tokens:
            raise ConfigError(
                "prefill_chunk", self.prefill_chunk, f"allowed: at most max_batched_tokens ({self.max_batched_tokens})"
            )

        for name in ("device_pages", "host_memory", "host_tier_path"):
            if getattr(self, name) is not None and not self.hisparse:
                raise ConfigError(name, getattr(self, name), "allowed with --hisparse only")
        if self.hisparse and self.role == "prefill":
            raise ConfigError("hisparse", True, "allowed with --role both and decode: prefill is dense, its KV leaves")

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Every option by name, in order of declaration."""
        return {opt.name: opt for opt in options_of(cls)}

    @classmethod
    def from_options(
        cls, given: Mapping[str, Any] | None = None, *, environ: Mapping[str, str] | None = None, cli: bool = False
    ) -> Self:
        """From given options, then the environment, then defaults. `cli`: errors name flags, not keywords."""
        env = os.environ if environ is None else environ
        return cls(**merge(cls.options(), given or {}, env, cli=cli))

    def replace(self, **changes: Any) -> Self:
        """A copy with some options changed, validated again. Raises ConfigError, for unknown names too."""
        return dataclasses.replace(self, **merge(self.options(), changes, {}, cli=False))

    # What "decided at start" comes to, where it needs no model.

    @property
    def overlap_on(self) -> bool:
        return self.device == "cuda" if self.overlap is None else self.overlap

    @property
    def deterministic_on(self) -> bool:
        return self.device == "cpu" if self.deterministic is None else self.deterministic

    @property
    def compute_dtype(self) -> str:
        """ "float32" or "bfloat16"."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if self.device == "cpu" else "bfloat16"

    @property
    def num_threads(self) -> int:
        return hardware.physical_cores() if self.threads is None else self.threads

    @property
    def prefill_chunk_tokens(self) -> int:
        return self.max_batched_tokens if self.prefill_chunk is None else self.prefill_chunk


@dataclass(frozen=True)
class ServerConfig(EngineConfig):
    """An engine's options plus those of the HTTP server."""

    host: str = option(
        "127.0.0.1", text("an address or host name", metavar="HOST"), "address to listen on", group="server"
    )
    port: int = option(8000, integer(0, 65535, metavar="PORT"), "port to listen on; 0 takes a free one", group="server")
    api_key: str | None = option(
        None,
        text("any text", metavar="KEY", optional=True),
        "key clients must send as a bearer token; better given as OCTAVO_API_KEY, where `ps` does not show it",
        group="server",
        secret=True,
    )
    served_model_name: tuple[str, ...] = option(
        (),
        names(),
        "names clients may ask for; the first is reported",
        group="server",
        shown_default="the model's name",
    )
    cors_origin: tuple[str, ...] = option(
        (), names(), "origins whose pages may call the server", group="server", shown_default="none"
    )
    root_path: str = option(
        "",
        text("a path", metavar="PATH", optional=True),
        "path prefix a reverse proxy strips",
        group="server",
        shown_default="none",
    )
    ssl_certfile: str | None = option(
        None, text("a PEM file", metavar="FILE", optional=True), "TLS certificate", group="server"
    )
    ssl_keyfile: str | None = option(
        None, text("a PEM file", metavar="FILE", optional=True), "TLS private key", group="server"
    )
    max_queue: int = option(256, integer(0), "requests that may wait; more get 429", group="server")
    max_body_bytes: int = option(16 * 1024**2, size(), "largest request body", group="server", shown_default="16MiB")
    shutdown_timeout_s: float = option(
        30.0,
        seconds(),
        "how long running requests may go on after a stop signal",
        group="server",
        shown_default="30",
    )
    restart_engine: bool = option(
        False, switch(), "start a dead engine process again instead of exiting", group="server"
    )
    log_level: str = option("info", choice("debug", "info", "warning", "error"), "what is logged", group="server")
    log_json: bool = option(False, switch(), "log JSON lines", group="server")
    log_prompts: bool = option(False, switch(), "log prompts and answers (never otherwise)", group="server")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            missing = "ssl_certfile" if self.ssl_certfile is None else "ssl_keyfile"
            raise ConfigError(missing, None, "allowed: certificate and key are given together")
