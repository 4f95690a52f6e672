"""When a run writes checkpoints, and what beside its tensors goes into one."""

from __future__ import annotations

import time

from meshwright.spec.job import AUTO_FIRST_SECONDS, AUTO_SECONDS, CheckpointSpec
from meshwright.training.reporting import Reporter
from meshwright.training.run_state import run_state, run_tensors
from meshwright.training.session import Session


class CheckpointTimer:
    """Whether a checkpoint is due by the clock, under `checkpoint.every: auto`.

    Clocks of ranks differ, so the first rank's decides: its answer goes to all ranks with the stop flags.
    """

    def __init__(self, spec: CheckpointSpec) -> None:
        self._next = time.monotonic() + AUTO_FIRST_SECONDS if spec.every == "auto" else None

    def due(self) -> bool:
        return self._next is not None and time.monotonic() >= self._next

    def restart(self) -> None:
        """A checkpoint was written."""
        if self._next is not None:
            self._next = time.monotonic() + AUTO_SECONDS


def save_checkpoint(session: Session, reporter: Reporter) -> None:
    """Write a checkpoint of the current step, unless the step is there already; then keep the newest ones only. Collective."""
    started = time.perf_counter()
    run = session.run
    state = run_state(session.step, run.train, session.tokens, session.data.record())
    with session.recorder.span("checkpoint"):
        saved = session.store.save(session.step, run_tensors(session.engine, session.optimizer), state, _texts(session))
        session.store.retain(run.checkpoint.keep)
    if saved.written:
        seconds = time.perf_counter() - started
        text = f"checkpoint {saved.path.name}: {saved.bytes / 1e6:,.0f} MB in {seconds:.1f} s"
        reporter.checkpoint(session.step, saved.path, text)


def _texts(session: Session) -> dict[str, str]:
    """The run's configuration and plan, as the run folder has them; the first rank's count."""
    if not session.world.leads:
        return {}
    from meshwright.config.load import plan_yaml, resolved_yaml  # imported at the first save: a start needs none of it

    return {"config.yaml": resolved_yaml(session.run), "plan.yaml": plan_yaml(session.plan)}
