"""Recording a network body and lowering it to the flat program the compiled module runs.

`NativeTape` is a `Tape` whose values are handles; `lower` then
* folds `add(x, linear(y))` into the linear (the residual is added where the result is stored),
* puts one quantisation before the first int4/int5/int8 linear that reads a value, shared by all that read it,
* gives values buffers, reused once their last reader has run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.ops import native_lib as nl
from octavo.ops.base import Activation
from octavo.ops.meta import KVLayer

_POOLS = {"full": 0, "swa": 1, "sparse": 2}
POOL_NAMES = tuple(_POOLS)
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


@dataclass(frozen=True, eq=False)
class Handle:
    """Columns offset … offset+width of the value `base`."""

    base: int
    offset: int
    width: int


@dataclass(eq=False)
class Node:
    """One recorded operation. `out` is the value it defines (None: it only writes KV or an output)."""

    op: int
    inputs: list[Handle]
    out: int | None
    width: int
    weight: Any = None
    ints: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()
    target: tuple[str, int] | None = None  # COPY into output `name` at a column
    residual: Handle | None = None


@dataclass(frozen=True)
class Attention:
    """What an attention layer needs of the pools: checked against the tensors of a run."""

    pool: int
    layer: int
    kv_heads: int
    head_dim: int


class NativeTape:
    """Records a body. See `ops.base.Tape` for what the operations mean."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.widths: list[int] = []  # by value
        self.inputs: dict[str, Handle] = {}
        self.outputs: dict[str, int] = {}  # name -> width
        self.layers: set[Attention] = set()

    # -- values
    def _value(self, width: int) -> int:
        self.widths.append(width)
        return len(self.widths) - 1

    def _emit(self, op: int, inputs: Sequence[Handle], width: int, **more: Any) -> Handle:
        out = self._value(width)
        self.nodes.append(Node(op, list(inputs), out, width, **more))
        return Handle(out, 0, width)

    # -- Tape
    def embed(self, table: Any, scale: float = 1.0) -> Handle:
        return self._emit(nl.EMBED, [], table.in_features, weight=table, floats=(scale,))

    def input(self, name: str, width: int) -> Handle:
        if name not in self.inputs:
            self.inputs[name] = Handle(self._value(width), 0, width)
        return self.inputs[name]

    def output(self, name: str, x: Handle, column: int = 0, width: int | None = None) -> None:
        full = x.width if width is None else width
        if self.outputs.setdefault(name, full) != full or column + x.width > full:
            raise ValueError(f"output {name!r}: columns {column}..{column + x.width} of {self.outputs[name]}")
        self.nodes.append(Node(nl.COPY, [x], None, x.width, target=(name, column)))

    def rms_norm(self, x: Handle, weight: Any, eps: float) -> Handle:
        _same("rms_norm", x.width, weight.width)
        return self._emit(nl.RMS_NORM, [x], x.width, weight=weight, ints=(0,), floats=(eps,))

    def head_norm(self, x: Handle, weight: Any, eps: float, head_dim: int) -> Handle:
        _same("head_norm", head_dim, weight.width)
        return self._emit(nl.RMS_NORM, [x], x.width, weight=weight, ints=(head_dim,), floats=(eps,))

    def linear(self, x: Handle, weight: Any) -> Handle:
        _same("linear", x.width, weight.in_features)
        return self._emit(nl.LINEAR, [x], weight.out_features, weight=weight)

    def split(self, x: Handle, widths: Sequence[int]) -> tuple[Handle, ...]:
        _same("split", x.width, sum(widths))
        parts, at = [], x.offset
        for width in widths:
            parts.append(Handle(x.base, at, width))
            at += width
        return tuple(parts)

    def concat(self, parts: Sequence[Handle]) -> Handle:
        out = self._value(sum(p.width for p in parts))
        at = 0
        for part in parts:
            self.nodes.append(Node(nl.COPY, [part], out, part.width, ints=(at,)))
            at += part.width
        return Handle(out, 0, at)

    def rope_write(
        self, q: Handle | None, k: Handle, v: Handle, layer: KVLayer, rope: Any, head_dim: int
    ) -> Handle | None:
        _same("rope_write", k.width, v.width)
        kv_heads = k.width // head_dim
        if layer.pool == "sparse":
            self._select(q, layer, rope, head_dim, kv_heads)
        self.layers.add(Attention(_POOLS[layer.pool], layer.index, kv_heads, head_dim))
        ints = (_POOLS[layer.pool], layer.index, head_dim, 0 if q is None else q.width // head_dim, kv_heads, rope.half)
        if q is None:
            self.nodes.append(Node(nl.ROPE_WRITE, [k, v], None, 0, weight=rope, ints=ints))
            return None
        return self._emit(nl.ROPE_WRITE, [q, k, v], q.width, weight=rope, ints=ints)

    def _select(self, q: Handle | None, layer: KVLayer, rope: Any, head_dim: int, kv_heads: int) -> None:
        """Pages for q, before the layer writes: what is written must have its place by then."""
        if q is None:
            raise ValueError("a sparse layer needs queries: draft layers are dense")
        ints = (_POOLS["sparse"], layer.index, head_dim, q.width // head_dim, kv_heads)
        self.nodes.append(Node(nl.SELECT, [q], None, q.width, weight=rope, ints=ints))

    def attention(self, q: Handle, layer: KVLayer, scale: float, heads: int, kv_heads: int, head_dim: int) -> Handle:
        _same("attention", q.width, heads * head_dim)
        self.layers.add(Attention(_POOLS[layer.pool], layer.index, kv_heads, head_dim))
        ints = (_POOLS[layer.pool], layer.index, head_dim, heads, kv_heads, layer.window_tokens or 0)
        return self._emit(nl.ATTENTION, [q], q.width, ints=ints, floats=(scale,))

    def gated(self, gate_up: Handle, activation: Activation) -> Handle:
        return self._emit(nl.GATED, [gate_up], gate_up.width // 2, ints=(_ACTIVATIONS[activation],))

    def add(self, a: Handle, b: Handle) -> Handle:
        _same("add", a.width, b.width)
        return self._emit(nl.ADD, [a, b], a.width)

    def scale(self, x: Handle, factor: float) -> Handle:
        return self._emit(nl.SCALE, [x], x.width, floats=(factor,))

    def argmax(self, name: str, x: Handle, weight: Any) -> None:
        _same("argmax", x.width, weight.in_features)
        self.outputs[name] = 1
        self.nodes.append(Node(nl.ARGMAX, [x], None, 1, weight=weight, target=(name, 0)))

    # -- not in Tape
    def softcap(self, x: Handle, cap: float) -> Handle:
        return self._emit(nl.SOFTCAP, [x], x.width, floats=(cap,))


def _same(op: str, have: int, want: int) -> None:
    if have != want:
        raise ValueError(f"{op}: width {have} where {want} is needed")


@dataclass
class Lowered:
    """Arrays of `octavo_program`, and what must stay alive with it."""

    code: list[nl.Instr] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    quant_widths: list[int] = field(default_factory=list)
    external: list[tuple[str, int]] = field(default_factory=list)  # inputs, then outputs: (name, width)


def fold_residuals(tape: NativeTape) -> list[Node]:
    """add(r, linear(x)) becomes linear with residual r, where nothing else reads the linear's result."""
    uses: dict[int, int] = {}
    made_at: dict[int, int] = {}
    for at, node in enumerate(tape.nodes):
        for x in node.inputs:
            uses[x.base] = uses.get(x.base, 0) + 1
        if node.out is not None:
            made_at[node.out] = at
    dropped = set()
    for at, node in enumerate(tape.nodes):
        if node.op != nl.ADD:
            continue
        for x, other in (node.inputs[::-1], node.inputs):
            maker = tape.nodes[made_at[x.base]] if x.base in made_at else None
            if maker is None or maker.op != nl.LINEAR or maker.residual is not None or uses[x.base] != 1:
                continue
            if x.width != tape.widths[x.base] or made_at.get(other.base, -1) >= made_at[x.base]:
                continue
            maker.residual, maker.out = other, node.out
            made_at[node.out if node.out is not None else -1] = made_at[x.base]
            dropped.add(at)
            break
    return [node for at, node in enumerate(tape.nodes) if at not in dropped]


def add_quantisation(nodes: list[Node]) -> list[Node]:
    """A QUANTIZE node before the first reader that needs codes; `out` of it counts quantised values."""
    made: dict[tuple[int, int, int], int] = {}
    result: list[Node] = []
    for node in nodes:
        if node.op in (nl.LINEAR, nl.ARGMAX) and node.weight.quantised:
            x = node.inputs[0]
            key = (x.base, x.offset, x.width)
            if key not in made:
                made[key] = len(made)
                result.append(Node(nl.QUANTIZE, [x], None, x.width, ints=(made[key],)))
            node.ints = (made[key],)
        result.append(node)
    return result


class _Buffers:
    """Buffers by width; a freed one is given again to the next value of the same width."""

    def __init__(self) -> None:
        self.widths: list[int] = []
        self._free: dict[int, list[int]] = {}

    def take(self, width: int) -> int:
        free = self._free.get(width)
        if free:
            return free.pop()
        self.widths.append(width)
        return len(self.widths) - 1

    def give(self, buffer: int) -> None:
        self._free.setdefault(self.widths[buffer], []).append(buffer)


class _Lowering:
    def __init__(self, tape: NativeTape) -> None:
        self.tape = tape
        self.nodes = add_quantisation(fold_residuals(tape))
        self.floats, self.quants = _Buffers(), _Buffers()
        self.home: dict[int, int] = {}  # value -> buffer; externals are counted from -1 downwards until the end
        self.quant_home: dict[int, int] = {}
        for i, handle in enumerate(tape.inputs.values()):
            self.home[handle.base] = -1 - i
        self.slot = {name: -1 - len(tape.inputs) - i for i, name in enumerate(tape.outputs)}
        self.last: dict[int, int] = {}
        self.quant_last: dict[int, int] = {}
        for at, node in enumerate(self.nodes):
            for x in [*node.inputs, *([node.residual] if node.residual else [])]:
                if not (node.op in (nl.LINEAR, nl.ARGMAX) and node.weight.quantised and x is node.inputs[0]):
                    self.last[x.base] = at
            if node.op in (nl.LINEAR, nl.ARGMAX) and node.weight.quantised:
                self.quant_last[node.ints[0]] = at

    def run(self) -> Lowered:
        code = []
        for at, node in enumerate(self.nodes):
            if node.op == nl.QUANTIZE:
                self.quant_home[node.ints[0]] = self.quants.take(node.width)
            elif node.out is not None and node.out not in self.home:
                self.home[node.out] = self.floats.take(self.tape.widths[node.out])
            code.append(self._instr(node))
            self._release(at, node)
        base = len(self.floats.widths)
        for instr in code:  # externals come behind the internal buffers
            self._renumber(instr, base)
        external = [(n, h.width) for n, h in self.tape.inputs.items()] + list(self.tape.outputs.items())
        return Lowered(code, self.floats.widths, self.quants.widths, external)

    def _release(self, at: int, node: Node) -> None:
        values = {x.base for x in [*node.inputs, *([node.residual] if node.residual else [])]}
        if node.out is not None and node.out not in self.last:
            values.add(node.out)  # nobody reads it
        for value in values:
            if self.last.get(value, at) <= at and self.home.get(value, -1) >= 0:
                self.floats.give(self.home.pop(value))
        if node.op in (nl.LINEAR, nl.ARGMAX) and node.weight.quantised and self.quant_last[node.ints[0]] == at:
            self.quants.give(self.quant_home[node.ints[0]])

    def _instr(self, node: Node) -> nl.Instr:
        instr = nl.Instr(op=node.op, dst=_NONE, src=_NONE, src2=_NONE, width=node.width)
        if node.weight is not None:
            instr.w = node.weight.handle
        for i, value in enumerate(node.floats):
            instr.f[i] = value
        if node.out is not None:
            instr.dst = self.home[node.out]
        if node.target is not None:
            instr.dst, instr.dst_offset = self.slot[node.target[0]], node.target[1]
        if node.op == nl.QUANTIZE:
            instr.dst = self.quant_home[node.ints[0]]
        elif node.op == nl.COPY and node.ints:
            instr.dst_offset = node.ints[0]
        elif node.op == nl.RMS_NORM or node.op == nl.GATED:
            instr.i[0] = node.ints[0]
        elif node.op in (nl.ROPE_WRITE, nl.ATTENTION, nl.SELECT):
            for i, value in enumerate(node.ints):
                instr.i[2 + i] = value
        if node.op == nl.ROPE_WRITE:
            self._rope_inputs(instr, node)
        elif node.op in (nl.LINEAR, nl.ARGMAX) and node.weight.quantised:
            instr.src = self.quant_home[node.ints[0]]
        elif node.inputs:
            instr.src, instr.src_offset = self.home[node.inputs[0].base], node.inputs[0].offset
        if node.op == nl.ADD:
            instr.src2, instr.src2_offset = self.home[node.inputs[1].base], node.inputs[1].offset
        if node.residual is not None:
            instr.src2, instr.src2_offset = self.home[node.residual.base], node.residual.offset
        return instr

    def _rope_inputs(self, instr: nl.Instr, node: Node) -> None:
        *q, k, v = node.inputs
        if q:
            instr.src, instr.src_offset = self.home[q[0].base], q[0].offset
        instr.src2, instr.src2_offset = self.home[k.base], k.offset
        instr.i[0], instr.i[1] = self.home[v.base], v.offset

    def _renumber(self, instr: nl.Instr, base: int) -> None:
        def final(buffer: int) -> int:
            return -1 if buffer == _NONE else base - 1 - buffer if buffer < 0 else buffer

        if instr.op != nl.QUANTIZE:
            instr.dst = final(instr.dst)
        instr.src, instr.src2 = final(instr.src), final(instr.src2)
        if instr.op == nl.ROPE_WRITE:
            instr.i[0] = final(instr.i[0])


_NONE = -(1 << 40)


def lower(tape: NativeTape) -> Lowered:
    """The recorded body as instructions over as few buffers as its values need."""
    return _Lowering(tape).run()
