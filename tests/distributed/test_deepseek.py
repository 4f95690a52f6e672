"""DeepSeek's models equal one device under every plan: latent attention, groups of experts, biases of the choice.

The oracle is a plain decoder with torch's AdamW, and the published rule of the biases. A rank's gradients and updated weights are compared
with the same boxes of the whole ones.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.events.span import NullRecorder
from meshwright.models.decoder import Decoder
from meshwright.models.initial_values import initial_values
from meshwright.models.moe import MoELayer
from meshwright.spec.model import ModelSpec, YarnScaling, parameters
from meshwright.spec.plan import BatchPlan, ExpertPlan, MeshAxis, Plan, Precision
from tests.distributed.drawn import SEQ, draw_case
from tests.distributed.pool import Pool
from tests.distributed.test_equality import ADAMW, BATCH, CLIP, LLAMA, RATE, TRAIN, batch
from tests.slow import quick_first

STEPS, BIAS_STEP, PREDICTION_LOSS = 2, 0.05, 0.4
FLOAT64 = Precision(compute="fp64", reduce="fp64")
V3 = replace(
    LLAMA,
    family="deepseek_v3",
    layers=5,
    kv_heads=4,
    head_dim=6,
    max_seq_len=SEQ,
    kv_rank=5,
    q_rank=7,
    rope_head_dim=4,
    value_head_dim=3,
    experts=8,
    experts_per_token=3,
    expert_hidden=6,
    shared_expert_hidden=4,
    first_dense_layers=1,
    router="sigmoid",
    expert_groups=4,
    groups_per_token=2,
    routing_scale=2.5,
    yarn=YarnScaling(factor=4.0, original_max_seq_len=8, mscale_all_dim=0.5),
)
V2 = replace(
    V3,
    family="deepseek_v2",
    router="softmax",
    layers=8,
    q_rank=0,
    normalised_routing=False,
    tied=True,
    value_head_dim=6,
    yarn=None,
)
EXPERTS_OVER_2, TENSOR_2 = (
    Plan(
        mesh=tuple(MeshAxis(axis=axis, size=size) for axis, size in axes),
        batch=BatchPlan(global_batch=BATCH, micro_batch=4, accumulate=accumulate),
        experts=experts,
        precision=FLOAT64,
        compile=False,
    )
    for axes, accumulate, experts in (
        ([("shard", 2)], 1, ExpertPlan(expert=2, expert_shard=1)),
        ([("shard", 1), ("tensor", 2)], 2, None),
    )
)
SEEDS = [18, 14, 27, 26, 30, 38, 20, 19, 17, 9, 3, 11]


@cache
def one_device(spec: ModelSpec, masked: bool) -> list[dict[str, Any]]:
    """Loss, gradient norm, gradients before they are clipped, and updated weights of each step."""
    model = Decoder(spec, reference=True).double()
    specs = {parameter.name: parameter for parameter in parameters(spec)}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(initial_values(0, specs[name], 0, weight.numel(), "cpu").view(weight.shape))
    moe_layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    loads: dict[MoELayer, torch.Tensor] = {}
    for moe in moe_layers:
        moe.register_forward_hook(lambda module, _, routed: loads.__setitem__(module, routed.load.double()))
    trained = {name: weight for name, weight in model.named_parameters() if specs[name].trained}
    decays = {True: TRAIN.weight_decay, False: 0.0}
    groups = [
        {"params": [weight for name, weight in trained.items() if specs[name].decay is decay], "weight_decay": rate}
        for decay, rate in decays.items()
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(ADAMW.beta1, ADAMW.beta2), eps=ADAMW.epsilon)
    steps = []
    for step in range(STEPS):
        tokens, targets, *packed = batch(step, spec)
        positions, documents = packed if masked else (None, None)
        optimizer.zero_grad()
        loss, balance, further = model.losses(tokens, targets, positions=positions, documents=documents)
        loss, further = (value / (targets >= 0).sum() for value in (loss, further / max(1, spec.prediction_depth)))
        (loss + TRAIN.balance_loss * balance / BATCH + PREDICTION_LOSS * further).backward()
        gradients = {name: weight.grad.clone() for name, weight in trained.items()}
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)
        optimizer.step()
        with torch.no_grad():
            for moe in moe_layers:
                if moe.choice_bias is not None:
                    load = loads[moe]
                    moe.choice_bias += BIAS_STEP * torch.sign(load.mean() - load)
        weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        figures = {"loss": loss.item(), "norm": norm.item(), "further": [further.item()] * (spec.prediction_depth > 0)}
        steps.append({**figures, "gradients": gradients, "weights": weights})
    return steps


def sharded(
    world: Any, spec: ModelSpec, plan: Plan, masked: bool, steps: range = range(STEPS), folder: str | None = None
) -> list[dict[str, Any]]:
    """The steps of the trainer on one rank; gradients and weights are lists of (offsets, elements) by parameter.

    With a `folder` they continue from its newest checkpoint, and end with one.
    """
    from meshwright.checkpoint.store import CheckpointStore
    from meshwright.data.loader import MicroBatch
    from meshwright.optim.optimizer import Optimizer
    from meshwright.optim.shards import local
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh
    from meshwright.training.train_step import train_step

    mesh = build_mesh(plan, world)
    options = {"balance_loss": TRAIN.balance_loss, "balance_bias": BIAS_STEP, "prediction_loss": PREDICTION_LOSS}
    engine = build_engine(spec, plan, mesh, loss_chunk=5, seed=0, reference=True, **options)
    optimizer = Optimizer(engine.model, spec, TRAIN, engine.weights, engine.host_offloaded)
    store = None if folder is None else CheckpointStore(Path(folder), group=world.control)
    if store is not None and steps.start:
        store.load_newest({parts.name: parts for parts in optimizer.state()})
        optimizer.set_steps(steps.start)
    micro, samples_per_rank, results = plan.batch.micro_batch, BATCH // mesh.data_ranks, []
    for step in steps:
        first = mesh.data_rank * samples_per_rank
        columns = [tensor[first : first + samples_per_rank].split(micro) for tensor in batch(step, spec)]
        batches = [MicroBatch(*parts, valid_tokens=int((parts[1] >= 0).sum())) for parts in zip(*columns, strict=True)]
        if not masked:
            batches = [replace(part, positions=None, documents=None) for part in batches]
        gradients: dict[str, Any] = {}

        def keep_gradients(gradients: dict[str, Any] = gradients) -> None:
            for name, parameter in engine.model.named_parameters():
                if parameter.grad is not None:
                    parts = replace(engine.weights[name], local=local(parameter.grad))
                    gradients[name] = [(box.offsets, elements.clone()) for box, elements in parts.pieces()]

        figures = train_step(
            engine,
            optimizer,
            mesh,
            batches,
            learning_rate=RATE,
            clip_norm=CLIP,
            recorder=NullRecorder(),
            before_update=keep_gradients,
        ).values.tolist()
        weights = {
            name: [(box.offsets, elements.clone()) for box, elements in parts.pieces()]
            for name, parts in engine.weights.items()
        }
        further = figures[6 : 6 + (spec.prediction_depth > 0)]
        results.append(
            {"loss": figures[0], "norm": figures[1], "further": further, "gradients": gradients, "weights": weights}
        )
    if store is not None:
        store.save(steps.stop, {parts.name: parts for parts in optimizer.state()}, {}, {})
    return results


def compare(results: list[list[dict[str, Any]]], truth: list[dict[str, Any]], bound: float) -> None:
    """Assert that every rank's figures and boxes equal those of one device, and that each parameter is on some rank."""
    seen: set[str] = set()
    for steps in results:
        for actual, want in zip(steps, truth, strict=True):
            assert actual["loss"] == pytest.approx(want["loss"], rel=bound)
            assert actual["norm"] == pytest.approx(want["norm"], rel=bound)
            assert actual["further"] == pytest.approx(want["further"], rel=bound)
            for quantity in ("gradients", "weights"):
                for name, pieces in actual[quantity].items():
                    for offsets, elements in pieces:
                        ends = zip(offsets, elements.shape, strict=True)
                        exact = want[quantity][name][tuple(slice(first, first + size) for first, size in ends)]
                        size = max(float(exact.norm()), 1e-3 * float(want[quantity][name].norm()))
                        assert float((elements - exact).norm()) <= bound * size, (quantity, name, offsets)
                    seen.add(name)
    assert seen == set(truth[0]["weights"])


def case_of(seed: int) -> tuple[ModelSpec, Plan, bool]:
    """The model and the plan of a seed, and whether documents are masked."""
    return draw_case(seed, FLOAT64, of=(V3, V2)[seed % 2])


@pytest.mark.parametrize("seed", quick_first(0, SEEDS))
def test_random_plans_equal_one_device(pool: Pool, seed: int) -> None:
    spec, plan, masked = case_of(seed)
    compare(pool.run(sharded, plan.ranks, spec, plan, masked), one_device(spec, masked), 1e-9)


@pytest.mark.slow
def test_biases_are_state_of_the_run_under_any_plan(pool: Pool, tmp_path: Path) -> None:
    """The second step continues from the first one's checkpoint, with other ranks."""
    truth, plans = one_device(V3, True), (EXPERTS_OVER_2, TENSOR_2)
    for step, plan in enumerate(plans):
        results = pool.run(sharded, plan.ranks, V3, plan, True, range(step, step + 1), str(tmp_path))
        compare(results, truth[step : step + 1], 1e-9)
    assert truth[0]["weights"]["layers.1.moe.choice_bias"].unique().numel() > 1
