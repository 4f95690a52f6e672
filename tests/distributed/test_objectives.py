"""Weights of tokens, and losses of log-probabilities, equal one device on every axis: loss, gradients, divisor.

The oracle is a plain decoder in float64 on one device with all logits, and autograd through them. Weights are negative for some tokens, a
loss of pairs has the number of pairs as its divisor, and micro-batches have unequal numbers of trained tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from meshwright.data.loader import MicroBatch, scheduled_micro_batches
from meshwright.data.slots import slots_to_run
from meshwright.events.span import NullRecorder
from meshwright.models.decoder import Decoder
from meshwright.models.initial_values import initialise
from meshwright.models.prediction import further_tokens
from meshwright.parallel.objective import Objective
from meshwright.parallel.world import World
from meshwright.policies.sample_balance import RankPool, balance_samples
from meshwright.preferences.objective import PreferenceObjective
from meshwright.spec.errors import BadInput
from meshwright.spec.hybrid import slot_numbering
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan
from meshwright.spec.preference import PreferenceSpec
from tests.distributed import test_hybrid as hybrid
from tests.distributed.pool import Pool
from tests.distributed.test_equality import BATCH, LLAMA, TRAIN, assemble_whole, batch, trained_weights, worst
from tests.distributed.test_schedules import Case
from tests.slow import quick_first

CAPPED = replace(LLAMA, logit_cap=2.0)
Z_LOSS, BETA = 0.02, 0.3
CASES = [  # those of breadth_first with the head's own gradients instead of autograd's
    Case("1f1b", shard=2, tensor=2, micro=2),
    Case("zbv", pipeline=2, ring=2, micro=2, recompute="selective"),
    Case("1f1b", replicate=2, ulysses=2, micro=2),
    Case("1f1b", pipeline=2, tensor=2, micro=2),
    Case("1f1b", shard=2, ring=2, tensor=2, micro=2),
    Case("interleaved", pipeline=2, shard=2, micro=2),
    Case("breadth_first", shard=2, micro=4),
    Case("1f1b", shard=4, micro=2, recompute="full"),
]


class Mean:
    """The mean over trained tokens, which the loss without objective is too."""

    by_sequence = False

    def count(self, batch: MicroBatch) -> float:
        return batch.valid_tokens

    def loss(self, log_probabilities: Tensor, batch: MicroBatch) -> Tensor:
        return -log_probabilities.sum()


class Pairs:
    """A loss of two sequences each, as of preferences: their sums less those of a reference."""

    by_sequence = True

    def count(self, batch: MicroBatch) -> float:
        return len(batch.tokens) / 2

    def loss(self, log_probabilities: Tensor, batch: MicroBatch) -> Tensor:
        ratios = log_probabilities.sum(1) - batch.columns["reference"]
        return -logsigmoid(BETA * (ratios[::2] - ratios[1::2])).sum()


def preferences() -> PreferenceObjective:
    return PreferenceObjective(PreferenceSpec(beta=BETA, sft=0.1), ["a"], torch.device("cpu"))


OBJECTIVES: dict[str, Objective | None] = {
    "weights": None,
    "mean": Mean(),
    "pairs": Pairs(),
    "preferences": preferences(),
}


class Columns(NamedTuple):
    """All sequences of the step: `(BATCH, seq)`, the reference `(BATCH,)`; of the documents `(BATCH, seq)` signs and references.

    Documents 2k and 2k + 1 of a sequence are a pair where both have a target.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor
    weights: Tensor
    reference: Tensor
    signs: Tensor
    references: Tensor


def columns(spec: ModelSpec) -> Columns:
    drawn = batch(0, spec)
    draw = torch.Generator().manual_seed(5)
    weights = torch.randn(BATCH, spec.max_seq_len, generator=draw)
    reference, signs = 5 * torch.randn(BATCH, generator=draw).double(), torch.zeros(BATCH, spec.max_seq_len)
    targets, documents = drawn[1], drawn[3]
    for row in range(BATCH):
        trained = documents[row][targets[row] >= 0].tolist()
        for first in range(0, int(documents[row].max()), 2):
            if {first, first + 1} <= {*trained}:
                signs[row, first : first + 2] = torch.tensor([1.0, -1.0])
    references = 5 * torch.randn(signs.shape, generator=draw).double()
    return Columns(*drawn, weights.where(targets >= 0, 0), reference, signs, references)


