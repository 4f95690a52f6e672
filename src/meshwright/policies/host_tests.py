"""Choice of the hosts and groups for the self-test after a failure, and of the hosts that a failed test excludes."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.policies.restart import Incident
from meshwright.spec.errors import EXIT_COMMUNICATION, EXIT_INTERNAL, EXIT_NUMERICAL

HARDWARE_SIGNALS = tuple(
    -number
    for number in (
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGILL,
        signal.SIGFPE,
        signal.SIGABRT,
        signal.SIGTRAP,
        signal.SIGSYS,
    )
)
"""Exit codes of processes that the processor, or a library that found a device broken, ended.
Programs, users and the kernel's out-of-memory killer send the others."""
DEVICE_ERRORS = re.compile(r"CUDA error|CUBLAS_STATUS_|CUDNN_STATUS_|NCCL.*unhandled|ECC error|HIP error")
"""Texts of internal errors that a broken device may have caused."""
TEST_SECONDS = 60.0
"""Seconds that a host's self-test may take, with the start of its processes."""
REPEATED_TEST_SECONDS = 180.0
"""Seconds for a test after one that did not end."""


@dataclass(frozen=True)
class Suspect:
    """A host that has to pass the self-test; `paired` adds exchanges with another host."""

    host: str
    paired: bool = False


@dataclass(frozen=True)
class Exclusion:
    """A host that trains no more in this job."""

    host: str
    cause: str
    found_by: Literal["self-test", "health"] = "self-test"

    @property
    def verdict(self) -> str:
        """Why the host is excluded, in words, without the cause."""
        return "failed the self-test" if self.found_by == "self-test" else "is not healthy"


def machine_of(host: str) -> str:
    """The machine of an agent that is named MACHINE/PID."""
    return host.partition("/")[0]


def suspects_after(incidents: Sequence[Incident], members: Sequence[str]) -> tuple[Suspect, ...]:
    """The hosts to test after the last of `incidents`, which are those since the newest checkpoint.

    A configuration error, exhausted memory and a lost host lead to no test. A killed process, and a rank that lost a
    peer, do so only if the same host or the same failure was involved before. Non-finite values end the job only if
    they persist: then any host may have produced them. The host of a rank whose state was corrupt is tested.
    """
    last = incidents[-1]
    earlier = incidents[:-1]
    if last.corrupt:
        return (Suspect(last.host),) if last.host in members else ()
    if last.code == EXIT_NUMERICAL:
        return tuple(Suspect(host) for host in members)
    if last.rank is None or last.host not in members:
        return ()
    if last.code == EXIT_COMMUNICATION:
        again = any(incident.code == EXIT_COMMUNICATION for incident in earlier)
        return (Suspect(last.host, paired=True),) if last.hang or again else ()
    if last.code < 0:
        again = any(machine_of(incident.host) == machine_of(last.host) for incident in earlier)
        return (Suspect(last.host),) if last.code in HARDWARE_SIGNALS or again else ()
    if last.code == EXIT_INTERNAL and DEVICE_ERRORS.search(last.cause):
        return (Suspect(last.host),)
    return ()


def self_test_groups(suspects: Sequence[Suspect], members: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The groups of `members` that run the self-test together: each suspect, and its partner if it is paired.

    The partner is the next member that is in no other group, so that all groups run at the same time.
    """
    groups = {host: suspect for host in members for suspect in suspects if machine_of(suspect.host) == machine_of(host)}
    idle = [host for host in members if host not in groups]
    answer = []
    for host, suspect in groups.items():
        position = members.index(host)
        later = [other for other in idle if members.index(other) > position]
        partner = next(iter(later or idle), None) if suspect.paired else None
        if partner is not None:
            idle.remove(partner)
        answer.append((host,) if partner is None else (host, partner))
    return tuple(answer)


def seconds_of_test(group: Sequence[str], incomplete: Sequence[str]) -> float:
    """Seconds that the test of a group may take. `incomplete` are hosts whose last test did not end."""
    return REPEATED_TEST_SECONDS if set(group) & set(incomplete) else TEST_SECONDS


def failed_host(host: str, group: Sequence[str], failure: str, exchange: str) -> tuple[str, str] | None:
    """The host that the test of `host` excludes, and why; None if it passed.

    `failure` and `exchange` say what was wrong with the host itself and with its exchanges. A failed exchange excludes
    the suspect, which is the first of `group`, not its partner: a defect of the partner shows in its next test.
    """
    if failure:
        return host, failure
    return (group[0], f"exchange with {' and '.join(group[1:]) or 'itself'}: {exchange}") if exchange else None
