"""Losses of reinforcement learning equal loops over tokens on one device, on every axis: loss and every gradient, in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.data.loader import MicroBatch, scheduled_micro_batches
from meshwright.data.slots import slots_to_run
from meshwright.events.span import NullRecorder
from meshwright.models.decoder import Decoder
from meshwright.models.initial_values import initialise
from meshwright.parallel.world import World
from meshwright.policies.sample_balance import RankPool, balance_samples
from meshwright.rl.objectives import Agreement, PolicyObjective
from meshwright.spec.hybrid import slot_numbering
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan
from meshwright.spec.rl import KlSpec, RewardSpec, RlSpec
from tests.distributed import test_hybrid as hybrid
from tests.distributed.pool import Pool
from tests.distributed.test_equality import ADAMW, BATCH, CLIP, TRAIN, assemble_whole, trained_weights, worst
from tests.distributed.test_objectives import CAPPED, CASES, columns
from tests.distributed.test_schedules import Case
from tests.slow import quick_first

RL = RlSpec(reward=RewardSpec(file="judge.py"), new_tokens=8)
POLICIES = {
    "grpo": replace(RL, kl=KlSpec(weight=0.2, estimator="k3")),
    "dapo": replace(RL, policy="dapo", correction="truncate", correction_most=1.2),
    "cispo": replace(RL, policy="cispo", clip_above=0.3, kl=KlSpec(weight=0.1, estimator="k2")),
    "rloo": replace(RL, policy="rloo", correction="mask", correction_least=0.8, correction_most=1.3),
    "dr_grpo": replace(RL, policy="dr_grpo", kl=KlSpec(weight=0.3, estimator="k1")),
}


def token_loss(rl: RlSpec, value: Tensor, sampled: float, advantage: float, reference: float) -> Tensor:
    """The loss of one token, as the formulas say."""
    engine = math.exp(value.item() - sampled)
    ratio = torch.exp(value - (value.item() if rl.correction != "none" else sampled))
    if rl.policy == "cispo":
        loss = -min(ratio.item(), 1.3) * advantage * value
    elif rl.policy == "rloo":
        loss = -ratio * advantage
    else:
        highest = 1.28 if rl.policy == "dapo" else 1.2
        within = 0.8 <= ratio.item() <= highest
        limited = ratio if within else torch.tensor(0.8 if ratio.item() < 0.8 else highest, dtype=torch.float64)
        loss = torch.maximum(-ratio * advantage, -limited * advantage)
    if rl.correction == "truncate":
        loss = loss * min(engine, rl.correction_most)
    elif rl.correction == "mask":
        loss = loss * (1.0 if rl.correction_least <= engine <= rl.correction_most else 0.0)
    d = value - reference
    penalty = {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[rl.kl.estimator]
    return loss + rl.kl.weight * penalty


@cache
def drawn(spec: ModelSpec) -> dict[str, Tensor]:
    """Columns `(BATCH, seq)` of the step beside its tokens; probabilities of the engine are near the model's own."""
    step, draw = columns(spec), torch.Generator().manual_seed(3)
    model = Decoder(spec, reference=True).double()
    initialise(model, spec, seed=0)
    with torch.no_grad():
        logits = model(step.tokens, positions=step.positions, documents=step.documents)
    values = logits.log_softmax(-1).gather(-1, step.targets.clamp_min(0)[..., None])[..., 0]
    noise, other, advantages = (torch.randn(values.shape, generator=draw, dtype=torch.float64) for _ in range(3))
    trained = step.targets >= 0
    counts = trained * torch.rand(values.shape, generator=draw, dtype=torch.float64)
    factors = torch.rand(values.shape, generator=draw, dtype=torch.float64)
    return {
        "values": values,
        "ones": torch.ones_like(values),
        "sampled": values + 0.3 * noise,
        "reference": values + 0.5 * other,
        "advantages": advantages * trained,
        "counts": counts,
        "factors": factors,
    }


@cache
def one_device(spec: ModelSpec, name: str) -> dict[str, Any]:
    model, step, other = Decoder(spec, reference=True).double(), columns(spec), drawn(spec)
    initialise(model, spec, seed=0)
    logits = model(step.tokens, positions=step.positions, documents=step.documents)
    values = logits.log_softmax(-1).gather(-1, step.targets.clamp_min(0)[..., None])[..., 0]
    losses = [
        token_loss(
            POLICIES[name], values[place], *(other[key][place].item() for key in ("sampled", "advantages", "reference"))
        )
        * other["factors"][place]
        for place in map(tuple, (step.targets >= 0).nonzero().tolist())
    ]
    loss = torch.stack(losses).sum() / other["counts"].sum()
    loss.backward()
    return {"loss": loss.item(), "gradients": {key: weight.grad for key, weight in trained_weights(model)}}


