"""Engine cores that the engine process of a test can load by name: the real engine on a tiny random model."""

from __future__ import annotations

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.setup import build
from tests.tiny import loaded_model


def tiny(config: EngineConfig) -> EngineCore:
    """The real engine on a random model of 4 layers, one token a byte, context 512."""
    return EngineCore(config, build(config, loaded_model()))
