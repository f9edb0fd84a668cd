"""A prefill and a decode engine in one process, over the in-process transport: real cores, real books, every fault."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from octavo.config import EngineConfig
from octavo.disagg.decode import DecodeSide
from octavo.disagg.hub import LocalNet
from octavo.disagg.prefill import PrefillSide
from octavo.disagg.transport.inprocess import InProcessTransport, Wire
from octavo.engine.core import EngineCore
from octavo.engine.request import Bootstrap, ChoiceOutput, EngineRequest
from octavo.engine.setup import build
from octavo.kv.balance import raise_on
from octavo.params import SamplingParams
from tests.tiny import loaded_model

PREFILL = "127.0.0.1:1"
DECODE = "decode"


class Steps:
    """The clock of a pair: a millisecond a step, a little for each look at it, and what a test lets pass. So no
    deadline is met or missed because a machine is fast, slow or standing still."""

    def __init__(self) -> None:
        self._now_s = 1000.0

    def __call__(self) -> float:
        self._now_s += 1e-7
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds


def make_core(role: str, net: LocalNet, wire: Wire, kind: str, model: dict[str, Any], *, clock: Callable[[], float],
              name: str = "", room_timeout_s: float = 30.0, quarantine_after_s: float = 30.0, **options: Any
              ) -> EngineCore:
    given = {"draft": "none", "kv_memory": "64MiB", "check_books": True, "threads": 1, "role": role, **options}
    config = EngineConfig.from_options(given, environ={})
    name = name or (PREFILL if role == "prefill" else DECODE)

    def side(core: EngineCore) -> PrefillSide | DecodeSide:
        hub, transport = net.hub(name), InProcessTransport(wire, name)
        if role == "prefill":
            return PrefillSide(core, hub, transport, room_timeout_s=room_timeout_s, clock=clock)
        return DecodeSide(core, hub, transport, room_timeout_s=room_timeout_s, quarantine_after_s=quarantine_after_s,
                          clock=clock)

    return EngineCore(config, build(config, loaded_model(kind, **model)), side=side)


class Pair:
    """`ask` puts a request to both sides; `run` steps them until nothing moves; `close` closes both books."""

    def __init__(self, kind: str = "llama", *, prefill: dict[str, Any] | None = None,
                 decode: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **options: Any) -> None:
        self.net, self.wire, self.clock = LocalNet(), Wire(), Steps()
        self.prefill, self.decode = (
            make_core(role, self.net, self.wire, kind, model or {}, clock=self.clock, **{**options, **(own or {})})
            for role, own in (("prefill", prefill), ("decode", decode))
        )
        self.cores = {"prefill": self.prefill, "decode": self.decode}
        self.outputs: dict[tuple[str, str], list[ChoiceOutput]] = {}
        self._rooms = itertools.count(1000)

    def ask(self, name: str, tokens: list[int], params: SamplingParams, *, rooms: list[int] | None = None,
            sides: Iterable[str] = ("prefill", "decode")) -> list[int]:
        rooms = [next(self._rooms) for _ in range(params.n)] if rooms is None else rooms
        for side in sides:
            boot = Bootstrap("127.0.0.1", 1, rooms)
            self.cores[side].add_request(EngineRequest(name, tokens, params, bootstrap=boot))
        return rooms

    def step(self, sides: Iterable[str] = ("prefill", "decode")) -> None:
        self.clock.advance(0.001)
        for side in sides:
            for output in self.cores[side].step():
                self.outputs.setdefault((side, output.request_id), []).append(output)

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not any(core.has_work() or core.side.open for core in self.cores.values()):
                return
            self.step()
        raise AssertionError({name: core.report() for name, core in self.cores.items()})

    def tokens(self, name: str, index: int = 0) -> list[int]:
        return [t for o in self.outputs.get(("decode", name), []) if o.index == index for t in o.token_ids]

    def text(self, name: str, index: int = 0) -> str:
        return "".join(o.text for o in self.outputs.get(("decode", name), []) if o.index == index)

    def end(self, side: str, name: str) -> ChoiceOutput:
        """The last word on a request of one choice."""
        outputs = self.outputs.get((side, name), [])
        assert outputs and outputs[-1].finished, (side, name, outputs)
        return outputs[-1]

    def leased(self) -> int:
        return sum(pool["leased"] for pool in self.decode.ledger.report()["pools"].values())

    def close(self) -> None:
        """Both sides at rest: only free, cached and quarantined pages are left."""
        for core in self.cores.values():
            core.close()
            raise_on(core.ledger, at_rest=True)
