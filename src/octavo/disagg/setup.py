"""From a configuration to the half of a prefill/decode pair that an engine core is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.disagg.decode import DecodeSide
from octavo.disagg.prefill import PrefillSide
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.engine.core import EngineCore


def make_side(core: EngineCore) -> PrefillSide | DecodeSide:
    """The side that `core.config.role` names, over ZMQ and Mooncake. Raises ConfigError."""
    from octavo.disagg.transport.mooncake import MooncakeTransport
    from octavo.disagg.zmq_hub import ZmqHub

    config = core.config
    if config.device != "cpu":
        raise ConfigError("device", config.device, f"--role {config.role} moves pages of host memory; allowed: cpu")
    transport = MooncakeTransport(config.bootstrap_host, config.transport_protocol, config.transport_device)
    if config.role == "prefill":
        hub = ZmqHub((config.bootstrap_host, config.bootstrap_port))
        return PrefillSide(core, hub, transport, room_timeout_s=config.room_timeout_s)
    return DecodeSide(core, ZmqHub(None), transport, room_timeout_s=config.room_timeout_s,
                      quarantine_after_s=config.quarantine_after_s)  # fmt: skip
