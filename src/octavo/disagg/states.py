"""States of a room on either side and the moves that are legal. Everything else raises."""

from __future__ import annotations

from enum import Enum

from octavo.errors import OctavoError


class Phase(Enum):
    """Decode side: arrived → preallocating → transferring → waiting → running. Prefill side: arrived → computing →
    offered. `done`, `failed` and `aborted` end a room; the first is reached from the last working phase only."""

    ARRIVED = "arrived"  # D: the prefill server is being greeted. P: no decode server has asked yet
    PREALLOCATING = "preallocating"  # D: in line for pages
    TRANSFERRING = "transferring"  # D: pages are leased, reads are running
    WAITING = "waiting"  # D: everything arrived; the prefill side is asked whether it held its pages
    RUNNING = "running"  # D: decodes like any other request
    COMPUTING = "computing"  # P: chunks are computed and announced
    OFFERED = "offered"  # P: all announced, pages are held until "read"
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"


_ENDS = frozenset({Phase.FAILED, Phase.ABORTED})

DECODE_MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.ARRIVED: frozenset({Phase.PREALLOCATING}) | _ENDS,
    Phase.PREALLOCATING: frozenset({Phase.TRANSFERRING}) | _ENDS,
    Phase.TRANSFERRING: frozenset({Phase.WAITING}) | _ENDS,
    Phase.WAITING: frozenset({Phase.RUNNING}) | _ENDS,
    Phase.RUNNING: frozenset({Phase.DONE}) | _ENDS,
    Phase.DONE: frozenset(),
    Phase.FAILED: frozenset(),
    Phase.ABORTED: frozenset(),
}

PREFILL_MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.ARRIVED: frozenset({Phase.COMPUTING}) | _ENDS,
    Phase.COMPUTING: frozenset({Phase.OFFERED}) | _ENDS,
    Phase.OFFERED: frozenset({Phase.DONE}) | _ENDS,
    Phase.DONE: frozenset(),
    Phase.FAILED: frozenset(),
    Phase.ABORTED: frozenset(),
}


class IllegalPhase(OctavoError):
    """A room was asked to make a move that its table does not have: a fault of ours, never of a user."""

    code = "illegal_room_move"


def move(table: dict[Phase, frozenset[Phase]], room: int, old: Phase, new: Phase) -> Phase:
    """`new`, if the table allows it. Raises IllegalPhase."""
    if new not in table.get(old, frozenset()):
        raise IllegalPhase(f"room {room}: {old.value} -> {new.value}")
    return new


class Tombstones:
    """Rooms that ended a while ago: bounded in number and age, so that a replay is known and nothing grows."""

    def __init__(self, limit: int = 65_536, keep_s: float = 600.0) -> None:
        self._ended: dict[int, float] = {}  # in order of ending
        self._limit, self._keep_s = limit, keep_s

    def add(self, room: int, now: float) -> None:
        self._ended.pop(room, None)
        self._ended[room] = now
        self.expire(now)

    def expire(self, now: float) -> None:
        while self._ended:
            room, ended = next(iter(self._ended.items()))
            if len(self._ended) <= self._limit and ended >= now - self._keep_s:
                return
            del self._ended[room]

    def __contains__(self, room: int) -> bool:
        return room in self._ended

    def __len__(self) -> int:
        return len(self._ended)
