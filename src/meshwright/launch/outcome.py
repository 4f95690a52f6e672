"""Explains how a job ended, in lines for the terminal, from the exit codes and last messages of its ranks."""

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
    """What the launcher knows about one rank.

    `code` is the exit code of its process: None while it runs, and negative if a signal killed it. `last_step` is the
    last step that it has finished.
    """

    rank: int
    code: int | None = None
    failure: FailureMessage | None = None
    last_step: int | None = None
    progress: ProgressMessage | None = None
    progress_count: int = 0
    """How often the rank has updated its progress page."""
    stopped: bool = False
    """Whether a signal has stopped (suspended) the rank's process."""
    pending: PendingWait | None = None
    """The communication that the rank's host thread is waiting for, if any."""

    @property
    def failed(self) -> bool:
        return self.failure is not None or self.code not in (None, EXIT_DONE)

    @property
    def exit_code(self) -> int | None:
        """The exit code that the rank has reported, or else its process's exit code."""
        return self.failure.exit_code if self.failure else self.code


def exit_codes(ranks: Sequence[RankState]) -> list[int | None]:
    """Return the exit codes of the ranks, as input of `policies.job_end`."""
    return [rank.exit_code for rank in ranks]


def cause(rank: RankState) -> str:
    """Return a clause about the rank that ended the job. It is sent to the other ranks."""
    if rank.failure:
        return f"rank {rank.rank} failed: {rank.failure.message}"
    return f"rank {rank.rank} {death(rank.code)}"


def outcome_lines(ranks: Sequence[RankState], logs: Path) -> Iterator[str]:
    """Yield the lines for the terminal; at least one if a rank failed. `logs` is the folder of the ranks' logs.

    First come ranks that died or did not answer, then each different failure message once.
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
    """Yield each different message once, with the rank's number unless that is 0."""
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
    """Return words for how a process ended."""
    if code is not None and code < 0:
        often = ", often because the host ran out of memory" if code == -signal.SIGKILL else ""
        return f"was killed by signal {-code} ({signal.strsignal(-code)}){often}"
    return f"ended with exit code {code} and without a message"


def progress_text(state: RankState) -> str:
    """Return words about the last step that a rank has finished."""
    return (
        "it had not finished a step" if state.last_step is None else f"the last step it finished is {state.last_step}"
    )
