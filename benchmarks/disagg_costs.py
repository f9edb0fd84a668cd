"""What one request costs the control plane of a prefill/decode pair.

    python benchmarks/disagg_costs.py [--no-reads] [--out FILE]

Prints the constants docs/scale.md uses: bytes of every message, messages a room, seconds of the books per room, and
what Mooncake moves over loopback by size of the batch. Needs `pip install 'octavo[disagg]'` for the last part.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from octavo.bench.record import environment
from octavo.disagg import protocol as p
from octavo.disagg.protocol import Region
from octavo.disagg.transport.base import Status, copies_of
from octavo.kv.ledger import Ledger, LedgerConfig

PROMPT_TOKENS, PAGE, CHUNK = 2048, 16, 512
LAYOUT = p.Layout(2, "SmolLM2-135M-Instruct.Q4_1", "0" * 16, "float32: int4 × 210, int8 × 1", PAGE, "float32", 30, 0, 3,
                  64, 0, "none", "little")  # fmt: skip


def message_bytes() -> dict[str, int]:
    """Encoded size of each message of a room of PROMPT_TOKENS, ids as large as they get."""
    room, attempt, pages = 2**63 - 1, 10**6, CHUNK // PAGE
    region = Region(2**47, 737_280, 100_000)
    messages = {
        "Hello": p.Hello(LAYOUT),
        "Welcome": p.Welcome("mooncake", "10.0.0.100:16908", {"full": region, "swa": region}),
        "Want": p.Want(room, attempt, PROMPT_TOKENS, 0, 0, bytes(16)),
        "Pages": p.Pages(room, attempt, "full", 0, [90_000] * pages),
        "Computed": p.Computed(room, attempt, 49_000, None, 0, None),
        "Read": p.Read(room, attempt, True),
        "Kept": p.Kept(room, attempt, True),
        "Beat": p.Beat(),
    }
    return {name: len(p.encoder.encode(message)) + 16 for name, message in messages.items()}


def books_s(rooms: int = 400) -> dict[str, float]:
    """Seconds of one core, the best of five: preallocate + land + release of a room; encoding and decoding of its
    messages, of a greeting with its comparison, of a beat; the digest of its prompt."""
    config = LedgerConfig(page_size=PAGE, full_pages=4096, max_rows=64, context_tokens=4096, prefix_cache=False)
    ledger = Ledger(config)
    tokens = np.arange(PROMPT_TOKENS, dtype=np.int32)
    best = float("inf")
    for _ in range(5):
        started = time.process_time()
        for _ in range(rooms):
            got = ledger.preallocate(tokens, PROMPT_TOKENS)
            ledger.land(got.row, got.generation)
            ledger.release(got.row)
        best = min(best, (time.process_time() - started) / rooms)
    pages = p.Pages(2**62, 1, "full", 0, list(range(CHUNK // PAGE)))
    region = Region(2**47, 737_280, 100_000)
    hello, welcome = p.Hello(LAYOUT), p.Welcome("mooncake", "10.0.0.100:16908", {"full": region, "swa": region})

    def room() -> None:
        for _ in range(PROMPT_TOKENS // CHUNK + 4):
            p.decoder.decode(p.encoder.encode(pages))

    def greet() -> None:
        p.differences(LAYOUT, p.decoder.decode(p.encoder.encode(hello)).layout)
        p.decoder.decode(p.encoder.encode(welcome))

    return {"books_s": best, "messages_s": _best(room, rooms), "greeting_s": _best(greet, rooms),
            "digest_s": _best(lambda: p.prompt_digest(tokens.tolist()), rooms),
            "beat_s": _best(lambda: p.decoder.decode(p.encoder.encode(p.Beat())), rooms)}  # fmt: skip


def _best(what: Callable[[], object], times: int) -> float:
    """Seconds of this process for one call; the best of five runs of `times`."""
    best = float("inf")
    for _ in range(5):
        started = time.process_time()
        for _ in range(times):
            what()
        best = min(best, (time.process_time() - started) / times)
    return best


def moved(page_bytes: int = 737_280, batches: tuple[int, ...] = (1, 8, 32, 128)) -> list[dict[str, Any]]:
    """GB/s of reads from another process, for pages that are neighbours and for scattered ones."""
    from octavo.disagg.transport.mooncake import MooncakeTransport

    code = (
        "import sys, numpy as np; from octavo.disagg.transport.mooncake import MooncakeTransport as M; "
        "from octavo.disagg.protocol import Region; m = M('127.0.0.1'); "
        f"a = np.ones({page_bytes * 256}, np.uint8); r = Region(a.ctypes.data, {page_bytes}, 256); m.register([r]); "
        "print(m.address, a.ctypes.data, flush=True); sys.stdin.read()"
    )
    source = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                              stderr=subprocess.DEVNULL)
    if source.stdout is None or source.stdin is None:
        raise OSError("no pipes to the source process")
    try:
        address, base = source.stdout.readline().split()
        here = MooncakeTransport("127.0.0.1")
        memory = np.zeros(page_bytes * 256, np.uint8)
        local, remote = Region(memory.ctypes.data, page_bytes, 256), Region(int(base), page_bytes, 256)
        here.register([local])
        out = []
        for pages in batches:
            for layout, step in (("neighbours", 1), ("scattered", 2)):
                ids = list(range(0, pages * step, step))
                seconds = []
                for _ in range(6):
                    started = time.perf_counter()
                    ticket = here.read(address, copies_of(local, remote, ids, ids))
                    while ticket.status is Status.PENDING:
                        time.sleep(0.0001)
                    if ticket.status is not Status.DONE:
                        raise OSError(ticket.error)
                    seconds.append(time.perf_counter() - started)
                middle = sorted(seconds[1:])[2]
                out.append({"pages": pages, "layout": layout, "seconds": middle,
                            "gb_per_s": pages * page_bytes / middle / 1e9})
        here.close()
        return out
    finally:
        source.stdin.close()
        source.wait(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-reads", action="store_true", help="messages and books only")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args()
    sizes = message_bytes()
    chunks = PROMPT_TOKENS // CHUNK
    room = sizes["Want"] + chunks * sizes["Pages"] + sizes["Computed"] + sizes["Read"] + sizes["Kept"]
    costs = {"prompt_tokens": PROMPT_TOKENS, "messages_bytes": sizes, "room_messages": chunks + 4, "room_bytes": room,
             **books_s()}  # fmt: skip
    print(json.dumps(costs, indent=1))
    reads = [] if args.no_reads else moved()
    for line in reads:
        took_ms = line["seconds"] * 1e3
        print(f"{line['pages']:4} pages, {line['layout']:10} {took_ms:8.2f} ms {line['gb_per_s']:6.2f} GB/s")
    if args.out is not None:
        document = {"environment": environment(), "costs": costs, "reads": reads}
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
