"""What a decode server (D) and a prefill server (P) say to each other over the control connection.

    D → P   Hello                     P → D   Welcome | Refuse
    D → P   Want                      P → D   Pages, Pages, …, Computed
    D → P   Read (ok)                 P → D   Kept            and both release what they hold for the other
    D → P   Drop, later Read (not ok) P → D   Gone            either side may end a room at any time

A *room* is one answer of one request: a 63-bit number the router draws. An *attempt* is one preallocation on one
decode server; messages of a former attempt are recognised by it and dropped. Metadata (`Computed`) comes over this
connection and never as a tag beside the payload, so it cannot be read before, or belong to, something else.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import msgspec

VERSION = 2


class Layout(msgspec.Struct, frozen=True):
    """Everything that must be equal on both sides for a page to mean the same and for an answer to be the one that a
    single server writes. Compared at the handshake, `model` apart: two names may be of the same weights."""

    version: int
    model: str
    weights: str  # fingerprint of configuration and sampled weights
    arithmetic: str  # what the weights are computed in, e.g. "float32: int4 × 210, int8 × 1"
    page_size: int
    kv_dtype: str
    full_layers: int  # draft layers included
    swa_layers: int
    kv_heads: int
    head_dim: int
    window_tokens: int
    draft: str  # drafts that keep KV or a seed; "none" for all others
    byte_order: str


_SHOWN = {"kv_dtype": "KV dtype", "weights": "weights fingerprint", "arithmetic": "weight formats"}


def differences(prefill: Layout, decode: Layout) -> list[str]:
    """What differs, named with both values; [] if pages may travel."""
    out = []
    for name in Layout.__struct_fields__:
        theirs, ours = getattr(prefill, name), getattr(decode, name)
        if theirs != ours and name != "model":
            if name == "weights":
                theirs, ours = f"{theirs} ({prefill.model})", f"{ours} ({decode.model})"
            shown = _SHOWN.get(name, name.replace("_", " "))
            out.append(f"{shown}: prefill has {theirs}, decode has {ours}")
    return out


class Region(msgspec.Struct, frozen=True):
    """One pool's memory: page i lies at `base + i * page_bytes`."""

    base: int
    page_bytes: int
    pages: int


# D → P


class Hello(msgspec.Struct, tag="hello", array_like=True):
    layout: Layout


class Want(msgspec.Struct, tag="want", array_like=True):
    """Pages are held for `room`: send what follows. Full pages from `prefix_tokens` on, sliding-window pages from
    `max(prefix_tokens, tail_start_tokens)` on. `prompt` is `prompt_digest` of the tokens."""

    room: int
    attempt: int
    prompt_tokens: int
    prefix_tokens: int
    tail_start_tokens: int
    prompt: bytes


class Read(msgspec.Struct, tag="read", array_like=True):
    """Nothing will be read for this attempt any more. `ok`: everything arrived."""

    room: int
    attempt: int
    ok: bool


class Drop(msgspec.Struct, tag="drop", array_like=True):
    """The decode side has ended the room: stop computing. Pages stay until `Read`. Attempt 0: it was never wanted."""

    room: int
    attempt: int
    reason: str


# P → D


class Welcome(msgspec.Struct, tag="welcome", array_like=True):
    transport: str  # kind of transport, e.g. "mooncake"
    address: str  # where the transport reads from
    regions: dict[str, Region]


class Refuse(msgspec.Struct, tag="refuse", array_like=True):
    reason: str


class Pages(msgspec.Struct, tag="pages", array_like=True):
    """Pages `first`, `first + 1`, … of the row are final: `ids` are their page ids in `pool`."""

    room: int
    attempt: int
    pool: str
    first: int
    ids: list[int]


class Computed(msgspec.Struct, tag="computed", array_like=True):
    """The whole prompt is computed and announced. `logprob`: (chosen, [(id, value), …]) or None; `seed`: float32
    bytes a drafter starts from."""

    room: int
    attempt: int
    token: int
    logprob: tuple[float, list[tuple[int, float]]] | None
    cached_tokens: int
    seed: bytes | None


class Kept(msgspec.Struct, tag="kept", array_like=True):
    """Answer to `Read(ok=True)`: whether the pages were held until now. False: what was read is worthless."""

    room: int
    attempt: int
    kept: bool


class Gone(msgspec.Struct, tag="gone", array_like=True):
    """The prefill side has ended the room. `code` and `status` are those of the error to show."""

    room: int
    attempt: int
    reason: str
    status: int = 502
    code: str = "prefill_failed"


class Beat(msgspec.Struct, tag="beat", array_like=True):
    """Sign of life, both ways."""


Message = Hello | Want | Read | Drop | Welcome | Refuse | Pages | Computed | Kept | Gone | Beat


class PeerDown(msgspec.Struct, array_like=True):
    """Made by the hub, never sent: the peer is silent, gone or restarted. `final`: its process is known to be dead."""

    reason: str
    final: bool


encoder = msgspec.msgpack.Encoder()
decoder = msgspec.msgpack.Decoder(Message)


def prompt_digest(tokens: Sequence[int]) -> bytes:
    """16 bytes that tell two prompts apart."""
    return hashlib.blake2b(struct.pack(f"<{len(tokens)}q", *tokens), digest_size=16).digest()
