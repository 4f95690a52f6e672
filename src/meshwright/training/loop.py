"""The training loop: steps, validations and checkpoints in order, until the last step or a request to stop."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from meshwright.checkpoint.ranks import RankGroup
from meshwright.data.loader import Loader
from meshwright.observe.prediction_check import PredictionCheck
from meshwright.optim.schedule import learning_rate
from meshwright.parallel.objective import Objective
from meshwright.spec.errors import Interrupted, MeshwrightError, Preempted
from meshwright.training.evaluate import Evaluation, evaluate
from meshwright.training.numerics import Rollback
from meshwright.training.prediction_checks import PredictionChecks
from meshwright.training.preferences import PreferenceRun
from meshwright.training.reporting import Reporter
from meshwright.training.rollback import roll_back
from meshwright.training.saving import Saver
from meshwright.training.session import TrainingSession
from meshwright.training.state_check import StateCheck
from meshwright.training.step_record import StepFigureReader, sample_figures
from meshwright.training.stop import FAILED, INTERRUPT, StopRequest
from meshwright.training.timelines import StepTimelines
from meshwright.training.tracing import step_trace
from meshwright.training.train_step import train_step
from meshwright.training.waiting import DataWait
from meshwright.training.wire_count import WireCount, wire_count

log = logging.getLogger("meshwright")
MOST_ANSWERS = 100
"""At most this many steps of a run with `rl` have their answers recorded for people to read, in addition to the first step."""


@dataclass(frozen=True)
class TrainingResult:
    """Result of a run: its last validation, and the comparison with the prediction; each is None if there was none."""

    validation: Evaluation | None
    prediction_check: PredictionCheck | None


def train(session: TrainingSession, reporter: Reporter, stop: StopRequest) -> TrainingResult:
    """Run the session's remaining steps.

    On a request to stop, writes a checkpoint if the run has any, and raises Preempted or Interrupted. Raises NumericalFailure if a loss is
    not finite. If metrics cannot be written, writes a checkpoint if the disk has space for it, and raises the error that
    `as_meshwright_error` makes.
    """
    wire = wire_count(session)
    last = None
    session.start.end("report")
    timelines = StepTimelines(session, reporter)
    prediction_checks = PredictionChecks(session, reporter)
    saver = Saver.open(session, reporter)
    check = StateCheck.open(session, reporter, saver)
    _note_new_length(session, reporter)
    if session.preferences is not None:
        last = _begin_preferences(session, reporter, session.preferences)
    with session.recording():
        while session.step < session.run.train.steps:
            try:
                if check is not None:
                    check.begin()
                last = _train_steps(session, reporter, stop, saver, check, prediction_checks, timelines, wire)
            except Rollback as request:
                with reporter.pause("rollback", session):
                    roll_back(session, reporter, saver, request)
    with reporter.pause("save", session):
        saver.close()
    prediction_check = _prediction_check(
        session, reporter, [wire, prediction_checks.waiting], prediction_checks, timelines
    )
    RankGroup(session.world.control).run_on_all(f"ended after step {session.step}", reporter.check)
    return TrainingResult(last, prediction_check)


def _train_steps(
    session: TrainingSession,
    reporter: Reporter,
    stop: StopRequest,
    saver: Saver,
    check: StateCheck | None,
    prediction_checks: PredictionChecks,
    timelines: StepTimelines,
    wire: WireCount | None,
) -> Evaluation | None:
    """Run the remaining steps and return the last validation. Raises Rollback if the run has to return to a checkpoint."""
    run = session.run
    last = None
    preferences = session.preferences
    of_sums = None if preferences is None else preferences.objective.figures
    figures = StepFigureReader(run, session.plan, session.world.device, session.tokens, wire, of_sums)

    def flag() -> int:
        """This rank's flag, which is summed over all ranks at the end of the current step."""
        return (FAILED if reporter.failure else stop.flag) + saver.flag()

    with _loader(session) as loader, _planned_collections(run.train.gc_every), step_trace(session, reporter) as trace:
        for step in range(session.step + 1, run.train.steps + 1):
            _one_step(session, loader, figures, prediction_checks, saver, check, step, flag)
            trace.end_step(step)
            prediction_checks.end_step(step, timelines.summary)
            ends = step == run.train.steps
            validates = ends or _due(run.train.validate_every, step)
            saves = saver.due(step, figures.flags)
            pauses = timelines.writes_after(step) or validates or (saves and saver.blocks(step))
            waits = bool(pauses or figures.flags.stop)
            if waits:
                _read(session, figures, prediction_checks, saver, check)
            if check is not None:
                stops = bool(ends or figures.flags.stop)
                check.end_step(step, saves=saves or stops, waits=waits, stops=stops)
            if figures.flags.stop:
                _stop(session, figures.flags.stop, reporter, saver)
            if validates:
                session.progress.begin("validate", step)
                with reporter.pause("validation", session):
                    last = _validate(session, reporter)
            if saves:
                session.progress.begin("save", step)
                with reporter.pause("save", session):
                    saver.save(step)
            if _due(run.train.gc_every, step):
                gc.collect()
            timelines.end_step(step)
            if pauses:
                figures.pause()
            saver.report()
    return last


