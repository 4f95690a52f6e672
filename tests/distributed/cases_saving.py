"""Functions that ranks run in the tests of saving: runs whose clock or disk changes during training."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from typing import Any
from unittest.mock import patch

import torch

from meshwright.observe.metrics import MetricsWriter
from meshwright.parallel.world import World
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.run import Assignment
from meshwright.training import saving
from meshwright.training.loop import train
from meshwright.training.reporting import Reporter
from meshwright.training.session import TrainingSession, open_session
from meshwright.training.stop import StopRequest


def full_for_metrics(session: TrainingSession) -> None:
    """The disk takes no more lines of metrics, as when it is full of something else and a checkpoint goes elsewhere."""

    def refuse(writer: MetricsWriter, record: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.jsonl")

    MetricsWriter._append = refuse


def full(session: TrainingSession) -> None:
    """The disk is full."""
    full_for_metrics(session)
    os.pwrite = _refuse


def _refuse(descriptor: int, data: Any, offset: int) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def deleted(session: TrainingSession) -> None:
    """Somebody deletes the run's folder, at once: a thread may just write a file there, which `rmtree` would stumble over."""
    aside = session.folder.with_name("deleted")
    session.folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def without_config(session: TrainingSession) -> None:
    """Somebody deletes the run's configuration and plan."""
    (session.folder / "config.yaml").unlink()
    (session.folder / "plan.yaml").unlink()


def disturbed(
    world: World, assignment: Assignment, step: int, happens: Callable[[TrainingSession], None]
) -> tuple[int, str, int, str]:
    """The run, in which something `happens` on rank 0 in the midst of a step: last step, and the error of this rank."""
    session = open_session(assignment, world)
    play = session.engine.executor.play

    def play_on(*arguments: Any) -> torch.Tensor:
        if session.step == step - 1 and world.leads:
            happens(session)
        return play(*arguments)

    session.engine.executor.play = play_on
    write, append = os.pwrite, MetricsWriter._append
    try:
        _train(session)
    except MeshwrightError as error:
        return session.step, type(error).__name__, error.exit_code, str(error)
    finally:
        os.pwrite, MetricsWriter._append = write, append
    return session.step, "nothing", 0, ""


def timed(world: World, assignment: Assignment, step_seconds: tuple[float, ...]) -> None:
    """The run by a clock on which each rank's steps take its `step_seconds`."""
    session = open_session(assignment, world)
    began = session.step
    with patch.object(saving.time, "monotonic", lambda: (session.step - began) * step_seconds[world.rank]):
        _train(session)


def _train(session: TrainingSession) -> None:
    path = session.folder / "metrics.jsonl"
    metrics = MetricsWriter(path, resume_from=session.step) if session.world.leads else None
    with closing(Reporter(metrics, None, None)) as reporter:
        train(session, reporter, StopRequest())
