"""Matmuls and gathers in fp8 give the same numbers in every layout, and those of an emulation written on its own.

Scales of activations are a micro-batch's, so layouts are compared that cut the batch into the same micro-batches. Computing in fp32 makes
the rounding to fp8 the only coarse one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.fp8_matmuls import quantize as quantize_whole
from meshwright.kernels.grouped import ExpertOrder
from meshwright.kernels.linear import Linear
from meshwright.models.decoder import Decoder
from meshwright.models.initial_values import initialise
from meshwright.models.moe import Experts
from meshwright.spec.plan import LayerStrategy, Plan, SchedulePlan
from tests.distributed.pool import Pool
from tests.distributed.test_equality import BATCH, GPT, LLAMA, TRAIN, batch, compare, plan, sharded
from tests.distributed.test_schedules import DEEP, Case
from tests.kernels.test_fp8_matmuls import Emulated
from tests.kernels.test_grouped_fp8 import EmulatedGroups
from tests.slow import quick_first

MICRO = 2
LAYOUT_BOUND = 1e-5
"""Between layouts: the same fp8 numbers, gradients summed in fp32 in another order."""
EMULATION_BOUND = 2e-2
"""Against the emulation: another order inside a matmul now and then rounds an activation to the next fp8 number."""


def with_fp8(bf16_plan: Plan, linear: str = "fp8_tensorwise", gather: str = "fp8", compute: str = "fp32") -> Plan:
    return replace(
        bf16_plan, precision=replace(bf16_plan.precision, compute=compute, reduce="fp32", linear=linear, gather=gather)
    )


def first_step(pool: Pool, spec: Any, tested_plan: Plan) -> list[list[dict[str, Any]]]:
    return pool.run(sharded, tested_plan.ranks, spec, tested_plan, 1.0, 1)


@cache
def emulated_step(spec: Any, scaling: str, micro: int) -> dict[str, Any]:
    """Loss and gradients of the first step on one device, its linear layers replaced by the emulation."""
    model = Decoder(spec, reference=True)
    initialise(model, spec, seed=0)
    for block in model.layers.values():
        for name in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.up", "mlp.down"):
            owner, _, leaf = name.partition(".")
            if hasattr(getattr(block, owner), leaf):
                linear = getattr(getattr(block, owner), leaf)
                linear.forward = lambda x, linear=linear: Emulated.apply(x, linear.weight, linear.bias, scaling)
    tokens, targets, positions, documents = batch(0, spec)
    valid, total = (targets >= 0).sum(), 0.0
    for samples in torch.arange(BATCH).split(micro):
        logits = model(tokens[samples], positions=positions[samples], documents=documents[samples])
        trained = targets[samples] >= 0
        loss = F.cross_entropy(logits[trained], targets[samples][trained], reduction="sum") / valid
        z_loss = logits[trained].logsumexp(-1).square().sum() / valid
        (loss + TRAIN.z_loss * z_loss).backward()
        total += loss.item()
    gradients = {name: weight.grad.double() for name, weight in model.named_parameters()}
    return {
        "loss": total,
        "norm": torch.stack([g.norm() for g in gradients.values()]).norm().item(),
        "gradients": gradients,
    }


def expected_of(steps: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One rank's gradients as what others are compared with."""
    return [{**step, "gradients": {n: g.double() for n, g in step["gradients"].items()}} for step in steps[0]]


