"""What the process may use of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo import hardware


def test_cores_are_within_the_affinity_mask() -> None:
    assert set(hardware.physical_cpus()) <= set(hardware.allowed_cpus()) == os.sched_getaffinity(0)
    assert 1 <= hardware.physical_cores() <= len(hardware.allowed_cpus())


def test_a_narrower_mask_is_seen() -> None:
    mask = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mask)})
        assert hardware.physical_cores() == 1
    finally:
        os.sched_setaffinity(0, mask)


def _cgroup(monkeypatch: pytest.MonkeyPatch, folder: Path, **files: str) -> None:
    for name, text in files.items():
        folder.joinpath(name.replace("__", ".")).write_text(text)
    monkeypatch.setattr(hardware, "_CGROUP", folder)
    monkeypatch.setattr(hardware, "_cgroup_folders", lambda: [folder])


@pytest.mark.parametrize(("quota", "cores"), [("150000 100000", 1), ("50000 100000", 1), ("max 100000", None)])
def test_cpu_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, cores: int | None) -> None:
    monkeypatch.setattr(hardware, "physical_cpus", lambda: (0, 1, 2, 3))
    _cgroup(monkeypatch, tmp_path, cpu__max=quota)
    assert hardware.physical_cores() == (cores or 4)


def test_memory_limit_counts_reclaimable_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _cgroup(monkeypatch, tmp_path, memory__max="1000", memory__current="900", memory__stat="anon 5\ninactive_file 300")
    assert hardware.available_memory_bytes() == 400


def test_memory_without_limit_is_the_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _cgroup(monkeypatch, tmp_path, memory__max="max", memory__current="900")
    assert hardware.available_memory_bytes() > 1 << 20
