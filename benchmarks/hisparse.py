"""HiSparse against dense attention: speed, memory and quality of decode steps by length and number of pages.

    python benchmarks/hisparse.py --parts speed --streams 1,8 --peer llama.cpp --json speed.json --plot speed.svg
    python benchmarks/hisparse.py --parts perplexity,needle --contexts 1024,4096,8192 --seeds 20 --json quality.json
    python benchmarks/hisparse.py --parts memory,perplexity,needle --model gemma3-270m --contexts 8192,32768
    python benchmarks/hisparse.py --parts needle --limit-minutes 30 --json quality.json      and again: goes on

The work is cut into units, each written to the JSON file as soon as it is done; the same command goes on where an
earlier one stopped, was stopped, or ran into --limit-minutes. Every setting of a unit decodes from one dense prefill.

    speed       milliseconds of a decode step (network and greedy token), device bytes of the KV, hits; of the peer, the
                milliseconds of its step behind the same tokens
    memory      bytes of the KV on the device and in the host tier; nothing is computed
    perplexity  of the last --scored tokens of each window, decoded with every page or with K of them
    needle      a number hidden at five depths of a text; the answer decoded greedily. The prompt is prefilled dense in
                every case, so the first token of an answer is the dense one
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from hisparse_runs import (
    ANSWER_TOKENS,
    DEPTHS,
    PIECE,
    WARM_STEPS,
    Bench,
    memory,
    needle,
    peer_speed,
    perplexity,
    speed,
    windows_of,
)

from octavo.bench.plot import lines, picture
from octavo.bench.record import environment, peak_memory_bytes
from octavo.bench.workload import read_text, source_text, text_sha256
from octavo.model.load import load_model
from octavo.model.load.loader import LoadedModel

PARTS = ("speed", "memory", "perplexity", "needle")
FORMAT = "octavo-hisparse-2"
# What units of one file must have been measured with; the other options only say which units are wanted.
FIXED = ("model", "fractions", "spare", "steps", "scored", "kv_dtype", "page_size", "sparse_dense_layers", "threads")


class Results:
    """The file that units are collected in. A stop at any moment loses the unit at work and no more."""

    def __init__(self, args: argparse.Namespace, text: str) -> None:
        """Go on with the file if there is one. Ends the program if that was made with other options."""
        self.path = Path(args.json)
        fixed = {name: getattr(args, name) for name in FIXED} | {"text_sha256": text_sha256(text)}
        self.data: dict[str, Any] = {"format": FORMAT, "fixed": fixed, "sessions": [], "units": {}}
        if self.path.exists() and not args.fresh:
            self.data = self._earlier(fixed)
        self.data["sessions"].append(environment())

    def _earlier(self, fixed: dict[str, Any]) -> dict[str, Any]:
        hint = "name another --json, or start anew with --fresh"
        try:
            data = json.loads(self.path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise SystemExit(f"{self.path}: {error}; {hint}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise SystemExit(f"{self.path}: not a result of format {FORMAT}; {hint}")
        for name, value in fixed.items():
            if data["fixed"].get(name) != value:
                raise SystemExit(f"{self.path}: measured with {name} = {data['fixed'].get(name)}, not {value}; {hint}")
        return data

    def has(self, unit: dict[str, Any]) -> bool:
        return name_of(unit) in self.data["units"]

    def add(self, unit: dict[str, Any], entries: list[dict[str, Any]], seconds: float) -> None:
        session = len(self.data["sessions"]) - 1
        self.data["units"][name_of(unit)] = {**unit, "seconds": seconds, "session": session, "lines": entries}
        self.save()

    def save(self) -> None:
        """Written beside and renamed: the file is whole at every moment."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.write_text(json.dumps({**self.data, **self.totals()}, indent=1) + "\n")
        os.replace(fresh, self.path)

    def totals(self) -> dict[str, list[dict[str, Any]]]:
        """The units added up: one line a context and setting (and depth, and number of streams)."""
        sums: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {part: {} for part in PARTS}
        for unit in self.data["units"].values():
            part = unit["part"].partition(" ")[0]
            where = {name: unit[name] for name in ("context", "streams", "depth") if name in unit}
            for entry in unit["lines"]:
                line = where | {name: value for name, value in entry.items() if name != "answer"}
                key = (*where.values(), entry["setting"])
                if (earlier := sums[part].setdefault(key, line)) is not line:
                    for name in ("nll", "tokens", "found", "of"):
                        if name in line:
                            earlier[name] += line[name]
        added = {part: sorted(found.values(), key=lambda n: n["context"]) for part, found in sums.items()}
        for line in added["perplexity"]:
            line["perplexity"] = math.exp(line["nll"] / line["tokens"])
        dense = {n["context"]: n["perplexity"] for n in added["perplexity"] if n["setting"] == "dense"}
        for line in added["perplexity"]:
            line["change"] = line["perplexity"] / dense[line["context"]] - 1
        return added