def micro_batches(spec: ModelSpec, plan: Plan, data_rank: int, data_ranks: int) -> list[MicroBatch]:
    share, size, step = BATCH // data_ranks, plan.batch.micro_batch, columns(spec)
    found = []
    for first in range(data_rank * share, (data_rank + 1) * share, size):
        rows = slice(first, first + size)
        tokens, targets, positions, documents = (each[rows] for each in step[:4])
        others = {key: column[rows] for key, column in drawn(spec).items()}
        valid = int((targets >= 0).sum())
        found.append(MicroBatch(tokens, targets, positions, documents, valid, columns=others))
    return found


def on_ranks(world: World, spec: ModelSpec, plan: Plan) -> dict[str, Any]:
    from meshwright.optim.optimizer import Optimizer
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh
    from meshwright.training.train_step import train_step

    mesh = build_mesh(plan, world)
    engine = build_engine(spec, plan, mesh, loss_chunk=5, seed=0, reference=True)
    optimizer = Optimizer(engine.model, spec, TRAIN, engine.weights)
    results: dict[str, Any] = {}
    for name, rl in POLICIES.items():

        def keep(name: str = name) -> None:
            results[name] = assemble_whole({n: w.grad for n, w in trained_weights(engine.model)}, spec, mesh)

        figures = train_step(
            engine,
            optimizer,
            mesh,
            micro_batches(spec, plan, mesh.data_rank, mesh.data_ranks),
            learning_rate=0.0,
            clip_norm=None,
            recorder=NullRecorder(),
            before_update=keep,
            objective=PolicyObjective(rl, Agreement(mesh.device)),
        )
        results[name] = {"gradients": results[name], "loss": figures.values[0].item()}
    return results


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_policy_equals_one_device_on_every_axis(pool: Pool, case: Case) -> None:
    spec = replace(CAPPED, layers=4) if case.pipeline > 1 else CAPPED
    ranks = pool.run(on_ranks, case.plan.ranks, spec, case.plan)
    for name in POLICIES:
        want, seen = one_device(spec, name), set()
        assert any(gradient.abs().max() > 0 for gradient in want["gradients"].values())
        for result in ranks:
            assert result[name]["loss"] == pytest.approx(want["loss"], rel=1e-9), name
            for key, gradient in result[name]["gradients"].items():
                assert worst(gradient, want["gradients"][key]) < 1e-9, (name, key)
                seen.add(key)
        assert seen == set(want["gradients"])


def columns_of_sample(spec: ModelSpec, samples: hybrid.Samples, sample: int) -> dict[str, Tensor]:
    """The columns `(length,)` of a sample of hybrid ranks; `values` are the model's own log-probabilities, with gradients."""
    model, draw = hybrid_model(spec), torch.Generator().manual_seed(100 + sample)
    tokens, targets = samples.read(sample, spec.vocab_size)
    logits = model(tokens[None])[0]
    values = logits.log_softmax(-1).gather(-1, targets.clamp_min(0)[:, None])[:, 0]
    noise, other, advantages = (torch.randn(len(tokens), generator=draw, dtype=torch.float64) for _ in range(3))
    counts, factors = (torch.rand(len(tokens), generator=draw, dtype=torch.float64) for _ in range(2))
    return {
        "values": values,
        "sampled": values.detach() + 0.3 * noise,
        "reference": values.detach() + 0.5 * other,
        "advantages": advantages * (targets >= 0),
        "counts": counts * (targets >= 0),
        "factors": factors,
    }


@cache
def hybrid_model(spec: ModelSpec) -> Decoder:
    model = Decoder(spec, reference=True).double()
    initialise(model, spec, seed=0)
    return model


def on_hybrid_ranks(world: World, spec: ModelSpec, plan: Plan, samples: hybrid.Samples) -> dict[str, Any]:
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh
    from meshwright.parallel.objective import StepObjective
    from meshwright.training.train_step import count_valid, loss_divisor

    mesh = build_mesh(plan, world)
    engine = build_engine(spec, plan, mesh, loss_chunk=5, seed=0, reference=True)
    pool = RankPool(mesh.data_ranks, samples.capacity, hybrid.TIME, 1, None, spec.kv_heads, None)
    batches = []
    for slot in slots_to_run(balance_samples(samples.lengths, pool), mesh.data_rank, slot_numbering(plan)):
        made = hybrid.micro_batch(slot, samples, spec.vocab_size)
        parts = [
            {
                name: each[inputs.start : inputs.stop]
                for name, each in columns_of_sample(spec, samples, part.sample).items()
            }
            for part in slot.parts
            for inputs in part.ranges
        ]
        padding = torch.zeros(slot.capacity - slot.tokens, dtype=torch.float64)
        columns = {
            name: torch.cat([*(part[name].detach() for part in parts), padding])[None]
            for name in ("sampled", "reference", "advantages", "counts", "factors")
        }
        batches.append(replace(made, columns=columns))
    schedule, results = engine.training_schedule(scheduled_micro_batches(batches)), {}
    for name, rl in POLICIES.items():
        objective = PolicyObjective(rl, Agreement(mesh.device))
        valid = count_valid(batches, mesh, objective)
        step = StepObjective(objective, valid[-1])
        loss = engine.executor.play(schedule, batches, NullRecorder(), loss_divisor(valid), objective=step)
        whole = assemble_whole({n: w.grad for n, w in trained_weights(engine.model)}, spec, mesh)
        results[name] = {"gradients": whole, "loss": mesh.sum_over_all(loss[None]).item()}
        for weight in engine.model.parameters():
            weight.grad = None
    return results


