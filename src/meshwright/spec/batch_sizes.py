"""The number of sequences in each step of a run: constant, or smaller at the start of the run (`train.batch_ramp`).

The samples of a run are divided into steps once and for all, because the sizes follow from the run file. So the first
sample of a step tells the size of the step. Steps whose samples a run leaves out count as steps here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from meshwright.spec.fields import Positive


@dataclass(frozen=True, kw_only=True)
class BatchStage:
    """Steps with a smaller batch. They follow the stage before, or begin the run."""

    until: Positive
    """Last step with this batch. Steps that a rollback left out count too."""
    batch: Positive
    """Sequences in one step, over all ranks: at most `train.global_batch`."""


class _Stage(NamedTuple):
    """Steps of equal size."""

    step: int
    """Number of steps before the first of them."""
    sample: int
    """Number of samples before the first of them."""
    batch: int
    """Samples of each of them."""


@dataclass(frozen=True)
class BatchSizes:
    """The sizes of a run's steps: first the stages of `ramp`, then steps of `batch` samples."""

    batch: int
    """Samples of a step after the ramp."""
    ramp: Sequence[BatchStage] = ()
    """Stages with smaller batches at the start of the run."""

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
        """Return the number of samples of the first `steps` steps together."""
        stage = next(stage for stage in reversed(self._stages) if stage.step <= steps)
        return stage.sample + (steps - stage.step) * stage.batch

    def steps_before(self, sample: int) -> int:
        """Return the number of whole steps before sample number `sample`."""
        stage = self._stage(sample)
        return stage.step + (sample - stage.sample) // stage.batch

    def at(self, sample: int) -> int:
        """Return the number of samples of the step that begins at sample number `sample`."""
        return self._stage(sample).batch

    def steps_of(self, samples: int) -> int:
        """Return the fewest steps that read `samples` samples."""
        steps = self.steps_before(samples)
        return steps + (self.samples_before(steps) < samples)

    def equal_until(self, other: BatchSizes, sample: int) -> bool:
        """Return whether `other` has the same steps before sample number `sample`, at which a step begins."""
        starts = (stage.sample for stage in (*self._stages, *other._stages))
        return all(self.at(start) == other.at(start) for start in starts if start < sample)

    def _stage(self, sample: int) -> _Stage:
        """Return the stage to which a sample belongs."""
        return next(stage for stage in reversed(self._stages) if stage.sample <= sample)