def name_of(unit: dict[str, Any]) -> str:
    return " ".join(str(unit["part"]) if name == "part" else f"{name}={value}" for name, value in unit.items())


def units(args: argparse.Namespace, ids: Sequence[int]) -> Iterator[dict[str, Any]]:
    """What is to be done, in order. Seeds and windows go round the contexts, so that a stop leaves equal numbers."""
    parts = args.parts.split(",")
    for context in args.contexts:
        for streams in args.streams:
            if "speed" in parts:
                yield {"part": "speed", "context": context, "streams": streams}
                if args.peer:
                    yield {"part": f"speed {args.peer}", "context": context, "streams": streams}
            if "memory" in parts:
                yield {"part": "memory", "context": context, "streams": streams}
    for number in range(max(args.seeds, args.windows)):
        for context in args.contexts:
            if "perplexity" in parts and number < windows_of(ids, context, args.windows):
                yield {"part": "perplexity", "context": context, "window": number}
            for depth in DEPTHS if "needle" in parts and number < args.seeds else ():
                yield {"part": "needle", "context": context, "seed": number, "depth": depth}


class Worker:
    """Runs units. A bench with pages for several rows serves speed and memory, another of one row the quality."""

    def __init__(self, args: argparse.Namespace, loaded: LoadedModel, text: str) -> None:
        self.args, self.loaded = args, loaded
        self.ids = list(loaded.tokenizer.encode(text))
        self.quality = Bench(args, loaded, 1, max(args.contexts) + PIECE)
        self.many: tuple[int, Bench] | None = None

    def bench(self, context: int) -> Bench:
        if self.many is None or self.many[0] != context:
            self.many = None  # gives the pages of another context back first
            self.many = context, Bench(self.args, self.loaded, max(self.args.streams), context + ANSWER_TOKENS)
        return self.many[1]

    def run(self, unit: dict[str, Any]) -> list[dict[str, Any]]:
        part, context = unit["part"], unit["context"] // self.args.page_size * self.args.page_size
        if part == "speed":
            return speed(self.bench(context), self.ids, context - PIECE, unit["streams"])
        if part.startswith("speed "):
            return peer_speed(self.args, self.ids, context - PIECE, unit["streams"])
        if part == "memory":
            return memory(self.bench(context), context, unit["streams"])
        self.many = None
        if part == "perplexity":
            return perplexity(self.quality, self.ids, context, unit["window"])
        return needle(self.quality, self.ids, context, unit["depth"], unit["seed"])


def work(results: Results, worker: Worker, wanted: list[dict[str, Any]], limit_s: float) -> None:
    """Run what is wanted and not there. Stops before a unit that would probably not end in time."""
    began, spent = time.perf_counter(), _Spent(results)
    todo = [unit for unit in wanted if not results.has(unit)]
    print(f"{len(wanted)} units, {len(wanted) - len(todo)} of them done before", flush=True)
    for number, unit in enumerate(todo, 1):
        start = time.perf_counter()
        if number > 1 and start - began + spent.expected(unit) > limit_s:
            print(f"stopped after {(start - began) / 60:.1f} minutes with {len(todo) - number + 1} units to do")
            return
        entries = worker.run(unit)
        seconds = time.perf_counter() - start
        results.add(unit, entries, seconds)
        spent.note(unit, seconds)
        left = sum(spent.expected(other) for other in todo[number:])
        progress = f"[{number}/{len(todo)}, {seconds:.0f} s, about {left / 60:.0f} min left]"
        print(f"{progress} {shown(unit, entries)}", flush=True)


class _Spent:
    """Mean seconds of units by part and context, from this and earlier sessions."""

    def __init__(self, results: Results) -> None:
        self._seen: dict[tuple[str, int], list[float]] = {}
        for unit in results.data["units"].values():
            self.note(unit, unit["seconds"])

    def note(self, unit: dict[str, Any], seconds: float) -> None:
        self._seen.setdefault((unit["part"], unit["context"]), []).append(seconds)

    def expected(self, unit: dict[str, Any]) -> float:
        seen = self._seen.get((unit["part"], unit["context"]), [])
        return sum(seen) / len(seen) if seen else 0.0


