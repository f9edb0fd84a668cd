"""The host tier's memory: RAM or a mapped file, and what is said when the file cannot be had or is lost."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from octavo.backend.host_tier import HostTier
from octavo.errors import ConfigError, HostTierLost

SHAPE = (9, 3, 2, 2, 16, 16)  # eight pages and the spare one


def test_memory_and_file_hold_the_same(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    values = torch.randn(SHAPE)
    for tier in (HostTier(SHAPE, torch.float32), HostTier(SHAPE, torch.float32, path=str(path))):
        assert tier.tensor.shape == SHAPE and not tier.tensor.any()
        tier.tensor.copy_(values)
        tier.check()
        assert torch.equal(tier.tensor, values)
        assert tier.page_bytes == 3 * 2 * 2 * 16 * 16 * 4
    assert path.read_bytes() == values.numpy().tobytes()
    tier.close()
    assert not path.exists()


def test_bf16_pages(tmp_path: Path) -> None:
    tier = HostTier(SHAPE, torch.bfloat16, path=str(tmp_path / "tier"))
    tier.tensor[2] = 1.5
    assert tier.tensor.dtype == torch.bfloat16 and tier.nbytes == tier.tensor.numel() * 2
    assert float(tier.tensor[2].float().mean()) == 1.5
    tier.close()


def test_the_whole_file_is_allocated_at_start(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    tier = HostTier(SHAPE, torch.float32, path=str(path))
    state = path.stat()
    assert state.st_size == tier.nbytes <= state.st_blocks * 512
    tier.close()


def test_a_full_disk_is_refused_at_start(tmp_path: Path) -> None:
    pages = (shutil.disk_usage(tmp_path).free + (64 << 30)) // (1 << 20)
    with pytest.raises(ConfigError, match=r"host_tier_path.*(do not fit|File too large)"):
        HostTier((pages, 1, 2, 1, 512, 256), torch.float32, path=str(tmp_path / "tier"))
    assert not (tmp_path / "tier").exists()


@pytest.mark.parametrize("name", ["nowhere/tier", "folder"])
def test_a_file_that_cannot_be_made_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="host_tier_path") as refused:
        HostTier(SHAPE, torch.float32, path=str(tmp_path / name))
    assert str(tmp_path / name) in str(refused.value)
    assert (tmp_path / "folder").is_dir()


def test_a_cut_file_is_seen_and_mended(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    tier = HostTier(SHAPE, torch.float32, path=str(path))
    tier.tensor.fill_(3)
    os.truncate(path, 4 * tier.page_bytes + 17)
    with pytest.raises(HostTierLost, match="cut short") as lost:
        tier.check()
    assert lost.value.intact_pages == 4
    tier.repair()
    tier.check()
    assert bool((tier.tensor[:4] == 3).all()) and not tier.tensor[5:].any()
    tier.tensor.fill_(5)
    assert path.stat().st_size == tier.nbytes
    tier.close()


def test_a_removed_file_is_seen_and_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    tier = HostTier(SHAPE, torch.float32, path=str(path))
    tier.tensor.fill_(3)
    path.unlink()
    with pytest.raises(HostTierLost, match="removed") as lost:
        tier.check()
    assert lost.value.intact_pages == 0
    tier.repair()
    tier.check()
    assert not tier.tensor.any()
    tier.tensor[1] = 7  # through the same tensor, into the new file
    assert path.read_bytes() == tier.tensor.numpy().tobytes()
    tier.close()


def test_a_folder_that_went_with_the_file_cannot_be_mended(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    tier = HostTier(SHAPE, torch.float32, path=str(folder / "tier"))
    shutil.rmtree(folder)
    with pytest.raises(HostTierLost, match="No such file"):
        tier.repair()
    tier.tensor.fill_(1)  # what is mapped can still be touched
    tier.close()
