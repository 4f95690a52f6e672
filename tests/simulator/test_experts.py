"""Simulated MoE models and offload to host memory: effects on a block, and agreement with the closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.config.presets import MODEL_PRESETS
from meshwright.costs.copies import copy_seconds
from meshwright.costs.plan_costs import number, plan_time, pricing
from meshwright.simulator.step_simulation import exposed_in_compute, memory_of, simulate_plan, timing_of
from meshwright.simulator.units import Unit, UnitCosts
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.fields import from_plain
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec, layer_parameters
from meshwright.spec.plan import BatchPlan, ExpertPlan, LayerStrategy, MeshAxis, Plan
from meshwright.workload.buffers import STAGING_BUFFERS, staged_elements

MIXTRAL = from_plain(ModelSpec, MODEL_PRESETS["mixtral-8x7b"])
LLAMA = from_plain(ModelSpec, MODEL_PRESETS["llama3-8b"])
NODES = ClusterSpec(gpu="H200", nodes=2, gpus_per_node=8)


def plan(mesh: dict[str, int], expert: int | None = None, accumulate: int = 2, **layer) -> Plan:
    shards = mesh.get("shard", 1) * mesh.get("context_ring", 1)
    return Plan(
        mesh=tuple(MeshAxis(axis=axis, size=size) for axis, size in mesh.items()),
        batch=BatchPlan(
            global_batch=mesh.get("replicate", 1) * mesh["shard"] * accumulate, micro_batch=1, accumulate=accumulate
        ),
        layers=(LayerStrategy(**layer),),
        experts=ExpertPlan(expert=expert, expert_shard=shards // expert) if expert else None,
    )


def job(chosen_plan: Plan) -> TrainSpec:
    return TrainSpec(steps=1, global_batch=chosen_plan.batch.global_batch, seq_len=4096)


def costs(model: ModelSpec, chosen_plan: Plan) -> UnitCosts:
    priced = pricing(model, job(chosen_plan), chosen_plan, NODES)
    assert priced is not None
    return UnitCosts(model, chosen_plan, priced)


def test_expert_exchange_is_part_of_block_compute() -> None:
    single_rank, distributed = (plan({"replicate": 2, "shard": 8}, expert) for expert in (1, 8))
    assert "expert" not in exposed_in_compute(MIXTRAL, job(single_rank), single_rank, NODES)
    exposed = exposed_in_compute(MIXTRAL, job(distributed), distributed, NODES)
    assert exposed["expert"] > 0
    block = costs(MIXTRAL, distributed).compute(0)
    assert block.exposed["expert"] * MIXTRAL.layers * distributed.batch.accumulate == pytest.approx(exposed["expert"])
    assert block.exposed["expert"] < block.forward + block.backward_input + block.backward_weight


def test_experts_of_expert_ranks_are_not_gathered() -> None:
    """With 8 expert ranks only attention is gathered; with every expert sharded over 8 ranks, the whole block is."""
    sharded, distributed = (costs(MIXTRAL, plan({"replicate": 2, "shard": 8}, expert)) for expert in (1, 8))
    block_parameters_list = list(layer_parameters(MIXTRAL, 0))
    experts = sum(parameter.count for parameter in block_parameters_list if parameter.expert)
    block, distributed_block = sharded.parameters(0), distributed.parameters(0)
    assert block.count == sum(parameter.count for parameter in block_parameters_list)
    assert block.count - distributed_block.count == experts * 7 // 8
    assert block.shard == distributed_block.shard == block.count / 8
    assert sharded.gather(0) > 20 * distributed.gather(0)


@pytest.mark.parametrize("expert", [2, 8])
def test_simulated_moe_is_near_its_closed_form(expert: int) -> None:
    chosen_plan = plan({"shard": 8}, expert, accumulate=8)
    node = replace(NODES, nodes=1)
    closed = plan_time(MIXTRAL, job(chosen_plan), chosen_plan, node)
    assert closed is not None
    assert simulate_plan(MIXTRAL, job(chosen_plan), chosen_plan, node).step_seconds == pytest.approx(
        closed.seconds, rel=0.06
    )


def test_dense_first_layers_are_priced_as_dense() -> None:
    model = replace(MIXTRAL, first_dense_layers=2)
    priced = costs(model, plan({"shard": 8}, 8))
    assert priced.compute(0).exposed["expert"] == 0 < priced.compute(2).exposed["expert"]
    assert (
        priced.compute(2).forward > 1.5 * priced.compute(0).forward
    )  # each token uses two experts, each as wide as the dense network
    assert priced.parameters(2).count != priced.parameters(0).count


def test_copies_over_a_slow_host_link_are_exposed() -> None:
    chosen_plan, offloaded = (plan({"shard": 8}, offload=offload) for offload in ("none", "activations"))
    slow = costs(LLAMA, offloaded)
    slow = UnitCosts(LLAMA, offloaded, replace(slow.cost_inputs, machine=replace(slow.cost_inputs.machine, host=2e9)))
    on_device = costs(LLAMA, chosen_plan).compute(0)
    exposed = slow.compute(0).exposed["host link"]
    assert on_device.exposed["host link"] == 0 < exposed
    total = [
        compute.forward + compute.backward_input + compute.backward_weight for compute in (slow.compute(0), on_device)
    ]
    assert total[0] - total[1] == pytest.approx(exposed)


def test_an_offloaded_optimizer_takes_its_transfer_time_and_no_device_memory() -> None:
    chosen_plan, offloaded = (plan({"shard": 8}, offload=offload) for offload in ("none", "optimizer"))
    on_device_seconds, offloaded_seconds = (
        timing_of(LLAMA, job(update_plan), update_plan, NODES).optim_seconds[0]
        for update_plan in (chosen_plan, offloaded)
    )
    unit_costs = costs(LLAMA, chosen_plan)
    owned = sum(unit_costs.parameters(unit).shard for unit in ("embed", *range(32), "head"))
    # The last block's forward waits for all copies, since the head is gathered meanwhile; the forwards before hide some.
    hidden = sum(unit_costs.compute(unit).forward for unit in ("embed", *range(31)))
    assert offloaded_seconds > 10 * on_device_seconds
    # The first chunks are fetched before the update.
    staged = STAGING_BUFFERS * staged_elements(10)
    assert offloaded_seconds == pytest.approx((owned - staged) * 10 / 13e9 - hidden, rel=0.02)
    memory = memory_of(LLAMA, job(offloaded), offloaded, cpu=False)[0]
    assert memory["optimizer"] == STAGING_BUFFERS * 10 * staged_elements(10)


def test_staging_makes_the_update_shorter_only_beyond_the_buffers_that_exist_in_any_case() -> None:
    least = STAGING_BUFFERS * float(staged_elements(10)) * 10 / 1e9  # gigabytes

    def update_seconds(gigabytes: float) -> float:
        offloaded = replace(plan({"shard": 8}, offload="optimizer", accumulate=8), offload_staging=gigabytes)
        return costs(LLAMA, offloaded).optimizer(["embed", *range(LLAMA.layers), "head"])

    assert update_seconds(0) == update_seconds(0.2) == update_seconds(least)
    assert update_seconds(0) - update_seconds(least + 1) == pytest.approx(1e9 / 12.9e9)


def test_time_of_a_plan_with_two_strategies_is_their_weighted_mean() -> None:
    chosen_plan = plan({"shard": 8}, accumulate=8)
    mixed = replace(chosen_plan, layers=(LayerStrategy(range="0-7", recompute="full"), LayerStrategy(range="8-31")))
    single_times = [
        plan_time(LLAMA, job(chosen_plan), plan({"shard": 8}, accumulate=8, recompute=mode), NODES)
        for mode in ("none", "full")
    ]
    mixed_time = plan_time(LLAMA, job(chosen_plan), mixed, NODES)
    assert mixed_time is not None and single_times[0] is not None and single_times[1] is not None
    assert mixed_time.seconds == pytest.approx(single_times[0].seconds * 3 / 4 + single_times[1].seconds / 4)
    assert sum(mixed_time.breakdown.values()) == pytest.approx(mixed_time.seconds, rel=0.02)


@pytest.mark.parametrize("tensor, expert", [(1, 1), (2, 1), (2, 2), (1, 4)])
def test_copies_of_experts_count_the_parameters_of_one_rank(tensor: int, expert: int) -> None:
    """The closed form divides experts by their ranks once: its copies equal the sum over units of exact parameters."""
    chosen_plan = plan({"tensor": tensor, "shard": 8 // tensor}, expert)
    priced = pricing(MIXTRAL, job(chosen_plan), chosen_plan, replace(NODES, nodes=1))
    assert priced is not None
    exact = UnitCosts(MIXTRAL, chosen_plan, priced)
    units: list[Unit] = ["embed", *range(MIXTRAL.layers), "head"]
    per_unit = sum(2 * exact.copy_out(unit) + exact.copy_in(unit) for unit in units)
    per_micro_batch, per_step = copy_seconds(priced.shape, priced.machine, priced.layout, priced.constants)
    assert number(per_micro_batch) == pytest.approx(per_unit, rel=1e-3)
    assert number(per_step) == 0
