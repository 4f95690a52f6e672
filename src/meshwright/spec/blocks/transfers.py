"""What tensor ranks transfer inside a block, from its table: the edges on which the division of a value changes.

Between modules each rank has its own part of the tokens; inside attention and feed-forward networks it has all tokens and a part of the
features. A linear layer split by rows needs all tokens, so its input is gathered. So is what joins values by feature, such as the part of
latent attention's keys that all heads share. The results of a linear layer split by columns are partial sums, which are added and
scattered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from meshwright.spec.blocks.block import BlockSpec
from meshwright.spec.blocks.table import LinearOp, NormOp, Op, Table, Value


@dataclass(frozen=True)
class RankTransfers:
    """Values that tensor ranks transfer in one forward of a block, in order."""

    gathered: tuple[tuple[Value, ...], ...]
    """Values gathered over tokens, together those of one body, or of bodies that share their transfers."""
    scattered: tuple[Value, ...]
    """Values whose partial sums are added and scattered."""
    squares: int = 0
    """Norms over heads that the ranks divide: their sums of squares, one number a token each, are added in one all-reduce."""


@lru_cache(maxsize=256)
def transfers(block: BlockSpec) -> RankTransfers:
    """The transfers of a block. Bodies that share them gather an input once, and scatter the sum of their outputs."""
    table = block.table()
    own = _values_by_token(table)
    gathered = list[tuple[Value, ...]]()
    scattered = list[Value]()
    for sublayer in block.sublayers:
        modules = [f"{body.MODULE}." for body in sublayer.bodies]
        for prefixes in [tuple(modules)] if sublayer.shares_transfers else modules:
            operations = [op for op in table.operations if op.name.startswith(prefixes)]
            names = dict.fromkeys(name for op in operations for name in _gathered_by(op, own))
            if names:
                gathered.append(tuple(table.values[name] for name in names))
            sums = [op.writes[0] for op in operations if isinstance(op, LinearOp) and op.split == "columns"]
            scattered += sums[:1] if sublayer.shares_transfers else sums
    divided = sum(isinstance(op, NormOp) and op.heads > 0 for op in table.operations)
    return RankTransfers(tuple(gathered), tuple(scattered), divided)


def _values_by_token(table: Table) -> set[str]:
    """Values of which each rank has its own tokens, with all features."""
    by_feature: set[str] = set()
    for op in table.operations:
        inside = any(name in by_feature for name in op.reads)
        if op.split == "rows" if isinstance(op, LinearOp) else inside:
            by_feature.update(value.name for value in op.writes)
    return set(table.values) - by_feature


def _gathered_by(op: Op, own: set[str]) -> Iterator[str]:
    """The values by token that an operation needs of all tokens."""
    by_token = [name for name in op.reads if name in own]
    if op.split == "rows" if isinstance(op, LinearOp) else len(by_token) < len(op.reads):
        yield from by_token
