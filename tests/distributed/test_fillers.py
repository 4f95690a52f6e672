"""Tokens that only fill a sequence do not count for routers: steps equal those of the same sequences cut before them.

The oracle is a plain decoder on one device in float64 that sees each sequence without its fillers. Losses, loads and biases follow from
the outputs of its routers by the papers' formulas.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from meshwright.events.span import NullRecorder
from meshwright.models.decoder import Decoder
from meshwright.models.initial_values import initialise
from meshwright.parallel.world import World
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan
from tests.distributed.pool import Pool
from tests.distributed.test_equality import BATCH, SEQ, TRAIN, assemble_whole, batch, compare
from tests.distributed.test_experts import SHARED
from tests.distributed.test_hybrid import collect_router_logits
from tests.distributed.test_schedules import Case
from tests.slow import quick_first

REAL = (12, 5, 9, 1, 12, 7, 3, 10)
"""Tokens of each sequence before its fillers."""
FILLER = 3
BIAS_STEP = 0.05
WEIGHTS = {"balance_loss": 0.3, "z_loss": 0.02, "router_z_loss": 0.03}
SPECS = {"softmax": SHARED, **{router: replace(SHARED, router=router) for router in ("sigmoid", "biased_softmax")}}
CASES = [
    Case("1f1b", shard=2, expert=2, tensor=2, micro=2),
    Case("1f1b", ring=2, ulysses=2, expert=2, recompute="full", micro=2),
    Case("zbv", pipeline=2, shard=2, recompute="selective"),
    Case("1f1b", replicate=2, shard=2, micro=2),
    Case("paired", shard=2, expert=2),
    Case("1f1b", shard=2, expert=2, compile=True, recompute="selective"),
]


def windows(masked: bool) -> list[Tensor | None]:
    """Tokens, targets, positions, documents and whether each token is real, `(BATCH, SEQ)`."""
    tokens, targets, positions, documents = batch(0, SHARED)
    real = torch.arange(SEQ) < torch.tensor(REAL)[:, None]
    targets[3, 0] = 7  # the only one of its sequence
    tokens, targets = tokens.where(real, FILLER), targets.where(real, -1)
    if not masked:
        return [tokens, targets, None, None, real]
    fill_positions = torch.arange(SEQ) - torch.tensor(REAL)[:, None]
    return [tokens, targets, positions.where(real, fill_positions), documents.where(real, SEQ), real]


@cache
def one_device(spec: ModelSpec, masked: bool, steps: int = 2) -> list[dict[str, Any]]:
    """Results of steps that change no weight but the biases; every sequence is cut before its fillers."""
    model = Decoder(spec, reference=True).double()
    initialise(model, spec, seed=0)
    router_logits, results = collect_router_logits(model), []
    for _ in range(steps):
        model.zero_grad()
        logits, targets = [], []
        for sequence, length in enumerate(REAL):
            tokens, target, positions, documents, _ = (
                None if whole is None else whole[sequence : sequence + 1, :length] for whole in windows(masked)
            )
            logits.append(model(tokens, positions=positions, documents=documents)[0])
            targets.append(target[0])
        every, trained = torch.cat(logits), torch.cat(targets) >= 0
        loss = cross_entropy(every[trained], torch.cat(targets)[trained])
        z_loss = every[trained].exp().sum(-1).log().square().mean()
        router_loss, sums = torch.zeros(()), torch.zeros(spec.layers, 2 + spec.experts, dtype=torch.float64)
        for layer, outputs in router_logits.items():
            bias = model.layers[str(layer)].moe.choice_bias
            squares = torch.cat(outputs, dim=1).exp().sum(-1).log().square().sum()
            balances, loads = zip(*(balance(output[0], spec, bias) for output in outputs), strict=True)
            sums[layer] = torch.cat([torch.stack([sum(balances), squares]).detach(), sum(loads)])
            router_loss += WEIGHTS["balance_loss"] * sum(balances) / sum(REAL)
            router_loss += WEIGHTS["router_z_loss"] * squares / sum(REAL)
            if bias is not None:
                bias += BIAS_STEP * (sums[layer, 2:].mean() - sums[layer, 2:]).sign()
            outputs.clear()
        (loss + WEIGHTS["z_loss"] * z_loss + router_loss).backward()
        gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.requires_grad}
        norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
        figures = {"loss": loss.item(), "z_loss": z_loss.item(), "norm": norm.item(), "gradients": gradients}
        results.append({**figures, "sums": sums, "biases": biases_of(model)})
    return results


def balance(logits: Tensor, spec: ModelSpec, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """A sequence's balance loss times its tokens, and how often it chose each expert; logits `(seq, experts)`."""
    if bias is None:
        scores = probabilities = logits.softmax(-1)
    else:
        scores = logits.sigmoid() + bias
        probabilities = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    chosen = scores.topk(spec.experts_per_token).indices.flatten().bincount(minlength=spec.experts).double()
    return spec.experts * (chosen / chosen.sum() * probabilities.sum(0)).sum(), chosen


