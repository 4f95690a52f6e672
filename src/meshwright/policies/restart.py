"""Decision after a failed attempt: a restart from a checkpoint, or the end of the run with an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.spec.errors import EXIT_COMMUNICATION, EXIT_INTERNAL, EXIT_REPEATED

RESTARTED_CODES = (EXIT_INTERNAL, EXIT_COMMUNICATION)
"""Exit codes of failures that may not occur again; a process that a signal killed is restarted too.
Bad input, exhausted memory or disk, damaged data and stop requests would only repeat."""
LONGEST_DELAY = 60.0
"""Seconds between a failure and the restart at most."""


@dataclass(frozen=True)
class Incident:
    """A failure: exit code (negative: signal), rank, host, and the step that the rank worked on, None before its first."""

    code: int
    cause: str
    rank: int | None = None
    host: str = ""
    step: int | None = None
    phase: str = "train"
    """Phase of the rank at its failure (`events.messages.Phase`)."""
    hang: bool = False
    """Whether the rank ran but made no progress."""
    corrupt: bool = False
    """Whether the rank's state was silently corrupt."""

    def repeats(self, other: Incident) -> bool:
        """Whether `other` is the same failure at the same step."""
        return (self.code, self.step) == (other.code, other.step)


@dataclass(frozen=True)
class Restart:
    """A restart after `delay` seconds, from the newest checkpoint or from one of at most `resume_at_most`."""

    delay: float = 0.0
    resume_at_most: int | None = None
    skip_step: int | None = None
    """Step whose samples are left out from now on."""


@dataclass(frozen=True)
class Stop:
    """The end of the run with an exit code; `diagnosis` says why there is no further restart."""

    code: int
    diagnosis: str = ""


@dataclass(frozen=True)
class RestartPolicy:
    """The limits of `supervision` in the run file."""

    restarts: int
    on_repeated_failure: Literal["stop", "skip_data"] = "stop"


def after_failure(
    incidents: Sequence[Incident], policy: RestartPolicy, checkpoints: Sequence[int], *, trained: bool
) -> Restart | Stop:
    """The decision after the last of `incidents`, which are those since the newest checkpoint was written.

    `checkpoints` are the steps of checkpoints that exist, ascending; `trained` says whether the job has finished a step.
    """
    last = incidents[-1]
    code = EXIT_COMMUNICATION if last.code < 0 else last.code
    if policy.restarts == 0 or code not in RESTARTED_CODES:
        return Stop(code)
    if code == EXIT_INTERNAL and not trained:
        return Stop(code, "there is no restart, as this job has not finished a step")
    repeats = _repeats(incidents)
    if repeats > 2:
        where = "before the first step" if last.step is None else f"at step {last.step}"
        return Stop(EXIT_REPEATED, f"the same failure occurred {repeats} times {where}: {last.cause}")
    if len(incidents) > policy.restarts:
        return Stop(code, f"{policy.restarts} restarts did not reach a new checkpoint (supervision.restarts)")
    delay = min(LONGEST_DELAY, 2.0 ** (len(incidents) - 1)) if len(incidents) > 1 else 0.0
    in_step = last.step is not None and last.phase in ("compile", "train")  # else its samples are trained already
    if repeats == 2 and policy.on_repeated_failure == "skip_data" and in_step:
        return Restart(delay, skip_step=last.step)
    if repeats == 2 and len(checkpoints) > 1:
        return Restart(delay, resume_at_most=checkpoints[-2])
    return Restart(delay)


def _repeats(incidents: Sequence[Incident]) -> int:
    """How many of the last incidents in a row are the same failure."""
    count = 0
    for incident in reversed(incidents):
        if not incident.repeats(incidents[-1]):
            break
        count += 1
    return count
