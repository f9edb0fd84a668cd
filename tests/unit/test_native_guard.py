"""Bus errors of a mapped file that is cut: empty pages in it, the process's own handling everywhere else."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.backend.host_tier import HostTier
from octavo.errors import HostTierLost
from octavo.ops import native
from octavo.ops.file_guard import FileGuard

pytestmark = pytest.mark.skipif(not native.available(), reason="the native module is not built")

SHAPE = (9, 3, 2, 2, 16, 16)  # eight pages and the spare one


def mapped(path: Path, pages: int) -> tuple[mmap.mmap, np.ndarray, FileGuard]:
    path.write_bytes(b"\7" * pages * mmap.PAGESIZE)
    with open(path, "r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0)
    words = np.frombuffer(mapping, np.uint8)
    return mapping, words, FileGuard(mapping, words.ctypes.data, len(words))


def test_what_was_cut_reads_as_nothing_and_is_counted(tmp_path: Path) -> None:
    _, words, guard = mapped(tmp_path / "file", 8)
    assert guard.active and guard.intact_bytes() == len(words)
    os.truncate(tmp_path / "file", 3 * mmap.PAGESIZE)
    assert words[: 3 * mmap.PAGESIZE].min() == 7 and guard.total_lost() == 0
    assert torch.from_numpy(words)[5 * mmap.PAGESIZE :].sum() == 0
    assert (guard.total_lost(), guard.intact_bytes()) == (3, 5 * mmap.PAGESIZE)
    assert words[3 * mmap.PAGESIZE] == 0 and guard.intact_bytes() == 3 * mmap.PAGESIZE
    guard.reset()
    assert (guard.total_lost(), guard.intact_bytes()) == (4, len(words))
    guard.close()
    guard.close()


def test_a_tier_that_was_cut_and_grown_again_between_two_looks(tmp_path: Path) -> None:
    """Its length says nothing; what was asked for in vain does."""
    path = tmp_path / "tier"
    tier = HostTier(SHAPE, torch.float32, path=str(path))
    tier.tensor.fill_(3)
    os.truncate(path, 4 * tier.page_bytes)
    assert not tier.tensor[6:].any()
    os.truncate(path, tier.nbytes)
    with pytest.raises(HostTierLost, match="cut short") as lost:
        tier.check()
    assert lost.value.intact_pages == 6 and tier.missed_accesses > 0
    tier.repair()
    tier.check()
    tier.tensor.fill_(5)
    assert path.read_bytes() == tier.tensor.numpy().tobytes(), "the file again, not the pages that stood in for it"
    tier.close()


def test_more_files_than_are_guarded(tmp_path: Path) -> None:
    kept = [mapped(tmp_path / str(i), 1) for i in range(18)]
    guards = [guard for _, _, guard in kept]
    assert sum(guard.active for guard in guards) <= 16 and not guards[-1].active
    assert guards[-1].intact_bytes() == mmap.PAGESIZE
    guards[-1].reset()
    guards[-1].close()
    del kept, guards
    gc.collect()  # a guard ends with its mapping
    assert mapped(tmp_path / "another", 1)[2].active


@pytest.mark.parametrize("guarded", [False, True])
def test_bus_errors_elsewhere_end_the_process_as_before(tmp_path: Path, guarded: bool) -> None:
    program = f"""
import faulthandler, mmap, os, sys
import numpy as np
from octavo.ops.file_guard import FileGuard
faulthandler.enable()
maps = []
for name in ("one", "two"):
    path = os.path.join({str(tmp_path)!r}, name)
    with open(path, "w+b") as file:
        file.truncate(mmap.PAGESIZE)
        maps.append(np.frombuffer(mmap.mmap(file.fileno(), mmap.PAGESIZE), np.uint8))
    os.truncate(path, 0)
guard = FileGuard(maps[0].base, maps[0].ctypes.data, mmap.PAGESIZE)
print(int(maps[0][9]), guard.total_lost(), flush=True)
maps[{0 if guarded else 1}][8]
print("still here", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("0 1\n")
    if guarded:
        assert done.returncode == 0 and "still here" in done.stdout
    else:
        assert done.returncode == -signal.SIGBUS and "still here" not in done.stdout
        assert "Bus error" in done.stderr, "Python's own handler had its turn"
