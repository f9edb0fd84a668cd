"""The training loop: AdamW, warm-up and cosine, checkpoints every few minutes from which it goes on exactly."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.train.data import plan_batches
from octavo.train.objectives import Outcome

FORMAT_VERSION = 1
CHECKPOINT_S = 600.0


@dataclass(frozen=True)
class LoopOptions:
    """`minutes` ends training early: the learning rate then falls with time instead of steps."""

    epochs: int
    batch_tokens: int
    learning_rate: float
    seed: int
    minutes: float | None = None
    warmup_share: float = 0.03
    floor: float = 0.05
    clip: float = 1.0
    weight_decay: float = 0.01
    checkpoint_s: float = CHECKPOINT_S


@dataclass
class Progress:
    """Where a run is; part of every checkpoint."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    elapsed_s: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)


OutcomeOf = Callable[[list[int], torch.Generator], Outcome]
Report = Callable[[Progress, Outcome, int], None]


class Trainer:
    """Trains one net. `outcome(indices, generator)` computes a batch's loss."""

    def __init__(
        self,
        net: nn.Module,
        lengths: Sequence[int],
        outcome: OutcomeOf,
        options: LoopOptions,
        *,
        checkpoint: Path | None = None,
        fingerprint: str = "",
    ) -> None:
        """`fingerprint` names target, corpus and options: a checkpoint with another one is not gone on from."""
        self.net, self.lengths, self.outcome, self.options = net, lengths, outcome, options
        self.checkpoint, self.fingerprint = checkpoint, fingerprint
        trainable = [p for p in net.parameters() if p.requires_grad]
        decayed = [p for p in trainable if p.dim() > 1]
        plain = [p for p in trainable if p.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": options.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95))
        self.progress = Progress()
        self.resumed = self._resume()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _resume(self) -> bool:
        if self.checkpoint is None or not self.checkpoint.is_file():
            return False
        state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        if state.get("version") != FORMAT_VERSION or state.get("fingerprint") != self.fingerprint:
            return False
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        return True

    def save(self) -> None:
        if self.checkpoint is None:
            return
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {
            "version": FORMAT_VERSION,
            "fingerprint": self.fingerprint,
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": vars(self.progress),
        }
        partial = self.checkpoint.with_suffix(".part")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self, report: Report = lambda progress, outcome, tokens: None) -> Progress:
        """Train to the end of the epochs or of the minutes; `report` is called after every step."""
        progress, options = self.progress, self.options
        started = time.monotonic() - progress.elapsed_s
        saved = time.monotonic()
        self.net.train()
        while progress.epoch < options.epochs and not self._out_of_time():
            batches = plan_batches(self.lengths, options.batch_tokens, random.Random(options.seed + progress.epoch))
            while progress.batch < len(batches) and not self._out_of_time():
                indices = batches[progress.batch]
                outcome = self._step(indices, len(batches))
                progress.batch += 1
                progress.step += 1
                progress.elapsed_s = time.monotonic() - started
                report(progress, outcome, sum(self.lengths[i] for i in indices))
                if time.monotonic() - saved > options.checkpoint_s:
                    self.save()
                    saved = time.monotonic()
            if progress.batch >= len(batches):
                progress.epoch += 1
                progress.batch = 0
        self.save()
        return progress

    def _out_of_time(self) -> bool:
        limit = self.options.minutes
        return limit is not None and self.progress.elapsed_s >= 60 * limit

    def _step(self, indices: list[int], batches: int) -> Outcome:
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + self.progress.step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.learning_rate * self._schedule(batches)
        self.optimizer.zero_grad(set_to_none=True)
        outcome = self.outcome(indices, generator)
        outcome.loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.net.parameters(), self.options.clip)
        self.optimizer.step()
        if self.progress.step % 20 == 0:
            self.progress.history.append(
                {
                    "step": float(self.progress.step),
                    "loss": float(outcome.loss.detach()),
                    "accept_length": outcome.accept_length,
                }
            )
        return outcome

    def _schedule(self, batches: int) -> float:
        """Factor on the learning rate: linear warm-up, then half a cosine down to `floor`."""
        options = self.options
        done = self.progress.step / max(1, options.epochs * batches)
        if options.minutes is not None:
            done = max(done, self.progress.elapsed_s / (60 * options.minutes))
        if done < options.warmup_share:
            return max(0.02, done / options.warmup_share)
        rest = min(1.0, (done - options.warmup_share) / (1 - options.warmup_share))
        return options.floor + (1 - options.floor) * 0.5 * (1 + math.cos(math.pi * rest))


@torch.no_grad()
def evaluate(net: nn.Module, batches: Sequence[list[int]], outcome: OutcomeOf, seed: int = 7) -> dict[str, float]:
    """Mean loss and teacher-forced accept length over fixed batches."""
    net.eval()
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    accepted, proposals = 0.0, 0
    for indices in batches:
        result = outcome(indices, generator)
        losses.append(float(result.loss))
        accepted += result.accepted
        proposals += result.proposals
    net.train()
    loss = sum(losses) / max(1, len(losses))
    return {"loss": loss, "accept_length": 1.0 + accepted / max(1, proposals)}
