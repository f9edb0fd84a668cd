"""SmolLM2 and Gemma-3-270M over two servers: real window tails, real drafts, the text of one server."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
from pathlib import Path
from typing import Any

import httpx
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
from tests.api.serving import running
from tests.disagg.pair import DECODE, PREFILL, Pair, Steps
from tests.disagg.processes import trio

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
    ids = alone.tokenizer.encode(TEXT * 80)
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
    pair = same_text("gemma3-270m", [511, 512, 513, 700, 20])
    tally = pair.decode.side.tally
    swa = pair.decode.side.regions["swa"].page_bytes
    # pages of 16: the tails start at 0, 0, 0, floor(700 - 512) = 176 = 11 pages, 0
    assert tally.results["done"] == 5 and tally.skipped_bytes == 11 * swa
    pair.close()


def test_gemma_with_pages_larger_than_its_window() -> None:
    """Pages of 1,024 tokens, a window of 512: from 1,536 tokens on the first one's window part does not travel."""
    pair = same_text("gemma3-270m", [1536, 40], page_size=1024, max_model_len=2048, kv_memory="512MiB")
    tally, swa = pair.decode.side.tally, pair.decode.side.regions["swa"].page_bytes
    assert tally.results["done"] == 2 and tally.skipped_bytes == swa
    pair.close()


PROMPTS = [f"{i}. {TEXT * (i % 4)}What does a {thing} need in {place}?"
           for i, (thing, place) in enumerate(itertools.product(
               ("river", "mill", "town", "harbour", "ship", "hill", "market", "bridge", "road", "farm"),
               ("spring", "summer", "autumn", "winter", "a storm")))]  # fmt: skip
REAL: dict[str, Any] = {"core": "octavo.engine.core:EngineCore", "model": "smollm2", "dtype": "float32",
                        "quantization": "none", "max_model_len": 512}  # fmt: skip


def answers(url: str) -> list[Any]:
    """Of a server or a router: text, end and log-probabilities of every prompt; every third one is streamed."""

    def ask(number: int) -> Any:
        body = {"model": "tiny", "messages": [{"role": "user", "content": PROMPTS[number]}], "temperature": 0,
                "max_tokens": 8, "logprobs": number % 5 == 1, "stop": ["."], "stream": number % 3 == 0}
        if not body["stream"]:
            answer = httpx.post(url + "/v1/chat/completions", json=body, timeout=300)
            assert answer.status_code == 200, answer.text
            choice = answer.json()["choices"][0]
            entries = (choice["logprobs"] or {"content": []})["content"]  # the router writes numbers anew: 15 digits
            logprobs = [(entry["token"], round(entry["logprob"], 12)) for entry in entries]
            return choice["message"]["content"], choice["finish_reason"], logprobs
        text, ends = "", []
        with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=300) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    text += choice["delta"].get("content") or ""
                    ends.append(choice["finish_reason"])
        return text, ends[-1], []

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return list(pool.map(ask, range(len(PROMPTS))))


@pytest.mark.timeout(1800)
def test_fifty_prompts_through_the_router_have_the_text_of_one_server(tmp_path: Path) -> None:
    """SmolLM2 in float32: a server, then two of them over Mooncake with the router in front."""
    with running(tmp_path, served_model_name=("tiny",), **REAL) as alone:
        want = answers(alone.url)
    with trio(tmp_path, router=True, **REAL) as servers:
        assert answers(servers.router) == want
        assert servers.decode.metric("kv_transfer_bytes_total") > 0
        servers.check_at_rest()
    assert len(PROMPTS) == len(want) == 50 and len({text for text, _, _ in want}) > 25
