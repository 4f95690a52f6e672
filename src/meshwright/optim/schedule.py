"""The learning rate as a function of the step. So a checkpoint needs no state of a scheduler."""

from __future__ import annotations

import math

from meshwright.spec.job import TrainSpec


def learning_rate(train: TrainSpec, step: int) -> float:
    """Return the learning rate of `step` (counted from 1): linear warm-up, then the decay of the schedule.

    `wsd` means warm-up, stable, decay (Hu et al. 2024). `inverse_sqrt` is the peak multiplied by √(warmup_steps / step) (Vaswani et al.
    2017).
    """
    return train.learning_rate * _fraction(train, step)


def _fraction(train: TrainSpec, step: int) -> float:
    if step <= train.warmup_steps:
        return step / train.warmup_steps
    floor = train.min_learning_rate
    start = train.warmup_steps
    if train.schedule == "wsd":
        start = max(start, train.steps - round(train.decay_fraction * train.steps))
    if train.schedule == "inverse_sqrt":
        return max(floor, math.sqrt(max(1, start) / step))
    if step <= start or train.steps == start:
        return 1.0
    progress = (step - start) / (train.steps - start)
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if train.schedule == "cosine" else 1 - progress
    return floor + (1 - floor) * remaining
