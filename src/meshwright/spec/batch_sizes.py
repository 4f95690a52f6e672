"""The number of sequences in each step of a run: constant, or smaller at its start (`train.batch_ramp`).

The samples of a run are cut into steps once and for all: the sizes follow from the run file, so the first sample of a step tells its size.
Steps whose samples a run leaves out count as steps here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from meshwright.spec.fields import Positive


@dataclass(frozen=True, kw_only=True)
class BatchStage:
    """Steps with a smaller batch, from the stage before or the run's begin on."""

    until: Positive
    """Last step with this batch; those that a rollback left out count."""
    batch: Positive
    """Sequences in one step, over all ranks: at most `train.global_batch`."""


class _Stage(NamedTuple):
    """Steps of equal size: the steps and the samples before the first of them, and the samples of each."""

    step: int
    sample: int
    batch: int


@dataclass(frozen=True)
class BatchSizes:
    """Steps of the sizes of `ramp`, then of `batch` samples."""

    batch: int
    ramp: Sequence[BatchStage] = ()

    @cached_property
    def _stages(self) -> tuple[_Stage, ...]:
        stages = []
        step = 0
        sample = 0
        for stage in self.ramp:
            stages.append(_Stage(step, sample, stage.batch))
            step, sample = stage.until, sample + (stage.until - step) * stage.batch
        return (*stages, _Stage(step, sample, self.batch))

    def samples_before(self, steps: int) -> int:
        """Samples of the first `steps` steps together."""
        stage = next(stage for stage in reversed(self._stages) if stage.step <= steps)
        return stage.sample + (steps - stage.step) * stage.batch

    def steps_before(self, sample: int) -> int:
        """Whole steps before `sample`."""
        stage = self._stage(sample)
        return stage.step + (sample - stage.sample) // stage.batch

    def at(self, sample: int) -> int:
        """Samples of the step that begins at `sample`."""
        return self._stage(sample).batch

    def steps_of(self, samples: int) -> int:
        """The fewest steps that read so many samples."""
        steps = self.steps_before(samples)
        return steps + (self.samples_before(steps) < samples)

    def equal_until(self, other: BatchSizes, sample: int) -> bool:
        """Whether `other` has the same steps before `sample`, where a step begins."""
        starts = (stage.sample for stage in (*self._stages, *other._stages))
        return all(self.at(start) == other.at(start) for start in starts if start < sample)

    def _stage(self, sample: int) -> _Stage:
        return next(stage for stage in reversed(self._stages) if stage.sample <= sample)
