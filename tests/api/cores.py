"""Engine cores that the engine process of a test can load by name: the real engine on a tiny random model."""

from __future__ import annotations

import os
import time
from pathlib import Path

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.request import ChoiceOutput
from octavo.engine.setup import Parts, build
from octavo.sched.batch import StepPlan
from tests.tiny import loaded_model


class PacedCore(EngineCore):
    """The real engine at the pace that a test needs, set in the environment.

    OCTAVO_TEST_STEP_S makes every step take longer, as a larger model's would. OCTAVO_TEST_HOLD names a file: while it
    is there no more steps are computed than the number in it; messages and aborts are heard as ever.
    """

    def __init__(self, config: EngineConfig, parts: Parts) -> None:
        super().__init__(config, parts)
        self._pause_s = float(os.environ.get("OCTAVO_TEST_STEP_S", "0"))
        hold = os.environ.get("OCTAVO_TEST_HOLD")
        self._hold = None if hold is None else Path(hold)
        self._since_hold = 0

    def step(self) -> list[ChoiceOutput]:
        time.sleep(self._pause_s)
        return super().step()

    def _plan(self) -> StepPlan | None:
        allowed = self._allowed()
        if allowed is None:
            self._since_hold = 0
        elif self._since_hold >= allowed:
            return None
        plan = super()._plan()
        self._since_hold += plan is not None
        return plan

    def _allowed(self) -> int | None:
        """Steps while the file is there; it may go at any moment."""
        try:
            return None if self._hold is None else int(self._hold.read_text())
        except FileNotFoundError:
            return None


class TinyCore(PacedCore):
    """A random model of 4 layers, one token a byte, context 512. OCTAVO_TEST_LOAD_S makes the start take longer;
    OCTAVO_TEST_LOADED names a file: the model is loaded when it is there."""

    kind = "llama"

    def __init__(self, config: EngineConfig) -> None:
        time.sleep(float(os.environ.get("OCTAVO_TEST_LOAD_S", "0")))
        loaded = os.environ.get("OCTAVO_TEST_LOADED")
        while loaded is not None and not Path(loaded).exists():
            time.sleep(0.02)
        super().__init__(config, build(config, loaded_model(self.kind)))


class TinyHybridCore(TinyCore):
    """The same with two full layers and four sliding ones: a window of 24 tokens, a pool of its own."""

    kind = "gemma3"


tiny = TinyCore
tiny_hybrid = TinyHybridCore
