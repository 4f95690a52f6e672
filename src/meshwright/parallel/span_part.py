"""A rank's part of a sample that several ranks divide, as the operators of `parallel.span_attention` read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.policies.sample_blocks import block_ranges


@dataclass(frozen=True)
class SpanPart:
    """A rank's part of a sample of `length` tokens that several ranks divide.

    `ranks` are the sample's ranks in the group; ranks[i] has part i, and this rank has part `part`. With `by_heads` the ranks exchange
    tokens for heads; otherwise keys and values go round a ring.
    """

    length: int
    ranks: tuple[int, ...]
    part: int
    by_heads: bool = False

    def encode(self, group_size: int) -> Tensor:
        """Return this part as an int64 tensor `(group_size + 3,)`, the form in which `span_attention` receives it."""
        absent = [-1] * (group_size - len(self.ranks))
        return torch.tensor([self.length, self.part, int(self.by_heads), *self.ranks, *absent])

    @classmethod
    def decode(cls, span: Tensor) -> SpanPart | None:
        """Return the part that `encode` made the tensor of, or None for `no_span`."""
        length, part, by_heads, *ranks = span.tolist()
        return cls(length, tuple(rank for rank in ranks if rank >= 0), part, bool(by_heads)) if length else None

    def size(self, part: int) -> tuple[int, int]:
        """Return the number of tokens in the first block of `part`, and the number in both of its blocks."""
        first, second = block_ranges(self.length, len(self.ranks), part)
        return len(first), len(first) + len(second)

    @property
    def tokens(self) -> int:
        """Number of tokens of this part."""
        return self.size(self.part)[1]

    @property
    def sizes(self) -> list[int]:
        """Number of tokens of every part, in order."""
        return [self.size(part)[1] for part in range(len(self.ranks))]

    def positions(self, device: torch.device) -> Tensor:
        """Return the positions `(length,)` in the sample of all tokens, where the tokens are in the order of the parts."""
        blocks = [
            block for part in range(len(self.ranks)) for block in block_ranges(self.length, len(self.ranks), part)
        ]
        return torch.cat([torch.arange(block.start, block.stop, device=device) for block in blocks])


def no_span(group_size: int) -> Tensor:
    """Return the tensor for a slot without a divided sample. It has the shape of the tensors of `SpanPart.encode`."""
    return torch.tensor([0, 0, 0, *[-1] * group_size])
