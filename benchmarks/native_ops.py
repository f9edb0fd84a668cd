"""Time of the native operations on one model: a forward pass and the head for several numbers of rows.

    .venv/bin/python benchmarks/native_ops.py --model smollm2 --threads 2 --rows 1,5,64 --context 256 --json FILE

Beside each line: weight bytes over time against a plain read of memory by the same threads, and the time relative
to one row. The best of the repeats is printed, since other programs only ever add time; raw repeats go to the JSON.
Columns in brackets are seconds of CPU of all threads, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from octavo.bench.record import environment
from octavo.kv.sizing import PoolSizes
from octavo.model.load import load_model
from octavo.model.network import Network
from octavo.model.registry import build_network, make_kv
from octavo.ops.meta import KVView, StepMeta

PAGE_SIZE = 16


def pools(network: Network, tokens: int, kv_dtype: torch.dtype) -> KVView:
    """Room for one row of `tokens`, pages in shuffled order."""
    pages = -(-tokens // PAGE_SIZE)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).int().view(1, -1)

    kv = make_kv(network, PoolSizes(pages, pages), max_rows=1, width_pages=pages)
    for pool, tables in ((kv.full, kv.full_table), (kv.swa, kv.swa_table)):
        if pool is not None and tables is not None:
            pool.copy_(torch.randn(pool.shape))
            tables.copy_(table)
    return kv


def rows_at(start: int, n: int) -> StepMeta:
    """A step of n rows of one sequence behind `start` committed tokens."""
    slots, zero = torch.arange(start, start + n), torch.zeros(1, dtype=torch.int64)
    ids = (slots * 7919) % 1000
    return StepMeta(ids, slots, slots, torch.zeros(n, dtype=torch.int64), zero, zero + start, None, (0, n), start + n)


def timed(work: Callable[[], object], seconds: float) -> tuple[list[float], float]:
    """Wall seconds of repeats (at least 3, about `seconds` in all) and the least CPU seconds of one."""
    work()
    wall: list[float] = []
    cpu = float("inf")
    while len(wall) < 3 or sum(wall) < seconds:
        a, b = time.perf_counter(), time.process_time()
        work()
        wall.append(time.perf_counter() - a)
        cpu = min(cpu, time.process_time() - b)
    return wall, cpu


def measure(network: Network, counts: list[int], context: int, kv: KVView, seconds: float) -> list[dict[str, Any]]:
    head_bytes = network._head.nbytes
    lines = []
    for n in counts:
        meta = rows_at(context, n)
        hidden, _ = network.forward(meta, kv)
        forward, forward_cpu = timed(lambda meta=meta: network.forward(meta, kv), seconds)
        head, head_cpu = timed(lambda hidden=hidden: network.argmax(hidden), seconds / 4)
        lines.append(
            {
                "rows": n, "forward_s": forward, "head_s": head, "forward_cpu_s": forward_cpu, "head_cpu_s": head_cpu,
                "layer_bytes": network.weight_bytes - head_bytes, "head_bytes": head_bytes,
            }
        )  # fmt: skip
    return lines


def show(lines: list[dict[str, Any]], memory_gbps: float) -> None:
    print(" rows  layers ms    (cpu)   head ms    (cpu)   GB/s of memory x one row")
    first = None
    for line in lines:
        layers, head = min(line["forward_s"]), min(line["head_s"])
        first = first or layers + head
        rate = (line["layer_bytes"] + line["head_bytes"]) / (layers + head) / 1e9
        print(
            f"{line['rows']:5d} {layers * 1e3:10.2f} {line['forward_cpu_s'] * 1e3:8.2f} {head * 1e3:9.2f} "
            f"{line['head_cpu_s'] * 1e3:8.2f} {rate:6.1f} {rate / memory_gbps:9.0%} {(layers + head) / first:9.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--rows", default="1,2,4,5,6,8,16,64,512")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--kv-dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--seconds", type=float, default=1.0, help="of repeats for each line")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts = [int(n) for n in options.rows.split(",")]
    kv_dtype = torch.float32 if options.kv_dtype == "float32" else torch.bfloat16
    network = build_network(load_model(options.model), threads=options.threads, kv_dtype=kv_dtype)
    read = getattr(network.ops, "read_memory_gbps", None)
    if read is None:
        raise SystemExit("the native operations are not built: scripts/build_native.sh")
    kv = pools(network, options.context + max(counts), kv_dtype)
    memory = read()
    print(f"{network.kernels}, {network.ops.threads} threads, {network.formats}, plain read {memory:.1f} GB/s")
    lines = measure(network, counts, options.context, kv, options.seconds)
    memory = max(memory, read())
    show(lines, memory)
    if options.json:
        result = {**environment(), "options": {k: str(v) for k, v in vars(options).items()}, "memory_gbps": memory}
        options.json.write_text(json.dumps({**result, "lines": lines}, indent=1))


if __name__ == "__main__":
    main()
