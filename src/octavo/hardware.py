"""What this process may use of the machine: cores and memory, as the affinity mask and cgroup allow. No torch."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"


def _read(path: Path | str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _cgroup_folders() -> list[Path]:
    """The version-2 cgroup of this process and its parents, innermost first (a limit of any of them binds)."""
    for line in (_read("/proc/self/cgroup") or "").splitlines():
        number, _, path = line.split(":", 2)
        if number == "0":
            folder = _CGROUP / path.lstrip("/")
            parents = [p for p in (folder, *folder.parents) if p == _CGROUP or _CGROUP in p.parents]
            return parents or [_CGROUP]
    return [_CGROUP]


def cpu_quota_cores() -> float | None:
    """Cores' worth of time the cgroup grants, or None without a limit."""
    quotas = []
    for folder in _cgroup_folders():
        fields = (_read(folder / "cpu.max") or "max").split()
        if fields[0] != "max":
            quotas.append(int(fields[0]) / int(fields[1]))
    v1_quota, v1_period = _read(_CGROUP / "cpu/cpu.cfs_quota_us"), _read(_CGROUP / "cpu/cpu.cfs_period_us")
    if v1_quota and v1_period and int(v1_quota) > 0:
        quotas.append(int(v1_quota) / int(v1_period))
    return min(quotas) if quotas else None


def allowed_cpus() -> tuple[int, ...]:
    """CPU numbers this process may run on, sorted."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def physical_cpus() -> tuple[int, ...]:
    """One allowed CPU number per physical core: where one thread a core is to be pinned."""
    chosen: dict[tuple[str, str], int] = {}
    for cpu in allowed_cpus():
        package = _read(_TOPOLOGY.format(cpu, "physical_package_id"))
        core = _read(_TOPOLOGY.format(cpu, "core_id"))
        key = (package or "0", core) if core is not None else ("?", str(cpu))
        chosen.setdefault(key, cpu)
    return tuple(chosen.values())


def physical_cores() -> int:
    """Physical cores this process may keep busy: affinity mask, then the cgroup's quota rounded down, at least 1."""
    cores = len(physical_cpus())
    quota = cpu_quota_cores()
    return max(1, min(cores, int(quota)) if quota is not None else cores)


def available_memory_bytes() -> int:
    """Memory that can be taken now without swapping: the machine's, or what the cgroup leaves, whichever is less."""
    free = []
    for line in (_read("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    for folder in _cgroup_folders():
        limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
        if limit and limit != "max" and used:
            free.append(int(limit) - int(used) + _reclaimable_bytes(folder / "memory.stat", "inactive_file"))
    limit, used = _read(_CGROUP / "memory/memory.limit_in_bytes"), _read(_CGROUP / "memory/memory.usage_in_bytes")
    if limit and used and int(limit) < 1 << 60:
        cache = _reclaimable_bytes(_CGROUP / "memory/memory.stat", "total_inactive_file")
        free.append(int(limit) - int(used) + cache)
    if not free:  # not Linux: count half of what the machine has
        free.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    return max(0, min(free))


def _reclaimable_bytes(stat: Path, name: str) -> int:
    for line in (_read(stat) or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


@lru_cache(maxsize=1)
def cpu_model() -> str:
    """The processor's name as the kernel gives it."""
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    import platform

    return platform.processor() or platform.machine()


@lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str]:
    """Instruction-set flags as the kernel names them ("avx2", "avx512_vnni", "asimddp", …); empty where unknown."""
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()