def expected_of_all(steps: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """All ranks' gradients as what others are compared with; each rank has whole gradients of some parameters."""
    (first,) = expected_of(steps)
    for others in steps[1:]:
        first["gradients"] |= {name: gradient.double() for name, gradient in others[0]["gradients"].items()}
    return [first]


def unclipped(step: dict[str, Any], clip: float = 0.5) -> dict[str, Any]:
    """The emulation's gradients as the trainer leaves them: clipped."""
    factor = min(1.0, clip / step["norm"])
    return {**step, "gradients": {name: grad * factor for name, grad in step["gradients"].items()}}


@pytest.mark.parametrize("linear", ["fp8_tensorwise", "fp8_rowwise"])
@pytest.mark.parametrize("spec", quick_first(1, [LLAMA, GPT]), ids=["llama", "gpt2-tied"])
def test_one_rank_equals_the_emulation(pool: Pool, spec: Any, linear: str) -> None:
    tested_plan = with_fp8(plan(1, 1, MICRO), linear, "fp8" if linear == "fp8_tensorwise" else "compute")
    truth = unclipped(emulated_step(spec, linear.removeprefix("fp8_"), MICRO))
    compare(first_step(pool, spec, tested_plan), [truth], EMULATION_BOUND, weights=False)


LAYOUTS = {
    "fsdp 2": plan(1, 2, MICRO),
    "fsdp 4, kept": plan(1, 4, MICRO, reshard=False),
    "hsdp 2x2": plan(2, 2, MICRO),
    "fsdp 2, recompute full": plan(1, 2, MICRO, recompute="full"),
    "fsdp 2, recompute selective": plan(1, 2, MICRO, recompute="selective"),
}


@pytest.mark.parametrize("name", quick_first(3, LAYOUTS))
@pytest.mark.parametrize("linear", quick_first(1, ["fp8_tensorwise", "fp8_rowwise"]))
def test_layouts_agree(pool: Pool, linear: str, name: str) -> None:
    gather = "fp8" if linear == "fp8_tensorwise" else "compute"
    single = first_step(pool, LLAMA, with_fp8(plan(1, 1, MICRO), linear, gather))
    compare(
        first_step(pool, LLAMA, with_fp8(LAYOUTS[name], linear, gather)),
        expected_of(single),
        LAYOUT_BOUND,
        weights=False,
    )


def test_the_bounds_notice_matmuls_that_are_not_in_fp8(pool: Pool) -> None:
    without_fp8 = expected_of(first_step(pool, LLAMA, with_fp8(plan(1, 1, MICRO), "compute", "compute")))
    for linear in ("fp8_tensorwise", "fp8_rowwise"):
        with pytest.raises(AssertionError):
            compare(
                [without_fp8],
                [unclipped(emulated_step(LLAMA, linear.removeprefix("fp8_"), MICRO))],
                EMULATION_BOUND,
                weights=False,
            )


MOE = replace(
    LLAMA,
    family="qwen3_moe",
    qk_norm=True,
    layers=4,
    experts=6,
    experts_per_token=2,
    expert_hidden=8,
    first_dense_layers=1,
    shared_expert_hidden=4,
)
MOE_CASES = [
    Case("1f1b", shard=2, expert=2, micro=MICRO),
    Case("1f1b", shard=2, micro=MICRO, recompute="selective"),
    Case("1f1b", shard=4, expert=2, micro=MICRO, recompute="full"),
    Case("zbv", pipeline=2, shard=2, expert=2, micro=MICRO),
    Case("paired", shard=2, expert=2, micro=1),
]


@cache
def emulated_moe_step(weigh_outputs: bool) -> dict[str, Any]:
    """The first step on one device with scales by row, all matmuls of blocks emulated but the router's.

    With `weigh_outputs` the router's weights multiply the experts' outputs, as they do with expert ranks, not the activations.
    """
    model = Decoder(MOE, reference=True)
    initialise(model, MOE, seed=0)
    for name, module in model.named_modules():
        if isinstance(module, Linear) and name.startswith("layers.") and not name.endswith(".router"):
            module.forward = partial(_emulated_linear, module)
        elif isinstance(module, Experts):
            module.forward = partial(_emulated_experts, module, weigh_outputs)
    columns, total = batch(0, MOE), 0.0
    valid = (columns[1] >= 0).sum()
    for parts in zip(*(column.split(MICRO) for column in columns), strict=True):
        loss, z_loss, balance, router_z_loss = _losses(model, *parts)
        mean = loss * (parts[1] >= 0).sum() / valid
        z_loss = z_loss * (parts[1] >= 0).sum() / valid
        routers = TRAIN.balance_loss * balance / BATCH + TRAIN.router_z_loss * router_z_loss * MICRO / BATCH
        (mean + TRAIN.z_loss * z_loss + routers).backward()
        total += mean.item()
    gradients = {name: weight.grad.double() for name, weight in model.named_parameters()}
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    return {"loss": total, "norm": norm, "gradients": gradients}


def _losses(
    model: Decoder, tokens: Tensor, targets: Tensor, positions: Tensor, documents: Tensor
) -> tuple[Tensor, ...]:
    """Mean cross-entropy and squared log-sum-exp of logits, the sum of balance losses, the router z-loss before its weight."""
    outputs: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _, inputs, out: outputs.append(out))
        for name, module in model.named_modules()
        if name.endswith("moe.router")
    ]
    x, balance = model._run_blocks(tokens, positions, documents)
    for hook in hooks:
        hook.remove()
    trained = targets >= 0
    logits = model.logits_or_loss(x, None)[trained]
    router_z_loss = sum(out.logsumexp(-1).square().mean() for out in outputs)
    return F.cross_entropy(logits, targets[trained]), logits.logsumexp(-1).square().mean(), balance, router_z_loss


def _emulated_linear(linear: Linear, x: Tensor) -> Tensor:
    return Emulated.apply(x, linear.weight, linear.bias, "rowwise")


def _emulated_experts(
    experts: Experts, weigh_outputs: bool, sorted_rows: Tensor, order: ExpertOrder, weights: Tensor
) -> Tensor:
    groups = torch.searchsorted(order.offsets, torch.arange(len(sorted_rows)), right=True)
    gate, up = EmulatedGroups.apply(sorted_rows, experts.gate_up, groups).chunk(2, dim=-1)
    activation = F.silu(gate) * up
    if weigh_outputs:
        return EmulatedGroups.apply(activation, experts.down, groups) * weights[:, None]
    return EmulatedGroups.apply(activation * weights[:, None], experts.down, groups)


