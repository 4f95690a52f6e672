"""Cases of silent corruption: runs in which a bit of one rank's state flips, at rest or as the result of an update."""

from __future__ import annotations

from contextlib import closing
from typing import Any
from unittest.mock import patch

import torch

from meshwright.parallel.world import World
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.run import Assignment
from meshwright.training.loop import train
from meshwright.training.saving import Saver
from meshwright.training.session import TrainingSession, open_session
from meshwright.training.state_digests import StateDigests
from meshwright.training.stop import StopRequest
from tests.distributed.cases_numerics import _Noting

Answer = tuple[str, list[tuple[int, float]], dict[str, torch.Tensor], list[str]]


def run_with_flip(
    world: World,
    assignment: Assignment,
    *,
    step: int = 0,
    rank: int = 1,
    name: str = "",
    bit: int = 27,
    at_rest: bool = True,
    saved: bool = False,
) -> Answer:
    """(error, (step, loss) of all records, this rank's state, events) of a run.

    In `step`, once, a bit of the first element of the state tensor `name` of `rank` flips: before the step if it `at_rest`, else in its
    update. With `saved` it flips between the check and the copy of the first save from `step` on.
    """
    session, flips_left = open_session(assignment, world), [world.rank == rank]
    play, update = session.engine.executor.play, session.optimizer.step

    def flip() -> None:
        if flips_left[0] and session.step + 1 == step:
            flips_left[0] = False
            as_words(session, name)[:1].bitwise_xor_(1 << bit)

    def play_with_flip(*arguments: Any) -> torch.Tensor:
        flip() if at_rest else None
        return play(*arguments)

    def update_with_flip(*arguments: Any) -> None:
        update(*arguments)
        flip() if not at_rest else None

    def save_with_flip(saver: Saver, after: int, **options: Any) -> bool:
        if saved and flips_left[0] and after >= step:
            flips_left[0] = False
            as_words(session, name)[:1].bitwise_xor_(1 << bit)
        return save(saver, after, **options)

    save = Saver.save
    if not saved:
        session.engine.executor.play, session.optimizer.step = play_with_flip, update_with_flip
    error = ""
    with patch.object(Saver, "save", save_with_flip), closing(_Noting(session)) as reporter:
        try:
            train(session, reporter, StopRequest())
        except MeshwrightError as raised:
            error = f"{type(raised).__name__}: {raised}"
    state = {name: parts.read().clone() for name, parts in session.state().items()}
    return error, [(record["step"], record["loss"]) for record in reporter.steps], state, reporter.events


def as_words(session: TrainingSession, name: str) -> torch.Tensor:
    """The elements of a state tensor as integers."""
    return session.state()[name].local.view(-1).view(torch.int32)


def differences(
    world: World, assignment: Assignment
) -> tuple[list[tuple[int, ...]], list[tuple[str, bool]], list[str]]:
    """(groups of ranks, (label, whether another rank has a copy) of this rank's pieces, pieces whose flip was not found).

    A bit of each piece of each rank flips, one after another.
    """
    session = open_session(assignment, world)
    state = StateDigests(list(session.state().values()), world)
    no_difference = torch.zeros(len(state.pieces), dtype=torch.bool)
    replicated = [group >= 0 for group in state.group_of_piece]
    labels = [(piece.label, shared) for piece, shared in zip(state.pieces, replicated, strict=True)]

    def check(changed: torch.Tensor) -> tuple[list[int], list[int]]:
        """Groups that differ, and ranks with changed pieces."""
        sums_by_rank = state.exchange(0, state.compute(), changed, compare=True).read_sums()
        return state.differing_groups(sums_by_rank), [rank for rank, sums in enumerate(sums_by_rank) if sums[-1][0]]

    assert check(no_difference) == ([], [])
    clean, missed = state.compute(), []
    for rank in range(world.ranks):
        differences_by_rank = [0] * world.ranks
        torch.distributed.all_gather_object(differences_by_rank, len(state.pieces))
        for index in range(differences_by_rank[rank]):
            content = (
                state.pieces[index].elements.view(-1).view(torch.int32)[-1:]
                if world.rank == rank
                else no_difference[:0]
            )
            content.bitwise_xor_(1 << 3) if world.rank == rank else None
            groups, changed = check((state.compute() != clean).any(dim=1))
            if world.rank != rank:
                continue
            expected = [state.group_of_piece[index]] if replicated[index] else []
            if groups != expected or changed != [rank]:
                missed.append(state.pieces[index].label)
            content.bitwise_xor_(1 << 3)
    assert check(no_difference) == ([], [])
    return state.groups, labels, missed
