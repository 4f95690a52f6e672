"""The work of a rank: join the job, train, leave it.

A locally launched rank calls `main` from `training.rank`; under torchrun and similar launchers `meshwright train` calls
`run_rank` itself.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from meshwright.durable.writes import write_durable
from meshwright.events.start import StartClock
from meshwright.observe.goodput import RunGoodput, run_goodput
from meshwright.parallel.world import World, join
from meshwright.spec.errors import Interrupted
from meshwright.spec.fields import to_plain
from meshwright.spec.rank_environment import RankEnvironment, stop_signals
from meshwright.spec.run import Assignment
from meshwright.training.cores import keep_to_own_cores
from meshwright.training.determinism import compute_deterministically
from meshwright.training.lifecycle import RankLife
from meshwright.training.loop import TrainingResult, train
from meshwright.training.reporting import Reporter
from meshwright.training.session import TrainingSession, open_session
from meshwright.training.stop import StopRequest


def main(life: RankLife, file: Path, clock: StartClock) -> NoReturn:
    """Run the locally launched rank of the assignment in `file`. `clock` has counted the phases of the start so far."""

    def work() -> None:
        assignment = Assignment.read(file)
        life.log_to(Path(assignment.folder))
        clock.end("plan")
        run = assignment.run
        world = join(life.environment, run.cluster, timeout_seconds=run.train.timeout_seconds)
        clock.end("join")
        run_rank(assignment, world, life, clock)
        world.leave()

    life.run(work)


def answer_as_rank(answer: Callable[[str, RankEnvironment], str]) -> NoReturn:
    """Run a locally launched rank that computes an answer; a stop signal interrupts it.

    The command's arguments are the file of the question and the file of the answer, which rank 0 writes.
    """
    question, destination = map(Path, sys.argv[1:])
    life = RankLife(RankEnvironment.from_environment(), StopRequest())
    for number in stop_signals():
        signal.signal(number, _interrupted)

    def work() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals())
        life.log_to(question.parent)
        text = answer(question.read_text(encoding="utf-8"), life.environment)
        if life.environment.rank == 0:
            write_durable(destination, text)

    life.run(work)


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise Interrupted("interrupted")


def run_rank(assignment: Assignment, world: World, life: RankLife, clock: StartClock) -> None:
    """Train on this rank of a joined job; rank 0 writes metrics, summary and report. `clock` has counted the phases of the start so far."""
    folder = life.stop.folder = Path(assignment.folder)
    if assignment.run.train.keep_cores:
        keep_to_own_cores(world)
    if assignment.run.train.deterministic:
        compute_deterministically()
    session = open_session(assignment, world, clock, life.progress.page.set_action)
    session.send_progress(life.progress)
    life.add_cleanup(lambda: life.progress.begin("end", session.step))
    reporter = Reporter.open(session, life.channel)
    if world.leads:
        life.add_cleanup(lambda: _write_report(folder))
    life.add_cleanup(reporter.close)
    life.stop.show = reporter.say
    if session.step >= session.run.train.steps:
        reporter.event(session.step, f"{folder} is finished: {session.step} of {session.run.train.steps} steps")
        return
    if session.step:
        reporter.event(session.step, f"resumed after step {session.step} from {session.resumed_from}")
    trained = train(session, reporter, life.stop)
    reporter.close()  # the wall time of the run ends here, in the summary as in the report
    if world.leads:
        _write_summary(session, trained, run_goodput(folder))


def _write_report(folder: Path) -> None:
    from meshwright.observe.report import write_report  # not before the first step

    write_report(folder)


def _write_summary(session: TrainingSession, trained: TrainingResult, time: RunGoodput | None) -> None:
    last = trained.validation
    summary: dict[str, Any] = {"steps": session.step, "tokens": session.tokens}
    if time is not None:
        summary |= {"wall_seconds": time.wall_seconds, "goodput": time.goodput}
    if last is not None and last.preferences:
        summary |= {
            "held_out_loss": last.loss,
            "held_out_tokens": last.tokens,
            "held_out_preferences": last.preferences,
        }
    elif last is not None and session.held_out is not None:
        summary |= {
            "held_out_loss": last.loss,
            "held_out_tokens": last.tokens,
            "perplexity": last.perplexity,
            "bits_per_byte": last.bits_per_byte,
            "unigram_entropy_nats": session.held_out.unigram_entropy(),
        }
    if trained.prediction_check is not None:
        summary["prediction_check"] = to_plain(trained.prediction_check)
    write_durable(session.folder / "summary.json", json.dumps(summary, indent=1))
