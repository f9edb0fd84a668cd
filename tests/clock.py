"""Time in which this machine ran, for bounds on what a server promises.

A virtual machine can stand still for seconds, and a loaded one runs nothing of ours for a while: a promise of 2 s is
not broken by that, and no server can keep it then. A thread that wakes fifty times a second counts how long it slept,
at most `MOST_S` at a time: what is beyond that it did not sleep through, the machine did.
"""

from __future__ import annotations

import threading
import time

TICK_S = 0.02
MOST_S = 0.1


class RunningTime:
    """`now()`: seconds, to a fiftieth, that only grow while threads of this process get to run."""

    def __init__(self) -> None:
        self._s = 0.0
        self._started = False
        self._lock = threading.Lock()

    def now(self) -> float:
        with self._lock:
            if not self._started:
                self._started = True
                threading.Thread(target=self._run, name="running-time", daemon=True).start()
            return self._s

    def _run(self) -> None:
        before_s = time.monotonic()
        while True:
            time.sleep(TICK_S)
            now_s = time.monotonic()
            with self._lock:
                self._s += min(now_s - before_s, MOST_S)
            before_s = now_s


running_time = RunningTime()
