"""The decode side: preallocates pages, reads them from a prefill server, decodes behind them.

    arrived → preallocating → transferring → waiting → running         (`failed`, `aborted` from each; states.py)

A page under transfer is leased and its lease ends only when its own read is final. A room that fails or is aborted
while reads run joins `_draining`: the request is answered at once, its pages come back later, or are quarantined
where no status will ever come. A row is landed when every read is final, the prefill side has confirmed that it held
its pages until then, and (row, generation) is still the same.
"""

from __future__ import annotations

import ipaddress
import math
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.disagg import protocol as p
from octavo.disagg.budget import Holder, admission_pages, growth_pages
from octavo.disagg.failures import failed, gone, said, too_late, why
from octavo.disagg.hub import Hub
from octavo.disagg.layout import import_seed, layout_of, regions_of, seed_size_bytes
from octavo.disagg.prefill import rooms_of
from octavo.disagg.rooms import Room
from octavo.disagg.states import Phase, Tombstones
from octavo.disagg.tally import TransferTally
from octavo.disagg.transport.base import Status, Transport, copies_of
from octavo.engine.output import TokenLogprob
from octavo.engine.request import Request
from octavo.errors import LawViolation, OctavoError, OutOfPages, RequestError
from octavo.kv.books import OutOfRows

if TYPE_CHECKING:
    from octavo.engine.core import EngineCore
    from octavo.engine.request import EngineRequest

TICK_S = 0.25
GREETING_S = 4.0  # until a prefill server has answered the handshake (clients are promised 5 s)
GREET_AGAIN_S = 1.0
ASK_AGAIN_S = 0.5  # a lost "read" or its lost answer is asked again
LOOK_AHEAD = 8  # rooms behind the head of the line that may pass it
MAX_PASSED = 16  # the head is passed so often, then everybody waits for it
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9.])?")
GRACE_S = 1.0  # a dead peer's last bytes may still be in the local network stack


class Server:
    """One prefill server as this side knows it."""

    def __init__(self, since_s: float) -> None:
        self.since_s = self.greeted_s = since_s
        self.welcome: p.Welcome | None = None