def biases_of(model: Decoder) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if name.endswith("choice_bias")}


def on_ranks(world: World, spec: ModelSpec, plan: Plan, masked: bool) -> list[dict[str, Any]]:
    from meshwright.data.loader import MicroBatch
    from meshwright.optim.optimizer import Optimizer
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh
    from meshwright.training.train_step import train_step

    mesh = build_mesh(plan, world)
    bias_step = BIAS_STEP if spec.router != "softmax" else 0.0
    engine = build_engine(spec, plan, mesh, loss_chunk=5, seed=0, reference=True, balance_bias=bias_step, **WEIGHTS)
    optimizer, share = Optimizer(engine.model, spec, TRAIN, engine.weights), BATCH // mesh.data_ranks
    batches = []
    for first in range(mesh.data_rank * share, (mesh.data_rank + 1) * share, plan.batch.micro_batch):
        own = slice(first, first + plan.batch.micro_batch)
        tokens, targets, positions, documents, real = (None if w is None else w[own] for w in windows(masked))
        valid = int((targets >= 0).sum())
        batches.append(MicroBatch(tokens, targets, positions, documents, valid, real=real))
    results: list[dict[str, Any]] = []

    def keep_gradients() -> None:
        gradients = {name: weight.grad for name, weight in engine.model.named_parameters() if weight.requires_grad}
        results.append({"gradients": assemble_whole(gradients, spec, mesh)})

    for step in range(2):
        figures = train_step(
            engine,
            optimizer,
            mesh,
            batches,
            learning_rate=0.0,
            clip_norm=None,
            recorder=NullRecorder(),
            before_update=keep_gradients,
        )
        assert engine.executor.rank_model.routing is not None and figures.loads is not None
        values = figures.values.tolist()
        results[step] |= {"loss": values[0], "norm": values[1], "z_loss": values[-1], "weights": {}, "figures": values}
        results[step] |= {"sums": engine.executor.rank_model.routing.sums.clone(), "biases": biases_of(engine.model)}
    return results


@pytest.mark.parametrize("case", quick_first(1, CASES), ids=str)
@pytest.mark.parametrize("router", [pytest.param("softmax", marks=pytest.mark.slow), "sigmoid"])
@pytest.mark.parametrize("masked", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["mask", "no mask"])
def test_routers_do_not_count_fillers(pool: Pool, router: str, masked: bool, case: Case) -> None:
    spec = SPECS[router]
    truth, results = one_device(spec, masked), pool.run(on_ranks, case.plan.ranks, spec, case.plan, masked)
    compare(results, truth, 1e-9, weights=False)
    routed = spec.layers - spec.first_dense_layers
    for steps in results:
        for actual, want in zip(steps, truth, strict=True):
            torch.testing.assert_close(actual["sums"], want["sums"])
            balance_loss, _, squares = actual["figures"][-4:-1]
            assert balance_loss == pytest.approx(float(want["sums"][:, 0].sum()) / routed / sum(REAL))
            assert squares == pytest.approx(float(want["sums"][:, 1].sum()) / routed / sum(REAL))
            for name, bias in actual["biases"].items():
                torch.testing.assert_close(bias.double(), want["biases"][name])
    assert router == "softmax" or any(bias.any() for bias in truth[0]["biases"].values())
