"""Random numbers as a pure function of (seed, choice, position): no generator, so no state to lose or share.

The same bits come out alone or in company, with or without drafts, after a rollback, on a CPU and on CUDA.
Mixing is the finaliser of SplitMix64 (Steele, Lea, Flood 2014), applied once per absorbed number; int64
products wrap modulo 2**64 on every device torch runs on, and a test compares with Python integers.
"""

from __future__ import annotations

import torch

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def signed64(value: int) -> int:
    """The int64 with the same low 64 bits as `value`."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


_S_GOLDEN, _S_MIX_1, _S_MIX_2 = signed64(_GOLDEN), signed64(_MIX_1), signed64(_MIX_2)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's own copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * _S_MIX_1
    x = (x ^ _shift_right(x, 27)) * _S_MIX_2
    return x ^ _shift_right(x, 31)


def hash64(seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """int64 [m] hash of three int64 [m]."""
    h = _mix(seeds + _S_GOLDEN)
    h = _mix((h ^ choices) + _S_GOLDEN)
    return _mix((h ^ positions) + _S_GOLDEN)


def uniform53(seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """float64 [m] in [0, 1): the hash's upper 53 bits."""
    return _shift_right(hash64(seeds, choices, positions), 11).to(torch.float64) * 2.0**-53


def request_seed(engine_seed: int, request_id: str) -> int:
    """A 63-bit seed for a request that brought none: depends on the engine's seed and the request's id only."""
    h = host_mix(engine_seed & (2**64 - 1))  # mixed first: seeds must not cancel against the id's letters
    for byte in request_id.encode("utf-8", "surrogatepass"):
        h = host_mix(h ^ (byte + 1))
    return host_mix(h) >> 1


def host_mix(x: int) -> int:
    """`_mix(x + golden)` on Python integers (unsigned 64 bits)."""
    x = (x + _GOLDEN) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * _MIX_1) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * _MIX_2) & (2**64 - 1)
    return x ^ (x >> 31)
