"""Decides after a failed attempt: restart from a checkpoint, or end the run with an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.spec.errors import EXIT_COMMUNICATION, EXIT_INTERNAL, EXIT_REPEATED

RESTARTED_CODES = (EXIT_INTERNAL, EXIT_COMMUNICATION)
"""Exit codes of failures that may not occur again after a restart. A process killed by a signal is restarted too.
Other failures would only repeat: bad input, exhausted memory or disk, damaged data. Stop requests are not restarted either."""
LONGEST_DELAY = 60.0
"""Longest delay between a failure and the restart, in seconds."""


@dataclass(frozen=True)
class Incident:
    """A failure: its exit code (negative for a signal), its rank and host, and the step of the rank; None before its first step."""

    code: int
    cause: str
    rank: int | None = None
    host: str = ""
    step: int | None = None
    phase: str = "train"
    """Phase in which the rank was (`events.messages.Phase`)."""
    hang: bool = False
    """Whether the rank was running but made no progress."""
    corrupt: bool = False
    """Whether the rank's state was silently corrupt."""

    def repeats(self, other: Incident) -> bool:
        """Whether `other` is the same failure at the same step."""
        return (self.code, self.step) == (other.code, other.step)


@dataclass(frozen=True)
class Restart:
    """A restart after `delay` seconds, from the newest checkpoint; if `resume_at_most` is set, from the newest one up to that step."""

    delay: float = 0.0
    resume_at_most: int | None = None
    skip_step: int | None = None
    """Step whose samples are left out from now on; None if none are."""


@dataclass(frozen=True)
class Stop:
    """The end of the run, with an exit code. `diagnosis` says why there is no restart."""

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
    """The decision after the last of `incidents`. These are all incidents since the newest checkpoint was written.

    `checkpoints` are the steps of existing checkpoints, ascending. `trained` says whether the job has finished a step.
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
    in_step = last.step is not None and last.phase in (
        "compile",
        "train",
    )  # in other phases, the step's samples are already trained
    if repeats == 2 and policy.on_repeated_failure == "skip_data" and in_step:
        return Restart(delay, skip_step=last.step)
    if repeats == 2 and len(checkpoints) > 1:
        return Restart(delay, resume_at_most=checkpoints[-2])
    return Restart(delay)


def _repeats(incidents: Sequence[Incident]) -> int:
    """How many of the last incidents, without interruption, are the same failure as the last one."""
    count = 0
    for incident in reversed(incidents):
        if not incident.repeats(incidents[-1]):
            break
        count += 1
    return count
