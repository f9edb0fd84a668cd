"""Engine cores for server processes of these tests: pages so large that a read can be cut in the middle."""

from __future__ import annotations

import os
import time

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.request import ChoiceOutput
from octavo.engine.setup import build
from tests.tiny import loaded_model

WIDE = {"head_dim": 128, "num_kv_heads": 4, "context_tokens": 2048}
TOKEN_BYTES = 4 * 2 * 4 * 128 * 4  # layers x (K, V) x heads x head size x float32: 1,000 tokens are 16 MB


class WideCore(EngineCore):
    """A random model whose KV is far larger than what sockets buffer. OCTAVO_TEST_STEP_S makes a step take longer,
    OCTAVO_TEST_SEED and OCTAVO_TEST_KV_HEADS make another model of it."""

    def __init__(self, config: EngineConfig) -> None:
        heads = int(os.environ.get("OCTAVO_TEST_KV_HEADS", WIDE["num_kv_heads"]))
        model = loaded_model(seed=int(os.environ.get("OCTAVO_TEST_SEED", "0")), **{**WIDE, "num_kv_heads": heads})
        super().__init__(config, build(config, model))
        self._pause_s = float(os.environ.get("OCTAVO_TEST_STEP_S", "0"))

    def step(self) -> list[ChoiceOutput]:
        time.sleep(self._pause_s)
        return super().step()


wide = WideCore
