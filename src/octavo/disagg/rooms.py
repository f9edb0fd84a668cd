"""One room on the decode side, and the reads of its pages."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.disagg import protocol as p
from octavo.disagg.states import DECODE_MOVES, Phase, move
from octavo.disagg.transport.base import Status, Ticket
from octavo.engine.request import Request
from octavo.kv.pages import ceil_pages


@dataclass
class Room:
    """`next_full`, `next_swa`: page numbers of the row that have not been announced yet; complete at `last_page`."""

    request: Request
    room: int
    peer: str
    deadline_s: float
    phase: Phase = Phase.ARRIVED
    passed_over: int = 0
    attempt: int = 0
    row: int = -1
    generation: int = -1
    fill_tokens: int = 0
    next_full: int = 0
    next_swa: int = 0
    last_page: int = 0
    has_swa: bool = False
    tickets: list[Ticket] = field(default_factory=list)
    computed: p.Computed | None = None
    asked_s: float = 0.0  # when the prefill side was last asked whether it kept its pages
    transfer_started_s: float = 0.0
    computed_s: float = 0.0  # when the prefill side said that the prompt is computed
    gone_final_s: float | None = None  # since when nothing can arrive any more, although reads ended unknown
    ended_s: float = 0.0
    arrived: bool = False  # the prefill side held its pages to the end: the KV is here, the row waits for device slots

    def move(self, phase: Phase) -> None:
        self.phase = move(DECODE_MOVES, self.room, self.phase, phase)

    def start(self, row: int, generation: int, fill_tokens: int, cached_tokens: int, tail_start_tokens: int,
              page_size: int, has_swa: bool, now_s: float) -> None:
        """Pages are leased."""
        self.row, self.generation, self.fill_tokens = row, generation, fill_tokens
        self.last_page = ceil_pages(fill_tokens, page_size)
        self.next_full = cached_tokens // page_size
        self.next_swa = max(cached_tokens, tail_start_tokens) // page_size
        self.has_swa = has_swa
        self.transfer_started_s = now_s

    def takes(self, pages: p.Pages) -> bool:
        """Whether an announcement is the next one of its pool and inside the row."""
        at = self.next_full if pages.pool == "full" else self.next_swa if pages.pool == "swa" and self.has_swa else -1
        return pages.first == at and bool(pages.ids) and at + len(pages.ids) <= self.last_page

    @property
    def announced(self) -> bool:
        """Every page and the first token are known."""
        swa = not self.has_swa or self.next_swa == self.last_page
        return self.computed is not None and self.next_full == self.last_page and swa

    def status(self) -> Status:
        """Of all reads together: pending while one is, then the worst."""
        seen = {ticket.status for ticket in self.tickets}
        for worst in (Status.PENDING, Status.UNKNOWN, Status.FAILED):
            if worst in seen:
                return worst
        return Status.DONE

    @property
    def moved_bytes(self) -> int:
        return sum(ticket.moved_bytes for ticket in self.tickets)

    @property
    def read_s(self) -> float:
        return sum(ticket.seconds for ticket in self.tickets)
