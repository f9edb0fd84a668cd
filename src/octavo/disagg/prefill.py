"""The prefill side: computes prompts that a decode server asks for, announces pages, holds them until "read".

    arrived     the request is here; it is not computed before a decode server has pages for it (`Want`), so two
                servers can never wait for each other's memory
    computing   like any other prompt; whole pages are announced after each chunk
    offered     all pages and the first token are announced, the client has its answer; the row is held, an operation
                in flight names it (law 14)
    done        the decode side has said "read": the row goes the usual way (`release`)

`_keeping` is the only thing shared with the hub's thread: it answers "read" at once, however long a step takes. An
attempt that was withdrawn (peer dead, deadline) answers `kept=False`, and the reader throws away what it has.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.disagg import protocol as p
from octavo.disagg.failures import failed, said, too_late, why
from octavo.disagg.hub import Hub
from octavo.disagg.layout import layout_of, regions_of, seed_bytes
from octavo.disagg.states import PREFILL_MOVES, Phase, Tombstones, move
from octavo.disagg.tally import TransferTally
from octavo.disagg.transport.base import Transport
from octavo.engine.request import Request, State
from octavo.errors import OctavoError, RequestError
from octavo.kv.pages import ceil_pages
from octavo.kv.sliding import swa_tail

if TYPE_CHECKING:
    from octavo.engine.core import EngineCore
    from octavo.engine.output import TokenLogprob
    from octavo.engine.request import EngineRequest

TICK_S = 0.25
ORPHAN_LIMIT = 4096  # `Want`s of one decode server without a request: more are refused


@dataclass
class Offer:
    """One room on the prefill side."""

    request: Request
    room: int
    deadline_s: float
    phase: Phase = Phase.ARRIVED
    peer: str = ""
    want: p.Want | None = None
    first_full: int = 0  # page numbers of the row: the next ones to announce
    first_swa: int = 0
    ops: list[int] = field(default_factory=list)
    op_row: int = -1  # (row, generation) the newest operation names
    op_generation: int = -1
    reason: str = ""  # why its client's answer ended, once it has it


class PrefillSide:
    """Owned by the engine core of a `--role prefill` server; every method but `quick` runs in the engine's loop."""

    role = "prefill"

    def __init__(self, core: EngineCore, hub: Hub, transport: Transport, *, room_timeout_s: float,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds that only grow; every deadline is by it."""
        self._core, self._hub, self._transport, self._clock = core, hub, transport, clock
        self._timeout_s = room_timeout_s
        self.layout = layout_of(core.parts)
        self.regions = regions_of(core.parts)
        transport.register(list(self.regions.values()))
        self._welcome = p.Welcome(transport.kind, transport.address, self.regions)
        self._rooms: dict[int, Offer] = {}
        self._by_request: dict[int, Offer] = {}  # id(request)
        self._orphans: OrderedDict[tuple[str, int], tuple[p.Want, float]] = OrderedDict()
        self._ended: list[Offer] = []  # the request has left; the reader has not said "read"
        self._tombstones = Tombstones()
        self._refused: set[str] = set()  # decode servers that do not fit
        self._lock = threading.Lock()
        self._keeping: dict[tuple[str, int, int], bool] = {}
        self._answered: OrderedDict[tuple[str, int, int], bool] = OrderedDict()
        self._tick_s = 0.0
        self.tally = TransferTally()
        hub.quick = self.quick

    def on_news(self, call: Callable[[], None]) -> None:
        """`call`, from any thread, when the loop has something to look at."""
        self._hub.wake = call

    # -- the hub's thread ----------------------------------------------------------------------------------------

    def quick(self, peer: str, message: p.Message) -> p.Message | None:
        """Answers that need nothing from the engine's loop."""
        if isinstance(message, p.Hello):
            wrong = p.differences(self.layout, message.layout)
            return p.Refuse("; ".join(wrong)) if wrong else self._welcome
        if isinstance(message, p.Read) and message.ok:
            key = (peer, message.room, message.attempt)
            with self._lock:
                kept = self._keeping.pop(key, None)
                if kept is None:
                    kept = self._answered.get(key, False)  # asked again: our answer was lost
                self._answered[key] = kept
                while len(self._answered) > 65_536:
                    self._answered.popitem(last=False)
            return p.Kept(message.room, message.attempt, kept)
        return None

    # -- requests ------------------------------------------------------------------------------------------------

    def check(self, call: EngineRequest) -> None:
        """Raises RequestError for a room that is missing, taken or over."""
        for room in rooms_of(call):
            if room in self._rooms:
                raise RequestError(f"bootstrap_room: {room} is in use", param="bootstrap_room", code="duplicate_room")
            if room in self._tombstones:
                reason = f"bootstrap_room: {room} has ended; nothing is replayed"
                raise RequestError(reason, param="bootstrap_room", code="expired_room")

    def arrive(self, request: Request, call: EngineRequest) -> None:
        room = rooms_of(call)[request.choice]
        offer = Offer(request, room, self._clock() + self._timeout_s)
        self._rooms[room] = self._by_request[id(request)] = offer
        for key in [k for k in self._orphans if k[1] == room]:
            self._match(offer, key[0], self._orphans.pop(key)[0])

    def _match(self, offer: Offer, peer: str, want: p.Want) -> None:
        if offer.phase is not Phase.ARRIVED:
            self._hub.send(peer, p.Gone(want.room, want.attempt, "the room is taken by another attempt", 409))
            return
        wrong = self._wrong(offer, want)
        if wrong is not None:
            cause, reason = wrong
            self._hub.send(peer, p.Gone(want.room, want.attempt, reason))
            self._core.fail(offer.request, failed(cause, f"room {offer.room}: {reason}"))
            return
        offer.peer, offer.want = peer, want
        size = self.layout.page_size
        offer.first_full = want.prefix_tokens // size
        offer.first_swa = max(want.prefix_tokens, want.tail_start_tokens) // size
        offer.deadline_s = self._clock() + self._timeout_s
        self._move(offer, Phase.COMPUTING)
        with self._lock:
            self._keeping[peer, want.room, want.attempt] = True
        self._core.scheduler.enqueue(offer.request)

    def _wrong(self, offer: Offer, want: p.Want) -> tuple[str, str] | None:
        """What is wrong with what a decode server asks for: (cause, text), or None. Both sides compute the tail with
        the same function; here the two results meet."""
        tokens, size, window = offer.request.tokens, self.layout.page_size, self.layout.window_tokens
        if want.prompt_tokens != len(tokens) or want.prompt != p.prompt_digest(tokens):
            return "prompts_differ", \
                f"the prompts differ ({len(tokens)} tokens here, {want.prompt_tokens} on the decode server)"
        if not 0 <= want.prefix_tokens <= len(tokens) or want.prefix_tokens % size:
            return "bad_message", f"a prefix of {want.prefix_tokens} tokens: whole pages of {size} within " \
                f"{len(tokens)} are possible"
        tail = swa_tail(len(tokens), window, size).start_tokens if window else 0
        if want.tail_start_tokens != tail:
            return "bad_message", f"a window tail from token {want.tail_start_tokens}: it starts at {tail}"
        return None

    def _move(self, offer: Offer, phase: Phase) -> None:
        offer.phase = move(PREFILL_MOVES, offer.room, offer.phase, phase)

    # -- hooks of the core ---------------------------------------------------------------------------------------

    def computed(self, request: Request, token: int | None, logprobs: list[TokenLogprob] | None) -> bool:
        """A chunk is settled and published. With `token` it was the last one: the request is held, True."""
        offer = self._by_request.get(id(request))
        if offer is None or offer.want is None:
            return False
        self._announce(offer, final=token is not None)
        if token is None:
            return False
        offer.deadline_s = self._clock() + self._timeout_s
        seed = seed_bytes(self._core.parts.drafter, request.row)
        logprob = None
        if logprobs:
            logprob = (float(logprobs[0].logprob), [(int(t), float(v)) for t, v in logprobs[0].top])
        want = offer.want
        self._hub.send(
            offer.peer, p.Computed(want.room, want.attempt, token, logprob, request.cached_tokens, seed)
        )
        self._move(offer, Phase.OFFERED)
        request.move(State.HANDOVER)
        self._core.scheduler.park(request)
        # Now and not at "read", which the loop hears of one step later: routers pass the decode server's stream on
        # when both halves have answered.
        offer.reason = self._core.answer_handover(request, token, logprobs)
        return True

    def _announce(self, offer: Offer, *, final: bool) -> None:
        """Whole pages of what is committed; the partial page waits for the last chunk."""
        request, want, ledger = offer.request, offer.want, self._core.ledger
        if want is None:
            return
        row, size = request.row, self.layout.page_size
        if (offer.op_row, offer.op_generation) != (row, request.generation):
            offer.ops.append(ledger.begin_op([row], "transfer"))
            offer.op_row, offer.op_generation = row, request.generation
        committed = int(ledger.committed[row])
        last = ceil_pages(committed, size) if final else committed // size
        if last > offer.first_full:
            ids = ledger.full_table[row, offer.first_full : last].tolist()
            self._hub.send(offer.peer, p.Pages(want.room, want.attempt, "full", offer.first_full, ids))
            offer.first_full = last
        if ledger.swa_table is not None and last > offer.first_swa:
            ids = ledger.swa_table[row, offer.first_swa : last].tolist()
            self._hub.send(offer.peer, p.Pages(want.room, want.attempt, "swa", offer.first_swa, ids))
            offer.first_swa = last

    def left(self, request: Request, reason: str, error: OctavoError | None) -> None:
        """The core has released a request, whatever the reason."""
        offer = self._by_request.pop(id(request), None)
        if offer is None:
            return
        now = self._clock()
        del self._rooms[offer.room]
        self._tombstones.add(offer.room, now)
        done = offer.phase is Phase.OFFERED and reason in ("stop", "length")
        self._move(offer, Phase.DONE if done else Phase.ABORTED if reason == "abort" else Phase.FAILED)
        if not done:
            self.tally.lost(reason, error)
        if offer.want is None:
            return
        if not done:
            status, code = (error.status, error.code) if error is not None else (502, "prefill_failed")
            ended = f"the prefill server ended the room: {why(reason, error)}"
            self._hub.send(offer.peer, p.Gone(offer.room, offer.want.attempt, ended, status, code))
        if offer.ops:
            offer.deadline_s = now + self._timeout_s
            self._ended.append(offer)  # its pages stay until the reader says "read", or is dead
        else:
            self._withdraw(offer)

    # -- the loop ------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Requests that are not in the scheduler's queue yet."""
        return sum(1 for offer in self._rooms.values() if offer.phase is Phase.ARRIVED)

    @property
    def open(self) -> bool:
        return bool(self._rooms or self._ended or self._orphans)

    def has_news(self) -> bool:
        return self._hub.has_mail() or (self.open and self._clock() >= self._tick_s)

    def patience_s(self) -> float | None:
        """How long the loop may sleep; None: until somebody calls."""
        return max(0.0, self._tick_s - self._clock()) if self.open else None

    def busy_elsewhere(self) -> bool:
        """Rows or pages are held for readers: they come back without any step."""
        return bool(self._ended) or any(o.phase is Phase.OFFERED for o in self._rooms.values())

    def poll(self) -> None:
        for peer, message in self._hub.receive():
            self._hear(peer, message)
        now = self._clock()
        if now >= self._tick_s:
            self._tick_s = now + TICK_S
            self._expire(now)

    def _hear(self, peer: str, message: p.Message | p.PeerDown) -> None:
        if isinstance(message, p.PeerDown):
            self._peer_down(peer, message.reason)
        elif isinstance(message, p.Hello):  # answered by `quick`
            (self._refused.add if p.differences(self.layout, message.layout) else self._refused.discard)(peer)
        elif isinstance(message, p.Want):
            self._wanted(peer, message)
        elif isinstance(message, p.Drop):
            offer = self._of(peer, message.room, message.attempt)
            if offer is None and message.attempt == 0:  # it was still in line over there
                offer = self._rooms.get(message.room)
                if offer is None:  # the decode side was faster than the request: it finds its room over
                    self._tombstones.add(message.room, self._clock())
                offer = offer if offer is not None and offer.phase is Phase.ARRIVED else None
            if offer is not None:
                reason = f"the decode server ended the room: {said(message.reason)}"
                self._core.fail(offer.request, failed("peer_ended", reason))
        elif isinstance(message, p.Read):
            self._finish(peer, message)

    def _wanted(self, peer: str, want: p.Want) -> None:
        offer = self._rooms.get(want.room)
        if peer in self._refused:
            self._hub.send(peer, p.Gone(want.room, want.attempt, "this decode server was refused at the handshake"))
        elif offer is not None:
            self._match(offer, peer, want)
        elif want.room in self._tombstones:
            self._hub.send(peer, p.Gone(want.room, want.attempt, "it has ended on the prefill server already"))
        elif sum(key[0] == peer for key in self._orphans) >= ORPHAN_LIMIT:
            self._hub.send(peer, p.Gone(want.room, want.attempt, "too many rooms without a request", 503))
        else:
            self._orphans[peer, want.room] = (want, self._clock() + self._timeout_s)

    def _of(self, peer: str, room: int, attempt: int) -> Offer | None:
        """The live offer that a message is about; None for a former attempt or somebody else's."""
        offer = self._rooms.get(room)
        if offer is None or offer.peer != peer or offer.want is None or offer.want.attempt != attempt:
            self._orphans.pop((peer, room), None)
            return None
        return offer

    def _finish(self, peer: str, read: p.Read) -> None:
        """Nothing is read any more: pages may go. With `ok` the request is done on this side."""
        offer = self._of(peer, read.room, read.attempt)
        if offer is None:
            for ended in [o for o in self._ended if o.want is not None and o.peer == peer
                          and (o.room, o.want.attempt) == (read.room, read.attempt)]:
                self._ended.remove(ended)
                self._withdraw(ended)
            return
        if not read.ok or offer.phase is not Phase.OFFERED:
            self._withdraw(offer)
            self._core.fail(offer.request, failed("peer_ended", "the decode server ended the room"))
            return
        self._withdraw(offer)
        self.tally.count("done")
        self._core.finish_handover(offer.request, offer.reason)

    def _withdraw(self, offer: Offer) -> None:
        """From here on a reader's "read" is answered with kept=False; the pages are ours again."""
        if offer.want is not None:
            with self._lock:
                self._keeping.pop((offer.peer, offer.room, offer.want.attempt), None)
        for op in offer.ops:
            self._core.ledger.end_op(op)
        offer.ops.clear()

    def _peer_down(self, peer: str, reason: str) -> None:
        self._refused.discard(peer)
        for key in [k for k in self._orphans if k[0] == peer]:
            del self._orphans[key]
        for offer in [o for o in self._rooms.values() if o.peer == peer]:
            self._withdraw(offer)
            self._core.fail(offer.request, failed("peer_gone", f"the decode server is gone: {reason}"))
        for offer in [o for o in self._ended if o.peer == peer]:
            self._ended.remove(offer)
            self._withdraw(offer)

    def _expire(self, now: float) -> None:
        for key in [k for k, (_, deadline_s) in self._orphans.items() if now >= deadline_s]:
            want, _ = self._orphans.pop(key)
            self._hub.send(key[0], p.Gone(want.room, want.attempt, "no request for this room has come", 504,
                                          "unknown_room"))
        for offer in [o for o in self._rooms.values() if now >= o.deadline_s and o.phase is not Phase.COMPUTING]:
            what = "no decode server has asked for" if offer.phase is Phase.ARRIVED else "the decode server never read"
            if offer.phase is Phase.OFFERED:
                self._withdraw(offer)
            self._core.fail(offer.request, too_late("deadline", f"{what} room {offer.room} in {self._timeout_s:g} s"))
        for offer in [o for o in self._ended if now >= o.deadline_s]:
            self._ended.remove(offer)
            self._withdraw(offer)
        self._tombstones.expire(now)

    def report(self) -> dict[str, Any]:
        """Rooms by phase, for `/kv.json`."""
        phases: dict[str, int] = {}
        for offer in self._rooms.values():
            phases[offer.phase.value] = phases.get(offer.phase.value, 0) + 1
        return {"role": self.role, "rooms": phases, "held_for_readers": len(self._ended), "orphans": len(self._orphans)}

    def close(self) -> None:
        """The core has ended every request; what readers still read is withdrawn, then nobody is listened to."""
        for offer in self._ended:
            self._withdraw(offer)
        self._ended.clear()
        self._hub.close()
        self._transport.close()


def rooms_of(call: EngineRequest) -> list[int]:
    """The rooms of a call, one a choice. Raises RequestError."""
    boot = call.bootstrap
    if boot is None or not boot.rooms:
        raise RequestError(
            "bootstrap_room: this server is one half of a prefill/decode pair; send the request to its router",
            param="bootstrap_room",
        )
    if len(boot.rooms) != call.params.n or len(set(boot.rooms)) != len(boot.rooms):
        raise RequestError(
            f"bootstrap_room: got {len(boot.rooms)} rooms; n = {call.params.n} distinct ones are needed",
            param="bootstrap_room",
        )
    return boot.rooms
