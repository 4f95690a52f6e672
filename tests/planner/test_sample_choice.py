"""Choice between static context ranks and ranks by sample."""

from __future__ import annotations

import numpy as np

from meshwright.config.load import load_run
from meshwright.planner.sample_choice import choose_sample_layout, draw_batch, sample_layouts
from meshwright.planner.sample_reasons import sample_reasons
from meshwright.spec.run import RunSpec
from meshwright.workload.expected_lengths import LengthHistogram

SHORT_AND_LONG = LengthHistogram.of([(64, 1024, 997), (65_536, 65_536, 3)])


def run_of(*words: str) -> RunSpec:
    return load_run(None, [
        "model.preset=llama3-8b", "model.max_seq_len=65536", "cluster.gpu=H200", "cluster.nodes=2", "cluster.gpus_per_node=4",
        "train.seq_len=65536", "train.global_batch=16", *words,
    ])  # fmt: skip


def test_batches_are_drawn_by_seed_and_number_and_have_all_tokens() -> None:
    first = draw_batch(SHORT_AND_LONG, 100_000, 65_536, 3, 0)
    assert first.sum() == 100_000 and first.min() >= 1
    assert np.array_equal(first, draw_batch(SHORT_AND_LONG, 100_000, 65_536, 3, 0))
    assert not np.array_equal(first, draw_batch(SHORT_AND_LONG, 100_000, 65_536, 3, 1))


def test_layouts_hold_the_longest_sample() -> None:
    layouts = list(sample_layouts(run_of(), 65_000))
    assert all(layout.capacity * layout.ranks >= 65_000 for layout in layouts if layout.hybrid)
    static = {(layout.ring, layout.ulysses) for layout in layouts if not layout.hybrid}
    assert static == {(1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (8, 1)}, "Ulysses inside a node only"
    pinned = list(sample_layouts(run_of("plan.context_ring=2", "plan.context_ulysses=1"), 65_000))
    assert [(layout.ring, layout.hybrid) for layout in pinned] == [(2, False)]


def test_ranks_by_sample_win_where_static_rings_cross_nodes() -> None:
    run = run_of()
    choice = choose_sample_layout(run, SHORT_AND_LONG)
    best, static = choice.layouts[0], choice.leading(hybrid=False)
    assert best.layout.hybrid and static is not None and best.seconds < static.seconds
    assert best.steps.efficiency <= 1 and 0 <= best.steps.padding.mean() < 0.1
    assert best.memory_bytes < 0.91 * 151e9
    reasons = list(sample_reasons(run, choice))
    assert f"{static.seconds / best.seconds:.2f} times as long" in reasons[0] and "32 batches" in reasons[-1]


def test_equal_samples_take_the_simpler_static_layout() -> None:
    """Samples that one rank holds need no ranks of their own number."""
    run = run_of("train.seq_len=4096", "train.global_batch=64")
    choice = choose_sample_layout(run, LengthHistogram.of([(4096, 4096, 1)]))
    assert not choice.layouts[0].layout.hybrid and choice.layouts[0].layout.context == 1
    assert any(
        "the simpler layout is taken" in reason or "times as long" in reason for reason in sample_reasons(run, choice)
    )


def test_what_cannot_be_played_is_said() -> None:
    choice = choose_sample_layout(run_of("plan.tensor=2"), SHORT_AND_LONG)
    assert choice.layouts == () and list(sample_reasons(run_of(), choice)) == [
        "with pinned tensor ranks unequal samples are not played"
    ]
