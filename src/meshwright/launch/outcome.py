"""How a job ended, from its ranks' exit codes and last messages: one exit code, and the lines that say why."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.events.messages import Failure
from meshwright.spec.errors import EXIT_COMMUNICATION, EXIT_DONE, EXIT_INTERNAL

STOPPED_WAITING = (EXIT_COMMUNICATION, -signal.SIGABRT)
"""How a rank ends that waited for another in vain: by itself, or by NCCL's watchdog."""


@dataclass
class RankEnd:
    """What the launcher knows of one rank. `code` is None while it runs, and a signal's negative number when one killed it."""

    rank: int
    code: int | None = None
    failure: Failure | None = None
    last_step: int | None = None

    @property
    def failed(self) -> bool:
        return self.failure is not None or self.code not in (None, EXIT_DONE)

    @property
    def exit_code(self) -> int | None:
        """The rank's exit code; the announced one while it still closes its files."""
        return self.failure.exit_code if self.failure and self.code in (None, EXIT_DONE) else self.code


def job_code(ends: Sequence[RankEnd]) -> int:
    """The exit code of the first rank that failed by itself; a rank killed by a signal counts as a communication failure."""
    codes = [end.exit_code or EXIT_DONE for end in ends if end.failed]
    own = [code for code in codes if code != EXIT_COMMUNICATION]
    code = (own or codes or [EXIT_DONE])[0]
    return EXIT_COMMUNICATION if code < 0 else code


def cause(ends: Sequence[RankEnd]) -> str:
    """Why the other ranks have to end, in one sentence."""
    own = [end for end in ends if end.failed and end.exit_code not in STOPPED_WAITING]
    end = (own or [end for end in ends if end.failed])[0]
    if end.failure:
        return f"rank {end.rank} failed: {end.failure.message}"
    return f"rank {end.rank} {_death(end.code)}"


def outcome_lines(ends: Sequence[RankEnd], logs: Path) -> Iterator[str]:
    """Lines for the terminal: ranks that were killed or did not answer, then each distinct failure once."""
    failed = [end for end in ends if end.failed]
    gave_up = bool(failed) and all(end.exit_code in STOPPED_WAITING for end in failed)
    named = False
    for end in ends:
        if end.code is None and not end.failed and gave_up:
            death = "did not answer while others waited for it"
        elif end.failed and end.failure is None and end.code != EXIT_COMMUNICATION:
            death = _death(end.code)
        else:
            continue
        named = True
        yield f"rank {end.rank} {death}; {_progress(end)}; the ranks' logs are in {logs}"
    own = [end for end in failed if end.failure and end.exit_code != EXIT_COMMUNICATION]
    lost = [end for end in failed if end.failure and end.exit_code == EXIT_COMMUNICATION]
    yield from _messages(own or ([] if named else lost[:1]))


def _messages(ends: Sequence[RankEnd]) -> Iterator[str]:
    """Each message once, with the rank that sent it where that was not the first one."""
    seen: set[str] = set()
    for end in ends:
        assert end.failure is not None, "only ranks with a message are listed"
        if end.failure.message in seen:
            continue
        seen.add(end.failure.message)
        yield f"rank {end.rank}: {end.failure.message}" if end.rank else end.failure.message
        if end.failure.exit_code == EXIT_INTERNAL and end.failure.log:
            yield f"  traceback in {end.failure.log}"


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        often = ", often because the host ran out of memory" if code == -signal.SIGKILL else ""
        return f"was killed by signal {-code} ({signal.strsignal(-code)}){often}"
    return f"ended with exit code {code} and without a message"


def _progress(end: RankEnd) -> str:
    return "it had not finished a step" if end.last_step is None else f"the last step it finished is {end.last_step}"
