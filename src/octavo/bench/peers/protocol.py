"""JSON lines between `octavo bench` and a peer's process: one request a line on stdin, one answer on stdout.

    {"op": "load", "model": path, "threads": 2, "streams": 1, "context_tokens": 4096, "max_tokens": 128}
        -> {"name", "version", "weights", "kv", "load_s"}
    {"op": "run", "prompts": [[ids]], "streams": 1, "output_tokens": n, "temperature": 0.0}
        -> {"wall_s", "first_token_s": [...], "decode_s", "output_tokens": [[ids]], "step_s": [...] where it can}
    {"op": "perplexity", "token_ids": [...], "window_tokens": 512} -> {"nll", "tokens"}      (where the peer can)

`streams` requests run at a time: where there are more prompts, the next begins when one has ended. Times are seconds
from the call, `first_token_s` from a request's own start. `decode_s` runs from the moment every stream has its first
token to the end, `step_s` has each step of that time.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any


def serve(handlers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """Answer requests until stdin closes, one at a time: who closes it before an answer came gets none, and the process
    ends with 1. Whatever the library prints goes to stderr, not between our lines."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    requests: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    busy = threading.Event()
    threading.Thread(target=_read, args=(requests, busy), daemon=True).start()
    while (line := requests.get()) is not None:
        request = json.loads(line)
        try:
            answer = handlers[request["op"]](request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        busy.clear()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _read(requests: queue.SimpleQueue[str | None], busy: threading.Event) -> None:
    """Lines of stdin as they come. If they end while a prompt is computed, who asked was killed: nobody waits."""
    for line in sys.stdin:
        busy.set()
        requests.put(line)
    if busy.is_set():
        os._exit(1)
    requests.put(None)