class DecodeSide:
    """Owned by the engine core of a `--role decode` server; every method runs in the engine's loop."""

    role = "decode"

    def __init__(
        self, core: EngineCore, hub: Hub, transport: Transport, *, room_timeout_s: float, quarantine_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: seconds that only grow; every deadline and every measured time is by it."""
        self._core, self._hub, self._transport, self._clock = core, hub, transport, clock
        self._timeout_s, self._quarantine_after_s = room_timeout_s, quarantine_after_s
        self.layout = layout_of(core.parts)
        self.regions = regions_of(core.parts)
        self._seed_bytes = seed_size_bytes(core.parts.drafter)
        transport.register(list(self.regions.values()))
        self._servers: dict[str, Server] = {}
        self._addresses: dict[str, str] = {}  # prefill server -> where its newest life is read from
        self._line: list[Room] = []  # arrived and preallocating, in order of arrival
        self._moving: dict[tuple[int, int], Room] = {}  # (room, attempt) -> transferring and waiting
        self._by_request: dict[int, Room] = {}  # id(request), every phase
        self._draining: list[Room] = []
        self._rooms: set[int] = set()
        self._tombstones = Tombstones()
        self._attempt = 0
        self._tick_s = 0.0
        self._changed = False
        self.tally = TransferTally()
        transport.on_final(self._final)

    def on_news(self, call: Callable[[], None]) -> None:
        """`call`, from any thread, when the loop has something to look at."""
        self._hub.wake = call

    def _final(self) -> None:
        self._changed = True
        self._hub.wake()

    # -- requests ------------------------------------------------------------------------------------------------

    def check(self, call: EngineRequest) -> None:
        """Raises RequestError for a room that is missing, taken or over."""
        for room in rooms_of(call):
            if room in self._rooms:
                raise RequestError(f"bootstrap_room: {room} is in use", param="bootstrap_room", code="duplicate_room")
            if room in self._tombstones:
                reason = f"bootstrap_room: {room} has ended; nothing is replayed"
                raise RequestError(reason, param="bootstrap_room", code="expired_room")
        if call.bootstrap is None:
            return
        host, port = call.bootstrap.host, call.bootstrap.port
        if not is_host(host):
            raise RequestError(f"bootstrap_host: got {said(host)!r}; the host name or IP address of a prefill server"
                               " is needed", param="bootstrap_host")
        if not 0 < port < 65536:
            raise RequestError(f"bootstrap_port: got {port}; 1 to 65535 is allowed", param="bootstrap_port")

    def arrive(self, request: Request, call: EngineRequest) -> None:
        boot = call.bootstrap
        if boot is None:
            raise RequestError("bootstrap_room: none was given", param="bootstrap_room")
        now = self._clock()
        peer = f"{boot.host}:{boot.port}"
        room = Room(request, boot.rooms[request.choice], peer, now + self._timeout_s)
        self._rooms.add(room.room)
        self._by_request[id(request)] = room
        self._line.append(room)
        if peer not in self._servers:
            self._servers[peer] = Server(now)
            self._hub.send(peer, p.Hello(self.layout))
        self._tick_s = 0.0

    # -- the loop ------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self._line)

    @property
    def open(self) -> bool:
        return bool(self._line or self._moving or self._draining)

    def has_news(self) -> bool:
        return self._changed or self._hub.has_mail() or (self.open and self._clock() >= self._tick_s)

    def patience_s(self) -> float | None:
        """How long the loop may sleep; None: until somebody calls."""
        return max(0.0, self._tick_s - self._clock()) if self.open else None

    def busy_elsewhere(self) -> bool:
        """Rows or pages are leased to transfers: they come back without any step."""
        return bool(self._moving or self._draining)

    def poll(self) -> None:
        self._changed = False
        for peer, message in self._hub.receive():
            self._hear(peer, message)
        now = self._clock()
        for room in list(self._moving.values()):
            self._advance(room, now)
        self._drain(now)
        if now >= self._tick_s:
            self._tick_s = now + TICK_S
            self._expire(now)
        self._preallocate()

    # -- what prefill servers say --------------------------------------------------------------------------------

    def _hear(self, peer: str, message: p.Message | p.PeerDown) -> None:
        if isinstance(message, p.PeerDown):
            self._peer_down(peer, message)
        elif isinstance(message, p.Welcome):
            self._welcomed(peer, message)
        elif isinstance(message, p.Refuse):
            reason = f"prefill server {peer} does not fit this one: {said(message.reason)}"
            self._turn_from(peer, failed("refused", reason))
        elif isinstance(message, (p.Pages, p.Computed, p.Kept, p.Gone)):
            room = self._moving.get((message.room, message.attempt))
            if room is None or room.peer != peer:
                return  # a former attempt, or somebody else's room
            if isinstance(message, p.Pages):
                self._announced(room, message)
            elif isinstance(message, p.Computed):
                self._computed(room, message)
            elif isinstance(message, p.Kept):
                self._confirmed(room, message)
            else:
                self._core.fail(room.request, gone(message))

    def _welcomed(self, peer: str, welcome: p.Welcome) -> None:
        server = self._servers.get(peer)
        if server is None:
            return
        wrong = ""
        if welcome.transport != self._transport.kind:
            wrong = f"transport: prefill has {said(welcome.transport)}, decode has {self._transport.kind}"
        for pool, region in self.regions.items():
            theirs = welcome.regions.get(pool)
            if theirs is None or theirs.page_bytes != region.page_bytes:
                wrong = f"bytes of a {pool} page: prefill has {theirs and theirs.page_bytes}, decode has " \
                        f"{region.page_bytes}"
            elif theirs.base <= 0 or theirs.pages <= 0 or theirs.base + theirs.pages * theirs.page_bytes > 1 << 63:
                wrong = f"the {pool} pool: {theirs.pages} pages from address {theirs.base} are no memory"
        if wrong:
            self._turn_from(peer, failed("refused", f"prefill server {peer} does not fit this one: {wrong}"))
            return
        server.welcome = welcome
        self._forget(peer, welcome.address)
        for room in self._draining:  # a new life of the server: the former one's reads are final
            if room.peer == peer and room.gone_final_s is None and _other(room, welcome.address):
                room.gone_final_s = self._clock()

    def _forget(self, peer: str, address: str | None) -> None:
        """A server is read from `address` now; what the transport keeps for its former life goes."""
        old = self._addresses.pop(peer, None)
        if address is not None:
            self._addresses[peer] = address
        if old is not None and old != address:
            self._transport.forget(old)

    def _peer_down(self, peer: str, down: p.PeerDown) -> None:
        server = self._servers.pop(peer, None)
        cause = "unreachable" if server is None or server.welcome is None else "peer_gone"
        self._fail_all(peer, failed(cause, f"prefill server {peer} is gone: {down.reason}"))
        if down.final:
            self._forget(peer, None)
            for room in self._draining:
                if room.peer == peer and room.gone_final_s is None:
                    room.gone_final_s = self._clock()

    def _turn_from(self, peer: str, error: OctavoError) -> None:
        """Nothing is wanted from a server that does not fit: it hears so while it is still known."""
        self._fail_all(peer, error)
        self._servers.pop(peer, None)

    def _fail_all(self, peer: str, error: OctavoError) -> None:
        for room in [r for r in (*self._line, *self._moving.values()) if r.peer == peer]:
            self._core.fail(room.request, error)

    def _announced(self, room: Room, pages: p.Pages) -> None:
        """Start reading pages that are final over there. Only leased pages of this row are ever written."""
        server = self._servers.get(room.peer)
        if server is None or server.welcome is None:
            return
        if not room.takes(pages):
            self._core.fail(room.request, failed("bad_message", f"room {room.room}: pages were announced out of order"))
            return
        last = pages.first + len(pages.ids)
        ledger = self._core.ledger
        table = ledger.full_table if pages.pool == "full" else ledger.swa_table
        if pages.pool == "full":
            room.next_full = last
        else:
            room.next_swa = last
        local, remote = self.regions.get(pages.pool), server.welcome.regions.get(pages.pool)
        if local is None or remote is None or table is None:
            return  # a pool of zero bytes: pages that only the books know
        if not all(0 <= page < remote.pages for page in pages.ids):
            self._core.fail(room.request, failed("bad_message", f"room {room.room}: announced pages do not exist"))
            return
        targets = table[room.row, pages.first : last]
        if pages.pool == "full" and ledger.tiers is not None:
            targets = ledger.tiers.pool.host_pages_of(targets)  # KV lands in the host tier
        copies = copies_of(local, remote, targets.tolist(), pages.ids)
        room.tickets.append(self._transport.read(server.welcome.address, copies))

    def _computed(self, room: Room, computed: p.Computed) -> None:
        """The first token and what belongs to it: nothing of it reaches the engine unless it can be right."""
        wrong, vocabulary = "", self._core.vocab_size
        if not 0 <= computed.token < vocabulary:
            wrong = f"token {computed.token} is outside the vocabulary (0 … {vocabulary - 1})"
        elif not 0 <= computed.cached_tokens <= room.fill_tokens:
            wrong = f"{computed.cached_tokens} of {room.fill_tokens} prompt tokens were cached"
        elif room.request.params.logprobs is not None and not _are_logprobs(computed.logprob, vocabulary):
            wrong = "the first token has no log-probabilities, or ones that cannot be"
        elif computed.seed is None or self._seed_bytes is None:
            if computed.seed is not self._seed_bytes:
                wrong = f"a draft seed: got {_length(computed.seed)}, the draft here takes {self._seed_bytes or 'none'}"
        elif len(computed.seed) != self._seed_bytes or not np.isfinite(np.frombuffer(computed.seed, np.float32)).all():
            wrong = f"a draft seed: got {_length(computed.seed)}; {self._seed_bytes} bytes of finite float32 are needed"
        if wrong:
            self._core.fail(room.request, failed("bad_message", f"room {room.room}: {wrong}"))
        else:
            room.computed, room.computed_s = computed, self._clock()

    # -- progress ------------------------------------------------------------------------------------------------

    def _advance(self, room: Room, now: float) -> None:
        status = room.status()
        if status in (Status.FAILED, Status.UNKNOWN):
            error = next(t.error for t in room.tickets if t.status is status)
            self._core.fail(room.request, failed("read_failed", f"room {room.room}: KV could not be read: {error}"))
        elif room.phase is Phase.TRANSFERRING and room.announced and status is Status.DONE:
            room.move(Phase.WAITING)
            self._ask(room, now)
        elif room.arrived:
            self._land(room)
        elif room.phase is Phase.WAITING and now - room.asked_s > ASK_AGAIN_S:
            self._ask(room, now)

    def _ask(self, room: Room, now: float) -> None:
        room.asked_s = now
        self._hub.send(room.peer, p.Read(room.room, room.attempt, True))

    def _confirmed(self, room: Room, kept: p.Kept) -> None:
        """The last check before the books take the pages: what was read is what the prefill side held."""
        if room.phase is not Phase.WAITING or room.arrived:
            return
        if not kept.kept:
            reason = f"room {room.room}: the prefill server let its pages go"
            self._core.fail(room.request, failed("pages_let_go", reason))
            return
        room.arrived = True
        self._land(room)

    def _land(self, room: Room) -> None:
        """Into the books. With a host tier the row gets its device slots now, or asks again when a row has ended."""
        computed = room.computed
        try:
            landed = computed is not None and self._core.ledger.land(room.row, room.generation)
        except OutOfPages:
            return
        if computed is None or not landed:
            raise LawViolation(14, "a room in line for landing has no lease", row=room.row, room=room.room)
        del self._moving[room.room, room.attempt]
        room.move(Phase.RUNNING)
        now = self._clock()
        self.tally.moved(room.moved_bytes, now - room.transfer_started_s, room.read_s, now - room.computed_s)
        request = room.request
        request.cached_tokens = max(request.cached_tokens, computed.cached_tokens)
        logprobs = None
        if computed.logprob is not None and request.params.logprobs is not None:
            chosen, top = computed.logprob
            logprobs = [TokenLogprob(computed.token, chosen, tuple((t, v) for t, v in top))]
        self._core.start_landed(request, computed.token, logprobs)
        if request.row >= 0:
            import_seed(self._core.parts.drafter, request.row, computed.seed)

    def _drain(self, now: float) -> None:
        """Rooms without a request: give their pages back when every read is final."""
        for room in list(self._draining):
            status = room.status()
            ledger = self._core.ledger
            dead = room.gone_final_s is not None and now >= room.gone_final_s + GRACE_S
            if status in (Status.DONE, Status.FAILED) or (status is Status.UNKNOWN and dead):
                ledger.fail_transfer(room.row, room.generation, final=True)
            elif now < room.ended_s + self._quarantine_after_s:
                continue
            elif ledger.quarantine(room.row, room.generation):
                self.tally.count("quarantined")
            self._draining.remove(room)
            self._hub.send(room.peer, p.Read(room.room, room.attempt, False))

    # -- preallocation -------------------------------------------------------------------------------------------

    def _preallocate(self) -> None:
        """First fit within a bounded look-ahead. Who was retracted here comes before anybody new."""
        for room in self._line:
            server = self._servers.get(room.peer)
            if room.phase is Phase.ARRIVED and server is not None and server.welcome is not None:
                room.move(Phase.PREALLOCATING)
        if self._core.scheduler.waiting:
            return
        passed: list[Room] = []
        for room in [r for r in self._line if r.phase is Phase.PREALLOCATING][: 1 + LOOK_AHEAD]:
            if self._fits(room) and self._start(room):
                for other in passed:
                    other.passed_over += 1
            elif room.passed_over >= MAX_PASSED:
                return
            else:
                passed.append(room)

    def _fits(self, room: Room) -> bool:
        core, request = self._core, room.request
        holders = [Holder(r.row, len(r.tokens), r.max_tokens - r.num_outputs) for r in core.scheduler.running]
        holders += [Holder(r.row, r.fill_tokens, r.request.max_tokens) for r in self._moving.values()]
        if len(holders) >= core.config.max_running:
            return False
        if not holders and not self._draining:
            return True  # alone: arrival has checked that it fits; what is missing is only found by trying
        ledger, reserve = core.ledger, core.parts.reserve.tokens
        retractable = sum(len(r.tokens) for r in core.scheduler.running)
        prefix = ledger.match(request.tokens, request.namespace, self._tail_page(len(request.tokens))).pages
        need = admission_pages(ledger, len(request.tokens), request.max_tokens - request.num_outputs, reserve,
                               prefix_tokens=prefix * ledger.page_size, retractable_tokens=retractable)
        growth = growth_pages(ledger, holders, reserve)
        return all(pages + growth[pool] <= ledger.available(pool) for pool, pages in need.items())

    def _tail_page(self, fill_tokens: int) -> int | None:
        """Below this page nothing is read: a local prefix needs no live window before it."""
        from octavo.kv.sliding import swa_tail

        window = self.layout.window_tokens
        return swa_tail(fill_tokens, window, self.layout.page_size).start_tokens // self.layout.page_size \
            if window else None

    def _start(self, room: Room) -> bool:
        """Lease pages for the whole prompt (SWA: its tail) through the one preallocation, then ask for them."""
        request, ledger = room.request, self._core.ledger
        # prompt plus earlier output but its newest token, whose KV the next step writes
        fill = request.prompt_tokens + max(request.num_outputs - 1, 0)
        try:
            got = ledger.preallocate(
                request.tokens, fill, namespace=request.namespace, host=ledger.tiers is not None,
                budget_pages=0 if ledger.tiers is None else self._core.scheduler.budget_pages(request),
            )  # fmt: skip
        except (OutOfPages, OutOfRows):
            return False
        self._attempt += 1
        room.attempt = self._attempt
        size = ledger.page_size
        room.start(got.row, got.generation, fill, got.cached_tokens, got.tail_start_tokens, size,
                   ledger.swa_table is not None, self._clock())
        for pool, region in self.regions.items():
            skipped = room.next_full if pool == "full" else room.next_swa
            self.tally.skipped_bytes += skipped * region.page_bytes
        self._line.remove(room)
        self._moving[room.room, room.attempt] = room
        room.move(Phase.TRANSFERRING)
        request.lease(got.row, got.generation, fill)
        self._core.scheduler.park(request)
        self._hub.send(room.peer, p.Want(room.room, room.attempt, fill, got.cached_tokens, got.tail_start_tokens,
                                         p.prompt_digest(request.tokens[:fill])))
        return True

    def computed(self, request: Request, token: int | None, logprobs: list[TokenLogprob] | None) -> bool:
        """Hook of the core behind a prompt chunk: a retracted request is recomputed here and kept."""
        return False

    # -- ends ----------------------------------------------------------------------------------------------------

    def left(self, request: Request, reason: str, error: OctavoError | None) -> None:
        """The core has released a request, whatever the reason."""
        room = self._by_request.pop(id(request), None)
        if room is None:
            return
        now = self._clock()
        self._rooms.discard(room.room)
        self._tombstones.add(room.room, now)
        was = room.phase
        room.move(Phase.DONE if was is Phase.RUNNING else Phase.ABORTED if reason == "abort" else Phase.FAILED)
        if was in (Phase.ARRIVED, Phase.PREALLOCATING):
            self._line.remove(room)
            self.tally.lost(reason, error)
            if room.peer in self._servers:  # the request over there waits to be asked: nobody will
                self._hub.send(room.peer, p.Drop(room.room, 0, why(reason, error)))
        elif was in (Phase.TRANSFERRING, Phase.WAITING):
            del self._moving[room.room, room.attempt]
            self.tally.lost(reason, error)
            room.ended_s = now
            self._draining.append(room)
            self._hub.send(room.peer, p.Drop(room.room, room.attempt, why(reason, error)))
            self._changed = True

    def _expire(self, now: float) -> None:
        for peer, server in list(self._servers.items()):
            if server.welcome is None and now > server.since_s + GREETING_S:
                reason = f"prefill server {peer} did not answer within {GREETING_S:g} s"
                self._turn_from(peer, too_late("unreachable", reason))
            elif server.welcome is None and now > server.greeted_s + GREET_AGAIN_S:
                server.greeted_s = now
                self._hub.send(peer, p.Hello(self.layout))
        for room in [r for r in (*self._line, *self._moving.values()) if now >= r.deadline_s]:
            self._core.fail(room.request, too_late(
                "deadline", f"room {room.room} was {room.phase.value} when its {self._timeout_s:g} s were over"))
        self._tombstones.expire(now)

    def report(self) -> dict[str, Any]:
        """Rooms by phase and what still drains, for `/kv.json`."""
        phases: dict[str, int] = {}
        for room in self._by_request.values():
            phases[room.phase.value] = phases.get(room.phase.value, 0) + 1
        return {"role": self.role, "rooms": phases, "draining": len(self._draining),
                "prefill_servers": sorted(name for name, s in self._servers.items() if s.welcome is not None)}

    def close(self, wait_s: float = 2.0) -> None:
        """The core has ended every request. Reads get `wait_s` to become final, then their pages are quarantined."""
        until_s = time.monotonic() + wait_s
        while self._draining and time.monotonic() < until_s:
            self._drain(self._clock())
            if self._draining:
                time.sleep(0.01)
        for room in self._draining:
            if self._core.ledger.quarantine(room.row, room.generation):
                self.tally.count("quarantined")
        self._draining.clear()
        self._hub.close()
        self._transport.close()


def is_host(host: str) -> bool:
    """Whether this may be the name or the address of a machine."""
    if _HOST_NAME.fullmatch(host):
        return True
    try:
        ipaddress.IPv6Address(host[1:-1] if host.startswith("[") and host.endswith("]") else host)
    except ValueError:
        return False
    return True


def _are_logprobs(found: tuple[float, list[tuple[int, float]]] | None, vocabulary: int) -> bool:
    return found is not None and not math.isnan(found[0]) and \
        all(0 <= token < vocabulary and not math.isnan(value) for token, value in found[1])


def _length(seed: bytes | None) -> str:
    return "none" if seed is None else f"{len(seed)} bytes"


def _other(room: Room, address: str) -> bool:
    """Whether a room's reads went to another life of its server."""
    return bool(room.tickets) and all(ticket.peer != address for ticket in room.tickets)
