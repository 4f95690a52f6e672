"""Decisions about present experts: delayed by two steps, in turns of layers, and the same after a restore at any step."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from meshwright.parallel.present_experts import PresentExperts
from meshwright.policies.expert_costs import ExpertCosts
from meshwright.spec.plan import ExpertPlan, ExpertPolicy
from meshwright.training import expert_decisions
from meshwright.training.expert_decisions import DELAY, ExpertDecisions

LAYERS, RANKS, EXPERTS, FIRST, RANK = 3, 4, 8, 1, 2
COSTS = ExpertCosts(2, 1e-6, 1e-7, 2e-7, 1e-7, 2e-7, 1e-3)
LOADS = np.random.default_rng(0).geometric(0.02, (12, LAYERS, RANKS, EXPERTS))


def decisions(policy: ExpertPolicy) -> tuple[ExpertDecisions, dict[int, PresentExperts]]:
    plan = ExpertPlan(expert=RANKS, policy=policy, slots=2, window=3)
    device = torch.device("cpu")
    presents = {FIRST + layer: PresentExperts(EXPERTS, plan, [0, 0, 1, 1], RANK, device) for layer in range(LAYERS)}
    return ExpertDecisions(plan, presents, (LAYERS, RANKS, EXPERTS), FIRST, RANK, COSTS), presents


def run(decider: ExpertDecisions, presents: dict[int, PresentExperts], steps: range) -> list[np.ndarray]:
    """The experts present in each of `steps`, from 1, in all layers."""
    seen = []
    for step in steps:
        decider.begin_step(step)
        seen.append(np.array([experts.present for experts in presents.values()]))
        decider.add(torch.from_numpy(LOADS[step - 1].astype(np.float64)).flatten())
    return seen


@pytest.mark.parametrize("policy", ["hecate", "fastermoe", "flexmoe"])
@pytest.mark.parametrize("elements", [30_000, 2 * RANKS * EXPERTS])
def test_a_restored_run_decides_as_the_uninterrupted_one(
    monkeypatch: pytest.MonkeyPatch, policy: ExpertPolicy, elements: int
) -> None:
    """`elements` allow all layers in a step, or two of three. A state may be asked for a step later."""
    monkeypatch.setattr(expert_decisions, "ELEMENTS", elements)
    whole = run(*decisions(policy), range(1, 13))
    copies = [present.sum() - LAYERS * EXPERTS for present in whole]
    assert copies[:DELAY] == [0, 0] and any(copies), "nothing is known before the first decision"
    for saved, asked in ((1, 1), (4, 4), (4, 5), (6, 6), (8, 8)):
        first = decisions(policy)
        run(*first, range(1, asked + 1))
        state = json.loads(json.dumps(first[0].state(saved) | {"step": saved}, sort_keys=True))  # "10" before "9"
        again = decisions(policy)
        again[0].restore(state)
        assert all(map(np.array_equal, run(*again, range(saved + 1, 13)), whole[saved:]))


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
