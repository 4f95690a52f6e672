"""Decisions of expert placement: closed forms, and properties under random loads, limits and machines."""

from __future__ import annotations

import hashlib
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.policies.expert_costs import ExpertCosts, layer_times
from meshwright.policies.expert_owners import (
    better_owners,
    even_owners,
    heterogeneous_owners,
    layer_owners,
    position_order,
)
from meshwright.policies.expert_placement import PlacementProblem, overlap_degree, place_experts
from meshwright.policies.expert_routing import node_rows, owned, route, row_totals
from meshwright.policies.load_window import LoadWindow
from meshwright.spec.errors import BadInput
from tests.policies.baseline_processor import digest_on_baseline
from tests.slow import examples

FREE_COPIES = ExpertCosts(2, 1e-6, 0.0, 0.0, 0.0, 0.0, 0.0)
"""Two ranks per node; only the experts' work takes time."""


@st.composite
def problems(draw: st.DrawFn) -> PlacementProblem:
    """Up to three layers of up to 16 experts on up to eight ranks, with any loads and costs."""
    nodes, per_node = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    ranks, layers, experts = nodes * per_node, draw(st.integers(1, 3)), draw(st.integers(1, 16))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    peaks = random.lognormal(0, draw(st.sampled_from([0, 1, 3])), (layers, 1, experts))
    counts = random.poisson(peaks * draw(st.sampled_from([0, 1, 50])), (layers, ranks, experts))
    seconds = [float(random.choice([0, 1e-6, 1e-5, 1e-4])) for _ in range(6)]
    owners = random.integers(0, ranks, (layers, experts))
    slots, costs = draw(st.integers(0, experts)), ExpertCosts(per_node, *seconds)
    return PlacementProblem(counts, owners, slots, costs, draw(st.integers(1, 5)))


@given(problems())
@settings(max_examples=examples(25, 400))
def test_decisions_keep_their_limits(problem: PlacementProblem) -> None:
    counts = problem.counts.copy()
    ranks = counts.shape[1]
    base = owned(problem.owners, ranks)
    present = place_experts(problem)
    assert (problem.counts == counts).all()
    assert (present >= base).all(), "owners keep their experts"
    assert ((present & ~base).sum(2) <= problem.slots).all()
    seconds = problem.times(problem.row_totals(present)).total
    assert (seconds <= problem.times(problem.row_totals(base)).total).all(), "never slower than expert parallelism"
    reordered = PlacementProblem(
        np.asfortranarray(counts), problem.owners.copy(), problem.slots, problem.costs, problem.steps
    )
    assert (place_experts(reordered) == present).all()


