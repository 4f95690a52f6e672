"""Checksums of state: the sum of 8-byte words is the same by device, by host and by snapshot buffer, wherever a piece begins."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from meshwright.checkpoint.write.checksum import BufferChecksums, Checksum, word_sum
from meshwright.checkpoint.write.source_checksum import DeviceChecksums, host_checksum
from meshwright.spec.errors import Damaged

PIECES = [(0, 0), (0, 5), (0, 8), (0, 1000), (3, 2), (3, 5), (4, 4), (4, 20), (7, 1001), (12, 4096)]
"""Byte offset in memory and size of a piece."""


def by_definition(data: bytes, phase: int) -> int:
    padded = bytes(phase) + data + bytes(-(phase + len(data)) % 8)
    return sum(int.from_bytes(padded[offset : offset + 8], "little") for offset in range(0, len(padded), 8)) % 2**64


@pytest.fixture
def memory() -> torch.Tensor:
    return torch.randint(0, 256, (8192,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("offset", "size"), PIECES)
def test_a_checksum_is_the_sum_of_the_words(memory: torch.Tensor, offset: int, size: int) -> None:
    source = memory[offset : offset + size]
    data, phase = source.numpy().tobytes(), offset % 8
    expected = by_definition(data, phase)
    assert word_sum(memoryview(data), phase) == expected
    checksum = host_checksum(source)
    assert (checksum.phase, checksum.total % 2**64) == (phase, expected)


def test_a_device_sums_all_pieces_of_a_snapshot(memory: torch.Tensor) -> None:
    """The same code as on a GPU, here in host memory, for two snapshots in turn."""
    sources = [memory[offset : offset + size] for offset, size in PIECES]
    numbered = list(enumerate(sources))
    checksums = DeviceChecksums([numbered[:4], [], numbered[4:]], torch.device("cpu"))
    for change in (1, 2):
        memory += change
        checksums.start()
        for group in range(3):
            checksums.sum_group(group)
        checksums.copy_to_host()
        assert checksums.result() == {index: host_checksum(source) for index, source in numbered}


def test_a_snapshot_buffer_is_compared_in_parts_of_any_size(memory: torch.Tensor) -> None:
    """Every flipped bit is found and named, whatever the order and the borders of the parts."""
    chance = random.Random(2)
    sources = [memory[offset : offset + size] for offset, size in PIECES]
    keys, sizes = [f"tensor {index}" for index in range(len(sources))], [source.numel() for source in sources]
    expected = [list(host_checksum(source)) for source in sources]
    buffer = bytearray(b"".join(source.numpy().tobytes() for source in sources))

    def check() -> None:
        borders = sorted({0, len(buffer), *(chance.randrange(len(buffer)) for _ in range(chance.randrange(20)))})
        parts = list(pairwise(borders))
        chance.shuffle(parts)
        checksums = BufferChecksums(keys, sizes, expected)
        for start, end in parts:
            checksums.add(start, memoryview(buffer)[start:end])
        checksums.check()

    check()
    tensor_starts = [sum(sizes[:index]) for index in range(len(sizes))]
    for index in (index for index, size in enumerate(sizes) if size):
        for _ in range(20):
            position, bit = tensor_starts[index] + chance.randrange(sizes[index]), 1 << chance.randrange(8)
            buffer[position] ^= bit
            with pytest.raises(Damaged, match=f"'tensor {index}' changed in host memory after it was copied there"):
                check()
            buffer[position] ^= bit
    check()


def test_sums_beyond_64_bits_wrap_around() -> None:
    source = torch.full((64,), 255, dtype=torch.uint8)
    data = memoryview(source.numpy())
    assert word_sum(data, 0) == 2**64 - 8 == host_checksum(source).total % 2**64
    checksums = BufferChecksums(["a"], [64], [Checksum(0, -8)])
    checksums.add(0, data)
    checksums.check()
