"""Choice between static context ranks and ranks by sample."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from tests.data import megatron

from meshwright.config.load import load_run
from meshwright.planner.sample_choice import choose_sample_layout, draw_batch, sample_layouts
from meshwright.planner.sample_lengths import expected_histogram
from meshwright.planner.sample_plans import hybrid_exchange
from meshwright.planner.sample_reasons import sample_reasons
from meshwright.planner.search import search
from meshwright.spec.run import RunSpec
from meshwright.workload.expected_lengths import LengthHistogram

SHORT_AND_LONG = LengthHistogram.of([(64, 1024, 997), (65_536, 65_536, 3)])


def run_of(*words: str) -> RunSpec:
    return load_run(
        None,
        [
            "model.preset=llama3-8b",
            "model.max_seq_len=65536",
            "cluster.gpu=H200",
            "cluster.nodes=2",
            "cluster.gpus_per_node=4",
            "train.seq_len=65536",
            "train.global_batch=16",
            *words,
        ],
    )


def test_batches_are_drawn_by_seed_and_number_and_have_all_tokens() -> None:
    first = draw_batch(SHORT_AND_LONG, 100_000, 65_536, 3, 0)
    assert first.sum() == 100_000 and first.min() >= 1
    assert np.array_equal(first, draw_batch(SHORT_AND_LONG, 100_000, 65_536, 3, 0))
    assert not np.array_equal(first, draw_batch(SHORT_AND_LONG, 100_000, 65_536, 3, 1))


def test_hybrid_ranks_exchange_heads_as_pinned_or_by_time() -> None:
    """A part's tokens take longer to exchange between nodes than inside one; of 3 ranks, 2 can exchange 8 heads, and none 5."""
    inside, across = (hybrid_exchange(run_of(f"cluster.nodes={nodes}"), 4 * nodes, 8) for nodes in (1, 2))
    assert 0 < inside < across == hybrid_exchange(run_of(), 3, 8) and hybrid_exchange(run_of(), 3, 5) == math.inf
    for attention, exchange in (("ring", None), ("ulysses", across)):
        words = ["data.packing=none", "train.global_batch=null", "train.global_batch_tokens=1048576", "plan.hybrid=8"]
        samples = search(run_of(*words, f"plan.hybrid_attention={attention}")).best.plan.samples
        assert (
            samples is not None and samples.exchange == exchange and samples.always_exchange == (exchange is not None)
        )


def test_layouts_hold_the_longest_sample() -> None:
    layouts = list(sample_layouts(run_of(), 65_000))
    assert all(layout.capacity * layout.ranks >= 65_000 for layout in layouts if layout.hybrid)
    static = {(layout.ring, layout.ulysses) for layout in layouts if not layout.hybrid}
    assert static == {(1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (8, 1)}, "Ulysses inside a node only"
    pinned = list(sample_layouts(run_of("plan.context_ring=2", "plan.context_ulysses=1"), 65_000))
    assert [(layout.ring, layout.hybrid) for layout in pinned] == [(2, False)]


@pytest.mark.slow
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


def lengths_file(folder: Path) -> Path:
    """Three of a thousand samples have 65,536 tokens."""
    ranges = [{"first": 64, "last": 1024, "documents": 997}, {"first": 65_536, "last": 65_536, "documents": 3}]
    (folder / "lengths.json").write_text(json.dumps({"ranges": ranges}))
    return folder / "lengths.json"


def samples_run(folder: Path, seq_len: int) -> RunSpec:
    return load_run(
        None,
        [
            "model.preset=llama3-8b",
            "model.max_seq_len=65536",
            "cluster.gpu=H200",
            "cluster.nodes=2",
            "cluster.gpus_per_node=4",
            f"train.seq_len={seq_len}",
            f"train.global_batch_tokens={16 * seq_len}",
            "data.packing=none",
            f"data.lengths={lengths_file(folder)}",
        ],
    )


def test_the_search_divides_samples_that_take_too_long_on_one_rank(tmp_path: Path) -> None:
    best = search(samples_run(tmp_path, 65_536)).best.plan
    assert best.axis_size("hybrid") == 8 and best.samples is not None and best.samples.capacity < 65_536
    assert all(not layer.reshard and layer.gradients == "whole" for layer in best.layers)
    assert (
        best.why[0].startswith(f"hybrid 8 with slots of {best.samples.capacity:,} tokens") and "longer" in best.why[0]
    )
    assert not any(reason.startswith("pinned") for reason in best.why)


def test_the_search_keeps_short_samples_on_data_ranks(tmp_path: Path) -> None:
    best = search(samples_run(tmp_path, 1024)).best.plan
    assert best.axis_size("hybrid") == 1 and best.samples is not None and best.samples.capacity == 1024


def test_lengths_of_the_data_are_those_of_its_index(tmp_path: Path) -> None:
    megatron.write(tmp_path / "a", [[[1] * 64], [[1] * 65], [[1] * 300]], code=8)
    run = load_run(
        None,
        [
            "model.preset=llama3-8b",
            "cluster.gpu=H200",
            "data.packing=none",
            f"data.mix={tmp_path}",
            "train.global_batch_tokens=65536",
        ],
    )
    histogram = expected_histogram(run)
    assert histogram is not None and histogram.shares.tolist() == pytest.approx([1 / 3] * 3)
    assert histogram.last.tolist() == [64, 128, 512]
    (tmp_path / "a.idx").unlink()
    assert expected_histogram(run) is None