@given(problems())
@settings(max_examples=examples(25, 400))
def test_every_row_has_a_destination(problem: PlacementProblem) -> None:
    per_node = problem.costs.ranks_per_node
    present = place_experts(problem)
    totals = problem.row_totals(present)
    layers, ranks, experts = present.shape
    for layer in range(layers):
        sent = np.array(
            [route(problem.counts[layer, rank], present[layer], rank, per_node) for rank in range(ranks)]
        )  # source rank, expert, destination
        assert (sent.sum(2) == problem.counts[layer]).all()
        assert (present[layer].T | (sent.sum(0) == 0)).all(), "only to ranks that have the expert"
        computed = sent.sum((0, 1))
        difference = totals.computed[layer] - computed
        assert (np.abs(difference) <= experts * per_node * 2).all()
        nodes = np.arange(ranks) // per_node
        crossing = sent * (nodes[:, None, None] != nodes[None, None, :])
        into = np.array([crossing[:, :, nodes == node].sum() for node in range(ranks // per_node)])
        out = np.array([crossing[nodes == node].sum() for node in range(ranks // per_node)])
        assert (totals.across[layer] >= out).all()
        assert (totals.across[layer] <= np.maximum(into, out) + experts * ranks).all()


def test_equal_loads_move_nothing() -> None:
    counts = np.full((2, 8, 16), 32)
    owners = even_owners(2, 16, 8)
    problem = PlacementProblem(counts, owners, 4, ExpertCosts(4, 1e-6, 1e-6, 1e-6, 1e-9, 1e-9, 1.0))
    assert (place_experts(problem) == owned(owners, 8)).all()


def test_one_popular_expert_is_copied_until_ranks_have_equal_rows() -> None:
    """Four ranks of one expert each send all rows to expert 0; with a copy everywhere each computes its own."""
    counts = np.zeros((1, 4, 4), dtype=np.int64)
    counts[:, :, 0] = 100
    problem = PlacementProblem(counts, even_owners(1, 4, 4), 1, FREE_COPIES)
    assert problem.row_totals(owned(problem.owners, 4)).computed.tolist() == [[400, 0, 0, 0]]
    present = place_experts(problem)
    assert problem.row_totals(present).computed.tolist() == [[100, 100, 100, 100]]
    assert present[0, :, 0].all() and present.sum() == 7


def test_copies_in_proportion_reach_all_nodes_first() -> None:
    """Eight ranks on four nodes with one slot each; the popular expert has half of the rows, the others 1/14 each."""
    counts = np.full((1, 8, 8), 10)
    counts[:, :, 0] = 70
    costs = ExpertCosts(2, 1e-6, 1e-9, 1e-9, 1e-9, 1e-9, 1.0)
    present = place_experts(PlacementProblem(counts, even_owners(1, 8, 8), 1, costs))
    assert present[0, :, 0].reshape(4, 2).any(1).all()


def test_overlap_degree_counts_the_slower_link() -> None:
    costs = ExpertCosts(2, 0.0, 0.0, 0.0, 1.0, 4.0, 10.0)
    assert (overlap_degree(costs, 2), overlap_degree(costs, 4)) == (10, 2)


def test_times_of_a_layer_by_hand() -> None:
    """Two nodes of two ranks; each rank has one expert and 8 rows for each. Then expert 0 is copied to rank 2."""
    counts = np.full((1, 4, 4), 8)
    owners, costs = even_owners(1, 4, 4), ExpertCosts(2, 1.0, 10.0, 100.0, 1000.0, 5000.0, 1500.0)
    present = owned(owners, 4)
    totals = row_totals(counts, node_rows(counts, 2), present)
    assert totals.computed.tolist() == [[32] * 4]
    assert totals.inside.tolist() == [[8] * 4]
    assert totals.across.tolist() == [[32, 32]], "two ranks of a node send 8 rows for each of two experts"
    times = layer_times(totals, owners, costs)
    assert (times.compute, times.exchange, times.weights) == (96, 4 * 3200, 0)
    present[0, 2, 0] = True
    totals = row_totals(counts, node_rows(counts, 2), present)
    assert totals.computed.tolist() == [[16, 32, 48, 32]]
    assert totals.across.tolist() == [[32, 32]], (
        "node 1 still sends rows of expert 1, and receives those of two experts"
    )
    assert layer_times(totals, owners, costs).weights == 2 * (5000 - 1500)


def test_owners_have_equal_numbers_over_layers_and_equal_loads_within() -> None:
    loads = np.array([[9, 1, 1, 1], [8, 4, 3, 1]])
    owners = heterogeneous_owners(loads, copied=1, ranks=4, ranks_per_node=2)
    assert np.bincount(owners.ravel()).tolist() == [2] * 4
    for layer in range(2):
        others = [expert for expert in range(4) if expert != 0]
        assert len({int(owners[layer, expert]) for expert in others}) == 3, (
            "experts without copies are on different ranks"
        )
    with pytest.raises(BadInput, match="a divisor of 2 layers × 3 experts, got 4 ranks"):
        heterogeneous_owners(np.ones((2, 3)), 0, 4, 2)
    with pytest.raises(BadInput, match="a divisor of 2 layers × 3 experts, got 4 ranks"):
        even_owners(2, 3, 4)


def test_owners_of_a_layer_have_equal_numbers_and_the_smallest_possible_load() -> None:
    """Of two ranks with two experts each the best pairs are the most with the least loaded."""
    loads = np.array([[9, 6, 5, 1], [1, 2, 9, 8]])
    assert layer_owners(loads, 0, 2, 2).tolist() == [[0, 1, 1, 0], [0, 1, 0, 1]]
    copied = layer_owners(loads, 2, 2, 2)
    assert copied[0, 2] != copied[0, 3], "the two most loaded are on all ranks, so the others are balanced"
    with pytest.raises(BadInput, match="a divisor of 6 experts, got 4 ranks"):
        layer_owners(np.ones((1, 6)), 0, 4, 2)


@given(st.integers(0, 2**32 - 1), st.sampled_from([(2, 2), (4, 2), (8, 4)]), st.integers(1, 4))
def test_positions_after_a_move_belong_to_the_new_owners(seed: int, ranks: tuple[int, int], owned: int) -> None:
    draw, (count, per_node) = np.random.default_rng(seed), ranks
    loads, experts = draw.geometric(0.02, (3, owned * count)), owned * count
    even = even_owners(3, experts, count)
    owners = better_owners(loads, even, 0, count, per_node)
    order = position_order(owners, count)
    assert (np.sort(order, axis=1) == np.arange(experts)).all()
    assert (np.take_along_axis(owners, order, axis=1) == np.arange(experts) // owned).all()
    stays = owners == even
    assert (order[stays] == np.tile(np.arange(experts), (3, 1))[stays]).all()
    moved = (owners != even).any(1)
    busiest = [
        np.stack([np.bincount(o, w, count) for o, w in zip(by, loads, strict=True)]).max(1) for by in (even, owners)
    ]
    assert (busiest[1][moved] <= 0.98 * busiest[0][moved]).all()


def test_fewer_experts_than_ranks_use_all_ranks_in_turn() -> None:
    assert even_owners(2, 2, 4).tolist() == [[0, 1], [2, 3]]
    assert even_owners(2, 4, 2).tolist() == [[0, 0, 1, 1]] * 2


def test_a_window_resumes_from_its_history() -> None:
    random = np.random.default_rng(0)
    steps = random.integers(0, 100, (7, 2, 4, 8))
    whole, stopped = LoadWindow(3), LoadWindow(3)
    with pytest.raises(ValueError, match="no step"):
        whole.sums()
    for step in steps:
        whole.add(step)
    for step in steps[:5]:
        stopped.add(step)
    resumed = LoadWindow(3, stopped.history)
    for step in steps[5:]:
        resumed.add(step)
    assert (whole.sums() == steps[4:].sum(0)).all()
    assert (resumed.sums() == whole.sums()).all() and len(resumed) == 3


def digest() -> str:
    """Digest of the decision for fixed loads."""
    random = np.random.default_rng(1)
    counts = random.poisson(random.lognormal(3, 1, (6, 1, 64)), (6, 32, 64))
    owners = heterogeneous_owners(counts.sum(1), 4, 32, 8)
    costs = ExpertCosts(8, 1e-7, 2e-8, 8e-9, 4e-5, 9e-5, 2e-3)
    return hashlib.sha256(place_experts(PlacementProblem(counts, owners, 8, costs, 3)).tobytes()).hexdigest()


@pytest.mark.slow
def test_processors_of_another_generation_decide_alike() -> None:
    """A process whose numpy may use no vector instructions beyond the baseline takes the same decisions."""
    assert digest_on_baseline("tests.policies.test_expert_placement") == digest()


@pytest.mark.parametrize("experts", [64, 256])
def test_decisions_for_sixty_layers_take_little_processor_time(experts: int) -> None:
    """About 10 ms on one core of 2020; the limit is five times the 20 ms that a step may spend on them."""
    random = np.random.default_rng(2)
    counts = random.poisson(random.lognormal(3, 1, (60, 1, experts)), (60, 32, experts))
    owners = even_owners(60, experts, 32)
    costs = ExpertCosts(8, 1e-7, 2e-8, 8e-9, 4e-5, 9e-5, 2e-3)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        place_experts(PlacementProblem(counts, owners, 4, costs))
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.1, f"{min(seconds):.3f} s"
