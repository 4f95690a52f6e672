"""Mixtures of experts and host memory, played: what they add to a block, and that the closed form says the same."""

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
from meshwright.workload.buffers import STAGED_ELEMENTS, STAGING_BUFFERS

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


def job(given: Plan) -> TrainSpec:
    return TrainSpec(steps=1, global_batch=given.batch.global_batch, seq_len=4096)


def costs(model: ModelSpec, given: Plan) -> UnitCosts:
    priced = pricing(model, job(given), given, NODES)
    assert priced is not None
    return UnitCosts(model, given, priced)


def test_tokens_travel_to_their_experts_inside_compute() -> None:
    together, spread = (plan({"replicate": 2, "shard": 8}, expert) for expert in (1, 8))
    assert "expert" not in exposed_in_compute(MIXTRAL, job(together), together, NODES)
    inside = exposed_in_compute(MIXTRAL, job(spread), spread, NODES)
    assert inside["expert"] > 0
    block = costs(MIXTRAL, spread).compute(0)
    assert block.exposed["expert"] * MIXTRAL.layers * spread.batch.accumulate == pytest.approx(inside["expert"])
    assert block.exposed["expert"] < block.forward + block.backward_input + block.backward_weight


def test_spread_experts_need_not_be_gathered() -> None:
    """Eight ranks with an eighth of the experts gather attention alone; with every expert cut in eight they gather all of it."""
    cut, spread = (costs(MIXTRAL, plan({"replicate": 2, "shard": 8}, expert)) for expert in (1, 8))
    rows = list(layer_parameters(MIXTRAL, 0))
    experts = sum(row.count for row in rows if row.expert)
    block, block_spread = cut.parameters(0), spread.parameters(0)
    assert block.count == sum(row.count for row in rows)
    assert block.count - block_spread.count == experts * 7 // 8
    assert block.shard == block_spread.shard == block.count / 8
    assert cut.gather(0) > 20 * spread.gather(0)


@pytest.mark.parametrize("expert", [2, 8])
def test_a_mixture_played_is_near_its_closed_form(expert: int) -> None:
    given = plan({"shard": 8}, expert, accumulate=8)
    node = replace(NODES, nodes=1)
    closed = plan_time(MIXTRAL, job(given), given, node)
    assert closed is not None
    assert simulate_plan(MIXTRAL, job(given), given, node).step_seconds == pytest.approx(closed.seconds, rel=0.06)


def test_dense_first_layers_are_priced_as_dense() -> None:
    model = replace(MIXTRAL, first_dense_layers=2)
    priced = costs(model, plan({"shard": 8}, 8))
    assert priced.compute(0).exposed["expert"] == 0 < priced.compute(2).exposed["expert"]
    assert (
        priced.compute(2).forward > 1.5 * priced.compute(0).forward
    )  # a token passes two experts as wide as the dense network
    assert priced.parameters(2).count != priced.parameters(0).count


def test_copies_that_a_slow_host_link_does_not_hide_show() -> None:
    given, away = (plan({"shard": 8}, offload=kept) for kept in ("none", "activations"))
    slow = costs(LLAMA, away)
    slow = UnitCosts(LLAMA, away, replace(slow.cost_inputs, machine=replace(slow.cost_inputs.machine, host=2e9)))
    plain = costs(LLAMA, given).compute(0)
    shown = slow.compute(0).exposed["host link"]
    assert plain.exposed["host link"] == 0 < shown
    total = [one.forward + one.backward_input + one.backward_weight for one in (slow.compute(0), plain)]
    assert total[0] - total[1] == pytest.approx(shown)


def test_an_optimizer_in_host_memory_takes_its_time_and_leaves_the_device() -> None:
    given, away = (plan({"shard": 8}, offload=kept) for kept in ("none", "optimizer"))
    here, there = (timing_of(LLAMA, job(one), one, NODES).optim_seconds[0] for one in (given, away))
    owned = sum(costs(LLAMA, given).parameters(unit).shard for unit in ("embed", *range(32), "head"))
    assert there > 10 * here
    assert there == pytest.approx(owned * 12 / 13e9, rel=0.02)
    kinds = memory_of(LLAMA, job(away), away, cpu=False)[0]
    assert kinds["optimizer"] == STAGING_BUFFERS * 3 * STAGED_ELEMENTS * 4


def test_a_plan_of_two_strategies_lies_between_the_two() -> None:
    given = plan({"shard": 8}, accumulate=8)
    mixed = replace(given, layers=(LayerStrategy(range="0-7", recompute="full"), LayerStrategy(range="8-31")))
    ends = [
        plan_time(LLAMA, job(given), plan({"shard": 8}, accumulate=8, recompute=mode), NODES)
        for mode in ("none", "full")
    ]
    found = plan_time(LLAMA, job(given), mixed, NODES)
    assert found is not None and ends[0] is not None and ends[1] is not None
    assert found.seconds == pytest.approx(ends[0].seconds * 3 / 4 + ends[1].seconds / 4)
    assert sum(found.breakdown.values()) == pytest.approx(found.seconds, rel=0.02)


@pytest.mark.parametrize("tensor, expert", [(1, 1), (2, 1), (2, 2), (1, 4)])
def test_copies_of_experts_count_the_parameters_of_one_rank(tensor: int, expert: int) -> None:
    """The closed form divides experts by their ranks once: its copies equal the sum over units of exact parameters."""
    given = plan({"tensor": tensor, "shard": 8 // tensor}, expert)
    priced = pricing(MIXTRAL, job(given), given, replace(NODES, nodes=1))
    assert priced is not None
    exact = UnitCosts(MIXTRAL, given, priced)
    units: list[Unit] = ["embed", *range(MIXTRAL.layers), "head"]
    per_unit = sum(2 * exact.copy_out(unit) + exact.copy_in(unit) for unit in units)
    per_micro_batch, per_step = copy_seconds(priced.shape, priced.machine, priced.layout, priced.constants)
    assert number(per_micro_batch) == pytest.approx(per_unit, rel=1e-3)
    assert number(per_step) == 0