def _begin_preferences(session: TrainingSession, reporter: Reporter, preferences: PreferenceRun) -> Evaluation | None:
    """Report what the start has computed. If no step has run, also validate, because later figures are compared with the first ones."""
    if preferences.note is not None:
        reporter.event(session.step, preferences.note)
    if session.step:
        return None
    session.progress.begin("validate", session.step)
    with reporter.pause("validation", session):
        return _validate(session, reporter)


def _prediction_check(
    session: TrainingSession,
    reporter: Reporter,
    sums: Sequence[WireCount | DataWait | None],
    prediction_checks: PredictionChecks,
    timelines: StepTimelines,
) -> PredictionCheck | None:
    """Report the sums over the run, and the comparison with the prediction, which is returned. Collective."""
    for total in sums:
        line = total.line(session.world.control) if total is not None else None
        if line is not None:
            reporter.event(session.step, line)
    return prediction_checks.close(timelines.summary)


def _note_new_length(session: TrainingSession, reporter: Reporter) -> None:
    """If `train.steps` is larger than in the checkpoint, report how this changes the learning rate."""
    train = session.run.train
    before = session.steps_before
    if before is None or before == train.steps:
        return
    old, new = (learning_rate(replace(train, steps=steps), session.step) for steps in (before, train.steps))
    reporter.event(
        session.step,
        f"train.steps raised from {before:,} to {train.steps:,}: from here on the learning rate follows the longer schedule; "
        f"at step {session.step:,} it is {new:.3g} there and was {old:.3g}",
    )


def _due(every: int, step: int) -> bool:
    """Whether something that is done every `every` steps (0: never) is due after `step`."""
    return every > 0 and step % every == 0


@contextmanager
def _loader(session: TrainingSession) -> Iterator[Loader]:
    loader = Loader(
        session.step_reader(),
        start_sample=session.next_sample,
        skipped=session.numerics.skip_samples,
        device=session.world.device,
        # The answers of a step are sampled with the weights of the previous step, so they cannot be read ahead.
        **({} if session.rollouts is None else {"prefetch": 0}),
    )
    with loader:
        yield loader


@contextmanager
def _planned_collections(every: int) -> Iterator[None]:
    """Run Python's garbage collector after the same steps on all ranks, so that no rank waits for another rank's pause."""
    if every:
        gc.collect()
        gc.freeze()  # objects that exist now stay for the whole run, so later collections skip them
        gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


