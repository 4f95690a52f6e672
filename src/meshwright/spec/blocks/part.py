"""What the descriptions of a block's parts have in common."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

from meshwright.spec.blocks.table import Op, Value
from meshwright.spec.errors import WrongKey


@dataclass(frozen=True, kw_only=True)
class BodyPlace:
    """Where a body stands: the width around it, the names of its module and of its input, and what its weights start from."""

    hidden: int
    prefix: str
    """Name of its module inside the block, such as `attention`."""
    reads: str
    """The value that it reads: the norm's output, or the residual stream."""
    std: float
    """Standard deviation of initial weights."""
    residual_std: float
    """That of projections back into the residual stream."""
    spread: bool = False
    """Whether the experts of a layer are on several ranks, which exchange rows."""

    @property
    def output(self) -> Value:
        """The value that a body writes."""
        return Value(f"{self.prefix}.output", self.hidden)

    def name(self, inside: str) -> str:
        """The name of a module or value inside the body."""
        return f"{self.prefix}.{inside}"


class BlockBody(Protocol):
    """A mixer or a feed-forward network: an immutable description with its checks and its operations."""

    MODULE: ClassVar[str]
    """Name of its module in a block."""
    NORM: ClassVar[str]
    """Name of the norm before it."""
    OUTPUT_NORM: ClassVar[str]
    """Name of the norm of its output, in blocks that have one."""

    def operations(self, place: BodyPlace) -> Iterator[Op]:
        """Its operations at a place; the last one that matters writes `place.output`."""

    def mistakes(self) -> Iterator[WrongKey]:
        """What is wrong with it, naming keys of `model`."""
