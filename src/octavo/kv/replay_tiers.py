"""The host tier's part of a replay: backups, tickets, and the sizes of the tiers at another page size."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError, OutOfPages
from octavo.kv.books import LedgerConfig, OutOfRows
from octavo.kv.pages import ceil_pages
from octavo.kv.tiers import Ticket, TierConfig, least_device_pages

if TYPE_CHECKING:
    from octavo.kv.ledger import Ledger
    from octavo.kv.replay import _Request


def scaled_tiers(config: LedgerConfig, page_size: int, host_pages: int | None) -> TierConfig | None:
    """Tiers of the recorded books for pages of `page_size`: the host tier, a row's slots and what is selected keep
    their size in tokens, and as many rows as before have slots.

    Raises `ConfigError`: host_pages without a host tier or below 1; page_size where a row's slots, so large in tokens,
    would not hold the pages of a query.
    """
    tiers, p = config.tiers, max(page_size, 1)
    if tiers is None:
        if host_pages is not None:
            raise ConfigError("host_pages", host_pages, "allowed for traces of books with a host tier (--hisparse)")
        return None
    if p == config.page_size:
        return tiers if host_pages is None else replace(tiers, host_pages=host_pages)
    device = ceil_pages(tiers.device_pages * config.page_size, p)
    topk = ceil_pages(tiers.topk_pages * config.page_size, p)
    least = least_device_pages(topk, tiers.recent_tokens, p)
    if device < least:
        tokens = tiers.device_pages * config.page_size
        raise ConfigError(
            "page_size", page_size, f"the {tokens} tokens of a row's slots are {device} pages, a query needs {least}"
        )
    host = max(1, tiers.host_pages * config.page_size // p) if host_pages is None else host_pages
    rows = tiers.device_slots // tiers.device_pages
    return replace(tiers, host_pages=host, device_slots=rows * device, device_pages=device, topk_pages=topk)


class TierReplay:
    """State that every replay has, and the calls that only books with a host tier record."""

    def __init__(self, ledger: Ledger, recorded_page_size: int) -> None:
        self.ledger = ledger
        self.by_row: dict[int, _Request] = {}  # row in the trace -> request
        self.waiting: list[_Request] = []
        self.tickets: dict[int, _Request] = {}  # ticket in the trace -> request that it belongs to
        self.backups: dict[int, int] = {}  # operation in the trace -> operation here
        self.recorded: dict[str, int] = {}
        self._recorded_page_size = recorded_page_size

    def live(self, rows: list[int]) -> list[_Request]:
        found = [self.by_row[row] for row in rows if row in self.by_row]
        return [request for request in found if request.row >= 0]

    def budget_of(self, call: dict[str, Any]) -> int:
        """Host pages promised by an `admit` or `preallocate`, in pages of these books."""
        return ceil_pages(call.get("budget", 0) * self._recorded_page_size, self.ledger.page_size)

    # --- one method per recorded call ----------------------------------------------------------------------------

    def on_begin_backup(self, call: dict[str, Any]) -> None:
        backup = self.ledger.begin_backup([request.row for request in self.live(call["rows"])])
        if backup is None:
            return
        if call["op"] is None:  # nothing was to be copied there: here it is done at once
            self.ledger.end_backup(backup.op)
        else:
            self.backups[call["op"]] = backup.op

    def on_end_backup(self, call: dict[str, Any]) -> None:
        if (op := self.backups.pop(call["op"], None)) is not None:
            self.ledger.end_backup(op, written=call["written"])

    def on_retract(self, call: dict[str, Any]) -> None:
        request = self.by_row.pop(call["row"])
        if request.row >= 0:
            self.part(request, keep=True)
        else:
            self.waiting.remove(request)
        self.tickets[call["ticket"]] = request

    def on_return(self, call: dict[str, Any]) -> None:
        """A `preallocate` with a ticket. Its `land` finds the row landed."""
        request = self.by_row[call["row"]] = self.tickets.pop(call["ticket"])
        self.open(request)

    def on_drop_ticket(self, call: dict[str, Any]) -> None:
        self.drop(self.tickets.pop(call["ticket"]))

    def on_tier_counters(self, call: dict[str, Any]) -> None:
        self.recorded = {"recorded_hits": int(call["hits"]), "recorded_swaps": int(call["swaps"])}

    # --- pressure ------------------------------------------------------------------------------------------------

    def open(self, request: _Request) -> bool:
        raise NotImplementedError

    def close(self, request: _Request, short: OutOfPages) -> None:
        """Preempt a request. Its KV stays in the host tier, unless that is what is short."""
        self.part(request, keep=short.pool != "host")
        self.waiting.append(request)

    def part(self, request: _Request, *, keep: bool) -> None:
        """End a request's row. `keep`: into a ticket, if it decodes and nothing in flight names it."""
        row, request.row = request.row, -1
        decodes = int(self.ledger.committed[row]) >= max(1, len(request.tokens) - 1)
        if keep and self.ledger.tiers is not None and decodes and not self.ledger.inflight.per_row[row]:
            request.ticket = self.ledger.retract(row)
        else:
            self.ledger.release(row)

    def reopen(self, request: _Request, ticket: Ticket) -> bool:
        """Give a request its row back from its ticket; what was committed meanwhile gets its pages with the next
        commit."""
        missing = ticket.committed - len(request.tokens)
        try:
            got = self.ledger.preallocate(
                [*request.tokens, *[0] * missing], ticket.committed, host=True, ticket=ticket
            )
        except (OutOfRows, OutOfPages):
            self.waiting.append(request)
            return False
        self.ledger.land(got.row, got.generation)
        request.row, request.generation, request.ticket = got.row, got.generation, None
        return True

    def drop(self, request: _Request) -> None:
        """A request that does not run has ended."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request.ticket is not None:
            self.ledger.drop_ticket(request.ticket)

    def tier_summary(self) -> dict[str, Any]:
        if self.ledger.tiers is None:
            return {}
        return {"tiers": {**self.ledger.tiers.counters(), **self.recorded}}
