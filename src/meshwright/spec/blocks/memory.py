"""Number of elements that the forward of a block saves for its backward, computed from the block's table.

Without recompute, these are the values that backwards read. Each counts once, however many operations read it. Sums
that the compiler computes again inside the kernel that reads them do not count.

With recompute, these are the block's input and the results of selected operations. Everything else that a backward
reads can be computed again from them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, fields

from meshwright.spec.blocks.table import ActivateOp, AttendOp, ExchangeOp, LinearOp, NormOp, Op, Table, Value
from meshwright.spec.plan import Recompute


@dataclass(frozen=True)
class Elements:
    """Numbers of elements of one token, divided by what multiplies them."""

    own: float = 0.0
    """Elements of the token itself, and of the copies of it that its rank sends to experts."""
    rounded: float = 0.0
    """Elements of the token in the number format of linear layers: fewer bytes in a run with fp8."""
    received: float = 0.0
    """Elements of the token's copies that experts receive. The busiest rank has more of them than the mean."""

    def __add__(self, other: Elements) -> Elements:
        return Elements(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @classmethod
    def of(cls, value: Value, *, rounded: bool = False) -> Elements:
        """Return all elements of a value. Values that experts receive are never rounded."""
        if value.rows == "received":
            return cls(received=value.elements)
        return cls(rounded=value.elements) if rounded else cls(own=value.elements)


def saved(table: Table, mode: Recompute, *, narrow: bool) -> Elements:
    """Return the elements that the forward saves under a recompute mode.

    `narrow` is true if linear layers have a narrower number format than the rest of the block.
    """
    if mode == "none":
        return _read_by_backwards(table, narrow=narrow)
    return sum((Elements.of(table.values[name]) for name in _recomputed_from(table, mode)), Elements())


def _read_by_backwards(table: Table, *, narrow: bool) -> Elements:
    """Return the elements that backwards read, without recompute."""
    whole = dict[str, Value]()
    rounded = dict[str, Value]()
    for op in table.operations:
        for name in op.kept:
            value = table.memory_of(name)
            (rounded if op.rounds else whole)[value.name] = value
    for name in [name for name in whole if _is_summed_again(table, name, {*whole, *rounded})]:
        del whole[name]
    # With rounding, a linear layer saves a rounded copy of its own. Without rounding, it saves the same tensor as
    # other readers do.
    copies = [value for name, value in rounded.items() if narrow or name not in whole]
    return sum(
        (
            *(Elements.of(value) for value in whole.values()),
            *(Elements.of(value, rounded=True) for value in copies),
        ),
        Elements(),
    )


def _is_summed_again(table: Table, name: str, saved_names: Container[str]) -> bool:
    """Return whether the backward of a norm computes the norm's input again, because it is a sum of available values.

    Available are saved values, and norms of saved values. Example: in a block with norms of outputs, the residual
    stream between the two sublayers is the sum of the block's input and the norm of the attention's output. The
    backward of that norm reads the attention's output anyway. Values that a linear layer or attention reads must exist
    in memory, so they are always saved.
    """
    readers = [op for op in table.operations if name in op.kept]

    def is_available(summand: str) -> bool:
        op = table.writer.get(summand)
        return table.memory_of(summand).name in saved_names or (isinstance(op, NormOp) and is_available(op.reads[0]))

    op = table.writer.get(name)
    return (
        type(op) is Op
        and all(isinstance(reader, NormOp) for reader in readers)
        and all(is_available(summand) for summand in op.reads)
    )


def _recomputed_from(table: Table, mode: Recompute) -> Iterable[str]:
    """Return the names of the values that are saved with recompute.

    Everything that a backward reads is computed again from them.
    """
    found: dict[str, None] = {table.source.name: None}
    seen: set[str] = set()
    needed = [name for op in table.operations for name in op.kept]
    while needed:
        value = table.memory_of(needed.pop())
        op = table.writer.get(value.name)
        if value.name in seen or op is None:
            continue
        seen.add(value.name)
        if not _is_saved(op, mode):
            needed.extend(op.reads)
            continue
        found[value.name] = None
        if isinstance(op, ExchangeOp) and op.stages:
            found.update(dict.fromkeys(op.reads))
    return found


def _is_saved(op: Op, mode: Recompute) -> bool:
    """Return whether the mode saves the results of an operation."""
    if mode == "selective":
        return op.selected
    return mode == "all_but_attention" and isinstance(op, AttendOp)


@dataclass(frozen=True)
class Activations:
    """Elements around the activation functions of a block's feed-forward networks, where its backward has its widest
    tensors.
    """

    before: Elements
    """Inputs of the activation functions. The backward has a gradient of each."""
    tiled: float
    """Inputs, gradients of inputs, and outputs of the activation functions that are computed in tiles of tokens."""
    tiled_weights: int
    """Number of weights of the linear layers before and after these."""
    rows: Elements
    """Rows that experts read."""


def activations(table: Table) -> Activations:
    """Return the tensors around a block's activation functions.

    `table` belongs to a block whose experts are on one rank.
    """
    operations = [op for op in table.operations if isinstance(op, ActivateOp)]
    before = sum((Elements.of(table.values[op.reads[0]]) for op in operations), Elements())
    tiled = [op for op in operations if op.tiled]
    widths = [(table.values[op.reads[0]].elements, op.writes[0].elements) for op in tiled]
    touched = {name for op in tiled for name in (op.reads[0], op.writes[0].name)}
    linears = [
        op
        for op in table.operations
        if isinstance(op, LinearOp) and not touched.isdisjoint((*op.reads, *(value.name for value in op.writes)))
    ]
    rows = table.values.get("moe.rows")
    return Activations(
        before=before,
        tiled=float(sum(2 * inputs + outputs for inputs, outputs in widths)),
        tiled_weights=sum(op.multiplications for op in linears),
        rows=Elements.of(rows) if rows is not None else Elements(),
    )
