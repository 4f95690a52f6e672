"""After a failure, chooses which hosts run the self-test and in which groups, and which host a failed test excludes."""

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
"""Exit codes of processes that were ended by the processor, or by a library that found a broken device.
Other exit codes come from programs, users and the kernel's out-of-memory killer."""
DEVICE_ERRORS = re.compile(r"CUDA error|CUBLAS_STATUS_|CUDNN_STATUS_|NCCL.*unhandled|ECC error|HIP error")
"""Texts of internal errors that a broken device may have caused."""
TEST_SECONDS = 60.0
"""Seconds that a host's self-test may take, including the start of its processes."""
REPEATED_TEST_SECONDS = 180.0
"""Seconds that a test may take if the previous one did not end in time."""


@dataclass(frozen=True)
class Suspect:
    """A host that must pass the self-test. With `paired`, the test includes exchanges with another host."""

    host: str
    paired: bool = False


@dataclass(frozen=True)
class Exclusion:
    """A host that is excluded from training for the rest of the job."""

    host: str
    cause: str
    found_by: Literal["self-test", "health"] = "self-test"

    @property
    def verdict(self) -> str:
        """Why the host is excluded, in words, without the cause."""
        return "failed the self-test" if self.found_by == "self-test" else "is not healthy"


def machine_of(host: str) -> str:
    """The machine of an agent whose name is MACHINE/PID."""
    return host.partition("/")[0]


def suspects_after(incidents: Sequence[Incident], members: Sequence[str]) -> tuple[Suspect, ...]:
    """The hosts to test after the last of `incidents`. These are all incidents since the newest checkpoint.

    - No test after a configuration error, exhausted memory or a lost host.
    - After a killed process, or a rank that lost a peer: only if the same host or the same failure was involved before.
    - After non-finite values that end the job because they persist: all hosts, as any of them may have produced the values.
    - After corrupt state: the host of that rank.
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
    """The groups of `members` that run the self-test together: each suspect, with a partner if it is paired.

    The partner is the next member that is not in another group, so all groups can run at the same time.
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
    """Seconds that the test of a group may take. `incomplete` are hosts whose last test did not end in time."""
    return REPEATED_TEST_SECONDS if set(group) & set(incomplete) else TEST_SECONDS


def failed_host(host: str, group: Sequence[str], failure: str, exchange: str) -> tuple[str, str] | None:
    """The host that is excluded after the test of `host`, and why; None if the test was passed.

    `failure` says what was wrong with the host itself, `exchange` what was wrong with its exchanges. A failed exchange excludes the
    suspect, which is the first of `group`, and not its partner. If the partner is defective, its next test will show it.
    """
    if failure:
        return host, failure
    return (group[0], f"exchange with {' and '.join(group[1:]) or 'itself'}: {exchange}") if exchange else None
