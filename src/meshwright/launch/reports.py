"""What agents report to the coordinator, and what it answers.

A report and an answer each describe a complete state, so a lost or repeated message does no harm. A network that works
again after an interruption may deliver an older report after a newer one; the coordinator ignores the older one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.events.messages import Corruption
from meshwright.launch.outcome import RankState
from meshwright.policies.host_health import HealthFinding
from meshwright.policies.skipped_samples import SampleRange


@dataclass(frozen=True)
class HostTest:
    """Result of a host's self-test for `attempt`: the errors found, as empty texts if there were none."""

    attempt: int
    failure: str = ""
    """Error found on the host's devices."""
    exchange: str = ""
    """Error found in communication between hosts, or the processes that did not answer."""
    complete: bool = True
    """Whether all checks ended. If not, the host may only have been slow."""


@dataclass(frozen=True)
class Evidence:
    """What agents collect about a failed attempt, before they end its ranks or begin the next attempt."""

    attempt: int = 0
    folder: str = ""
    """Folder of the incident; empty if the failure is not an incident."""
    hang: bool = False
    """Whether the attempt failed because it hung."""


@dataclass(frozen=True)
class Report:
    """The state of an agent and its ranks, which the agent sends to the coordinator."""

    host: str
    """Name of the agent, unique within the job. Users see it."""
    address: str = "127.0.0.1"
    """Address at which other hosts can reach this host."""
    port: int = 0
    """Port of the store of the processes that wait to become ranks; 0 if none wait."""
    attempt: int = 0
    """Attempt to which the ranks belong; 0 before the first attempt."""
    ended: bool = True
    """Whether all ranks of that attempt have ended."""
    ranks: tuple[RankState, ...] = ()
    checkpoints: tuple[int, ...] = ()
    """Steps of the newest checkpoints that ranks of this host have committed in the attempt."""
    skipped: tuple[SampleRange, ...] = ()
    """Samples that ranks of this host have begun to skip in the attempt."""
    corruptions: tuple[Corruption, ...] = ()
    """Silent corruption that ranks of this host have reported in the attempt."""
    stop: int = 0
    """Exit code of a stop request that this agent has received; 0 without one."""
    test: HostTest | None = None
    """The last self-test of this host that has ended; None before the first."""
    findings: tuple[HealthFinding, ...] = ()
    """What is wrong with this host's health now."""
    job: str = ""
    """Identity of the job from which this agent has received a directive; empty before the first."""
    number: int = 0
    """Number of the report, which its agent counts from 1. 0 if agent and coordinator are one process: no report can
    then be late.
    """

    @property
    def urgency(self) -> tuple[object, ...]:
        """The values whose change an agent reports at once.

        A change of the ranks' progress waits for the next regular report.
        """
        ends = tuple((rank.code, rank.failure) for rank in self.ranks)
        progress = self.checkpoints, self.skipped, self.corruptions
        health = tuple((finding.rule, finding.part) for finding in self.findings)
        return (self.port, self.attempt, self.ended, ends, progress, self.stop, self.test, health)


Order = Literal["wait", "test", "run", "end", "idle", "exit"]
"""What an agent is told to do; see `Directive`."""


@dataclass(frozen=True)
class Directive:
    """The coordinator's answer to a report: what the agent must do.

    - `wait`: keep processes ready that can become ranks
    - `test`: let these processes run the self-test for `attempt`
    - `run`: let them be the ranks of `attempt`
    - `end`: end the ranks of `attempt`
    - `idle`: keep no processes, because this host is excluded
    - `exit`: end the agent with exit code `code`
    """

    order: Order = "wait"
    attempt: int = 0
    # Number of the first rank on this host.
    first_rank: int = 0
    ranks: int = 0
    """Ranks of all hosts; in a self-test, the ranks of all hosts that run it together."""
    address: str = ""
    port: int = 0
    """Address and port of the store, which is on the host of rank 0."""
    assignment: str = ""
    """File of the attempt's assignment."""
    cause: str = ""
    """Why the ranks must end, or why this host is idle."""
    evidence: Evidence = Evidence()
    """The last failure. Every answer has it, because an agent whose ranks have all ended gets no order to end them."""
    grace: float = 0.0
    """Seconds that ranks may take to end before they are killed; in a self-test, seconds that it may take."""
    code: int = 0
    stop: int = 0
    """Stop signal for the ranks; 0 for none."""
    drain: bool = False
    """Whether the ranks must save a checkpoint and end after the current step.

    The next attempt begins without one of the hosts.
    """
    heartbeat: float = 3.0
    """Seconds until the next report, unless something happens earlier."""
    job: str = ""
    """Identity of the job (`policies.supervision.State.job`)."""
    standby: bool = False
    """Whether this agent watches the coordinator's lease, to become coordinator when the lease ends."""
