"""Decisions about present experts: delayed by two steps, in turns of layers, and the same after a restore at any step."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from meshwright.parallel.present_experts import PresentExperts
from meshwright.policies.expert_costs import ExpertCosts
from meshwright.spec.plan import ExpertPlan, ExpertPolicy
from meshwright.training import expert_decisions
from meshwright.training.expert_decisions import DELAY, ExpertDecisions
from meshwright.training.expert_owners import ExpertOwners

LAYERS, RANKS, EXPERTS, FIRST, RANK = 3, 4, 8, 1, 2
COSTS = ExpertCosts(2, 1e-6, 1e-7, 2e-7, 1e-7, 2e-7, 1e-3)
LOADS = np.random.default_rng(0).geometric(0.02, (12, LAYERS, RANKS, EXPERTS))


def decisions(
    policy: ExpertPolicy, moves: list[Mapping[int, np.ndarray]] | None = None
) -> tuple[ExpertDecisions, dict[int, PresentExperts]]:
    """The decisions of a rank; with `moves`, which gets all moves, owners follow the loads every four steps."""
    plan = ExpertPlan(expert=RANKS, policy=policy, slots=2, load_window=3)
    device, shape, owners = torch.device("cpu"), (LAYERS, RANKS, EXPERTS), None
    presents = {FIRST + layer: PresentExperts(EXPERTS, plan, [0, 0, 1, 1], RANK, device) for layer in range(LAYERS)}
    if moves is not None:
        owners = ExpertOwners(shape, every=4, copied=0, ranks_per_node=2, first=FIRST, move=moves.append, device=device)
    costs = None if policy == "none" else COSTS
    return ExpertDecisions(plan, presents, shape, FIRST, RANK, costs, owners), presents


def run(decider: ExpertDecisions, presents: dict[int, PresentExperts], steps: range) -> list[np.ndarray]:
    """The experts present in each of `steps`, from 1, in all layers."""
    seen = []
    for step in steps:
        decider.begin_step(step)
        seen.append(np.array([experts.present for experts in presents.values()]))
        loads = LOADS[step - 1]
        if decider.owners is not None:  # routers count rows by position
            loads = np.take_along_axis(loads, decider.owners.numbers[:, None], axis=2)
        decider.add(torch.from_numpy(loads.astype(np.float64)).flatten())
    return seen


@pytest.mark.parametrize("elements", [30_000, 2 * RANKS * EXPERTS])
def test_a_restored_run_decides_as_the_uninterrupted_one(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    """`elements` allow all layers in a step, or two of three. A state may be asked for a step later."""
    monkeypatch.setattr(expert_decisions, "ELEMENTS", elements)
    whole = run(*decisions("hecate"), range(1, 13))
    copies = [present.sum() - LAYERS * EXPERTS for present in whole]
    assert copies[:DELAY] == [0, 0] and any(copies), "nothing is known before the first decision"
    for saved, asked in ((1, 1), (4, 4), (4, 5), (6, 6), (8, 8)):
        first = decisions("hecate")
        run(*first, range(1, asked + 1))
        state = json.loads(json.dumps(first[0].state(saved) | {"step": saved}, sort_keys=True))  # "10" before "9"
        again = decisions("hecate")
        again[0].restore(state)
        assert all(map(np.array_equal, run(*again, range(saved + 1, 13)), whole[saved:]))


@pytest.mark.parametrize("policy", ["none", "hecate"])
def test_owners_follow_the_loads_and_a_restored_run_moves_them_alike(policy: ExpertPolicy) -> None:
    """Moves come before steps 5 and 9. A state of step 4 may be asked for after the first."""
    moves: list[Mapping[int, np.ndarray]] = []
    whole = decisions(policy, moves)
    seen = run(*whole, range(1, 13))
    assert whole[0].owners is not None and len(moves) == 2
    numbers = whole[0].owners.numbers
    loads = torch.from_numpy(LOADS[11].sum(1))
    by_position = torch.from_numpy(np.take_along_axis(LOADS[11].sum(1), numbers, axis=1))
    assert torch.equal(whole[0].by_number(by_position), loads)
    for saved, asked in ((3, 3), (4, 4), (4, 5), (5, 5), (6, 7), (9, 9)):
        first = decisions(policy, [])
        run(*first, range(1, asked + 1))
        state = json.loads(json.dumps(first[0].state(saved) | {"step": saved}))
        again = decisions(policy, [])
        again[0].restore(state)
        assert all(map(np.array_equal, run(*again, range(saved + 1, 13)), seen[saved:]))
        assert again[0].owners is not None and np.array_equal(again[0].owners.numbers, numbers)


@pytest.mark.parametrize("other", [{"shape": [LAYERS, 8, EXPERTS]}, {"slots": 3}])
def test_a_state_of_other_ranks_or_slots_is_not_used(other: dict[str, object]) -> None:
    first = decisions("hecate")
    run(*first, range(1, 5))
    state = first[0].state(4) | {"step": 4}
    state["experts"] |= other
    again = decisions("hecate")
    again[0].restore(state)
    assert run(*again, range(5, 6))[0].sum() == LAYERS * EXPERTS


def test_each_rank_adds_its_rows_in_its_place() -> None:
    decider, _ = decisions("hecate")
    loads = torch.arange((FIRST + LAYERS) * EXPERTS, dtype=torch.float64).view(-1, EXPERTS)
    by_rank = decider.rank_loads(loads).view(LAYERS, RANKS, EXPERTS)
    assert torch.equal(by_rank[:, RANK], loads[FIRST:]) and by_rank.sum() == loads[FIRST:].sum()
