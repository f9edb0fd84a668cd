"""The target's hidden states over a corpus: what drafts learn from. Kept on disk in shards, in half precision.

A shard is one .npy of [tokens, (taps + 1) * H] float16, the last H columns being the hidden state after the final
norm (from which the target's distribution is recomputed). A stale or foreign cache is rebuilt, never misread.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from octavo.kv.sizing import PoolSizes
from octavo.model.registry import make_kv
from octavo.ops.meta import StepMeta
from octavo.train.corpus import Corpus, Sample

FORMAT_VERSION = 1
_BATCH_TOKENS = 1024
_SHARD_SAMPLES = 64
_LIMIT = 60_000.0  # float16 holds 65,504; a few channels of some models are huge


@torch.no_grad()
def target_features(
    network: Any, texts: Sequence[Sequence[int]], taps: tuple[int, ...]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One ragged forward from scratch over several texts: per text (features [T, taps * H], hidden [T, H])."""
    p = network.page_size
    sizes = [len(t) for t in texts]
    width = -(-max(sizes) // p)
    b = len(texts)
    kv = make_kv(network, PoolSizes(b * width, b * width), max_rows=b, width_pages=width, device=network.device)
    pages = torch.arange(b * width, dtype=torch.int32, device=network.device).reshape(b, width)
    kv.full_table.copy_(pages)
    if kv.swa_table is not None:
        kv.swa_table.copy_(pages)
    indptr = np.concatenate([[0], np.cumsum(sizes)])
    device = network.device
    at = torch.from_numpy(np.concatenate([np.arange(n) for n in sizes])).to(device)
    meta = StepMeta(
        token_ids=torch.tensor([t for text in texts for t in text], dtype=torch.int64, device=device),
        positions=at,
        write_slots=at,
        q_seq=torch.from_numpy(np.repeat(np.arange(b), sizes)).to(device),
        rows=torch.arange(b, device=device),
        kv_start=torch.zeros(b, dtype=torch.int64, device=device),
        mask=None,
        q_indptr=tuple(int(i) for i in indptr),
        max_kv_tokens=max(sizes),
    )
    hidden, features = network.forward(meta, kv, taps)
    if features is None:
        features = hidden.new_empty(hidden.shape[0], 0)
    return list(zip(features.float().split(sizes), hidden.float().split(sizes), strict=True))


class FeatureStore:
    """Features of every sample of a corpus, by sample index."""

    def __init__(self, folder: Path, corpus: Corpus, taps: tuple[int, ...], hidden_size: int, key: str) -> None:
        """`key` names the target; a folder made for another target, corpus or taps is emptied."""
        self.folder, self.corpus, self.taps, self.hidden_size = folder, corpus, taps, hidden_size
        digest = hashlib.sha256(json.dumps([FORMAT_VERSION, key, taps, hidden_size]).encode())
        for sample in corpus.samples:
            digest.update(np.asarray(sample.tokens, dtype=np.int64).tobytes())
        self.key = digest.hexdigest()
        self._offsets = self._layout()
        stamp = folder / "key"
        if not stamp.is_file() or stamp.read_text() != self.key:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            stamp.write_text(self.key)
        self._open: dict[int, np.ndarray] = {}

    @property
    def width(self) -> int:
        return (len(self.taps) + 1) * self.hidden_size

    @property
    def shards(self) -> int:
        return -(-len(self.corpus) // _SHARD_SAMPLES)

    def _layout(self) -> list[int]:
        """First row of every sample inside its shard."""
        offsets, at = [], 0
        for i, sample in enumerate(self.corpus.samples):
            at = 0 if i % _SHARD_SAMPLES == 0 else at
            offsets.append(at)
            at += len(sample.tokens)
        return offsets

    def _path(self, shard: int) -> Path:
        return self.folder / f"{shard:05d}.npy"

    def missing(self) -> list[int]:
        return [s for s in range(self.shards) if not self._path(s).is_file()]

    def build(self, network: Any, progress: Callable[[int], None] = lambda tokens: None) -> None:
        """Compute the shards that are not there yet."""
        for shard in self.missing():
            samples = self.corpus.samples[shard * _SHARD_SAMPLES : (shard + 1) * _SHARD_SAMPLES]
            rows: list[np.ndarray] = []
            for group in _groups(samples):
                for features, hidden in target_features(network, [s.tokens for s in group], self.taps):
                    both = torch.cat([features, hidden], dim=1).clamp(-_LIMIT, _LIMIT)
                    rows.append(both.to(torch.float16).cpu().numpy())
                progress(sum(len(s.tokens) for s in group))
            partial = self._path(shard).with_suffix(".part")
            with partial.open("wb") as out:
                np.save(out, np.concatenate(rows))
            partial.replace(self._path(shard))

    def sample(self, index: int, taps: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """(features [T, len(taps) * H] of the wanted taps, hidden [T, H]) of one sample, float32."""
        shard = index // _SHARD_SAMPLES
        if shard not in self._open:
            self._open[shard] = np.load(self._path(shard), mmap_mode="r")
        first = self._offsets[index]
        rows = self._open[shard][first : first + len(self.corpus.samples[index].tokens)]
        h = self.hidden_size
        columns = [self.taps.index(t) for t in taps]
        wanted = torch.from_numpy(np.concatenate([rows[:, c * h : (c + 1) * h] for c in columns], axis=1))
        return wanted.float(), torch.from_numpy(np.array(rows[:, -h:])).float()


def _groups(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Samples in runs of at most `_BATCH_TOKENS` tokens (one sample at least)."""
    group: list[Sample] = []
    tokens = 0
    for sample in samples:
        if group and tokens + len(sample.tokens) > _BATCH_TOKENS:
            yield group
            group, tokens = [], 0
        group.append(sample)
        tokens += len(sample.tokens)
    if group:
        yield group
