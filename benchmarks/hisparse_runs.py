"""What benchmarks/hisparse.py runs: one network dense and sparse over the same pages, and the units of work.

A prompt is prefilled dense, as the engine does it, and only as far as row 0 does not hold it yet: whole pages of an
equal beginning stay, as they would from the prefix cache. Its pages, all layers of the model, are the host tier of
every sparse run, so one prefill serves all numbers of pages.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from octavo.bench.engines import Peer, peer_python, run
from octavo.bench.scratch import scratch_pages
from octavo.bench.workload import Case
from octavo.kv.sizing import PoolSizes, min_swa_pages
from octavo.kv.tiers import least_device_pages
from octavo.model.load.loader import LoadedModel, resolve
from octavo.model.registry import build_network, make_kv
from octavo.ops.meta import KVView, StepMeta
from octavo.ops.sparse_state import back_up, new_sparse_view, summarise_host_pages

PIECE = 16  # tokens scored in one step, each selecting for itself
CHUNK = 512
RECENT = 64
ANSWER_TOKENS = 20
WARM_STEPS = 2
DEPTHS = (0.95, 0.75, 0.5, 0.25, 0.05)  # deepest first: what stands before the needle is computed once
NEEDLE = "The secret number of {city} is {number}. Remember it."
QUESTION = "What is the secret number of {city}? Answer with the number only."
CITIES = ("Lisbon", "Oslo", "Nairobi", "Quito", "Hanoi", "Perth", "Zagreb", "Cairo")


def step_meta(ids: Sequence[Sequence[int]], start: int, *, decodes: bool) -> StepMeta:
    """Row r computes ids[r] (equally many each) from position `start` on."""
    rows, n = len(ids), len(ids[0])
    slots = torch.arange(start, start + n).repeat(rows)
    seq = torch.arange(rows).repeat_interleave(n)
    flat = torch.tensor([token for row in ids for token in row])
    first = torch.full((rows,), start)
    indptr = tuple(range(0, rows * n + 1, n))
    decoding = rows if decodes else 0
    return StepMeta(flat, slots, slots, seq, torch.arange(rows), first, None, indptr, start + n, decoding)


def same_beginning(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Bench:
    """Both networks over the same weights, pages for `rows` rows of `tokens` tokens."""

    def __init__(self, args: argparse.Namespace, loaded: LoadedModel, rows: int, tokens: int) -> None:
        self.args, self.loaded = args, loaded
        common: dict[str, Any] = {
            "dtype": torch.float32, "page_size": args.page_size, "kv_dtype": getattr(torch, args.kv_dtype),
            "threads": args.threads, "max_positions": max(tokens, 1) + PIECE,
        }  # fmt: skip
        torch.set_num_threads(args.threads)
        self.dense = build_network(self.loaded, **common)
        self.sparse = build_network(self.loaded, sparse_dense_layers=args.sparse_dense_layers, **common)
        if self.dense.kernels.startswith("native"):
            torch.set_num_threads(1)
        self.kv: KVView = scratch_pages(self.dense, rows, tokens + PIECE, args.page_size)
        if self.kv.full is None:
            raise SystemExit("this model has no full-attention layer")
        self.host = self.kv.full
        self.width = self.kv.full_table.shape[1]
        self.held: list[int] = []  # tokens whose dense KV lies in row 0

    def prefill(self, ids: Sequence[int], *, copies: int = 1) -> torch.Tensor:
        """Dense prefill of row 0; its pages are copied for rows 1 … copies - 1. Returns the last hidden state."""
        shared = min(same_beginning(self.held, ids), len(ids) - 1) // self.args.page_size * self.args.page_size
        self.held = self.held[:shared]
        for at in range(shared, len(ids), CHUNK):
            chunk = ids[at : at + CHUNK]
            hidden = self.dense.forward(step_meta([chunk], at, decodes=False), self.kv)[0]
            self.held += chunk
        for row in range(1, copies):
            for pool in (self.kv.full, self.kv.swa):
                if pool is not None:
                    pool[row * self.width : (row + 1) * self.width] = pool[: self.width]
        return hidden[-1:]

    def sparse_kv(self, length: int, topk: int, device_pages: int, rows: int) -> KVView:
        """State of rows whose first `length` tokens (whole pages) are in the host tier, all slots empty."""
        net, args = self.sparse, self.args
        view = new_sparse_view(
            sparse_layers=net.sparse_layers, host_layers=net.host_layers, dense_host_layers=net.dense_host_layers,
            slots=rows * device_pages, host=self.host, max_rows=rows, width_pages=self.width,
            device_pages=device_pages, topk_pages=topk, recent_tokens=RECENT, footprint_tokens=PIECE,
            dense_limit_tokens=0,
        )  # fmt: skip
        pages = length // args.page_size
        view.row_slots.copy_(torch.arange(rows * device_pages, dtype=torch.int32).view(rows, device_pages))
        view.host_table.copy_(self.kv.full_table[:rows])
        view.backed.fill_(pages)
        for row in range(rows):
            summarise_host_pages(view, self.kv.full_table[row, :pages].long())
        kv = replace(self.kv, full=None)
        if net.full_layers:
            kv = make_kv(net, PoolSizes(rows * self.width, 0), max_rows=rows, width_pages=self.width)
            if kv.full is not None:
                kv.full.copy_(self.host[: kv.full.shape[0], list(net.dense_host_layers)])
            kv.full_table.copy_(self.kv.full_table[:rows])
        return replace(kv, swa=self.kv.swa, swa_table=self.kv.swa_table, sparse=view)

    def settle(self, kv: KVView, start: int, end: int, rows: int) -> None:
        """Pages that became complete between positions start and end go to the host tier."""
        p = self.args.page_size
        columns = torch.arange(start // p, end // p)
        if kv.sparse is None or not len(columns):
            return
        del self.held[start // p * p :]
        for row in range(rows):
            back_up(kv, torch.full_like(columns, row), columns)
            summarise_host_pages(kv.sparse, kv.sparse.host_table[row, columns].long())
        kv.sparse.backed.fill_(end // p)

    def forward(self, ids: Sequence[Sequence[int]], start: int, kv: KVView) -> torch.Tensor:
        """Hidden states of a decode step, dense or sparse as kv says. What it writes is not the prompt's."""
        del self.held[start:]
        network = self.sparse if kv.sparse is not None else self.dense
        return network.forward(step_meta(ids, start, decodes=kv.sparse is not None), kv)[0]

    def settings(self, length: int, rows: int) -> Iterator[tuple[str, int, KVView]]:
        """("dense" or "K = 1/8", K, state) of every run of a line; one state at a time."""
        pages = length // self.args.page_size
        yield "dense", 0, self.kv
        for divisor in self.args.fractions:
            topk = max(1, pages // divisor)
            least = least_device_pages(topk, RECENT, self.args.page_size)
            buffer = min(self.width, int(least + self.args.spare * topk))
            yield f"K = 1/{divisor}", topk, self.sparse_kv(length, topk, buffer, rows)


# Memory


def device_bytes(kv: KVView, length: int, rows: int) -> int:
    """KV bytes on the device for `rows` rows of `length` tokens: pages of dense layers, slots, page bounds. Pages of
    sliding-window layers, the same in every setting, are not in it."""
    pages = -(-length // kv.page_size)
    total = 0
    if kv.full is not None and kv.full.shape[1]:
        total += rows * pages * kv.full[0].numel() * kv.full.element_size()
    if kv.sparse is not None:
        view = kv.sparse
        total += (view.slots.shape[0] - 1) * view.slots[0].numel() * view.slots.element_size()
        total += rows * pages * view.bounds[:, 0].numel() * 4
    return total


def memory(bench: Bench, length: int, streams: int) -> list[dict[str, Any]]:
    """Device and host bytes of every setting; nothing is computed."""
    kv, p = bench.kv, bench.args.page_size
    host_page_bytes = bench.host[0].numel() * bench.host.element_size()
    window_bytes = 0
    if kv.swa is not None:
        window = max(w for w in bench.loaded.config.windows if w is not None)
        pages = min_swa_pages(window, 1, CHUNK, p, overlap=False)
        window_bytes = streams * min(pages, -(-length // p)) * kv.swa[0].numel() * kv.swa.element_size()
    return [
        {
            "setting": name, "topk_pages": topk, "device_bytes": device_bytes(state, length, streams),
            "window_bytes": window_bytes,
            "host_bytes": 0 if state.sparse is None else streams * -(-length // p) * host_page_bytes,
        }
        for name, topk, state in bench.settings(length, streams)
    ]  # fmt: skip


# Speed


def speed(bench: Bench, ids: Sequence[int], length: int, streams: int) -> list[dict[str, Any]]:
    """Milliseconds per step of every setting, decoding the same tokens behind `length` tokens of context."""
    results = []
    steps = range(length, length + bench.args.steps + WARM_STEPS)
    bench.prefill(ids[:length], copies=streams)
    for name, topk, kv in bench.settings(length, streams):
        network = bench.sparse if kv.sparse is not None else bench.dense
        wall, cpu = [], []
        for at in steps:
            began, used = time.perf_counter(), time.process_time()
            network.argmax(bench.forward([[ids[at]]] * streams, at, kv))
            wall.append(1e3 * (time.perf_counter() - began))
            cpu.append(1e3 * (time.process_time() - used))
        counts = [0, 0, 0] if kv.sparse is None else kv.sparse.counts.tolist()
        results.append(
            {
                "setting": name, "topk_pages": topk,
                "device_pages": 0 if kv.sparse is None else kv.sparse.device_pages,
                "step_ms": statistics.median(wall[WARM_STEPS:]), "best_ms": min(wall[WARM_STEPS:]),
                "cpu_ms": statistics.median(cpu[WARM_STEPS:]), "device_bytes": device_bytes(kv, length, streams),
                "hit_share": counts[0] / max(1, counts[0] + counts[1]), "raw_ms": wall,
            }
        )  # fmt: skip
    return results


def peer_speed(args: argparse.Namespace, ids: Sequence[int], length: int, streams: int) -> list[dict[str, Any]]:
    """The peer behind the same token ids, as many streams and as much context; it goes on with its own greedy tokens.

    Its pass over the prompts gives the first token and is not timed here.
    """
    path, _ = resolve(args.model, accept_license=True)
    python = peer_python(args.peer, args.peer_python)
    peer = Peer(args.peer, python, str(path), threads=args.threads, streams=streams, context_tokens=length + 2 * PIECE)
    try:
        case = Case("depth", streams, length, args.steps + WARM_STEPS + 1)
        sample = run(peer, [list(ids[:length])] * streams, case)
        described = peer.describe()
    finally:
        peer.close()
    wall = [1e3 * seconds for seconds in sample.step_s]
    timed = wall[WARM_STEPS:]
    return [
        {
            "setting": args.peer, "step_ms": statistics.median(timed), "best_ms": min(timed), "raw_ms": wall,
            "prefill_s": max(sample.first_token_s),
            "peer": {name: described[name] for name in ("version", "weights", "kv")},
        }
    ]  # fmt: skip


# Quality


def perplexity(bench: Bench, ids: Sequence[int], length: int, window: int) -> list[dict[str, Any]]:
    """Negative log-likelihood (nats) of the last tokens of one window of text, by setting."""
    lead = bench.loaded.tokenizer.encode("")  # the token a text begins with, where the model has one
    first = len(lead) + window * (length + 257)
    piece = [*lead, *ids[first : first + length + 1 - len(lead)]]
    start = (length - bench.args.scored) // bench.args.page_size * bench.args.page_size
    bench.prefill(piece[:start])
    results = []
    for name, topk, kv in bench.settings(start, 1):
        nll = 0.0
        for at in range(start, length, PIECE):
            end = min(length, at + PIECE)
            hidden = bench.forward([piece[at:end]], at, kv)
            logits = (bench.dense if kv.sparse is None else bench.sparse).logits(hidden).double()
            wanted = torch.tensor(piece[at + 1 : end + 1])
            nll -= float(torch.log_softmax(logits, dim=-1).gather(1, wanted[:, None]).sum())
            bench.settle(kv, at, end, 1)
        results.append({"setting": name, "topk_pages": topk, "nll": nll, "tokens": length - start})
    return results


def windows_of(ids: Sequence[int], length: int, wanted: int) -> int:
    """How many windows the text has, at most `wanted`."""
    return min(wanted, max(0, (len(ids) - length - 1) // (length + 257) + 1))


def needle_prompt(bench: Bench, filler: Sequence[int], length: int, depth: float, seed: int) -> tuple[list[int], str]:
    """(prompt ids of about `length` tokens, the number to find). One seed has the same text at every depth."""
    rng = random.Random(seed)
    city, number = rng.choice(CITIES), str(rng.randrange(10000, 99999))
    tokenizer = bench.loaded.tokenizer
    needle = tokenizer.encode("\n\n" + NEEDLE.format(city=city, number=number) + "\n\n", add_special_tokens=False)
    question = QUESTION.format(city=city)
    marker = "\u241e"
    if tokenizer.chat_template is not None:
        around = tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{marker}\n\n{question}"}], add_generation_prompt=True
        )
        before, after = (tokenizer.encode(part, add_special_tokens=False) for part in around.split(marker))
    else:
        before, after = (
            [],
            tokenizer.encode(f"\n\n{question}\nAnswer: The secret number of {city} is", add_special_tokens=False),
        )
    room = length - len(before) - len(after) - len(needle)
    start = rng.randrange(0, max(1, len(filler) - room))
    text, cut = list(filler[start : start + room]), int(depth * room)
    return [*before, *text[:cut], *needle, *text[cut:], *after], number


def needle(bench: Bench, filler: Sequence[int], length: int, depth: float, seed: int) -> list[dict[str, Any]]:
    """Whether each setting finds the number of one prompt. The answer is decoded greedily."""
    p = bench.args.page_size
    prompt, number = needle_prompt(bench, filler, length - ANSWER_TOKENS, depth, seed)
    whole = len(prompt) // p * p
    first = int(bench.dense.argmax(bench.prefill(prompt))[0])
    results = []
    for name, topk, kv in bench.settings(whole, 1):
        network, answer, at = bench.dense if kv.sparse is None else bench.sparse, [first], len(prompt)
        if kv.sparse is not None and at > whole:  # the partial page: its slots are filled by a dense pass
            network.forward(step_meta([prompt[whole:]], whole, decodes=False), kv)
        while len(answer) < ANSWER_TOKENS:
            answer.append(int(network.argmax(bench.forward([answer[-1:]], at, kv))[0]))
            bench.settle(kv, at, at + 1, 1)
            at += 1
        text = bench.loaded.tokenizer.decode(answer)
        results.append({"setting": name, "topk_pages": topk, "found": int(number in text), "of": 1, "answer": text})
    return results