@cache
def one_device(spec: ModelSpec, kind: str) -> dict[str, Any]:
    model, step = Decoder(spec, reference=True).double(), columns(spec)
    initialise(model, spec, seed=0)
    logits = model(step.tokens, positions=step.positions, documents=step.documents)
    trained, count = step.targets >= 0, int((step.targets >= 0).sum())
    values = logits.log_softmax(-1).gather(-1, step.targets.clamp_min(0)[..., None])[..., 0]
    values = values.masked_fill(~trained, 0)
    if kind == "preferences":
        losses = []
        for row, pair in (step.signs > 0).nonzero().tolist():
            chosen, rejected = (values[row][trained[row] & (step.documents[row] == each)] for each in (pair, pair + 1))
            references = step.references[row, pair : pair + 2]
            margin = BETA * (chosen.sum() - references[0] - rejected.sum() + references[1])
            losses.append(-logsigmoid(margin) - 0.1 * chosen.mean())
        assert len(losses) > 3
        loss = torch.stack(losses).mean()
    elif kind == "pairs":
        ratios = values.sum(1) - step.reference
        loss = -logsigmoid(BETA * (ratios[::2] - ratios[1::2])).mean()
    else:
        loss = -(values * (step.weights if kind == "weights" else 1)).sum() / count
    (loss + Z_LOSS * logits[trained].logsumexp(-1).square().mean()).backward()
    gradients = {name: weight.grad for name, weight in trained_weights(model)}
    return {"loss": loss.item(), "values": values.detach(), "gradients": gradients}


def micro_batches(spec: ModelSpec, plan: Plan, data_rank: int, data_ranks: int, kind: str) -> list[MicroBatch]:
    share, size = BATCH // data_ranks, plan.batch.micro_batch
    found = []
    for first in range(data_rank * share, (data_rank + 1) * share, size):
        tokens, targets, positions, documents, weights, reference, signs, references = (
            c[first : first + size] for c in columns(spec)
        )
        valid, given = int((targets >= 0).sum()), weights if kind == "weights" else None
        whole = {"reference": reference}
        if kind == "preferences":
            whole = {"reference": references, "signs": signs, "sources": torch.zeros(len(tokens), dtype=torch.long)}
        found.append(MicroBatch(tokens, targets, positions, documents, valid, weights=given, columns=whole))
    return found


def on_ranks(world: World, spec: ModelSpec, plan: Plan) -> dict[str, Any]:
    from meshwright.optim.optimizer import Optimizer
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh
    from meshwright.training.train_step import train_step

    mesh = build_mesh(plan, world)
    engine = build_engine(
        spec, plan, mesh, loss_chunk=5, seed=0, reference=plan.schedule.name != "breadth_first", z_loss=Z_LOSS
    )
    optimizer = Optimizer(engine.model, spec, TRAIN, engine.weights)
    results: dict[str, Any] = {}
    for kind, objective in OBJECTIVES.items():
        batches = micro_batches(spec, plan, mesh.data_rank, mesh.data_ranks, kind)

        def keep(kind: str = kind) -> None:
            results[kind] = assemble_whole({n: w.grad for n, w in trained_weights(engine.model)}, spec, mesh)

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
            take_sums=objective.take if isinstance(objective, PreferenceObjective) else None,
        )
        results[kind] = {"gradients": results[kind], "loss": figures.values[0].item()}
        if isinstance(objective, PreferenceObjective):
            assert figures.sums is not None
            results["pairs seen"] = objective.counts(figures.sums.tolist()).judged
    schedule = engine.evaluation_schedule(len(batches))
    values = engine.executor.log_probabilities(schedule, batches, NullRecorder())
    first = mesh.data_rank * (BATCH // mesh.data_ranks)
    return results | {"values": {first + number * len(value): value for number, value in values.items()}}


@pytest.mark.parametrize("case", quick_first(2, CASES), ids=str)
def test_every_axis_equals_one_device(pool: Pool, case: Case) -> None:
    spec = replace(CAPPED, layers=4) if case.pipeline > 1 else CAPPED
    ranks = pool.run(on_ranks, case.plan.ranks, spec, case.plan)
    for kind in OBJECTIVES:
        want, seen = one_device(spec, kind), set()
        for result in ranks:
            assert result[kind]["loss"] == pytest.approx(want["loss"], rel=1e-9), kind
            for name, gradient in result[kind]["gradients"].items():
                assert worst(gradient, want["gradients"][name]) < 1e-9, (kind, name)
                seen.add(name)
        assert seen == set(want["gradients"])
    sequences = set()
    for result in ranks:
        assert result["pairs seen"] == (columns(spec).signs > 0).sum()
        for first, values in result["values"].items():
            torch.testing.assert_close(values, want["values"][first : first + len(values)])
            sequences |= {*range(first, first + len(values))}
    assert sequences == {*range(BATCH)}


def slot_weights(sample: int, length: int) -> Tensor:
    """A weight for each input of a sample of hybrid ranks."""
    return torch.randn(length, generator=torch.Generator().manual_seed(sample))


def on_hybrid_ranks(world: World, spec: ModelSpec, plan: Plan, samples: hybrid.Samples) -> dict[str, Any]:
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh
    from meshwright.parallel.objective import StepObjective
    from meshwright.training.train_step import count_valid, loss_divisor

    mesh = build_mesh(plan, world)
    engine = build_engine(spec, plan, mesh, loss_chunk=5, seed=0, reference=True, z_loss=Z_LOSS)
    pool = RankPool(mesh.data_ranks, samples.capacity, hybrid.TIME, 1, None, spec.kv_heads, None)
    slots = slots_to_run(balance_samples(samples.lengths, pool), mesh.data_rank, slot_numbering(plan))
    batches = []
    for slot in slots:
        made = hybrid.micro_batch(slot, samples, spec.vocab_size)
        ranges = [(part, each) for part in slot.parts for each in part.ranges]
        weights = [slot_weights(part.sample, part.length)[each.start : each.stop] for part, each in ranges]
        padding = torch.zeros(slot.capacity - slot.tokens)
        batches.append(replace(made, weights=torch.cat([*weights, padding])[None].where(made.targets >= 0, 0)))
    valid = count_valid(batches, mesh, Mean())
    assert valid[-1] == valid[0]
    schedule = engine.training_schedule(scheduled_micro_batches(batches))
    results: dict[str, Any] = {}
    for kind, objective in {"weights": None, "mean": StepObjective(Mean(), valid[-1])}.items():
        given = batches if kind == "weights" else [replace(each, weights=None) for each in batches]
        loss = engine.executor.play(schedule, given, NullRecorder(), loss_divisor(valid), objective=objective)
        whole = assemble_whole({n: w.grad for n, w in trained_weights(engine.model)}, spec, mesh)
        results[kind] = {"gradients": whole, "loss": mesh.sum_over_all(loss[None]).item()}
        for weight in engine.model.parameters():
            weight.grad = None
    refused = StepObjective(Pairs(), valid[-1])
    with pytest.raises(BadInput, match=r"plan.hybrid: expected no hybrid ranks with a loss of whole sequences"):
        engine.executor.play(schedule, batches, NullRecorder(), loss_divisor(valid), objective=refused)
    return results


def test_hybrid_ranks_equal_one_device(pool: Pool) -> None:
    spec, case = replace(hybrid.LLAMA64, logit_cap=2.0), hybrid.Case(2)
    samples = hybrid.Samples(1, case.ranks, case.capacity)
    assert samples.lengths.max() > case.capacity  # one sample is divided
    ranks = pool.run(on_hybrid_ranks, case.plan.ranks, spec, case.plan, samples)
    for kind in ("weights", "mean"):
        model = Decoder(spec, reference=True).double()
        initialise(model, spec, seed=0)
        sums, z_sums, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), 0
        for sample in range(len(samples.lengths)):
            tokens, targets = samples.read(sample, spec.vocab_size)
            logits, trained = model(tokens[None])[0], targets >= 0
            values = logits.log_softmax(-1).gather(-1, targets.clamp_min(0)[:, None])[:, 0]
            weights = slot_weights(sample, len(tokens)) if kind == "weights" else torch.ones(len(tokens))
            sums = sums - (values * weights)[trained].sum()
            z_sums = z_sums + logits[trained].logsumexp(-1).square().sum()
            count += int(trained.sum())
        (sums / count + Z_LOSS * z_sums / count).backward()
        for result in ranks:
            assert result[kind]["loss"] == pytest.approx(sums.item() / count, rel=1e-9)
            for name, weight in trained_weights(model):
                if name in result[kind]["gradients"]:
                    assert worst(result[kind]["gradients"][name], weight.grad) < 1e-9, (kind, name)


