"""Copies of experts in a plan's costs and in the planner's choice, against cases that are known without the policies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.costs.plan_costs import pricing
from meshwright.planner.candidate import Candidate, memory_budget
from meshwright.planner.expert_moves import copies, owners
from meshwright.planner.expert_reasons import uneven_loads_reason
from meshwright.planner.finalists import PlanEstimator, simplest
from meshwright.planner.moves import MOVES, with_moves
from meshwright.planner.reprice import reprice
from meshwright.simulator.copied_experts import copy_effects, with_copies
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.plan import ExpertPlan, ExpertPolicy, LayerStrategy, Plan
from meshwright.spec.plan_keys import PlanKeys
from meshwright.spec.run import RunSpec
from meshwright.workload.activations import busiest_rows
from meshwright.workload.plan_bytes import fullest_rank_memory
from tests.workload.test_plan_bytes import ATTENTION, EXPERT, HIDDEN, MOE, TRAIN, plan

CLUSTER = ClusterSpec(gpu="H200", gpus_per_node=4)
OWN = ExpertPlan(expert=4, expert_shard=1)


def run_with(tmp_path: Path, loads: list[int]) -> RunSpec:
    """Four layers' and eight steps' equal recordings of `loads` of 8 experts."""
    path = tmp_path / "loads.csv"
    lines = [f"{layer},{step},{','.join(map(str, loads))}" for layer in range(4) for step in range(8)]
    path.write_text("\n".join(["layer,step," + ",".join(f"expert_{index}" for index in range(8)), *lines]) + "\n")
    train = replace(TRAIN, expert_load=str(path))
    return RunSpec(name="run", model=MOE, train=train, cluster=CLUSTER)


def copied(policy: ExpertPolicy, slots: int, *, keep: bool = False) -> Plan:
    return replace(plan({"shard": 4}), experts=replace(OWN, policy=policy, slots=slots, keep=keep))


def improved(run: RunSpec, candidate: Candidate) -> Candidate:
    """The fastest plan that the moves of experts make of the candidate."""
    moves = [move for move in MOVES if move.plans.__module__ == copies.__module__]
    return with_moves(run, [candidate], PlanEstimator(run), simplest, memory_budget(run), moves)[0]


def test_all_experts_on_all_ranks_send_no_rows_and_are_even(tmp_path: Path) -> None:
    run = run_with(tmp_path, [24, 8, 4, 4, 4, 4, 4, 4])
    everywhere = copied("fixed", 6)
    effects = copy_effects(run.model, run.train, everywhere, run.cluster)
    assert (effects.imbalance, effects.exchanged_share) == (1.0, 0.0)
    assert busiest_rows(run.model, run.train, everywhere) == 1.0
    # Without copies the first rank has 32 of 56 rows.
    assert busiest_rows(run.model, run.train, copied("none", 0)) == pytest.approx(32 / 14)


def test_equal_loads_need_no_copies(tmp_path: Path) -> None:
    run = run_with(tmp_path, [5] * 8)
    effects = copy_effects(run.model, run.train, copied("hecate", 2), run.cluster)
    assert effects.imbalance == pytest.approx(1.0, abs=1e-3)
    assert effects.exchanged_share == pytest.approx(1.0) and effects.copy_seconds == 0.0
    plain = pricing(run.model, run.train, copied("none", 0), run.cluster)
    assert with_copies(plain, run.model, run.train, copied("none", 0), run.cluster) is plain


def test_slots_take_memory_for_whole_experts() -> None:
    """Two gathered blocks are in flight. Copies that are kept exist in all 8 layers, with the two experts of the rank."""
    by_slots = [
        fullest_rank_memory(MOE, TRAIN, copied("hecate" if slots else "none", slots), cpu=False)["gathered"]
        for slots in (0, 1, 2)
    ]
    assert by_slots[1] - by_slots[0] == by_slots[2] - by_slots[1] == 2 * 2 * EXPERT
    kept = fullest_rank_memory(MOE, TRAIN, copied("hecate", 2, keep=True), cpu=False)["gathered"]
    block = ATTENTION + HIDDEN * 8 + 4 * EXPERT
    assert kept - by_slots[2] == pytest.approx(2 * (8 * 4 * EXPERT - 2 * block), rel=1e-6)


def test_the_planner_copies_a_loaded_expert_and_says_so(tmp_path: Path) -> None:
    run = run_with(tmp_path, [40, 4, 4, 4, 4, 4, 4, 4])
    alone = Candidate(reprice(run, copied("none", 0)), simulated=True)
    assert {
        (variant.experts.policy, variant.experts.slots) for variant in copies(run, alone.plan, None) if variant.experts
    } == {
        *(("hecate", slots) for slots in (1, 4, 6)),
        ("fixed", 6),
    }
    best = improved(run, alone)
    assert best.plan.experts is not None and best.plan.experts.policy != "none" and best.seconds < alone.seconds
    assert "with copies the busiest of 4 ranks" in uneven_loads_reason(run, best.plan)
    unknown = replace(run, train=replace(run.train, expert_load=None))
    assert not list(copies(unknown, alone.plan, None)) and not list(copies(run, best.plan, None))


def test_the_planner_moves_owners_where_that_balances_loads(tmp_path: Path) -> None:
    """The first two of four ranks own most of the load; each rank can own one loaded expert. Copies are pinned off."""
    run = replace(run_with(tmp_path, [9, 9, 9, 9, 1, 1, 1, 1]), plan=PlanKeys(expert_policy="none"))
    even = replace(plan({"shard": 4}), experts=OWN)
    (moved,) = owners(run, even, None)
    assert copy_effects(run.model, run.train, moved, run.cluster).imbalance == pytest.approx(1.0, abs=1e-2)
    alone = Candidate(reprice(run, even), simulated=True)
    best = improved(run, alone)
    assert best.plan.experts is not None and best.plan.experts.placement == "balanced" and best.seconds < alone.seconds
    assert "moved experts the busiest of 4 ranks computes 1.00 times the mean, without 1.80" in uneven_loads_reason(
        run, best.plan
    )
    offloaded = replace(even, layers=(LayerStrategy(offload="optimizer"),))
    fixed = replace(even, experts=replace(OWN, policy="fixed", slots=6))
    unknown = replace(run, train=replace(run.train, expert_load=None))
    assert not [
        plan for run, even in ((run, offloaded), (run, fixed), (unknown, even)) for plan in owners(run, even, None)
    ]
