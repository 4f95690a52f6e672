"""What tensor ranks send to each other inside a block, computed from the block's table.

Between modules, each rank has its own part of the tokens, with all features. Inside attention and feed-forward
networks, each rank has all tokens, with its part of the features. So there are two kinds of transfers:

- The input of a linear layer that is split by rows is gathered, because the layer needs all tokens. Values are also
  gathered if an operation joins them with values that are divided by feature. An example is the part of latent
  attention's keys that all heads share.
- The outputs of a linear layer that is split by columns are partial sums. They are added and scattered
  (reduce-scatter).
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
    """Values that are gathered over tokens.

    Each inner tuple has the values of one body, or of bodies that share their transfers.
    """
    scattered: tuple[Value, ...]
    """Values whose partial sums are added and scattered."""
    squares: int = 0
    """Number of norms over heads that the ranks divide.

    The ranks add their sums of squares, one number per token, in one all-reduce.
    """


@lru_cache(maxsize=256)
def transfers(block: BlockSpec) -> RankTransfers:
    """Return the transfers of a block.

    Bodies that share transfers gather their input once, and scatter the sum of their outputs once.
    """
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
    """Return the names of values of which each rank has its own tokens with all features."""
    by_feature: set[str] = set()
    for op in table.operations:
        inside = any(name in by_feature for name in op.reads)
        if op.split == "rows" if isinstance(op, LinearOp) else inside:
            by_feature.update(value.name for value in op.writes)
    return set(table.values) - by_feature


def _gathered_by(op: Op, own: set[str]) -> Iterator[str]:
    """Yield the values with own tokens only of which an operation needs all tokens."""
    by_token = [name for name in op.reads if name in own]
    if op.split == "rows" if isinstance(op, LinearOp) else len(by_token) < len(op.reads):
        yield from by_token