def shown(unit: dict[str, Any], entries: Sequence[dict[str, Any]]) -> str:
    """A unit's outcome in one line."""
    value: Callable[[dict[str, Any]], str] = {
        "speed": lambda n: f"{n['step_ms']:.1f} ms",
        "memory": lambda n: f"{n['device_bytes'] / 2**20:.0f} MiB",
        "perplexity": lambda n: f"{math.exp(n['nll'] / n['tokens']):.2f}",
        "needle": lambda n: "found" if n["found"] else "missed",
    }[unit["part"].partition(" ")[0]]
    return f"{name_of(unit)}: " + ", ".join(f"{entry['setting']} {value(entry)}" for entry in entries)


# Pictures


def draw(totals: dict[str, list[dict[str, Any]]]) -> str:
    """Step time, perplexity and needles over the context, by setting."""
    panels = []
    for streams in sorted({line["streams"] for line in totals["speed"]}):
        mine = [line for line in totals["speed"] if line["streams"] == streams]
        panels.append(_over(mine, f"ms of a decode step, {streams} stream{'s' if streams > 1 else ''}", "step_ms"))
    for streams in sorted({line["streams"] for line in totals["memory"]}):
        mine = [line | {"mib": line["device_bytes"] / 2**20} for line in totals["memory"] if line["streams"] == streams]
        panels.append(_over(mine, f"MiB of KV on the device, {streams} stream{'s' if streams > 1 else ''}", "mib"))
    if totals["perplexity"]:
        panels.append(_over(totals["perplexity"], "perplexity", "perplexity"))
    if totals["needle"]:
        sums: dict[tuple[str, int], list[int]] = {}
        for line in totals["needle"]:
            entry = sums.setdefault((line["setting"], line["context"]), [0, 0])
            entry[0] += line["found"]
            entry[1] += line["of"]
        shares = [
            {"setting": setting, "context": context, "share": 100 * good / count}
            for (setting, context), (good, count) in sums.items()
        ]
        panels.append(_over(shares, "needles found, % of all depths", "share"))
    return picture(panels)


def _over(entries: Sequence[dict[str, Any]], title: str, value: str) -> str:
    contexts = sorted({line["context"] for line in entries})
    series: dict[str, list[float | None]] = {}
    for line in entries:
        series.setdefault(line["setting"], [None] * len(contexts))[contexts.index(line["context"])] = line[value]
    return lines(title, [str(context) for context in contexts], series)


# Arguments


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="HiSparse against dense attention")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--parts", default="speed,perplexity,needle", help=", ".join(PARTS))
    parser.add_argument("--contexts", type=numbers, default=[1024, 4096, 8192], help="tokens")
    parser.add_argument("--streams", type=numbers, default=[1, 8])
    parser.add_argument("--fractions", type=numbers, default=[2, 4, 8, 16], help="K is 1/n of the pages of the context")
    parser.add_argument("--spare", type=float, default=1.0, help="places beyond the least buffer, in K")
    parser.add_argument("--steps", type=int, default=12, help=f"decode steps timed (at most {PIECE - WARM_STEPS})")
    parser.add_argument("--windows", type=int, default=4, help="windows of text scored at each length")
    parser.add_argument("--scored", type=int, default=256, help="tokens scored of each window")
    parser.add_argument("--seeds", type=int, default=20, help="needles at each depth")
    parser.add_argument("--limit-minutes", type=float, default=math.inf, help="stop after so many; run again to go on")
    parser.add_argument("--peer", choices=("llama.cpp",), help="time its decode steps beside those of speed")
    parser.add_argument("--peer-python", help="the peer's interpreter (default: of `make peers`)")
    parser.add_argument("--text", help="text file (default: Python's help topics)")
    parser.add_argument("--kv-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--sparse-dense-layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--fresh", action="store_true", help="do not go on with the units of an earlier --json")
    parser.add_argument("--json", default="benchmarks/results/hisparse.json")
    parser.add_argument("--plot", help="write the curves as SVG")
    args = parser.parse_args(arguments)
    if unknown := [part for part in args.parts.split(",") if part not in PARTS]:
        parser.error(f"--parts: {unknown[0]}; allowed: {', '.join(PARTS)}")
    if not 1 <= args.steps <= PIECE - WARM_STEPS:
        parser.error(f"--steps: {args.steps}; allowed: 1 to {PIECE - WARM_STEPS}")
    return args


def main() -> None:
    args = parse(sys.argv[1:])
    text = source_text() if args.text is None else read_text(args.text)
    results = Results(args, text)
    with torch.inference_mode():
        worker = Worker(args, load_model(args.model, accept_license=True), text)
        work(results, worker, list(units(args, worker.ids)), 60 * args.limit_minutes)
    results.save()
    if args.plot:
        Path(args.plot).write_text(draw(results.totals()))
    print(f"written: {', '.join(filter(None, (args.json, args.plot)))}; peak memory {peak_memory_bytes() >> 20} MiB")


if __name__ == "__main__":
    main()
