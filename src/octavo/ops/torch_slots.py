"""Slots of sparse rows in torch: which column sits in which place, least recently used first, and swapping in.

One layer of b rows at a time. `needed` columns that have a place are hits; the others take places in the order of
use, oldest first, from columns that are not needed and are backed up (`column < backed`, empty places too). The order
afterwards is stale → loaded → hit, each group in its former order.

The host sees to it that the needed columns of a step fit. Should they not, columns to be written come first, if need
be in the places of backed-up hits; what is left without a place is read in the host tier.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from octavo.ops.meta import SparseView


def map_columns(
    view: SparseView,
    layer: int,
    rows: torch.Tensor,
    needed: torch.Tensor,
    written: torch.Tensor,
    filled: torch.Tensor,
    host_pages: torch.Tensor,
) -> None:
    """Give every needed column a place as far as places go, and load the content of those that have some.

    rows [b]; needed, written (to be written in this step: they come first), filled (holds tokens already) [b, W]
    bool; host_pages [b, W] int64, -1 where the row has no page.
    """
    width, places = view.slot_map.shape[2], view.device_pages
    most = min(places, needed.shape[1])
    place_of = view.slot_map[layer].index_select(0, rows)
    held = view.column_of[layer].index_select(0, rows).long()
    order = view.order[layer].index_select(0, rows).long()

    last = needed.shape[1] - 1
    hit = (held >= 0) & (held <= last) & needed.gather(1, held.clamp(0, last))
    backed = held < view.backed.index_select(0, rows)[:, None]
    kept = hit & written.gather(1, held.clamp(0, last))
    rank = torch.where(backed & ~kept, hit.to(torch.int8), 2)  # 0: may go, 1: may go for a written column, 2: stays
    missing = needed & (place_of[:, : last + 1] < 0) & (host_pages >= 0)
    urgency = torch.where(missing, 1 - written.to(torch.int8), 2)
    wanted = _sorted(urgency)[:, :most]
    victims = order.gather(1, _sorted(rank.gather(1, order)))[:, :most]
    taken = torch.minimum(missing.sum(1), (rank == 0).sum(1))
    forced = torch.minimum((missing & written).sum(1), (rank < 2).sum(1))
    take = torch.arange(most, device=rows.device) < torch.maximum(taken, forced)[:, None]

    old = held.gather(1, victims)
    place_of = F.pad(place_of, (0, 1))  # one more column, one more place: a bin for what is not taken
    place_of.scatter_(1, torch.where(take & (old >= 0), old, width), -1)
    place_of.scatter_(1, torch.where(take, wanted, width), victims.to(torch.int32))
    target = torch.where(take, victims, places)
    held = F.pad(held, (0, 1)).scatter_(1, target, wanted)
    kind = F.pad(hit.to(torch.int8) * 2, (0, 1)).scatter_(1, target, 1)
    order = order.gather(1, _sorted(kind.gather(1, order)))

    view.slot_map[layer].index_copy_(0, rows, place_of[:, :width])
    view.column_of[layer].index_copy_(0, rows, held[:, :places].to(torch.int32))
    view.order[layer].index_copy_(0, rows, order.to(torch.int32))
    load = take & filled.gather(1, wanted)
    view.counts.add_(torch.stack([hit.sum(), load.sum(), (take & ~load).sum()]))
    source = torch.where(load, host_pages.gather(1, wanted), view.host.shape[0] - 1)
    slot = view.row_slots.index_select(0, rows).gather(1, victims).long()
    slot = torch.where(load & (slot >= 0), slot, view.slots.shape[0] - 1)
    view.slots[:, layer][slot.flatten()] = view.host[:, view.host_layers[layer]][source.flatten()]


def locate(
    view: SparseView, layer: int, rows: torch.Tensor, columns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(int64 slot, bool: the column has one) for rows and columns of shapes that broadcast; spare slot without."""
    place = view.slot_map[layer][rows, columns].long()
    slot = view.row_slots[rows, place.clamp(min=0)].long()
    there = (place >= 0) & (slot >= 0)
    return torch.where(there, slot, view.slots.shape[0] - 1), there


def _sorted(key: torch.Tensor) -> torch.Tensor:
    """Indices that sort each line of key [b, n], equal keys in their order."""
    return torch.sort(key, dim=1, stable=True).indices
