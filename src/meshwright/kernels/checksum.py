"""Checksums of the contents of tensors: integer sums modulo 2⁶⁴, so that the order of the additions does not matter.

A word is 8 bytes of a tensor's content, in the byte order of the machine; the last word is completed with zeros. There are
two sums. The plain sum of the words detects any single change. The weighted sum also detects changes that cancel
in the plain sum, and words that have swapped positions. A GPU and a CPU compute equal values, and nothing here waits for
the device.

`checkpoint.write.checksum` computes other sums: of byte ranges that may begin within a word, without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

COLUMNS = 1024
"""Words whose indices are equal modulo `COLUMNS` have the same weight, so that one read of a tensor gives both sums."""


def digests(tensors: Sequence[Tensor]) -> Tensor:
    """Return both sums of each tensor: int64 `(tensors, 2)` on the tensors' device. Each tensor is read once.

    The word with index i has the weight 1 + 2 · (i mod `COLUMNS`). Odd weights have inverses modulo 2⁶⁴, so that a change of
    one word always changes the weighted sum.
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
    """Sum the words of `tensor` by column: element i of `columns` gets the sum of the words i, i + `COLUMNS`, …

    Only complete rows of `COLUMNS` words are summed here. Yields pairs (part of `columns`, words): the caller adds the
    remaining words to that part.
    """
    words, last = _words(tensor)
    complete = words.numel() // COLUMNS * COLUMNS
    if complete:
        torch.sum(words[:complete].view(-1, COLUMNS), 0, out=columns)
    remaining = words.numel() - complete
    # The incomplete row of complete words, and the incomplete last word, which is the next element after them.
    for part, remainder in ((columns[:remaining], words[complete:]), (columns[remaining : remaining + 1], last)):
        if remainder.numel():
            yield part, remainder


def _words(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the complete words of `tensor`, and its last incomplete word padded with zeros (or no word).

    Both are int64. The complete words are a view of the tensor where its memory is contiguous and aligned.
    """
    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if content.data_ptr() % 8 or content.storage_offset() % 8:
        content = content.clone()
    complete = content.numel() // 8 * 8
    last = content[complete:]
    if last.numel():
        last = torch.nn.functional.pad(last, (0, 8 - last.numel()))
    return content[:complete].view(torch.int64), last.view(torch.int64)