@pytest.mark.slow
def test_every_policy_equals_one_device_on_hybrid_ranks(pool: Pool) -> None:
    """Two ranks divide one of the samples."""
    spec, case = replace(hybrid.LLAMA64, logit_cap=2.0), hybrid.Case(2)
    samples = hybrid.Samples(1, case.ranks, case.capacity)
    assert samples.lengths.max() > case.capacity
    ranks = pool.run(on_hybrid_ranks, case.plan.ranks, spec, case.plan, samples)
    for name, rl in POLICIES.items():
        losses, divisor, model = [], 0.0, hybrid_model(spec)
        for sample in range(len(samples.lengths)):
            drawn_here = columns_of_sample(spec, samples, sample)
            divisor += drawn_here["counts"].sum().item()
            for place in (samples.read(sample, spec.vocab_size)[1] >= 0).nonzero()[:, 0].tolist():
                others = (drawn_here[key][place].item() for key in ("sampled", "advantages", "reference"))
                losses.append(token_loss(rl, drawn_here["values"][place], *others) * drawn_here["factors"][place])
        loss = torch.stack(losses).sum() / divisor
        weights = dict(trained_weights(model))
        gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
        seen = set()
        for result in ranks:
            assert result[name]["loss"] == pytest.approx(loss.item(), rel=1e-9), name
            for key, gradient in result[name]["gradients"].items():
                assert worst(gradient, gradients[key]) < 1e-9, (name, key)
                seen.add(key)
        assert seen == set(gradients) and any(gradient.abs().max() > 0 for gradient in gradients.values())


RATE, UPDATES = 1e-2, 3


@cache
def plain_updates(spec: ModelSpec) -> dict[str, Tensor]:
    """Weights after some updates by one batch: losses with fixed sampled probabilities, torch's own AdamW and clipping."""
    model, step, other = Decoder(spec, reference=True).double(), columns(spec), drawn(spec)
    initialise(model, spec, seed=0)
    decayed = [weight for _, weight in trained_weights(model) if weight.dim() > 1]
    others = [weight for _, weight in trained_weights(model) if weight.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": TRAIN.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(ADAMW.beta1, ADAMW.beta2), eps=ADAMW.epsilon)
    moved = []
    for _ in range(UPDATES):
        optimizer.zero_grad()
        logits = model(step.tokens, positions=step.positions, documents=step.documents)
        values = logits.log_softmax(-1).gather(-1, step.targets.clamp_min(0)[..., None])[..., 0]
        losses = [
            token_loss(
                CLIPPED,
                values[place],
                *(other[key][place].item() for key in ("values", "advantages", "reference")),
            )
            for place in map(tuple, (step.targets >= 0).nonzero().tolist())
        ]
        moved.append((values - other["values"])[step.targets >= 0].abs().max().item())
        (torch.stack(losses).sum() / other["counts"].sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    assert moved[0] < 1e-12 and min(moved[1:]) > math.log(1.2)  # off 1 after the first update, beyond the clip
    return {name: weight.detach().clone() for name, weight in trained_weights(model)}


CLIPPED = replace(RL, policy="grpo")


def updates_on_ranks(world: World, spec: ModelSpec, plan: Plan) -> dict[str, Tensor]:
    from meshwright.optim.optimizer import Optimizer
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh
    from meshwright.training.train_step import train_step

    mesh = build_mesh(plan, world)
    engine = build_engine(spec, plan, mesh, loss_chunk=5, seed=0, reference=True)
    optimizer = Optimizer(engine.model, spec, TRAIN, engine.weights)
    batches = [
        replace(each, columns={**each.columns, "sampled": each.columns["values"], "factors": each.columns["ones"]})
        for each in micro_batches(spec, plan, mesh.data_rank, mesh.data_ranks)
    ]
    for _ in range(UPDATES):
        train_step(
            engine,
            optimizer,
            mesh,
            batches,
            learning_rate=RATE,
            clip_norm=CLIP,
            recorder=NullRecorder(),
            objective=PolicyObjective(CLIPPED, Agreement(mesh.device)),
        )
    weights = {name: weight.detach() for name, weight in trained_weights(engine.model)}
    return assemble_whole(weights, spec, mesh)


@pytest.mark.parametrize("case", quick_first(1, CASES), ids=str)
def test_several_updates_of_one_batch_equal_one_device(pool: Pool, case: Case) -> None:
    spec = replace(CAPPED, layers=4) if case.pipeline > 1 else CAPPED
    results, want, seen = pool.run(updates_on_ranks, case.plan.ranks, spec, case.plan), plain_updates(spec), set()
    for result in results:
        for key, weight in result.items():
            assert worst(weight, want[key]) < 1e-8, key
            seen.add(key)
    assert seen == set(want)
