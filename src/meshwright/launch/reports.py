"""Reports of agents to the coordinator, and its answer.

Both are complete states: a lost or repeated one does no harm. When a cut network works again, it may deliver an older
report after a newer one. The coordinator ignores the older one.
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
    """Result of a host's self-test for an attempt: its errors; empty texts if there were none."""

    attempt: int
    failure: str = ""
    """Error found in the host's devices."""
    exchange: str = ""
    """Error found in exchanges, or processes that did not answer."""
    complete: bool = True
    """Whether all checks ended; if not, the host may only have been slow."""


@dataclass(frozen=True)
class Evidence:
    """The evidence of a failed attempt, which agents collect before they end its ranks or begin the next attempt."""

    attempt: int = 0
    folder: str = ""
    """Folder of the incident; empty if there is none."""
    hang: bool = False
    """Whether the attempt failed because of a hang."""


@dataclass(frozen=True)
class Report:
    """An agent's state."""

    host: str
    """Name of the agent: unique within the job, shown to people."""
    address: str = "127.0.0.1"
    """Address at which other hosts reach this one."""
    port: int = 0
    """Store port of the processes that wait to begin; 0 if none wait."""
    attempt: int = 0
    """Attempt that the ranks belong to; 0 before the first."""
    ended: bool = True
    """Whether all ranks of the attempt have ended."""
    ranks: tuple[RankState, ...] = ()
    checkpoints: tuple[int, ...] = ()
    """Steps of the newest checkpoints that ranks of this host committed in the attempt."""
    skipped: tuple[SampleRange, ...] = ()
    """Samples that ranks of this host began to leave out in the attempt."""
    corruptions: tuple[Corruption, ...] = ()
    """Silent corruption that ranks of this host reported in the attempt."""
    stop: int = 0
    """Exit code of a stop request that this agent received."""
    test: HostTest | None = None
    """The last self-test of this host that has ended."""
    findings: tuple[HealthFinding, ...] = ()
    """What is wrong with the host's health now."""
    job: str = ""
    """The job of which this agent has had a directive; empty before the first."""
    number: int = 0
    """Number of the report, counted by its agent from 1; 0 if agent and coordinator are one process and no report can be late."""

    @property
    def urgency(self) -> tuple[object, ...]:
        """The values whose change an agent reports at once. The progress of ranks waits for the next report."""
        ends = tuple((rank.code, rank.failure) for rank in self.ranks)
        progress = self.checkpoints, self.skipped, self.corruptions
        health = tuple((finding.rule, finding.part) for finding in self.findings)
        return (self.port, self.attempt, self.ended, ends, progress, self.stop, self.test, health)


Order = Literal["wait", "test", "run", "end", "idle", "exit"]


@dataclass(frozen=True)
class Directive:
    """Order to an agent.

    `wait`: have processes ready. `test`: let them run the self-test for `attempt`. `run`, `end`: the ranks of `attempt`.
    `idle`: have no processes, as this host is excluded. `exit`: end with `code`.
    """

    order: Order = "wait"
    attempt: int = 0
    first_rank: int = 0
    ranks: int = 0
    """Ranks of all hosts; of a self-test, those of the hosts that run it together."""
    address: str = ""
    port: int = 0
    """Address and port of the store, on the host of rank 0."""
    assignment: str = ""
    cause: str = ""
    """Reason why the ranks end, or why this host idles."""
    evidence: Evidence = Evidence()
    """The last failure. It stands in every answer, as an agent may get no order to end ranks that have all ended."""
    grace: float = 0.0
    """Seconds that ranks may take to end before they are killed, or that a self-test may take."""
    code: int = 0
    stop: int = 0
    """Stop signal that the ranks get; 0 for none."""
    drain: bool = False
    """Whether the ranks save and end after the running step, as the next attempt begins without one of the hosts."""
    heartbeat: float = 3.0
    """Seconds until the next report, unless something happens."""
    job: str = ""
    """Identity of the job (`policies.supervision.State.job`)."""
    standby: bool = False
    """Whether this agent watches the lease of the coordinator, to take its place."""
