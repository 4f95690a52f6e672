"""Reads steps whose samples differ in length: the time slots of this rank in each step.

Every rank computes the same balance of a step from the lengths of its samples, and reads only the tokens of its own slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from meshwright.data.loader import LoadedStep, MicroBatch
from meshwright.data.packing import document_sizes
from meshwright.data.slots import SampleSlot, TokenReader, slot_arrays, slots_to_run
from meshwright.data.step_samples import SampleLengths, lengths_of_step
from meshwright.policies.sample_balance import RankPool, balance_samples
from meshwright.policies.skipped_samples import SampleRange
from meshwright.spec.hybrid import Numbering


class Documents(SampleLengths, Protocol):
    """A source of samples of any length, such as a `DataSource`."""

    def begin_step(self, indices: Sequence[int] | np.ndarray) -> None: ...

    def token_reader(self, indices: Sequence[int] | np.ndarray) -> TokenReader: ...


class SampleSteps:
    """Reads steps of at most `tokens` tokens that are balanced over `pool`.

    `rank` is the data rank, which always gets at least one slot.
    """

    def __init__(
        self, source: Documents, *, tokens: int, pool: RankPool, rank: int, numbering: Numbering = "equal"
    ) -> None:
        self._source = source
        self._tokens = tokens
        self._pool = pool
        self._rank = rank
        self._numbering: Numbering = numbering

    def read(self, sample: int, skipped: Sequence[SampleRange] = ()) -> LoadedStep:
        """This rank's slots of the step that begins at `sample`."""
        lengths = lengths_of_step(self._source, sample, self._tokens, skipped)
        indices = np.arange(sample, sample + len(lengths))
        self._source.begin_step(indices)
        balance = balance_samples(lengths, self._pool)
        read = self._source.token_reader(indices)
        slots = slots_to_run(balance, self._rank, self._numbering)
        empty = int(np.maximum(1 - balance.slots, 0).sum())
        if self._numbering == "equal":
            empty = len(slots) * self._pool.ranks - int(balance.slots.sum())
        size = int(balance.slot_sizes.sum()) + empty * int(self._pool.slot_tokens(np.array(0)))
        return LoadedStep(
            [_micro_batch(slot, read) for slot in slots],
            (sample, sample + len(lengths)),
            sum(slot.tokens for slot in slots),
            lengths,
            1.0 - int(lengths.sum()) / size,
        )


def _micro_batch(slot: SampleSlot, read: TokenReader) -> MicroBatch:
    """The slot as tensors of shape (1, capacity)."""
    arrays = slot_arrays(slot, read)
    tokens, targets, positions, documents = (
        torch.from_numpy(array)[None] for array in (arrays.tokens, arrays.targets, arrays.positions, arrays.documents)
    )
    work = sum(part.tokens * part.length for part in slot.parts)
    sizes = document_sizes(arrays.documents)
    return MicroBatch(tokens, targets, positions, documents, slot.tokens, work, slot, document_sizes=sizes)
