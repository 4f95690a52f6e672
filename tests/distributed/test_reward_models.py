"""A reward model's loss and every gradient equal one device on every axis in float64, with all weights and with adapters.

The oracle is a plain decoder on one device, the matmul of its last hidden states with the score's weight, and autograd.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

from meshwright.data.loader import MicroBatch
from meshwright.events.span import NullRecorder
from meshwright.models.decoder import Decoder
from meshwright.models.initial_values import initialise
from meshwright.parallel.world import World
from meshwright.preferences.objective import PreferenceObjective
from meshwright.spec.model import SCORE, ModelSpec
from meshwright.spec.plan import Plan
from meshwright.spec.preference import PreferenceSpec
from tests.adapted import adapter_of
from tests.distributed.pool import Pool
from tests.distributed.test_equality import BATCH, GPT, LLAMA, TRAIN, assemble_whole, trained_weights, worst
from tests.distributed.test_experts import SHARED
from tests.distributed.test_objectives import Columns, columns
from tests.distributed.test_schedules import Case, named
from tests.slow import quick_first

PREFERENCE = PreferenceSpec(loss="reward", center=0.1, score_margin=0.25, label_smoothing=0.1)
DENSE = replace(LLAMA, layers=4, head="score")
LEARNED = replace(GPT, heads=4, kv_heads=4, head="score", tied=False)
ADAPTED = adapter_of(DENSE, rank=3, alpha=6.0)
EXPERTS = replace(SHARED, head="score")
CASES = [
    (ADAPTED, Case("1f1b", shard=2, tensor=2, micro=2)),
    (DENSE, Case("zbv", pipeline=2, ring=2, micro=2, recompute="selective")),
    (DENSE, Case("1f1b", replicate=2, ulysses=2, micro=2)),
    (DENSE, Case("1f1b", shard=4, micro=2, recompute="full")),
    (ADAPTED, Case("1f1b", pipeline=2, micro=4)),
    (ADAPTED, Case("1f1b", shard=2, micro=2)),
    (LEARNED, Case("1f1b", pipeline=2, tensor=2, micro=4)),
    (DENSE, Case("breadth_first", shard=2, replicate=2, micro=2)),
    (DENSE, Case("1f1b", micro=4)),
    (EXPERTS, Case("1f1b", shard=2, expert=2, micro=2)),
]


def given_scores(step: Columns) -> torch.Tensor:
    """Scores in the data of the answers `(BATCH, seq)`."""
    return torch.rand(step.signs.shape, generator=torch.Generator().manual_seed(9)).double()


@cache
def one_device(spec: ModelSpec) -> dict[str, Any]:
    model, step = Decoder(spec, reference=True).double(), columns(spec)
    initialise(model, spec, seed=0)
    hidden = model.hidden(step.tokens, step.positions, step.documents)
    scores, given, losses, right = (hidden @ model.get_parameter(SCORE)[0]), given_scores(step), [], 0.0
    for row, pair in (step.signs > 0).nonzero().tolist():
        chosen, rejected = (
            scores[row, (step.documents[row] == number).nonzero()[-1, 0]] for number in (pair, pair + 1)
        )
        margin = chosen - rejected - 0.25 * (given[row, pair] - given[row, pair + 1])
        losses.append(-0.9 * logsigmoid(margin) - 0.1 * logsigmoid(-margin) + 0.1 * (chosen + rejected) ** 2)
        right += float(chosen > rejected)
    assert len(losses) > 3
    loss = torch.stack(losses).mean()
    loss.backward()
    gradients = {name: weight.grad for name, weight in trained_weights(model)}
    return {"loss": loss.item(), "scores": scores.detach(), "gradients": gradients, "accuracy": right / len(losses)}


def micro_batches(spec: ModelSpec, plan: Plan, data_rank: int, data_ranks: int) -> list[MicroBatch]:
    share, size, step = BATCH // data_ranks, plan.batch.micro_batch, columns(spec)
    given, found = given_scores(step), []
    for first in range(data_rank * share, (data_rank + 1) * share, size):
        tokens, targets, positions, documents, _, _, signs, _ = (each[first : first + size] for each in step)
        more = {"signs": signs, "scores": given[first : first + size], "sources": torch.zeros(size, dtype=torch.long)}
        found.append(MicroBatch(tokens, targets, positions, documents, int((targets >= 0).sum()), columns=more))
    return found


def on_ranks(world: World, spec: ModelSpec, plan: Plan) -> dict[str, Any]:
    from meshwright.optim.optimizer import Optimizer
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh
    from meshwright.training.train_step import train_step

    mesh = build_mesh(plan, world)
    engine = build_engine(spec, plan, mesh, loss_chunk=5, seed=0, reference=plan.schedule.name != "breadth_first")
    optimizer = Optimizer(engine.model, spec, TRAIN, engine.weights)
    batches = micro_batches(spec, plan, mesh.data_rank, mesh.data_ranks)
    objective, results = PreferenceObjective(PREFERENCE, ["a"], torch.device("cpu")), dict[str, Any]()

    def keep() -> None:
        found = {name: weight.grad for name, weight in trained_weights(engine.model)}
        results["gradients"] = assemble_whole(found, spec, mesh)

    figures = train_step(
        engine,
        optimizer,
        mesh,
        batches,
        learning_rate=0.0,
        clip_norm=None,
        recorder=NullRecorder(),
        before_update=keep,
        objective=objective,
        take_sums=objective.take,
    )
    assert figures.sums is not None
    judged = objective.figures(figures.sums.tolist())
    values = engine.executor.log_probabilities(engine.evaluation_schedule(len(batches)), batches, NullRecorder())
    first = mesh.data_rank * (BATCH // mesh.data_ranks)
    scores = {first + number * len(value): value for number, value in values.items()}
    return results | {"loss": figures.values[0].item(), "accuracy": judged["accuracy"], "scores": scores}


@pytest.mark.parametrize(("spec", "case"), quick_first(4, CASES, unpack=True), ids=named)
def test_every_axis_equals_one_device(pool: Pool, spec: ModelSpec, case: Case) -> None:
    want, seen, sequences = one_device(spec), set(), set()
    for result in pool.run(on_ranks, case.plan.ranks, spec, case.plan):
        assert result["loss"] == pytest.approx(want["loss"], rel=1e-9)
        assert result["accuracy"] == pytest.approx(want["accuracy"])
        for name, gradient in result["gradients"].items():
            assert worst(gradient, want["gradients"][name]) < 1e-9, name
            seen.add(name)
        for first, values in result["scores"].items():
            torch.testing.assert_close(values, want["scores"][first : first + len(values)])
            sequences |= {*range(first, first + len(values))}
    assert seen == {*want["gradients"]} and SCORE in seen
    assert sequences == {*range(BATCH)}
