"""SmolLM2 and Gemma-3-270M over two servers: real window tails, real drafts, the text of one server."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.config import EngineConfig
from octavo.disagg.decode import DecodeSide
from octavo.disagg.hub import LocalNet
from octavo.disagg.prefill import PrefillSide
from octavo.disagg.transport.inprocess import InProcessTransport, Wire
from octavo.engine.core import EngineCore
from octavo.engine.request import EngineRequest
from octavo.engine.setup import build
from octavo.model.load import load_model
from octavo.params import SamplingParams
from octavo.spec.checkpoint import random_draft, save_draft
from octavo.spec.draft_config import (
    DFlashConfig,
    EagleConfig,
    LayerShape,
    default_dflash_layers,
    default_eagle_taps,
)
from tests.disagg.pair import DECODE, PREFILL, Pair, Steps

pytestmark = pytest.mark.models

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TEXT = "The river rises in the hills, runs past the old mill and the market town, and reaches the sea at the harbour. "


def cores(name: str, **options: Any) -> tuple[EngineCore, Pair]:
    """One engine alone, and a pair, all three on the same checkpoint."""
    loaded = load_model(name, accept_license=True)
    shared = {"model": name, "draft": "none", "kv_memory": "192MiB", "max_model_len": 1024, "max_running": 4,
              "check_books": True, "max_batched_tokens": 256, "draft_adaptive": False, **options}
    net, wire, clock, made = LocalNet(), Wire(), Steps(), {}
    for role in ("both", "prefill", "decode"):
        config = EngineConfig.from_options({**shared, "role": role}, environ={})

        def side(core: EngineCore, role: str = role) -> PrefillSide | DecodeSide:
            name = PREFILL if role == "prefill" else DECODE
            hub, transport = net.hub(name), InProcessTransport(wire, name)
            if role == "prefill":
                return PrefillSide(core, hub, transport, room_timeout_s=120, clock=clock)
            return DecodeSide(core, hub, transport, room_timeout_s=120, quarantine_after_s=120, clock=clock)

        made[role] = EngineCore(config, build(config, loaded), side=None if role == "both" else side)
    pair = Pair.__new__(Pair)
    pair.net, pair.wire, pair.clock = net, wire, clock
    pair.prefill, pair.decode = made["prefill"], made["decode"]
    pair.cores, pair.outputs = {"prefill": pair.prefill, "decode": pair.decode}, {}
    pair._rooms = itertools.count(1)
    return made["both"], pair


def same_text(name: str, lengths: list[int], **options: Any) -> Pair:
    alone, pair = cores(name, **options)
    ids = alone.tokenizer.encode(TEXT * 40)
    want: dict[str, list[int]] = {}
    for i, length in enumerate(lengths):
        tokens = ids[i : i + length]
        alone.add_request(EngineRequest(f"r{i}", tokens, PARAMS))
        pair.ask(f"r{i}", tokens, PARAMS)
    while alone.has_work():
        for output in alone.step():
            want.setdefault(output.request_id, []).extend(output.token_ids)
    alone.close()
    pair.run()
    assert [pair.tokens(f"r{i}") for i in range(len(lengths))] == [want[f"r{i}"] for i in range(len(lengths))]
    if alone.parts.drafter is not None:
        assert pair.decode.report()["speculation"] == alone.report()["speculation"]
    return pair


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_smollm2(draft: str) -> None:
    pair = same_text("smollm2", [5, 17, 70], draft=draft)
    assert pair.decode.side.tally.results["done"] == 3
    pair.close()


@pytest.mark.parametrize("draft", ["eagle3", "dflash"])
def test_smollm2_with_draft_kv(draft: str, tmp_path: Path) -> None:
    """Random drafts: text and acceptance, proposal by proposal, are those of one server."""
    target = load_model("smollm2").config
    shape, vocab = LayerShape.of(target), target.vocab_size
    config: EagleConfig | DFlashConfig = EagleConfig(shape, vocab, 1024, default_eagle_taps(target.num_layers))
    if draft == "dflash":
        config = DFlashConfig(shape, vocab, vocab, 2, default_dflash_layers(target.num_layers, 2), 6, vocab - 1,
                              (None, None), (False, False))
    save_draft(tmp_path / draft, random_draft(config, seed=3), dtype=torch.float32)
    same_text("smollm2", [17, 40], draft=draft, draft_model=str(tmp_path / draft)).close()


def test_gemma_moves_the_tail_of_its_window_only() -> None:
    pair = same_text("gemma3-270m", [511, 513, 700, 20])
    tally = pair.decode.side.tally
    swa = pair.decode.side.regions["swa"].page_bytes
    # pages of 16: the tails start at 0, 0, floor(700 - 512) = 176 = 11 pages, 0
    assert tally.results["done"] == 4 and tally.skipped_bytes == 11 * swa
    pair.close()
