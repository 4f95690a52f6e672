"""Checksums of the raw words of tensors: integer sums that wrap around, so the order of the additions does not matter.

A word is 8 bytes of a tensor's content, in the byte order of the machine; zeros complete the last one. The sum of the words detects any
single change. The weighted sum also detects changes that cancel each other in the sum, and words that swapped their positions. A device
and a CPU compute equal values, and nothing here waits for the device. `checkpoint.write.checksum` has other sums: those of pieces that may
begin within a word, which a writer without torch compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

COLUMNS = 1024
"""Words with the same index modulo `COLUMNS` have the same weight, so that one read of a tensor gives both sums."""


def digests(tensors: Sequence[Tensor]) -> Tensor:
    """Return two sums of each tensor: int64 `(tensors, 2)` on the tensors' device, from one read of each.

    The word with index i has the weight 1 + 2·(i modulo `COLUMNS`). Odd weights have inverses modulo 2⁶⁴, so no change of one word is lost.
    """
    columns = tensors[0].new_zeros((len(tensors), COLUMNS), dtype=torch.int64)
    totals = []
    remainders = []
    for tensor, sums in zip(tensors, columns, strict=True):
        for total, remainder in _sum_complete_rows(tensor, sums):
            totals.append(total)
            remainders.append(remainder)
    if totals:
        torch._foreach_add_(totals, remainders)  # few launches for many tensors that are small
    weights = torch.arange(1, 2 * COLUMNS, 2, device=columns.device)
    return torch.stack([columns.sum(1), (columns * weights).sum(1)], dim=1)


def _sum_complete_rows(tensor: Tensor, columns: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Write to element i of `columns` the sum of the words i, i + `COLUMNS`, … of `tensor` as far as all elements have one.

    Returns the parts of `columns` to which the remaining words are to be added, with these words.
    """
    words, last = _words(tensor)
    complete = words.numel() // COLUMNS * COLUMNS
    if complete:
        torch.sum(words[:complete].view(-1, COLUMNS), 0, out=columns)
    remaining = words.numel() - complete
    for part, remainder in ((columns[:remaining], words[complete:]), (columns[remaining : remaining + 1], last)):
        if remainder.numel():
            yield part, remainder


def _words(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The content of `tensor` as its complete words, without a copy where the memory permits it, and one more word or none."""
    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if content.data_ptr() % 8 or content.storage_offset() % 8:
        content = content.clone()
    complete = content.numel() // 8 * 8
    last = content[complete:]
    if last.numel():
        last = torch.nn.functional.pad(last, (0, 8 - last.numel()))
    return content[:complete].view(torch.int64), last.view(torch.int64)
