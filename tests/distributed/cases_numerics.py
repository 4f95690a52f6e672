"""Cases of numerical policies: runs in which one step of one rank computes with a poisoned weight."""

from __future__ import annotations

import math
from contextlib import closing
from typing import Any
from unittest.mock import patch

import torch

from meshwright.parallel.world import World
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.run import Assignment
from meshwright.training import train_step
from meshwright.training.loop import train
from meshwright.training.session import open_session
from meshwright.training.stop import StopRequest
from tests.distributed.cases_training import Watching, _part

WEIGHT = "layers.1.mlp.down.weight"


def run_with_nan(
    world: World,
    assignment: Assignment,
    *,
    nan_at: tuple[int, ...] = (),
    value: float = math.nan,
    name: str = WEIGHT,
    times: int = 1,
    is_permanent: bool = False,
    skip_at: int = 0,
    stop_at: int = 0,
    reduced: bool = False,
) -> tuple[str, list[tuple[int, float]], dict[str, torch.Tensor], list[str]]:
    """(error, (step, loss) of all records, this rank's state, events) of a run.

    In the first `times` passes of each step of `nan_at`, the last rank has one element `value` in the weight `name`; after it the right
    one, unless `stays`.
    With `reduced` it is an element of its gradients instead, after their sum over replicas.
    `skip_at` names a step whose update is skipped for no reason, `stop_at` one after which the run ends with a checkpoint.
    """
    session = open_session(assignment, world)
    stop, times_left = StopRequest(), dict.fromkeys(nan_at, times)
    play, limit = session.engine.executor.play, session.numerics.norm_limit

    def play_with_nan(*arguments: Any) -> torch.Tensor:
        step = session.step + 1
        if step == stop_at:
            stop.flag = 1 << 22
        if reduced or times_left.get(step, 0) == 0 or world.rank != world.ranks - 1:
            return play(*arguments)
        times_left[step] -= 1
        weight = _part(session.engine.model.get_parameter(name)).view(-1)
        with torch.no_grad():
            saved_weight = weight[0].clone()
            weight[0] = value
            loss = play(*arguments)
            if not is_permanent:
                weight[0] = saved_weight
        return loss

    norm_of = train_step.gradient_norm

    def norm_with_nan(gradients: list[torch.Tensor], *arguments: Any) -> torch.Tensor:
        step = session.step + 1
        if reduced and times_left.get(step, 0) and world.rank == world.ranks - 1:
            times_left[step] -= 1
            gradients[-1].view(-1)[0] = value
        return norm_of(gradients, *arguments)

    session.engine.executor.play = play_with_nan
    session.numerics.norm_limit = lambda step: -1.0 if step == skip_at else limit(step)
    error = ""
    with closing(_Noting(session)) as reporter, patch.object(train_step, "gradient_norm", norm_with_nan):
        try:
            train(session, reporter, stop)
        except MeshwrightError as raised:
            error = f"{type(raised).__name__}: {raised}"
    state = {name: parts.read().clone() for name, parts in session.state().items()}
    return error, [(record["step"], record["loss"]) for record in reporter.steps], state, reporter.events


class _Noting(Watching):
    """Keeps events too."""

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self.events: list[str] = []

    def event(self, step: int, text: str) -> None:
        super().event(step, text)
        self.events.append(text)
