"""Returns a running job to its newest good checkpoint, without starting new processes."""

from __future__ import annotations

from meshwright.training.numerics import Rollback
from meshwright.training.reporting import Reporter
from meshwright.training.resume import check_none_damaged, load_newest
from meshwright.training.saving import Saver
from meshwright.training.session import TrainingSession


def roll_back(session: TrainingSession, reporter: Reporter, saver: Saver, request: Rollback) -> None:
    """Load the newest good state before the failed step into the session. Collective; all ranks have the same `request`.

    Raises the error class that the request names if there is no such state, and NumericalFailure if rollbacks to it did not help.
    """
    session.progress.begin("start", request.step)
    session.recorder.wait()
    end = saver.settle(request.step)
    samples = ""
    if request.skips_samples:
        first, end = session.samples_of[request.step]
        session.numerics.skip((first, end))
        reporter.skip_samples(first, end)
        samples = f"; samples {first} to {end - 1} are left out"
    tier = load_newest(session, end - 1)
    if tier is None:
        check_none_damaged(session, end - 1)
        raise request.failure(f"{request.cause}; there is no checkpoint to go back to; checkpoint.every=N writes some")
    session.numerics.count_rollback(session.step, request.cause)
    saver.restart_from(session.step)
    reporter.rewind(session.step)
    reporter.event(session.step, f"{request.cause}; back to step {session.step} from {tier}{samples}")
