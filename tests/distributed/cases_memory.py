"""Cases of the memory tier: ranks train with arenas that outlive them, and start again in the same process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from meshwright.checkpoint.arena import ARENA, Arena, empty_memory
from meshwright.checkpoint.ranks import Ranks
from meshwright.observe.metrics import MetricsWriter
from meshwright.parallel.world import World
from meshwright.spec.run import Assignment
from meshwright.training.loop import train
from meshwright.training.reporting import Reporter
from meshwright.training.session import Session, open_session
from meshwright.training.stop import StopRequest

Change = Callable[[World, Session], None]


def nothing(world: World, session: Session) -> None:
    """The arenas stay as they are."""


def delete_checkpoints(world: World, session: Session) -> None:
    """Storage has no checkpoint."""
    if world.leads:
        shutil.rmtree(session.folder / "checkpoints")
        (session.folder / "checkpoints").mkdir()


def corrupt_byte(world: World, session: Session) -> None:
    """One byte of the last rank's arena changes."""
    if world.rank == world.ranks - 1:
        arena = _arena()
        arena.data[arena.size // 2] ^= 4


def corrupt_record(world: World, session: Session) -> None:
    """One byte of the last rank's record changes."""
    if world.rank == world.ranks - 1:
        arena = _arena()
        offset = os.fstat(arena.descriptor).st_size - 9
        os.pwrite(arena.descriptor, bytes([os.pread(arena.descriptor, 1, offset)[0] ^ 1]), offset)


def begin_next_snapshot(world: World, session: Session) -> None:
    """One rank has begun to copy the next snapshot."""
    if world.rank == 0:
        _arena().begin_snapshot()


def lose_arena(world: World, session: Session) -> None:
    """The last rank's host was replaced."""
    if world.rank == world.ranks - 1:
        os.environ[ARENA] = f"/proc/self/fd/{empty_memory()}"


def corrupt_and_delete(world: World, session: Session) -> None:
    corrupt_byte(world, session)
    delete_checkpoints(world, session)


def _arena() -> Arena:
    arena = Arena.of_last_process()
    assert arena is not None
    return arena


def restarted(world: World, assignment: Assignment, change: Change, at_most: int | None = None) -> tuple[Any, ...]:
    """(tier, step, equal) of a start after a run and a `change`.

    `equal` tells whether all state has the trained bits, or at step 0 the initial ones.
    """
    with mock.patch.dict(os.environ, {ARENA: f"/proc/self/fd/{empty_memory()}"}):
        session = open_session(assignment, world)
        initial = {name: parts.local.clone() for name, parts in session.state().items()}
        _train(session)
        trained = {name: parts.local.clone() for name, parts in session.state().items()}
        ranks = Ranks(world.control)
        ranks.run_on_all("training", lambda: None)
        change(world, session)
        ranks.run_on_all("changing", lambda: None)
        session = open_session(_resume_assignment(assignment, at_most), world)
        expected = trained if session.step else initial
        equal = all(torch.equal(parts.local, expected[name]) for name, parts in session.state().items())
        return session.resumed_from, session.step, equal


def _resume_assignment(assignment: Assignment, at_most: int | None) -> Assignment:
    return replace(assignment, resume_at_most=at_most, attempt=2)


def resumed_losses(world: World, assignment: Assignment) -> list[tuple[Any, ...]]:
    """(tier, step) of a second start in the same arenas, after which it trains to its end and saves there."""
    with mock.patch.dict(os.environ, {ARENA: f"/proc/self/fd/{empty_memory()}"}):
        shorter_run = replace(assignment, run=replace(assignment.run, train=replace(assignment.run.train, steps=4)))
        _train(open_session(shorter_run, world))
        Ranks(world.control).run_on_all("training", lambda: None)
        session = open_session(_resume_assignment(assignment, None), world)
        begins = session.resumed_from, session.step
        _train(session)
        Ranks(world.control).run_on_all("training", lambda: None)
        session = open_session(_resume_assignment(assignment, None), world)
        return [begins, (session.resumed_from, session.step)]


def _train(session: Session) -> None:
    path = session.folder / "metrics.jsonl"
    metrics = MetricsWriter(path, resume_from=session.step) if session.world.leads else None
    with closing(Reporter(metrics, None, None)) as reporter:
        train(session, reporter, StopRequest())
