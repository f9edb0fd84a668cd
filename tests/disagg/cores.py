"""Engine cores for server processes of these tests: pages so large that a read can be cut in the middle."""

from __future__ import annotations

import os

from octavo.config import EngineConfig
from octavo.engine.setup import build
from tests.api.cores import PacedCore
from tests.tiny import loaded_model

WIDE = {"head_dim": 128, "num_kv_heads": 4, "context_tokens": 2048}
TOKEN_BYTES = 4 * 2 * 4 * 128 * 4  # layers x (K, V) x heads x head size x float32: 1,000 tokens are 16 MB


class WideCore(PacedCore):
    """A random model whose KV is far larger than what sockets buffer. OCTAVO_TEST_SEED and OCTAVO_TEST_KV_HEADS make
    another model of it."""

    def __init__(self, config: EngineConfig) -> None:
        heads = int(os.environ.get("OCTAVO_TEST_KV_HEADS", WIDE["num_kv_heads"]))
        model = loaded_model(seed=int(os.environ.get("OCTAVO_TEST_SEED", "0")), **{**WIDE, "num_kv_heads": heads})
        super().__init__(config, build(config, model))


wide = WideCore
