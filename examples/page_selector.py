"""A page selector for HiSparse: pages whose keys point on average where the query points, and spread that way.

    octavo serve --hisparse --page-selector examples.page_selector:Centroids

A selector is a class without constructor arguments and two methods (`octavo.ops.meta.PageSelector`). A page is summed
up once, when it is complete and has been copied to the host tier, by two vectors a KV head, [2, kv_heads, head_dim]
float32; what they hold is the selector's business. A decode step then asks, layer by layer, how much each page matters
to each query, and the best `--topk-pages` complete pages count beside the first and the newest ones.

    layer       number of the sparse layer, so that a model with an indexer of its own can use that layer's weights
    keys        [pages, kv_heads, page_size, head_dim], rotated, in the KV format
    queries     [n, kv_heads, group, head_dim] float32, rotated, not scaled: `group` query heads share a KV head
    summaries   [n, pages, 2, kv_heads, head_dim]: what `summarise` returned for the pages of each query's request

Two rules keep the text what it is. A query's scores may not depend on other queries or pages of the call: element-wise
arithmetic and sums over the last axis keep that, matrix products of a library may not. And no value may be read on the
host (`.item()`, a boolean index): the step would wait for the device.
"""

from __future__ import annotations

import torch


class Centroids:
    """Mean key of a page, and how far its keys spread in each direction.

    The score of a page for one query is what q·k is on average plus `reach` standard deviations of it, taking the
    elements of a key as independent: a page that holds one matching key among many others still gets its chance.
    """

    reach = 2.0

    def summarise(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        wide = keys.float()
        mean = wide.mean(dim=2)
        variance = (wide - mean[:, :, None]).square().mean(dim=2)
        return torch.stack([mean, variance], dim=1)

    def score(self, layer: int, queries: torch.Tensor, summaries: torch.Tensor) -> torch.Tensor:
        best = None
        for head in range(queries.shape[2]):  # one head of every group at a time: little memory
            q = queries[:, None, :, head]
            average = (q * summaries[:, :, 0]).sum(dim=-1)
            spread = (q.square() * summaries[:, :, 1]).sum(dim=-1).clamp(min=0.0).sqrt()
            vote = (average + self.reach * spread).amax(dim=-1)
            best = vote if best is None else torch.maximum(best, vote)
        return best
