"""Events of a supervised job, and the actions that result from them (`policies.supervision.decide`)."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.policies.host_health import HealthFinding
from meshwright.policies.restart import Incident
from meshwright.policies.skipped_samples import SampleRange


@dataclass(frozen=True)
class Ready:
    """The processes of `host` wait for an attempt to begin. If `ready` is false, they no longer do."""

    host: str
    ready: bool = True


@dataclass(frozen=True)
class Lost:
    """`host` no longer answers. Its ranks have ended, or cannot write."""

    host: str
    cause: str


@dataclass(frozen=True)
class AttemptReported:
    """An agent has begun a later attempt than the state knows of, because the record of that state was lost."""

    attempt: int


@dataclass(frozen=True)
class AttemptPrepared:
    """The files of the attempt are written."""

    attempt: int


@dataclass(frozen=True)
class Unplannable:
    """There is no plan for the attempt's number of hosts."""

    attempt: int
    cause: str


@dataclass(frozen=True)
class SelfTestEnded:
    """The self-test of `host` has ended. The texts are errors of the host itself and of its exchanges; empty without errors."""

    attempt: int
    host: str
    failure: str = ""
    exchange: str = ""
    complete: bool = True
    """Whether all checks ended. If not, the host may only have been slow."""


@dataclass(frozen=True)
class StepTrained:
    """A rank has finished a step."""


@dataclass(frozen=True)
class Committed:
    """The checkpoint of `step` is durable."""

    step: int


@dataclass(frozen=True)
class Present:
    """The checkpoints of `steps`, ascending, exist. This is looked up before each event that may end the attempt."""

    steps: tuple[int, ...]


@dataclass(frozen=True)
class SkippedSamples:
    """After a rollback, the ranks of the attempt leave out the samples in `ranges`."""

    ranges: tuple[SampleRange, ...]


@dataclass(frozen=True)
class Corrupted:
    """The state of a rank was corrupt, and the ranks go back to an earlier state by themselves. `number` counts such reports from 1."""

    attempt: int
    number: int
    incident: Incident


@dataclass(frozen=True)
class Unhealthy:
    """A finding about the health of `host`. It is repeated as long as it is true."""

    host: str
    finding: HealthFinding


@dataclass(frozen=True)
class Failed:
    """The attempt failed or was stopped, for the reason in `incident`."""

    attempt: int
    incident: Incident


@dataclass(frozen=True)
class HostEnded:
    """All ranks of the attempt on `host` have ended."""

    attempt: int
    host: str


@dataclass(frozen=True)
class StopRequested:
    """A stop signal arrived. It ends the job with `code`. Running ranks write a checkpoint and stop by themselves; no others begin."""

    code: int


@dataclass(frozen=True)
class Unrecordable:
    """The state of the job could not be written for too long. This ends the job with `code`."""

    code: int
    cause: str


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = (
    Ready
    | Lost
    | AttemptReported
    | AttemptPrepared
    | Unplannable
    | SelfTestEnded
    | StepTrained
    | Committed
    | Present
    | SkippedSamples
    | Corrupted
    | Unhealthy
    | Failed
    | HostEnded
    | StopRequested
    | Unrecordable
    | Tick
)


@dataclass(frozen=True)
class Prepare:
    """Write the files of the attempt in the state: lease, plan and assignment."""


@dataclass(frozen=True)
class Test:
    """Let the members run the self-test, without preparing an attempt."""

    __test__ = False  # for pytest


@dataclass(frozen=True)
class BeginAttempt:
    """Let the ranks of the members begin the attempt."""


@dataclass(frozen=True)
class EndAttempt:
    """End the ranks of the attempt for `reason`. `incident` is the failure of the attempt; None if it did not fail."""

    reason: str
    incident: Incident | None = None


@dataclass(frozen=True)
class RecordIncident:
    """Record `incident`, which does not end the attempt."""

    incident: Incident


@dataclass(frozen=True)
class Note:
    """Show `text` to the operator. Of all notes with the same `key`, only the first is shown."""

    text: str
    key: str = ""


@dataclass(frozen=True)
class Finish:
    """The job is over."""

    code: int


Action = Prepare | Test | BeginAttempt | EndAttempt | RecordIncident | Note | Finish
