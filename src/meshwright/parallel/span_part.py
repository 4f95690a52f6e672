"""A rank's part of a sample that several ranks divide, as the operators of `parallel.span_attention` read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.policies.sample_blocks import block_ranges


@dataclass(frozen=True)
class SpanPart:
    """A rank's part of a sample of `length` tokens, divided over `ranks` of a group in the order of their parts.

    With `by_heads` the ranks exchange tokens for heads, otherwise keys and values go round a ring.
    """

    length: int
    ranks: tuple[int, ...]
    part: int
    by_heads: bool = False

    def encode(self, group_size: int) -> Tensor:
        """This part as an int64 tensor `(group_size + 3,)`, for `span_attention`."""
        absent = [-1] * (group_size - len(self.ranks))
        return torch.tensor([self.length, self.part, int(self.by_heads), *self.ranks, *absent])

    @classmethod
    def decode(cls, span: Tensor) -> SpanPart | None:
        """The part of a tensor of `encode`, or None for `no_span`."""
        length, part, by_heads, *ranks = span.tolist()
        return cls(length, tuple(rank for rank in ranks if rank >= 0), part, bool(by_heads)) if length else None

    def size(self, part: int) -> tuple[int, int]:
        """(tokens of the first block, tokens of both blocks) of `part`."""
        first, second = block_ranges(self.length, len(self.ranks), part)
        return len(first), len(first) + len(second)

    @property
    def tokens(self) -> int:
        """Tokens of this part."""
        return self.size(self.part)[1]

    @property
    def sizes(self) -> list[int]:
        """Tokens of every part, in order."""
        return [self.size(part)[1] for part in range(len(self.ranks))]

    def positions(self, device: torch.device) -> Tensor:
        """Positions `(length,)` in the sample of the tokens of all parts, in the order of parts."""
        blocks = [
            block for part in range(len(self.ranks)) for block in block_ranges(self.length, len(self.ranks), part)
        ]
        return torch.cat([torch.arange(block.start, block.stop, device=device) for block in blocks])


def no_span(group_size: int) -> Tensor:
    """The tensor of a slot without a divided sample, shaped like those of `SpanPart.encode`."""
    return torch.tensor([0, 0, 0, *[-1] * group_size])
