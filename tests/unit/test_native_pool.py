"""Where the threads of the compiled module run."""

import os
import threading
from pathlib import Path

import pytest
import torch

from octavo.ops import native
from octavo.ops.native_lib import ThreadPool

pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled operations are not there")


def _worker_cores() -> dict[str, str]:
    """Allowed cores of each worker thread of this process, by thread id."""
    cores = {}
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("octavo-"):
            status = (task / "status").read_text()
            cores[task.name] = status.split("Cpus_allowed_list:")[1].split()[0]
    return cores


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="asks Linux where threads may run")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: nobody is pinned")
def test_workers_take_the_cores_their_caller_is_not_on() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    before = set(_worker_cores())
    pool = ThreadPool(2)
    data = torch.ones(1 << 16, dtype=torch.uint8)
    seen = []

    def call_from(cpu: int) -> None:
        os.sched_setaffinity(0, {cpu})  # of this thread only
        pool._lib.octavo_read_memory(pool.handle, data.data_ptr(), data.numel())
        seen.append((cpu, {at for thread, at in _worker_cores().items() if thread not in before}))

    for cpu in (cpus[0], cpus[1], cpus[0]):
        caller = threading.Thread(target=call_from, args=(cpu,))
        caller.start()
        caller.join()
    other = {cpus[0]: str(cpus[1]), cpus[1]: str(cpus[0])}
    assert seen == [(cpu, {other[cpu]}) for cpu in (cpus[0], cpus[1], cpus[0])]
