"""What stands between a model's logits and the distribution a token is drawn from: one pure function each.

All take float32 logits [m, V] and return a new tensor; per-row settings are tensors [m]. A row whose setting is
neutral (penalty 1 or 0, top-p 1, …) comes out bit-equal, so a request's token never depends on what its
neighbours asked for. Sums that decide something (top-p mass) are made of integers: order cannot change them,
be it the order of threads, of CUDA atomics or of a sort. Nothing here synchronises with the device.
"""

from __future__ import annotations

import ctypes

import torch

from octavo.ops import native_lib

MASS_BITS = 40  # probabilities are counted in units of 2**-40
NEG_INF = float("-inf")
SHORT_LIST = 1024  # up to here a list of the best beats histograms


def _mass_of(probabilities: torch.Tensor) -> torch.Tensor:
    return (probabilities * 2.0**MASS_BITS).to(torch.int64)  # exact: a power of two


def integer_mass(logits: torch.Tensor) -> torch.Tensor:
    """int64 [m, V]: softmax in units of 2**-40. softmax works per row, so a row does not see the others."""
    return _mass_of(torch.softmax(logits, dim=-1))


def _compiled(x: torch.Tensor) -> ctypes.CDLL | None:
    """The compiled module where it can work on x; it has the same results in a fraction of the time."""
    return native_lib.library() if x.device.type == "cpu" and x.dtype == torch.float32 else None


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


def radix_threshold(keys: torch.Tensor, key_bits: int, weights: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Largest key per row such that the weights of keys >= it sum to at least targets (int64 [m], from 1).

    keys [m, V] integers in [0, 2**key_bits), weights int64 [m, V] >= 0; a target above the row's total gives 0.
    Returns int64 [m, 1]. Two histograms instead of a sort: torch's CPU sort of one row of 49,152 takes longer
    than a whole decode step.
    """
    bits = key_bits // 2
    high, low = (keys >> bits).to(torch.int64), (keys & (2**bits - 1)).to(torch.int64)
    first, remaining = _digit(high, 2 ** (key_bits - bits), weights, targets.unsqueeze(1))
    second, _ = _digit(torch.where(high == first, low, 2**bits), 2**bits, weights, remaining)
    return (first << bits) + second


def _digit(
    digits: torch.Tensor, bins: int, weights: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest digit with weight(>= digit) >= target, and what of the target is left for it. Digit `bins` is nobody."""
    histogram = torch.zeros((digits.shape[0], bins + 1), dtype=torch.int64, device=digits.device)
    histogram.scatter_add_(1, digits, weights)
    below = histogram[:, :bins].cumsum(1)  # weight of digits <= d
    total = below[:, -1:]
    chosen = torch.searchsorted(below, total - targets, right=True).clamp_max(bins - 1)
    return chosen, targets - (total - below.gather(1, chosen))


def top_k(logits: torch.Tensor, k: torch.Tensor, max_k: int, uniform: int | None = None) -> torch.Tensor:
    """Keep the k [m] best of each row (ties at the last place stay). `max_k`: host maximum over rows with a limit.

    A row with k >= V is left alone. `uniform`: host, the one k of all rows, which then need no mask of their own.
    """
    vocab = logits.shape[1]
    if uniform is not None and uniform <= min(SHORT_LIST, vocab):
        last = torch.topk(logits, uniform, dim=-1).values[:, -1:]
        return torch.where(logits >= last, logits, NEG_INF)
    unlimited = (k >= vocab).unsqueeze(1)
    if max_k <= SHORT_LIST:
        best = torch.topk(logits, min(max_k, vocab), dim=-1).values
        last = best.gather(1, k.clamp(1, best.shape[1]).sub(1).unsqueeze(1))
        return torch.where(unlimited | (logits >= last), logits, NEG_INF)
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: −0 and 0 are one value
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64) + 2**31  # in the order of the floats
    ones = torch.ones_like(logits, dtype=torch.int64)
    return torch.where(unlimited | (keys >= radix_threshold(keys, 32, ones, k)), logits, NEG_INF)


def top_p(logits: torch.Tensor, p: torch.Tensor, best: int | None = None) -> torch.Tensor:
    """Keep the smallest set of best ids whose mass reaches p [m] (ties at the last place stay); p = 1 keeps all.

    best  host: at most so many different ids are possible in every row (top-k ran); then a short sorted list
          does what needs histograms otherwise, with the same result
    """
    probabilities = torch.softmax(logits, dim=-1)
    lib = _compiled(logits)
    if lib is not None:
        probabilities = probabilities.contiguous()
        last = torch.empty((logits.shape[0], 1))
        p = p.to(torch.float32).contiguous()
        if lib.octavo_top_p(probabilities.data_ptr(), *probabilities.shape, p.data_ptr(), last.data_ptr()):
            raise MemoryError("top-p ran out of memory")
        return torch.where((p >= 1.0).unsqueeze(1) | (probabilities >= last), logits, NEG_INF)
    mass = _mass_of(probabilities)
    total = mass.sum(dim=-1)
    wanted = (p.to(torch.float64) * total.to(torch.float64)).ceil().to(torch.int64).clamp_min(1)
    if best is not None:
        listed = torch.topk(probabilities, min(best, logits.shape[1]), dim=-1).values
        before = _mass_of(listed).cumsum(dim=-1) - _mass_of(listed)
        last = torch.where(before < wanted.unsqueeze(1), listed, 2.0).amin(dim=-1, keepdim=True)
        kept = probabilities >= last
    else:
        keys = probabilities.view(torch.int32)  # from 0 to 1 the bits of a float have its order, in 30 bits
        kept = keys >= radix_threshold(keys, 30, mass, wanted)
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
    lib = _compiled(logits)
    if lib is not None:
        probabilities, uniforms = torch.softmax(logits, dim=-1).contiguous(), uniforms.to(torch.float64).contiguous()
        ids = torch.empty(logits.shape[0], dtype=torch.int64)
        lib.octavo_draw(probabilities.data_ptr(), *probabilities.shape, uniforms.data_ptr(), ids.data_ptr())
        return ids
    cdf = integer_mass(logits).cumsum(dim=-1)
    total = cdf[:, -1]
    point = (uniforms * total.to(torch.float64)).floor().to(torch.int64)
    point = torch.minimum(point, total - 1)
    chosen = torch.searchsorted(cdf, point.unsqueeze(1), right=True).squeeze(1)
    return chosen.clamp_max(logits.shape[1] - 1)
