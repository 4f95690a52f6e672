"""Lines that explain how a job ended, from its ranks' exit codes and last messages."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.events.messages import FailureMessage, ProgressMessage
from meshwright.events.progress import PendingWait
from meshwright.policies.job_end import PEER_LOSS_CODES
from meshwright.spec.errors import EXIT_DONE, EXIT_INTERNAL


@dataclass
class RankState:
    """The launcher's record of one rank. `code` is None while it runs, and negative if a signal killed it."""

    rank: int
    code: int | None = None
    failure: FailureMessage | None = None
    last_step: int | None = None
    progress: ProgressMessage | None = None
    progress_count: int = 0
    """Number of progress marks that the rank has stored."""
    stopped: bool = False
    """Whether a signal has stopped the rank's process."""
    pending: PendingWait | None = None
    """The communication in which the rank's host waits."""

    @property
    def failed(self) -> bool:
        return self.failure is not None or self.code not in (None, EXIT_DONE)

    @property
    def exit_code(self) -> int | None:
        """The exit code that the rank reported, else that of its process."""
        return self.failure.exit_code if self.failure else self.code


def exit_codes(ranks: Sequence[RankState]) -> list[int | None]:
    """The ranks' exit codes as `policies.job_end` takes them."""
    return [rank.exit_code for rank in ranks]


def cause(rank: RankState) -> str:
    """A sentence about the rank that caused the end of the job (`policies.job_end.culprit`), for the other ranks."""
    if rank.failure:
        return f"rank {rank.rank} failed: {rank.failure.message}"
    return f"rank {rank.rank} {death(rank.code)}"


def outcome_lines(ranks: Sequence[RankState], logs: Path) -> Iterator[str]:
    """Lines for the terminal, at least one if a rank failed.

    First ranks that died or did not answer, then each distinct failure once.
    """
    failed = [rank for rank in ranks if rank.failed]
    only_peer_loss = bool(failed) and all(rank.exit_code in PEER_LOSS_CODES for rank in failed)
    culprits = [rank for rank in failed if rank.failure and rank.exit_code not in PEER_LOSS_CODES]
    printed = False
    for rank in ranks:
        if rank.code is None and not rank.failed and only_peer_loss:
            end = "did not answer while others waited for it"
        elif rank.failed and rank.failure is None and rank.code not in PEER_LOSS_CODES:
            end = death(rank.code)
        else:
            continue
        printed = True
        yield f"rank {rank.rank} {end}; {progress_text(rank)}; the ranks' logs are in {logs}"
    if culprits or printed:
        yield from _messages(culprits)
    elif failed:
        with_message = [rank for rank in failed if rank.failure]
        yield from _messages(with_message[:1])
        if not with_message:
            yield f"rank {failed[0].rank} {death(failed[0].code)}; {progress_text(failed[0])}; the ranks' logs are in {logs}"


def _messages(states: Sequence[RankState]) -> Iterator[str]:
    """Yield each message once, with the number of its rank unless that is 0."""
    messages_seen: set[str] = set()
    for state in states:
        assert state.failure is not None, "only ranks with a message are listed"
        if state.failure.message in messages_seen:
            continue
        messages_seen.add(state.failure.message)
        yield f"rank {state.rank}: {state.failure.message}" if state.rank else state.failure.message
        if state.failure.exit_code == EXIT_INTERNAL and state.failure.log:
            yield f"  traceback in {state.failure.log}"


def death(code: int | None) -> str:
    """How a process ended, in words."""
    if code is not None and code < 0:
        often = ", often because the host ran out of memory" if code == -signal.SIGKILL else ""
        return f"was killed by signal {-code} ({signal.strsignal(-code)}){often}"
    return f"ended with exit code {code} and without a message"


def progress_text(state: RankState) -> str:
    """The last finished step of a rank, in words."""
    return (
        "it had not finished a step" if state.last_step is None else f"the last step it finished is {state.last_step}"
    )
