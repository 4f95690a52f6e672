"""When a run writes checkpoints: by steps, by a clock that the caller reads, and how many that makes."""

from __future__ import annotations

from meshwright.spec.job import AUTO_FIRST_SECONDS, AUTO_SECONDS, CheckpointSpec


def due_after_step(spec: CheckpointSpec, step: int, last_step: int) -> bool:
    """Whether a checkpoint is written after `step`, whatever the clock says."""
    if step == last_step and spec.at_end:
        return True
    return isinstance(spec.every, int) and spec.every > 0 and step % spec.every == 0


def due_by_clock(spec: CheckpointSpec, seconds: float, written: int) -> bool:
    """Whether `checkpoint.every: auto` asks for a checkpoint now.

    `written` counts this start's checkpoints; `seconds` have passed since the last of them, or since the start where there is none.
    """
    return spec.every == "auto" and seconds >= (AUTO_SECONDS if written else AUTO_FIRST_SECONDS)


def planned_checkpoints(spec: CheckpointSpec, last_step: int, done: int, step_seconds: float | None) -> int:
    """Checkpoints that a start after step `done` writes if nothing stops it; without a prediction `step_seconds` is None."""
    if spec.every == "auto":
        seconds = (last_step - done) * (step_seconds or 0.0)
        timed = 0 if seconds < AUTO_FIRST_SECONDS else 1 + int((seconds - AUTO_FIRST_SECONDS) / AUTO_SECONDS)
        return timed + spec.at_end
    periodic = last_step // spec.every - done // spec.every if spec.every else 0
    return periodic + (spec.at_end and not (spec.every and last_step % spec.every == 0))
