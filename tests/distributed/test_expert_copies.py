"""Copies of experts on other ranks: loss and every gradient equal one device, whatever experts are present where.

The oracle is that of test_equality. Present experts are drawn anew for every step and layer, with free slots, or are all experts, or none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.models.initial_values import initial_values
from meshwright.policies.expert_routing import route
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import ExpertPlan, ExpertPolicy, Plan
from tests.distributed import test_equality
from tests.distributed.pool import Pool
from tests.distributed.test_equality import compare, one_device, sharded
from tests.distributed.test_experts import EVEN, LATE, SHALLOW, SHARED, STEPS, TIED, lopsided_values, opened_under
from tests.distributed.test_schedules import Case, named
from tests.distributed.test_training import merge_tensors, same_bits, trained
from tests.slow import quick_first
from tests.training.tiny import make_tiny, ranks


def with_copies(case: Case, slots: int, *, policy: ExpertPolicy = "hecate", keep: bool = False) -> Plan:
    """The plan of a case with copies of experts; `slots` of a rank."""
    plan = case.plan
    ranks = case.shard * case.ring * case.ulysses
    experts = plan.experts or ExpertPlan(expert=1, expert_shard=ranks)
    return replace(plan, experts=replace(experts, policy=policy, slots=slots, keep=keep))


def drawn(ranks: int, experts: int, slots: int, draw: np.random.Generator) -> np.ndarray:
    """Present experts `(ranks, experts)`: on each rank up to `slots` copies; in one of four draws none at all."""
    present = np.zeros((ranks, experts), dtype=bool)
    for rank in range(ranks if draw.integers(4) else 0):
        others = np.flatnonzero(np.arange(experts) // (experts // ranks) != rank)
        present[rank, draw.choice(others, draw.integers(min(slots, len(others)) + 1), replace=False)] = True
    return present


@contextmanager
def present_experts(choice: str) -> Iterator[None]:
    """Engines of this context have in each step `drawn` experts present, `all` or `none`."""
    from meshwright.parallel import apply

    build = apply.build_engine

    def build_with(*arguments: Any, **options: Any) -> Any:
        engine = build(*arguments, **options)
        play, step = engine.executor.play, 0

        def play_with(*arguments: Any) -> Any:
            nonlocal step
            step += 1
            for layer, present in engine.present_experts.items():
                draw = np.random.default_rng((step, layer))
                shape = present.ranks, present.experts
                sets = {"all": np.ones(shape, dtype=bool), "none": np.zeros(shape, dtype=bool)}
                present.set(sets[choice] if choice in sets else drawn(*shape, present.slots - present.owned, draw))
            return play(*arguments)

        engine.executor.play = play_with
        return engine

    apply.build_engine = build_with
    try:
        yield
    finally:
        apply.build_engine = build


def copied(world: Any, spec: ModelSpec, plan: Plan, choice: str, lopsided: bool = False) -> list[dict[str, Any]]:
    from meshwright.parallel import apply

    apply.initial_values = lopsided_values if lopsided else initial_values
    try:
        with present_experts(choice):
            return sharded(world, spec, plan, 1.0, STEPS)
    finally:
        apply.initial_values = initial_values


FOUR = Case("1f1b", shard=4, expert=4)
CASES = [
    (EVEN, with_copies(FOUR, 3), "drawn"),
    (EVEN, with_copies(Case("1f1b", shard=2, expert=2, micro=2), 4, policy="fixed", keep=True), "all"),
    (EVEN, with_copies(FOUR, 6), "all"),
    (EVEN, with_copies(FOUR, 6, keep=True), "drawn"),
    (SHARED, with_copies(Case("1f1b", shard=4, expert=4, recompute="full"), 2), "drawn"),
    (SHARED, with_copies(Case("1f1b", shard=4, expert=2, recompute="selective"), 2), "drawn"),
    (SHARED, with_copies(Case("1f1b", shard=4, expert=2, recompute="all_but_attention"), 4, keep=True), "all"),
    (EVEN, with_copies(FOUR, 2), "none"),
    (SHARED, with_copies(Case("zbv", pipeline=2, shard=2, expert=2, recompute="selective"), 3), "drawn"),
    (LATE, with_copies(Case("1f1b", pipeline=2, shard=2, expert=2), 2, keep=True), "drawn"),
    (TIED, with_copies(Case("breadth_first", shard=2, expert=2, gradients="whole", recompute="full"), 2), "drawn"),
    (EVEN, with_copies(Case("1f1b", replicate=2, shard=2, expert=2, gradients="whole"), 3), "drawn"),
    (SHARED, with_copies(Case("1f1b", tensor=2, shard=2, expert=2, recompute="selective"), 3), "drawn"),
    (SHARED, with_copies(Case("1f1b", tensor=2, micro=4), 4, policy="fixed"), "all"),
    (EVEN, with_copies(Case("1f1b", ring=2, ulysses=2, expert=2, micro=2), 2), "drawn"),
    (EVEN, with_copies(Case("1f1b", shard=4, expert=4, reshard=False), 2), "drawn"),
    (EVEN, with_copies(Case("1f1b", shard=4, expert=4, offload="activations"), 2), "drawn"),
    (EVEN, with_copies(Case("1f1b", shard=4, expert=2, offload="optimizer"), 2), "drawn"),
    (SHARED, with_copies(Case("paired", shard=2, expert=2), 3), "drawn"),
    (EVEN, with_copies(Case("paired", shard=2, expert=2), 4), "all"),
    (EVEN, with_copies(Case("zb_h1", pipeline=2, shard=4, expert=4), 3), "drawn"),
    (replace(EVEN, experts=4), with_copies(Case("1f1b", shard=8, expert=2), 1), "drawn"),
]
"""The first of each kind is quick. The last: four ranks share two experts, and split their rows."""
COMPILED = [
    (EVEN, with_copies(Case("1f1b", shard=2, expert=2, compile=True, recompute="full"), 3), "drawn"),
    (EVEN, with_copies(Case("1f1b", shard=2, expert=2, compile=True, micro=2), 4, policy="fixed"), "all"),
]


def plan_text(value: object) -> str:
    """How a case is called: its mesh and its copies."""
    if not isinstance(value, Plan) or value.experts is None:
        return named(value)
    axes = "-".join(f"{axis.axis}{axis.size}" for axis in value.mesh)
    return f"{value.schedule.name}-{axes}-e{value.experts.expert}-{value.experts.policy}{value.experts.slots}"


@pytest.mark.parametrize(
    ("spec", "plan", "choice"),
    [*quick_first(1, CASES, unpack=True), *(pytest.param(*case, marks=pytest.mark.slow) for case in COMPILED)],
    ids=plan_text,
)
def test_copies_equal_one_device(pool: Pool, spec: ModelSpec, plan: Plan, choice: str) -> None:
    compare(pool.run(copied, plan.ranks, spec, plan, choice), one_device(spec)[:STEPS], 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["drawn", "all"])
def test_all_tokens_at_two_experts(pool: Pool, monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    """The later half of the experts gets nothing, on owners and on copies."""
    monkeypatch.setattr(test_equality, "initial_values", lopsided_values)
    truth = one_device.__wrapped__(EVEN)[:STEPS]
    plan = with_copies(replace(FOUR, recompute="full"), 6)
    compare(pool.run(copied, 4, EVEN, plan, choice, True), truth, 1e-9)


@pytest.mark.parametrize("nodes", [[0, 0, 0, 0], [0, 0, 1, 1]])
def test_rows_go_where_the_simulation_sends_them(nodes: list[int]) -> None:
    from meshwright.parallel.present_experts import PresentExperts

    draw, device = np.random.default_rng(0), torch.device("cpu")
    for _ in range(20):
        present, load = drawn(4, 12, 5, draw), draw.integers(0, 9, 12)
        owned = np.arange(12) // 3 == np.arange(4)[:, None]
        for rank in range(4):
            layer = PresentExperts(12, ExpertPlan(expert=4, policy="hecate", slots=5), nodes, rank, device)
            layer.set(present)
            expected = route(load, present | owned, rank, nodes.count(0))
            assert np.array_equal(layer.destinations(torch.from_numpy(load)).numpy(), expected)
            assert layer.slots == 8 and set(layer.expert_in[rank].tolist()) - {12} == set(
                np.flatnonzero(present[rank] | owned[rank]).tolist()
            )


PLAIN = [*ranks(4), "plan.expert=2", *SHALLOW, "train.steps=9", "train.balance_loss=0", "checkpoint.every=5"]
COPIES = [*ranks(4), "plan.expert=4", "plan.expert_slots=3", "train.balance_loss=0", *SHALLOW, "train.steps=9"]
POLICIES = [
    ["plan.expert_policy=hecate", "plan.expert_keep=true", "plan.expert_load_window=2"],
    ["plan.expert_policy=hecate"],
    ["plan.expert_policy=fixed", "plan.expert_keep=true"],
]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES, ids=" ".join)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: list[str]
) -> None:
    """Window and pending decisions are in the checkpoint. The plain arrangement opens its tensors bit for bit."""
    tiny, settings = make_tiny(tmp_path / "data"), [*COPIES, *policy, "checkpoint.every=5"]
    whole = trained(pool, tiny, tmp_path / "whole", *settings)
    first = trained(pool, tiny, tmp_path / "parts", *settings, stop_at=5)
    state = json.loads(next((tmp_path / "parts").glob("tiny/checkpoints/*5/state.json")).read_text())
    assert ("experts" in state) == ("fixed" not in policy[0])
    plain = opened_under(pool, tiny, tmp_path / "parts", *PLAIN)
    assert same_bits(plain, merge_tensors(first))
    second = trained(pool, tiny, tmp_path / "parts", *settings)
    assert first[0].losses + second[0].losses == whole[0].losses
    assert same_bits(merge_tensors(second), merge_tensors(whole))
