"""Engine cores that the engine process of a test can load by name: the real engine on a tiny random model."""

from __future__ import annotations

import os
import time

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.request import ChoiceOutput
from octavo.engine.setup import build
from tests.tiny import loaded_model


class TinyCore(EngineCore):
    """The real engine on a random model of 4 layers, one token a byte, context 512.

    OCTAVO_TEST_STEP_S and OCTAVO_TEST_LOAD_S make every step and the start take longer, as a larger model's would.
    """

    def __init__(self, config: EngineConfig) -> None:
        time.sleep(float(os.environ.get("OCTAVO_TEST_LOAD_S", "0")))
        super().__init__(config, build(config, loaded_model()))
        self._pause_s = float(os.environ.get("OCTAVO_TEST_STEP_S", "0"))

    def step(self) -> list[ChoiceOutput]:
        time.sleep(self._pause_s)
        return super().step()


tiny = TinyCore
