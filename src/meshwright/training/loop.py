"""The training loop: steps, validations and checkpoints in order, until done or asked to stop."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from meshwright.data.loader import Loader
from meshwright.observe.account import Account
from meshwright.optim.schedule import learning_rate
from meshwright.spec.errors import Interrupted, Preempted
from meshwright.training.accounting import Accounting
from meshwright.training.evaluate import Evaluation, evaluate
from meshwright.training.figures import FigureReader, check_finite
from meshwright.training.reporting import Reporter
from meshwright.training.session import Session
from meshwright.training.state import run_state, run_tensors
from meshwright.training.step import train_step
from meshwright.training.stop import INTERRUPT, StopRequest
from meshwright.training.timelines import StepTimelines
from meshwright.training.tracing import step_trace
from meshwright.training.traffic import wire_count

log = logging.getLogger("meshwright")


@dataclass(frozen=True)
class Trained:
    """How a run ended: its last validation, and its figures beside the predicted ones; None where there is nothing to say."""

    validation: Evaluation | None
    account: Account | None


def train(session: Session, reporter: Reporter, stop: StopRequest) -> Trained:
    """Run the session's remaining steps.

    Raises Preempted or Interrupted when asked to stop, after writing a checkpoint if the run has any, and NumericalFailure when a loss is
    not finite.
    """
    run, wire = session.run, wire_count(session)
    session.start.end("report")
    figures = FigureReader(run, session.plan, session.world.device, session.tokens, wire)
    last: Evaluation | None = None
    timelines, accounting = StepTimelines(session, reporter), Accounting(session, reporter)
    with _loader(session) as loader, _planned_collections(run.train.gc_every), step_trace(session, reporter) as trace:
        for step in range(session.step + 1, run.train.steps + 1):
            _one_step(session, loader, figures, accounting, step, stop)
            trace.end_step(step)
            accounting.end_step(step, timelines.summary)
            ends = step == run.train.steps
            validates = ends or _due(run.train.validate_every, step)
            saves = (ends and run.checkpoint.at_end) or _due(run.checkpoint.every, step)
            if validates or saves or timelines.writes_after(step) or figures.stop_flag:
                _read(session, figures, accounting)
            if figures.stop_flag:
                _stop(session, figures, reporter)
            if validates:
                last = _validate(session, reporter)
            if saves:
                _save(session, reporter)
            if _due(run.train.gc_every, step):
                gc.collect()
            if timelines.end_step(step) or validates or saves:
                figures.pause()
    for summed in (wire, accounting.waiting):
        if summed is not None and (line := summed.line(session.world.control)) is not None:
            reporter.event(session.step, line)
    return Trained(last, accounting.close(timelines.summary))


def _due(every: int, step: int) -> bool:
    """Whether what is done every so many steps (0: never) is due after `step`."""
    return bool(every) and step % every == 0


@contextmanager
def _loader(session: Session) -> Iterator[Loader]:
    batch = session.plan.batch
    loader = Loader(
        session.data,
        global_batch=batch.global_batch,
        data_rank=session.mesh.data_rank,
        data_ranks=session.mesh.data_ranks,
        micro_batch=batch.micro_batch,
        start_sample=session.step * batch.global_batch,
        device=session.world.device,
    )
    with loader:
        yield loader


@contextmanager
def _planned_collections(every: int) -> Iterator[None]:
    """Python's collector runs on all ranks after the same steps, so that no rank waits for another's pause."""
    if every:
        gc.collect()
        gc.freeze()  # what is there now stays for the whole run; later collections need not look at it
        gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


def _one_step(
    session: Session, loader: Loader, figures: FigureReader, accounting: Accounting, step: int, stop: StopRequest
) -> None:
    recorder, rate = session.recorder, learning_rate(session.run.train, step)
    recorder.begin_step(step)
    with recorder.span("data"):
        micro_batches = next(loader)
    result = train_step(
        session.engine,
        session.optimizer,
        session.mesh,
        micro_batches,
        learning_rate=rate,
        clip_norm=session.run.train.clip_norm,
        recorder=recorder,
        stop_flag=lambda: stop.flag,
    )
    recorder.end_step()
    session.step = step
    host = {"lr": rate, "data_wait_seconds": loader.wait_seconds}
    for record in figures.push(step, result, host):
        _report(session, accounting, record)


def _read(session: Session, figures: FigureReader, accounting: Accounting) -> None:
    """Catch up with the device, so that every launched step is reported."""
    session.recorder.wait()
    for record in figures.drain():
        _report(session, accounting, record)


def _report(session: Session, accounting: Accounting, record: dict) -> None:
    session.tokens = record["tokens"]
    accounting.step({**record, "phases": session.recorder.step_times(record["step"])})
    check_finite(record)


def _validate(session: Session, reporter: Reporter) -> Evaluation | None:
    if session.held_out is None:
        return None
    with session.recorder.span("validate"):
        result = evaluate(
            session.engine,
            session.held_out,
            mesh=session.mesh,
            micro_batch=session.plan.batch.micro_batch,
            device=session.world.device,
        )
    reporter.validation(session.step, result)
    return result


def _save(session: Session, reporter: Reporter) -> None:
    """Write a checkpoint of the current step, unless the step is there already; then keep the newest ones only."""
    started = time.perf_counter()
    texts = {name: (session.folder / name).read_text(encoding="utf-8") for name in ("config.yaml", "plan.yaml")}
    state = run_state(session.step, session.run.train.global_batch, session.tokens, session.data.record())
    with session.recorder.span("checkpoint"):
        saved = session.store.save(session.step, run_tensors(session.engine, session.optimizer), state, texts)
        session.store.retain(session.run.checkpoint.keep)
    if saved.written:
        seconds = time.perf_counter() - started
        text = f"checkpoint {saved.path.name}: {saved.bytes / 1e6:,.0f} MB in {seconds:.1f} s"
        reporter.checkpoint(session.step, saved.path, text)


def _stop(session: Session, figures: FigureReader, reporter: Reporter) -> None:
    checkpoint, where = session.run.checkpoint, f"after step {session.step}"
    if checkpoint.every or checkpoint.at_end:
        _save(session, reporter)
        where += "; run it again (without --fresh) to continue from its checkpoint"
    else:
        where += ", without a checkpoint, as checkpoint.every is 0 and checkpoint.at_end is false"
    if figures.stop_flag >= INTERRUPT:
        raise Interrupted(f"interrupted {where}")
    raise Preempted(f"preempted {where}")