def test_weights_of_further_tokens() -> None:
    """Weights of 0 and 1 are what targets of -1 are, for prediction modules too; others multiply the tokens' losses."""
    spec = replace(LLAMA, prediction_depth=2)
    model, step = Decoder(spec, reference=True).double(), columns(spec)
    initialise(model, spec, seed=0)
    packed = {"positions": step.positions, "documents": step.documents}
    kept = torch.rand(step.targets.shape, generator=torch.Generator().manual_seed(1)) < 0.6
    masked = model.losses(step.tokens, step.targets.where(kept, -1), **packed)
    weighted = model.losses(step.tokens, step.targets, weights=kept.double(), **packed)
    torch.testing.assert_close(weighted, masked)
    halved = model.losses(step.tokens, step.targets, weights=kept.double() / 2, **packed)
    torch.testing.assert_close(2 * halved.further, masked.further)
    torch.testing.assert_close(2 * halved.tokens, masked.tokens)
    further = further_tokens(step.tokens, step.targets, None, 2, step.weights)
    assert further.weights is not None and further.weights[0, 3].tolist() == step.weights[0, 4:6].tolist()


def test_weights_of_1_have_the_bits_of_none() -> None:
    """In fp32 and on the fast path of the CPU: sums and gradients."""
    from meshwright.kernels.loss import linear_cross_entropy

    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 16, generator=draw).requires_grad_()
    targets = torch.randint(-1, 40, (30,), generator=draw)
    hidden = torch.randn(30, 16, generator=draw).requires_grad_()
    results = []
    for weights in (None, torch.ones(30)):
        sums = linear_cross_entropy(hidden, weight, targets, 7, weights=weights, z_loss=0.01)
        results.append([sums.loss, sums.squares, *torch.autograd.grad(sums.loss, (hidden, weight))])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
