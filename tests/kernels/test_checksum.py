"""Checksums of tensors against Python's integers; each change of the content changes one of the sums."""

from __future__ import annotations

import pytest
import torch

from meshwright.kernels.checksum import COLUMNS, digests


def expected(tensor: torch.Tensor) -> list[int]:
    """Both sums of a contiguous tensor's words, in Python's integers."""
    content = tensor.clone().view(-1).view(torch.uint8).numpy().tobytes()
    words = [int.from_bytes(content[start : start + 8], "little") for start in range(0, len(content), 8)]
    sums = sum(words), sum(word * (1 + 2 * (index % COLUMNS)) for index, word in enumerate(words))
    return [(total + 2**63) % 2**64 - 2**63 for total in sums]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
def test_sums_equal_those_of_python_integers(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    sizes = (0, 1, 3, 4, 257, 2 * COLUMNS, 5 * COLUMNS + 3, 9 * COLUMNS + 1)
    tensors = [torch.randn(size, generator=draw, dtype=torch.float64).mul(1e4).to(dtype) for size in sizes]
    assert digests(tensors).tolist() == [expected(tensor) for tensor in tensors]


def test_sums_depend_on_the_content_alone() -> None:
    memory = torch.arange(4000, dtype=torch.int16).float()
    aligned, shifted = memory[:1000].clone(), torch.cat([memory[:1], memory[:1000]])[1:]
    transposed = aligned.view(10, 100).t().contiguous().t()
    assert digests([aligned, shifted, transposed]).unique(dim=0).shape[0] == 1
    assert digests([torch.tensor(2.5)]).tolist() == [expected(torch.tensor(2.5))]


def test_every_bit_of_every_word_counts() -> None:
    words = torch.randint(-(2**62), 2**62, (COLUMNS + 5,), generator=torch.Generator().manual_seed(1))
    original_digest = digests([words])[0]
    for index in (0, 1, COLUMNS - 1, COLUMNS, COLUMNS + 4):
        for bit in range(64):
            flipped = words.clone()
            flipped[index] ^= -(2**63) if bit == 63 else 1 << bit
            assert (digests([flipped])[0] != original_digest).all()


def test_changes_that_cancel_in_the_sum_change_the_weighted_sum() -> None:
    words = torch.arange(100)
    changed = words.clone()
    changed[3] += 8
    changed[70] -= 8
    equal_sum, equal_weighted_sum = (digests([words])[0] == digests([changed])[0]).tolist()
    assert equal_sum and not equal_weighted_sum
    assert digests([words])[0, 1] != digests([words.flip(0)])[0, 1]
