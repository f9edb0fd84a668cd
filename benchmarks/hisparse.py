"""HiSparse against dense attention: speed, memory and quality of decode steps by length and number of pages.

    python benchmarks/hisparse.py --seeds 20      the figures of docs/hisparse.md: hours
    python benchmarks/hisparse.py --parts speed --streams 1 --fractions 4,8,16 --json s.json --plot s.svg
    python benchmarks/hisparse.py --parts perplexity,needle --minutes 5 --json q.json --plot q.svg
    python benchmarks/hisparse.py --parts speed --model gemma3-270m --contexts 8192

One dense prefill serves a whole line of settings: its pages, all layers of the model, are the host tier of the sparse
runs. Every run of a line decodes the same tokens from the same state.

    speed       milliseconds of a decode step (network and greedy token), device bytes of the KV, hits
    perplexity  of the last --scored tokens of each window, decoded with every page or with K of them
    needle      a number hidden at five depths of a text; the answer decoded greedily. The prompt is prefilled dense
                in every case, so the first token of an answer is the dense one
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from octavo.bench.plot import lines, picture
from octavo.bench.record import environment
from octavo.bench.scratch import scratch_pages
from octavo.bench.workload import read_text, source_text, text_sha256
from octavo.kv.sizing import PoolSizes
from octavo.kv.tiers import least_device_pages
from octavo.model.load import load_model
from octavo.model.registry import build_network, make_kv
from octavo.ops.meta import KVView, StepMeta
from octavo.ops.sparse_state import back_up, new_sparse_view, summarise_host_pages

PIECE = 16  # tokens scored in one step, each selecting for itself
RECENT = 64
ANSWER_TOKENS = 20
DEPTHS = (0.05, 0.25, 0.5, 0.75, 0.95)
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


class Bench:
    """Both networks over the same weights, pages for `rows` rows of `tokens` tokens."""

    def __init__(self, args: argparse.Namespace, rows: int, tokens: int) -> None:
        self.args, self.rows = args, rows
        self.deadline = math.inf
        self.loaded = load_model(args.model, accept_license=True)
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

    def out_of_time(self, done: int) -> bool:
        """Whether --minutes are over; the first window or seed is always measured."""
        return done > 0 and time.perf_counter() > self.deadline

    def prefill(self, ids: Sequence[int], *, copies: int = 1) -> None:
        """Dense prefill of row 0; its pages are copied for rows 1 … copies - 1."""
        for at in range(0, len(ids), 512):
            self.dense.forward(step_meta([ids[at : at + 512]], at, decodes=False), self.kv)
        for row in range(1, copies):
            for pool in (self.kv.full, self.kv.swa):
                if pool is not None:
                    pool[row * self.width : (row + 1) * self.width] = pool[: self.width]

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
        kv = self.kv
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
        for row in range(rows):
            back_up(kv, torch.full_like(columns, row), columns)
            summarise_host_pages(kv.sparse, kv.sparse.host_table[row, columns].long())
        kv.sparse.backed.fill_(end // p)

    def forward(self, ids: Sequence[Sequence[int]], start: int, kv: KVView) -> torch.Tensor:
        """Hidden states of a decode step, dense or sparse as kv says."""
        network = self.sparse if kv.sparse is not None else self.dense
        return network.forward(step_meta(ids, start, decodes=kv.sparse is not None), kv)[0]

    def settings(self, length: int, rows: int) -> list[tuple[str, int, KVView]]:
        """("dense" or "K = 1/8", K, state) of every run of a line."""
        pages = length // self.args.page_size
        made: list[tuple[str, int, KVView]] = [("dense", 0, self.kv)]
        for divisor in self.args.fractions:
            topk = max(1, pages // divisor)
            least = least_device_pages(topk, RECENT, self.args.page_size)
            buffer = min(self.width, int(least + self.args.spare * topk))
            made.append((f"K = 1/{divisor}", topk, self.sparse_kv(length, topk, buffer, rows)))
        return made


def device_bytes(kv: KVView, length: int, rows: int) -> int:
    """KV bytes on the device for `rows` rows of `length` tokens: pages of dense layers, slots, page bounds."""
    pages = -(-length // kv.page_size)
    total = 0
    if kv.full is not None and kv.full.shape[1]:
        total += rows * pages * kv.full[0].numel() * kv.full.element_size()
    if kv.sparse is not None:
        view = kv.sparse
        total += (view.slots.shape[0] - 1) * view.slots[0].numel() * view.slots.element_size()
        total += rows * pages * view.bounds[:, 0].numel() * 4
    return total


def speed(bench: Bench, ids: Sequence[int], length: int, streams: int) -> list[dict[str, Any]]:
    """Milliseconds per step of every setting, decoding the same tokens."""
    results = []
    bench.prefill(ids[:length], copies=streams)
    for name, topk, kv in bench.settings(length, streams):
        network = bench.sparse if kv.sparse is not None else bench.dense
        wall, cpu = [], []
        for i in range(bench.args.steps + 2):
            at = length + i
            if at + 1 > length + PIECE:
                break
            began, used = time.perf_counter(), time.process_time()
            network.argmax(bench.forward([[ids[at]]] * streams, at, kv))
            wall.append(1e3 * (time.perf_counter() - began))
            cpu.append(1e3 * (time.process_time() - used))
        counts = [0, 0, 0] if kv.sparse is None else kv.sparse.counts.tolist()
        results.append(
            {
                "context": length, "streams": streams, "setting": name, "topk_pages": topk,
                "device_pages": 0 if kv.sparse is None else kv.sparse.device_pages,
                "step_ms": statistics.median(wall[2:]), "best_ms": min(wall[2:]), "cpu_ms": statistics.median(cpu[2:]),
                "device_bytes": device_bytes(kv, length, streams),
                "hit_share": counts[0] / max(1, counts[0] + counts[1]), "raw_ms": wall,
            }
        )  # fmt: skip
        show("speed", results[-1], "step_ms", "cpu_ms", "device_bytes", "hit_share")
    return results


def perplexity(bench: Bench, ids: Sequence[int], length: int) -> list[dict[str, Any]]:
    """Perplexity of the last tokens of each window."""
    scored = bench.args.scored
    sums: dict[str, list[float]] = {}
    for window in range(bench.args.windows):
        first = window * (length + 257)
        piece = ids[first : first + length + 1]
        if len(piece) < length + 1 or bench.out_of_time(window):
            break
        start = (length - scored) // bench.args.page_size * bench.args.page_size
        bench.prefill(piece[:start])
        for name, topk, kv in bench.settings(start, 1):
            total = 0.0
            for at in range(start, length, PIECE):
                end = min(length, at + PIECE)
                hidden = bench.forward([piece[at:end]], at, kv)
                logits = (bench.dense if kv.sparse is None else bench.sparse).logits(hidden).double()
                wanted = torch.tensor(piece[at + 1 : end + 1])
                total -= float(torch.log_softmax(logits, dim=-1).gather(1, wanted[:, None]).sum())
                bench.settle(kv, at, end, 1)
            entry = sums.setdefault(name, [topk, 0.0, 0])
            entry[1] += total
            entry[2] += length - start
    results = []
    for name, (topk, total, count) in sums.items():
        value = math.exp(total / count)
        base = math.exp(sums["dense"][1] / sums["dense"][2])
        line = {"context": length, "setting": name, "topk_pages": int(topk), "perplexity": value, "tokens": int(count),
                "change": value / base - 1}  # fmt: skip
        results.append(line)
        show("perplexity", line, "perplexity", "change")
    return results


def needle_prompt(bench: Bench, filler: Sequence[int], length: int, depth: float, seed: int) -> tuple[list[int], str]:
    """(prompt ids of about `length` tokens, the number to find)."""
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


def needle(bench: Bench, filler: Sequence[int], length: int) -> list[dict[str, Any]]:
    """Share of numbers found at each depth."""
    p, found = bench.args.page_size, {}
    for seed in range(bench.args.seeds):
        if bench.out_of_time(seed):
            break
        for depth in DEPTHS:
            prompt, number = needle_prompt(bench, filler, length - ANSWER_TOKENS, depth, seed)
            whole = len(prompt) // p * p
            bench.prefill(prompt)
            first = int(bench.dense.argmax(bench.forward([prompt[-1:]], len(prompt) - 1, bench.kv))[0])
            for name, topk, kv in bench.settings(whole, 1):
                network, answer, at = bench.dense if kv.sparse is None else bench.sparse, [first], len(prompt)
                if kv.sparse is not None and at > whole:  # the partial page: its slots are filled by a dense pass
                    network.forward(step_meta([prompt[whole:]], whole, decodes=False), kv)
                while len(answer) < ANSWER_TOKENS:
                    answer.append(int(network.argmax(bench.forward([answer[-1:]], at, kv))[0]))
                    bench.settle(kv, at, at + 1, 1)
                    at += 1
                good = number in bench.loaded.tokenizer.decode(answer)
                entry = found.setdefault((name, depth), [topk, 0, 0])
                entry[1] += good
                entry[2] += 1
    results = []
    for (name, depth), (topk, good, count) in found.items():
        line = {"context": length, "setting": name, "topk_pages": topk, "depth": depth, "found": good, "of": count}
        results.append(line)
        show("needle", line, "depth", "found", "of")
    return results


def show(part: str, line: dict[str, Any], *names: str) -> None:
    values = ", ".join(f"{name} {line[name]:.4g}" for name in names)
    streams = f" x{line['streams']}" if "streams" in line else ""
    print(f"{part:<10} {line['context']:>6}{streams} {line['setting']:<9} {values}", flush=True)


def draw(result: dict[str, Any]) -> str:
    """Step time and perplexity over the context, by setting; needles over depth."""
    panels = []
    for streams in sorted({line["streams"] for line in result["speed"]}):
        mine = [line for line in result["speed"] if line["streams"] == streams]
        panels.append(_over(mine, f"ms of a decode step, {streams} stream{'s' if streams > 1 else ''}", "step_ms"))
    if result["perplexity"]:
        panels.append(_over(result["perplexity"], "perplexity", "perplexity"))
    if result["needle"]:
        totals: dict[tuple[str, int], list[int]] = {}
        for line in result["needle"]:
            entry = totals.setdefault((line["setting"], line["context"]), [0, 0])
            entry[0] += line["found"]
            entry[1] += line["of"]
        shown = [
            {"setting": setting, "context": context, "share": 100 * good / count}
            for (setting, context), (good, count) in totals.items()
        ]
        panels.append(_over(shown, "needles found, % of all depths", "share"))
    return picture(panels)


def _over(entries: Sequence[dict[str, Any]], title: str, value: str) -> str:
    contexts = sorted({line["context"] for line in entries})
    series: dict[str, list[float | None]] = {}
    for line in entries:
        series.setdefault(line["setting"], [None] * len(contexts))[contexts.index(line["context"])] = line[value]
    return lines(title, [str(context) for context in contexts], series)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="HiSparse against dense attention")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--parts", default="speed,perplexity,needle")
    parser.add_argument("--contexts", type=numbers, default=[1024, 4096, 8192], help="tokens")
    parser.add_argument("--streams", type=numbers, default=[1, 8])
    parser.add_argument("--fractions", type=numbers, default=[2, 4, 8, 16], help="K is 1/n of the pages of the context")
    parser.add_argument("--spare", type=float, default=1.0, help="places beyond the least buffer, in K")
    parser.add_argument("--steps", type=int, default=12, help="decode steps timed (at most 14)")
    parser.add_argument("--windows", type=int, default=4, help="windows of text scored at each length")
    parser.add_argument("--scored", type=int, default=256, help="tokens scored of each window")
    parser.add_argument("--seeds", type=int, default=4, help="needles at each depth")
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="of perplexity and needles, shared by contexts (0: no limit)"
    )
    parser.add_argument("--text", help="text file (default: Python's help topics)")
    parser.add_argument("--kv-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--sparse-dense-layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", default="benchmarks/results/hisparse.json")
    parser.add_argument("--plot", default="benchmarks/results/hisparse.svg")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse(sys.argv[1:])
    parts = args.parts.split(",")
    text = source_text() if args.text is None else read_text(args.text)
    result: dict[str, Any] = {"environment": environment(), "text_sha256": text_sha256(text), "options": vars(args)}
    result |= {"speed": [], "perplexity": [], "needle": []}
    rows = max(args.streams) if "speed" in parts else 1
    with torch.inference_mode():
        for context in args.contexts:
            length = context // args.page_size * args.page_size
            bench = Bench(args, rows, length + ANSWER_TOKENS)
            ids = list(bench.loaded.tokenizer.encode(text))
            if "speed" in parts:
                for streams in args.streams:
                    result["speed"] += speed(bench, ids, length - PIECE, streams)
            quality = [part for part in parts if part != "speed"]
            share = 60 * args.minutes / max(1, len(quality) * len(args.contexts)) if args.minutes else math.inf
            bench.deadline = time.perf_counter() + share
            if "perplexity" in parts:
                result["perplexity"] += perplexity(bench, ids, length)
            bench.deadline = time.perf_counter() + share
            if "needle" in parts:
                result["needle"] += needle(bench, ids, length)
            del bench
    Path(args.json).parent.mkdir(parents=True, exist_ok=True)
    Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    Path(args.plot).write_text(draw(result))
    print(f"written: {args.json}, {args.plot}")


if __name__ == "__main__":
    main()
