"""The end of a job with several ranks: its exit code, and when the remaining ranks are asked to end or killed.

Ranks are represented by their exit codes, in rank order. This is the code that a rank reported, otherwise that of its process (the negative
signal number if a signal killed it). It is None while the rank runs.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Literal

from meshwright.spec.errors import EXIT_COMMUNICATION, EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED
from meshwright.spec.rank_environment import PROGRAM_STOP

PEER_LOSS_CODES = (EXIT_COMMUNICATION, -signal.SIGABRT)
"""Exit codes of a rank that lost a peer: it reported this itself, or NCCL's watchdog aborted it."""
STOP_CODES = (EXIT_PREEMPTED, EXIT_INTERRUPTED)
STOP_EXIT_CODES: dict[int, int] = {
    signal.SIGINT: EXIT_INTERRUPTED,
    signal.SIGTERM: EXIT_PREEMPTED,
    signal.SIGUSR1: EXIT_PREEMPTED,
    signal.SIGHUP: EXIT_PREEMPTED,
    PROGRAM_STOP: EXIT_PREEMPTED,
}
"""Exit code of a job that was ended by a stop signal, by signal."""
CULPRIT_SECONDS = 2.0
"""After a rank reports a lost peer, the seconds to wait for the failure of that peer."""
AGREEMENT_SECONDS = 0.5
"""Seconds to wait for other ranks to report the same failure. They do if all ranks detect it."""
STOP_SECONDS = 30.0
"""Seconds that the other ranks may take to stop after one rank has stopped on request."""
GRACE_SECONDS = 12.0
"""Seconds that ranks may take after they were asked to end. It is more than `training.lifecycle.FINISH_SECONDS`."""

ExitCodes = Sequence[int | None]


def culprit(codes: ExitCodes) -> int | None:
    """The rank whose failure decides the job's exit code; None if no rank failed.

    It is the lowest rank that failed by itself. If there is none, the lowest that stopped on request; else the lowest that lost a peer.
    """
    failed = [rank for rank, code in enumerate(codes) if code not in (None, EXIT_DONE)]
    by_itself = [rank for rank in failed if codes[rank] not in PEER_LOSS_CODES]
    not_stopped = [rank for rank in by_itself if codes[rank] not in STOP_CODES]
    return next(iter(not_stopped or by_itself or failed), None)


def job_code(codes: ExitCodes) -> int:
    """The exit code of the culprit; a rank killed by a signal counts as a communication failure."""
    rank = culprit(codes)
    code = EXIT_DONE if rank is None else codes[rank] or EXIT_DONE
    return EXIT_COMMUNICATION if code < 0 else code


def next_action(
    codes: ExitCodes, since_failure: float, since_request: float | None
) -> Literal["wait", "request end", "kill"]:
    """What the launcher should do with the running ranks after another rank failed.

    `since_failure` is the time since the first failure in seconds. `since_request` is the time since the ranks were asked to end; None if
    they were not. The launcher waits before it asks, so that other ranks have time to stop too, and the rank that caused the failure has
    time to report it. If a signal killed a rank, that rank is the cause and reports nothing, so there is no wait.
    """
    if since_request is not None:
        return "kill" if since_request > GRACE_SECONDS else "wait"
    failed = [code for code in codes if code not in (None, EXIT_DONE)]
    if any(code is not None and code < 0 and code not in PEER_LOSS_CODES for code in failed):
        return "request end"
    if all(code in STOP_CODES for code in failed):
        patience = STOP_SECONDS
    else:
        patience = CULPRIT_SECONDS if all(code in PEER_LOSS_CODES for code in failed) else AGREEMENT_SECONDS
    return "request end" if since_failure >= patience else "wait"