@pytest.mark.parametrize("case", quick_first(1, MOE_CASES), ids=str)
def test_mixtures_equal_the_emulation(pool: Pool, case: Case) -> None:
    step = first_step(pool, MOE, with_fp8(case.plan, "fp8_rowwise", "compute"))
    compare(step, [unclipped(emulated_moe_step(case.expert > 1))], EMULATION_BOUND, weights=False)


@pytest.mark.slow
def test_the_bound_of_mixtures_notices_matmuls_that_are_not_in_fp8(pool: Pool) -> None:
    without_fp8 = first_step(pool, MOE, with_fp8(plan(1, 1, MICRO), "compute", "compute"))
    with pytest.raises(AssertionError):
        compare(without_fp8, [unclipped(emulated_moe_step(False))], EMULATION_BOUND, weights=False)


@pytest.mark.parametrize("case", quick_first(0, MOE_CASES), ids=str)
def test_mixtures_gather_in_fp8(pool: Pool, case: Case) -> None:
    """Weights outside of the experts, which gives the numbers of weights that are gathered as they are."""
    gathered_wide = first_step(pool, MOE, with_fp8(case.plan, gather="compute"))
    compare(first_step(pool, MOE, with_fp8(case.plan)), expected_of_all(gathered_wide), LAYOUT_BOUND, weights=False)


SCHEDULES = [
    Case("zb_h1", pipeline=2, shard=2, micro=MICRO),
    Case("zbv", pipeline=2, micro=MICRO),
    Case("zbv", pipeline=2, shard=2, micro=MICRO, recompute="full"),
    Case("zb_h1", pipeline=2, micro=MICRO, recompute="selective"),
    Case("interleaved", pipeline=2, micro=MICRO, reshard=False, gradients="whole"),
    Case("breadth_first", shard=2, micro=MICRO, reshard=False, gradients="whole"),
]


@pytest.mark.parametrize("case", quick_first(1, SCHEDULES), ids=str)
def test_schedules_agree_also_where_the_backward_is_split(pool: Pool, case: Case) -> None:
    single = first_step(pool, DEEP, with_fp8(replace(plan(1, 1, MICRO), schedule=SchedulePlan())))
    compare(first_step(pool, DEEP, with_fp8(case.plan)), expected_of(single), LAYOUT_BOUND, weights=False)


@pytest.mark.slow
def test_compiled_blocks_gather_and_split_too(pool: Pool) -> None:
    """Inductor may round an activation to the next fp8 number, as it sums norms in another order."""
    case = Case("zbv", pipeline=2, micro=MICRO, compile=True)
    single = first_step(pool, DEEP, with_fp8(plan(1, 1, MICRO)))
    compare(first_step(pool, DEEP, with_fp8(case.plan)), expected_of(single), EMULATION_BOUND, weights=False)


def gathered_weights(world: Any, tested_plan: Plan) -> dict[str, tuple[Tensor, Tensor, Tensor, int]]:
    """Of every linear layer: the whole master weight, its fp8 copy as gathered, the scale, and the bytes of `weight`."""
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh

    mesh = build_mesh(tested_plan, world)
    engine = build_engine(LLAMA, tested_plan, mesh, loss_chunk=5, seed=0)
    masters = {name: weight.detach().full_tensor() for name, weight in engine.model.named_parameters()}
    assert engine.executor.scales is not None
    engine.executor.scales.refresh()
    gathered_weights = {}
    for unit in engine.executor.rank_model.stages[0]:
        unit.sharded.gather()
        unit.sharded.wait_for_gather()
        linears = [weight.linear for weight in unit.sharded.linear_weights]
        linears = [linear for linear in linears if linear is not None and linear.fp8_weight is not None]
        for linear in linears:
            name = next(name for name, module in engine.model.named_modules() if module is linear) + ".weight"
            values, scale = (tensor.clone() for tensor in linear.fp8_weight)
            gathered_weights[name] = masters[name], values, scale, linear.weight.untyped_storage().nbytes()
        unit.sharded.free_gathered()
        assert not any(linear.fp8_weight.values.untyped_storage().nbytes() for linear in linears)
    return gathered_weights


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gathered_weights_are_the_whole_weight_rounded_with_one_scale(pool: Pool, ranks: int) -> None:
    weights_by_rank = pool.run(gathered_weights, ranks, with_fp8(plan(1, ranks, MICRO)))
    for rank_weights in weights_by_rank:
        assert len(rank_weights) == 4 * LLAMA.layers
        for name, (master, values, scale, stored_bytes) in rank_weights.items():
            expected = quantize_whole(master, "tensorwise")
            assert torch.equal(values.view(torch.uint8), expected.values.view(torch.uint8)), name
            assert torch.equal(scale, expected.scale)
            assert stored_bytes == 4, "the weight beside its fp8 copy is a shape over one number"


def test_layers_can_be_left_out(pool: Pool) -> None:
    tested_plan = with_fp8(plan(1, 2, MICRO))
    unquantized = LayerStrategy(range="0", linear="compute")
    weights = pool.run(gathered_weights, 2, replace(tested_plan, layers=(unquantized, LayerStrategy(range="1"))))[0]
    assert {name.split(".")[1] for name in weights} == {"1"}
