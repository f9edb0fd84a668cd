"""A target network ready to run: weights of one checkpoint in one `Ops`, one program for each set of feature taps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from octavo.errors import ConfigError
from octavo.model.config import ModelConfig
from octavo.model.layers import WeightReader
from octavo.model.rope import rope_tables
from octavo.ops.base import Body, Ops, Program, Tape
from octavo.ops.meta import KVLayer, KVView, StepMeta
from octavo.ops.torch_ops import TorchOps


def build_ops(device: torch.device, dtype: torch.dtype, *, use_native: bool, threads: int | None) -> tuple[Ops, bool]:
    """(operations, are they the compiled ones)."""
    if use_native and device.type == "cpu":
        from octavo.ops import native  # the module is optional: a package without a compiler has no library

        if native.available():
            return native.NativeOps(threads), True
    return TorchOps(device, dtype), False


class Network:
    """One interface for the torch and the native path.

    kv_layers               attention layer i -> pool and index in that pool's pages
    full_layers, swa_layers layers of the target in a page of each pool; drafts follow behind full_layers
    sparse_layers           layers that HiSparse keeps in device slots and the host tier; 0 without
    host_layers, dense_host_layers  layer inside a host page of each sparse layer, of each layer of the full pool
                            (drafts included); a host page holds host_page_layers of them
    embedding               the table, for programs of `ops` that embed tokens themselves
    weight_bytes, formats, kernels  for the start-up print
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        reader: WeightReader,
        layer: Callable[..., Any],
        kv_layers: tuple[KVLayer, ...],
        *,
        draft_kv_layers: int,
        page_size: int,
        kv_dtype: torch.dtype,
        max_positions: int,
    ) -> None:
        self.config, self.ops, self.kv_layers = config, ops, kv_layers
        self.swa_layers = sum(place.pool == "swa" for place in kv_layers)
        self.sparse_layers = sum(place.pool == "sparse" for place in kv_layers)
        self.full_layers = len(kv_layers) - self.swa_layers - self.sparse_layers
        self.draft_kv_layers, self.page_size = draft_kv_layers, page_size
        whole = [place for place in kv_layers if place.pool != "swa"]  # model order, as in a full page without tiers
        self.host_page_layers = len(whole) + draft_kv_layers
        self.host_layers = tuple(i for i, place in enumerate(whole) if place.pool == "sparse")
        dense = [i for i, place in enumerate(whole) if place.pool == "full"]
        self.dense_host_layers = (*dense, *range(len(whole), self.host_page_layers))
        self.dtype, self.kv_dtype, self.device = reader.dtype, kv_dtype, reader.device
        self.kernels, self.max_positions = ops.name, max_positions
        self._embed = self.embedding = reader.table("model.embed_tokens.weight")
        self._head = self._embed if config.tie_embeddings else reader.table("lm_head.weight")
        self._norm = reader.vector("model.norm.weight")
        ropes: dict[bool, Any] = {}
        self._layers = [layer(reader, index, place, self._rope(ropes, place)) for index, place in enumerate(kv_layers)]
        self.weight_bytes = reader.weight_bytes
        self.formats = ", ".join(f"{kind} × {count}" for kind, count in sorted(reader.kinds.items()))
        self._programs: dict[tuple[int, ...], Program] = {}

    def forward(
        self, meta: StepMeta, kv: KVView, taps: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(hidden [n, H] after the final norm, features [n, len(taps)·H] or None).

        `taps` are indices into the hidden-state list of the transformers library: 0 = embeddings, j + 1 = output
        of 0-based layer j, and the last one is the hidden after the final norm. Raises ConfigError for others.
        """
        outputs = self.program(taps).run(meta, kv)
        return outputs["hidden"], outputs.get("features")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [m, V] of hidden [m, H]."""
        return self.ops.logits(hidden, self._head, self.config.final_logit_softcap)

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        """int64 [m]: the greedy token of each row of hidden [m, H], ties to the lowest id."""
        return self.ops.argmax(hidden, self._head)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings [..., H] of ids [...], with the model's own scale."""
        return self.ops.embed(self._embed, ids, self.config.embed_scale)

    def program(self, taps: tuple[int, ...] = ()) -> Program:
        """The forward that also returns these taps; made on first use."""
        if taps not in self._programs:
            bad = [tap for tap in taps if not 0 <= tap <= self.config.num_layers]
            if bad:
                raise ConfigError("taps", bad, f"hidden states 0 … {self.config.num_layers} exist")
            self._programs[taps] = self.ops.program(self._body(taps))
        return self._programs[taps]

    def _rope(self, made: dict[bool, Any], place: KVLayer) -> Any:
        local = place.window_tokens is not None and self.config.rope_local is not None
        if local not in made:
            rope = self.config.rope_local if local and self.config.rope_local is not None else self.config.rope
            made[local] = self.ops.rope(*rope_tables(rope, self.config.head_dim, self.max_positions))
        return made[local]

    def _body(self, taps: tuple[int, ...]) -> Body:
        hidden_size = self.config.hidden_size

        def keep(tape: Tape, index: int, x: Any) -> None:
            for place, tap in enumerate(taps):
                if tap == index:
                    tape.output("features", x, column=place * hidden_size, width=len(taps) * hidden_size)

        def body(tape: Tape) -> None:
            x = tape.embed(self._embed, self.config.embed_scale)
            for index, layer in enumerate(self._layers):
                keep(tape, index, x)
                x = layer.run(tape, x)
            hidden = tape.rms_norm(x, self._norm, self.config.rms_eps)
            keep(tape, len(self._layers), hidden)
            tape.output("hidden", hidden)

        return body
