"""What stands between a model's logits and the distribution a token is drawn from: one pure function each.

All take float32 logits [m, V] and return a new tensor; per-row settings are tensors [m]. A row whose setting is
neutral (penalty 1 or 0, top-p 1, …) comes out bit-equal, so a request's token never depends on what its
neighbours asked for. Sums that decide something (top-p mass) are made of integers: order cannot change them,
be it the order of threads, of CUDA atomics or of a sort. Nothing here synchronises with the device.
"""

from __future__ import annotations

import torch

MASS_BITS = 40  # probabilities are counted in units of 2**-40
NEG_INF = float("-inf")
_RADIX_BITS = 16


def integer_mass(logits: torch.Tensor) -> torch.Tensor:
    """int64 [m, V]: softmax in units of 2**-40. softmax works per row, scaling by a power of two is exact."""
    return torch.softmax(logits, dim=-1).to(torch.float64).mul_(2.0**MASS_BITS).to(torch.int64)


def count_tokens(tokens: torch.Tensor, valid: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """int32 [m, V]: how often each id occurs among tokens [m, L] where valid [m, L]."""
    ids = torch.where(valid, tokens.to(torch.int64), vocab_size)  # the extra column swallows what does not count
    counts = torch.zeros((tokens.shape[0], vocab_size + 1), dtype=torch.int32, device=tokens.device)
    counts.scatter_add_(1, ids, torch.ones_like(ids, dtype=torch.int32))
    return counts[:, :vocab_size]


def repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Divide positive logits of seen ids (bool [m, V]) by the penalty, multiply negative ones."""
    factor = penalty.unsqueeze(1)
    return torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)


def presence_frequency(
    logits: torch.Tensor, counts: torch.Tensor, presence: torch.Tensor, frequency: torch.Tensor
) -> torch.Tensor:
    """logit − presence·[count > 0] − frequency·count, counts int [m, V] of output tokens."""
    minus = presence.unsqueeze(1) * (counts > 0) + frequency.unsqueeze(1) * counts
    return logits - minus


def add_sparse(logits: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Add values [m, W] at ids [m, W]; padding is id 0 with value 0."""
    return logits.scatter_add(1, ids, values)


def ban(logits: torch.Tensor, ids: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """Forbid ids [m, W] (padding −1) in rows where active [m]; a row that would keep nothing stays as it is."""
    on = active.unsqueeze(1) & (ids >= 0)
    banned = logits.scatter_add(1, ids.clamp_min(0), torch.where(on, NEG_INF, 0.0).to(logits.dtype))
    keeps_something = banned.amax(dim=-1, keepdim=True) > NEG_INF
    return torch.where(keeps_something, banned, logits)


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """Forbid ids whose bit is 0. bitmask int32 [m, ≥ ceil(V/32)], bit i of word w is id 32·w + i; −1 allows 32 ids."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    words = bitmask[:, : (logits.shape[1] + 31) // 32].repeat_interleave(32, dim=1)[:, : logits.shape[1]]
    allowed = ((words >> (ids & 31).to(torch.int32)) & 1).to(torch.bool)
    return torch.where(allowed, logits, NEG_INF)


def temperature(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Divide by temperatures [m] (1 for greedy rows)."""
    return logits / temperatures.unsqueeze(1)


def _ordered_keys(x: torch.Tensor) -> torch.Tensor:
    """float32 → int64 in [0, 2**32) with the same order."""
    bits = (x + 0.0).view(torch.int32).to(torch.int64)  # + 0.0: −0 and 0 are one value
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) + 2**31


def radix_threshold(x: torch.Tensor, weights: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Largest key t per row such that the weights of values with key >= t sum to at least targets (int64 [m]).

    x float32 [m, V], weights int64 [m, V] >= 0; a target above the row's total gives the smallest key. Returns
    int64 [m, 1] in the order of `_ordered_keys`. Two histograms instead of a sort: torch's CPU sort of one
    row of 49,152 takes longer than a whole decode step.
    """
    keys = _ordered_keys(x)
    remaining = targets.unsqueeze(1)
    threshold = torch.zeros_like(remaining)
    high, low = keys >> _RADIX_BITS, keys & (2**_RADIX_BITS - 1)
    bins = torch.zeros((x.shape[0], 2**_RADIX_BITS + 1), dtype=torch.int64, device=x.device)
    for level, digit in ((0, high), (1, low)):
        if level == 1:
            digit = torch.where(high == threshold, low, 2**_RADIX_BITS)  # others fall into the spare bin
            bins = torch.zeros_like(bins)
        bins.scatter_add_(1, digit, weights)
        # above[d] = weight of digits > d; the wanted digit is the largest with weight(>= d) >= remaining
        at_least = bins[:, :-1].flip(1).cumsum(1).flip(1)
        chosen = (at_least >= remaining).sum(dim=1, keepdim=True).sub_(1).clamp_min_(0)
        above = at_least.gather(1, chosen) - bins.gather(1, chosen)
        remaining = remaining - above
        threshold = (threshold << _RADIX_BITS) + chosen if level else chosen
    return threshold


def top_k(logits: torch.Tensor, k: torch.Tensor, max_k: int) -> torch.Tensor:
    """Keep the k [m] best of each row (ties at the last place stay). `max_k`: host maximum over rows with a limit.

    A row with k >= V is left alone.
    """
    vocab = logits.shape[1]
    unlimited = (k >= vocab).unsqueeze(1)
    if max_k <= 1024:
        best = torch.topk(logits, min(max_k, vocab), dim=-1).values
        last = best.gather(1, k.clamp(1, best.shape[1]).sub(1).unsqueeze(1))
        return torch.where(unlimited | (logits >= last), logits, NEG_INF)
    ones = torch.ones_like(logits, dtype=torch.int64)
    return torch.where(unlimited | (_ordered_keys(logits) >= radix_threshold(logits, ones, k)), logits, NEG_INF)


def top_p(logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Keep the smallest set of best ids whose mass reaches p [m] (ties at the last place stay); p = 1 keeps all."""
    probabilities = torch.softmax(logits, dim=-1)
    mass = probabilities.to(torch.float64).mul_(2.0**MASS_BITS).to(torch.int64)
    total = mass.sum(dim=-1)
    wanted = (p.to(torch.float64) * total.to(torch.float64)).ceil().to(torch.int64).clamp_min(1)
    kept = _ordered_keys(probabilities) >= radix_threshold(probabilities, mass, wanted)
    return torch.where((p >= 1.0).unsqueeze(1) | kept, logits, NEG_INF)


def min_p(logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Keep ids at least p [m] times as probable as the best one; p = 0 keeps all."""
    probabilities = torch.softmax(logits, dim=-1)
    floor = probabilities.amax(dim=-1, keepdim=True) * p.unsqueeze(1)
    return torch.where(probabilities < floor, NEG_INF, logits)


def draw(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """int64 [m]: inverse CDF of softmax(logits) at float64 uniforms [m] in [0, 1).

    The CDF is a running sum of integers (units of 2**-40): exact, so the same on every device and for every m.
    """
    cdf = integer_mass(logits).cumsum(dim=-1)
    total = cdf[:, -1]
    point = (uniforms * total.to(torch.float64)).floor().to(torch.int64)
    point = torch.minimum(point, total - 1)
    chosen = torch.searchsorted(cdf, point.unsqueeze(1), right=True).squeeze(1)
    return chosen.clamp_max(logits.shape[1] - 1)
