"""Decides when a run writes checkpoints, by steps or by elapsed time, and how many it will write."""

from __future__ import annotations

from math import sqrt

from meshwright.spec.job import AUTO_FIRST_SECONDS, AUTO_LEAST_SECONDS, AUTO_SECONDS, CheckpointSpec


def due_after_step(spec: CheckpointSpec, step: int, last_step: int) -> bool:
    """Return whether a checkpoint is due after `step` according to a number of steps (`checkpoint.every: N`, `at_end`)."""
    if step == last_step and spec.at_end:
        return True
    return isinstance(spec.every, int) and spec.every > 0 and step % spec.every == 0


def due_by_clock(spec: CheckpointSpec, seconds: float, written: int, interval: float = AUTO_SECONDS) -> bool:
    """Return whether `checkpoint.every: auto` requires a checkpoint now.

    `written` is the number of checkpoints since this start of the run. `seconds` is the time since the last of them, or
    since the start if there is none. `interval` is the time from one checkpoint to the next in seconds
    (`auto_interval`).
    """
    return spec.every == "auto" and seconds >= (interval if written else AUTO_FIRST_SECONDS)


def auto_interval(cost_seconds: float, save_seconds: float, hosts: int, host_mtbf_hours: float) -> float:
    """Return the seconds from one checkpoint to the next under `checkpoint.every: auto`.

    A checkpoint costs training `cost_seconds`, and is durable `save_seconds` after its start. The result is the
    Young-Daly interval √(2 · cost · MTBF) of a job on `hosts` hosts (Young 1974; Daly 2006), within limits. It is at
    most `AUTO_SECONDS`, because jobs also end for other reasons than failed hosts. It is at least `AUTO_LEAST_SECONDS`,
    and at least twice `save_seconds`.
    """
    young_daly = sqrt(2 * cost_seconds * host_mtbf_hours * 3600 / hosts)
    return max(2 * save_seconds, min(AUTO_SECONDS, max(AUTO_LEAST_SECONDS, young_daly)))


def planned_checkpoints(spec: CheckpointSpec, last_step: int, done: int, step_seconds: float | None) -> int:
    """Return the number of checkpoints that a run without interruptions writes from step `done` to step `last_step`.

    `step_seconds` is the time of a step, None if it is not known.
    """
    if spec.every == "auto":
        seconds = (last_step - done) * (step_seconds or 0.0)
        timed = 0 if seconds < AUTO_FIRST_SECONDS else 1 + int((seconds - AUTO_FIRST_SECONDS) / AUTO_SECONDS)
        return timed + spec.at_end
    periodic = last_step // spec.every - done // spec.every if spec.every else 0
    return periodic + (spec.at_end and not (spec.every and last_step % spec.every == 0))
