"""Elements that a block's forward saves for its backward, from its table.

Without recompute these are the values that backwards read, each counted once however many operations read it, without sums that the
compiler computes again inside the kernel that reads them. With recompute they are
the block's input and those results of selected operations from which everything else that a backward reads can be computed again.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, fields

from meshwright.spec.blocks.table import ActivateOp, AttendOp, ExchangeOp, LinearOp, NormOp, Op, Table, Value
from meshwright.spec.plan import Recompute


@dataclass(frozen=True)
class Elements:
    """Elements of one token, by the factor that applies to them."""

    own: float = 0.0
    """Of the token, and of its copies as the rank sends them."""
    rounded: float = 0.0
    """Of the token, in the format of linear layers: fewer bytes in a run with fp8."""
    received: float = 0.0
    """Of the copies that the rank's experts get: more than the mean on the busiest rank."""

    def __add__(self, other: Elements) -> Elements:
        return Elements(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @classmethod
    def of(cls, value: Value, *, rounded: bool = False) -> Elements:
        """All elements of a value; those that experts receive are not rounded."""
        if value.rows == "received":
            return cls(received=value.elements)
        return cls(rounded=value.elements) if rounded else cls(own=value.elements)


def saved(table: Table, mode: Recompute, *, narrow: bool) -> Elements:
    """Elements that the forward saves under a recompute mode; `narrow`: linear layers have a narrower format than the block."""
    if mode == "none":
        return _read_by_backwards(table, narrow=narrow)
    return sum((Elements.of(table.values[name]) for name in _recomputed_from(table, mode)), Elements())


def _read_by_backwards(table: Table, *, narrow: bool) -> Elements:
    whole = dict[str, Value]()
    rounded = dict[str, Value]()
    for op in table.operations:
        for name in op.kept:
            value = table.memory_of(name)
            (rounded if op.rounds else whole)[value.name] = value
    for name in [name for name in whole if _is_summed_again(table, name, {*whole, *rounded})]:
        del whole[name]
    # A linear layer keeps a rounded copy of its own; without rounding it keeps the tensor that others keep too.
    copies = [value for name, value in rounded.items() if narrow or name not in whole]
    return sum(
        (
            *(Elements.of(value) for value in whole.values()),
            *(Elements.of(value, rounded=True) for value in copies),
        ),
        Elements(),
    )


def _is_summed_again(table: Table, name: str, saved_names: Container[str]) -> bool:
    """Whether a norm's backward computes its input again: a sum of saved values, and of norms of saved values.

    In a block with norms of outputs that is the residual stream between its sublayers: a sum of its input and of the norm of the
    attention's output, whose backward reads that output anyway. Values that linear layers or attention read have to exist.
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
    """The values that are saved with recompute: everything that a backward reads is computed again from these."""
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
    """Whether the mode saves the results of an operation."""
    if mode == "selective":
        return op.selected
    return mode == "all_but_attention" and isinstance(op, AttendOp)


@dataclass(frozen=True)
class Activations:
    """Elements around the activations of a block's feed-forward networks, where its backward has the widest tensors."""

    before: Elements
    """Inputs of the activations; the backward has a gradient of each."""
    tiled: float
    """Inputs, their gradients, and outputs of those that are computed in tiles."""
    tiled_weights: int
    """Weights of the linear layers around these."""
    rows: Elements
    """Rows that experts read."""


def activations(table: Table) -> Activations:
    """The tensors around a block's activations; `table` is that of experts on one rank."""
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