def _one_step(
    session: TrainingSession,
    loader: Loader,
    figures: StepFigureReader,
    prediction_checks: PredictionChecks,
    saver: Saver,
    check: StateCheck | None,
    step: int,
    flag: Callable[[], int],
) -> None:
    recorder = session.recorder
    rate = learning_rate(session.run.train, step)
    session.progress.begin("train" if figures.flags.step else "compile", step)
    recorder.begin_step(step)
    with recorder.span("data"):
        micro_batches = next(loader)
        read = loader.step
    assert read is not None
    recorder.tokens(read.tokens)
    if session.replay is not None:
        session.replay.begin_step(step)
    if session.decisions is not None:
        moved = session.decisions.begin_step(step)
        if moved and check is not None:
            check.skip_comparison()
    rollouts = session.rollouts
    preferences = session.preferences
    if preferences is not None:
        preferences.begin_step(micro_batches)
    with nullcontext() if rollouts is None else rollouts.tempered(session.engine.model.head):
        result = train_step(
            session.engine,
            session.optimizer,
            session.mesh,
            micro_batches,
            learning_rate=rate,
            clip_norm=session.run.train.clip_norm,
            norm_limit=session.numerics.norm_limit(step),
            recorder=recorder,
            stop_flag=flag,
            before_update=None if check is None else check.before_update,
            decisions=session.decisions,
            objective=_objective(session),
            updates=rollouts is None or not rollouts.empty,
            take_sums=None if preferences is None else preferences.objective.take,
        )
    recorder.end_step()
    session.end_step(step, read.samples)
    host: dict[str, Any] = {"lr": rate, "data_wait_seconds": loader.wait_seconds}
    host["epochs"] = {name: round(passes, 4) for name, passes in session.data.epochs(read.samples[1]).items()}
    if rollouts is not None:
        host |= rollouts.end_step()
        if step == 1 or _due(-(-session.run.train.steps // MOST_ANSWERS), step):
            prediction_checks.reporter.answers(step, rollouts.answers_to_read())
    if read.lengths is not None:
        host |= sample_figures(step, read.lengths, read.padding)
    for record in figures.push(step, result, host, read.lengths, len(range(*read.samples))):
        _report(session, prediction_checks, saver, check, record)


def _objective(session: TrainingSession) -> Objective | None:
    """The objective that replaces the cross-entropy of the tokens; None if the run has none."""
    of_run = session.preferences if session.rollouts is None else session.rollouts
    return None if of_run is None else of_run.objective


def _read(
    session: TrainingSession,
    figures: StepFigureReader,
    prediction_checks: PredictionChecks,
    saver: Saver,
    check: StateCheck | None,
) -> None:
    """Wait for the device and report every step that was launched."""
    session.recorder.wait()
    for record in figures.drain():
        _report(session, prediction_checks, saver, check, record)


def _report(
    session: TrainingSession, prediction_checks: PredictionChecks, saver: Saver, check: StateCheck | None, record: dict
) -> None:
    step = record["step"]
    numerics = session.numerics
    session.tokens = record["tokens"]
    prediction_checks.step({**record, "phases": session.phases(step)})
    if check is not None:
        check.read(step)
    skipped = numerics.check(record)
    if skipped is None:
        saver.read(record) if check is None else check.hold(record)
    else:
        prediction_checks.reporter.event(step, skipped)
        saver.skip(record)


def _validate(session: TrainingSession, reporter: Reporter) -> Evaluation | None:
    if session.held_out is None:
        return None
    if session.preferences is not None:
        with session.recorder.span("validate"):
            judged = session.preferences.evaluate()
        if judged is not None:
            reporter.validation(session.step, judged)
        return judged
    with session.recorder.span("validate"):
        result = evaluate(
            session.engine,
            session.held_out,
            mesh=session.mesh,
            micro_batch=session.plan.batch.micro_batch,
            device=session.world.device,
            plan=session.plan,
        )
    if not result.tokens:
        reporter.event(session.step, "no validation loss: the held-out samples have no token that is trained on")
        return None
    reporter.validation(session.step, result)
    return result


def _stop(session: TrainingSession, flag: int, reporter: Reporter, saver: Saver) -> None:
    """End the run after this step, on all ranks, with a checkpoint if the run writes checkpoints."""
    checkpoint = session.run.checkpoint
    where = f"after step {session.step}"
    session.progress.begin("save", session.step)
    if checkpoint.every or checkpoint.at_end:
        try:
            limit = checkpoint.grace_seconds if flag < INTERRUPT else None
            with reporter.pause("save", session):
                saved = saver.save(session.step, waits=True, limit=limit)
            if saved:
                where += f"; started again, the run {session.run.name} continues from its checkpoint"
            else:
                where += (
                    f"; its checkpoint is not complete after checkpoint.grace_seconds ({checkpoint.grace_seconds:g})"
                )
            saver.close()
        except MeshwrightError as error:
            if flag < FAILED:
                raise
            log.warning("no checkpoint: %s", error)
            where += ", without a checkpoint"
    else:
        where += ", without a checkpoint, as checkpoint.every is 0 and checkpoint.at_end is false"
    if flag >= FAILED:
        RankGroup(session.world.control).run_on_all(f"ended {where}", reporter.check)
    if flag >= INTERRUPT:
        raise Interrupted(f"interrupted {where}")
    raise Preempted(f"ended on request {where}")
