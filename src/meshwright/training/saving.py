"""When a run writes checkpoints, and what beside its tensors goes into one."""

from __future__ import annotations

import time

from meshwright.policies.checkpoint_times import due_by_clock
from meshwright.spec.job import CheckpointSpec
from meshwright.training.reporting import Reporter
from meshwright.training.run_state import run_state
from meshwright.training.session import Session


class CheckpointTimer:
    """Whether a checkpoint is due by the clock, under `checkpoint.every: auto`.

    Clocks of ranks differ, so the first rank's decides: its answer goes to all ranks with the stop flags.
    """

    def __init__(self, spec: CheckpointSpec) -> None:
        self._spec, self._since, self._written = spec, time.monotonic(), 0

    def due(self) -> bool:
        return due_by_clock(self._spec, time.monotonic() - self._since, self._written)

    def restart(self) -> None:
        """Count a checkpoint that was written."""
        self._since, self._written = time.monotonic(), self._written + 1


def save_checkpoint(session: Session, reporter: Reporter) -> None:
    """Write a checkpoint of the current step, unless the step is there already; then keep the newest ones only. Collective."""
    started = time.perf_counter()
    run = session.run
    state = run_state(session.step, run.train, session.tokens, session.data.record())
    with session.recorder.span("checkpoint"):
        saved = session.store.save(session.step, session.state(), state, _texts(session))
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
