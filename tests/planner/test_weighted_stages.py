"""Stages of unlike layers against every way to cut them, and against a closed form."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.slow import examples

from meshwright.config.load import load_run
from meshwright.planner.schedule_choice import head_in_layers, with_stages
from meshwright.planner.weighted_stages import LEAST_GAIN, balanced_by_weight
from meshwright.spec.layout import STAGES_PER_RANK, balanced_stages, stage_table

GEMMA = "model=gemma3-4b model.vocab_size=4096 cluster.gpu=H200 cluster.gpus_per_node=8 train.global_batch=64"


def slowest(
    table: tuple[tuple[range, ...], ...], weights: list[float], head: float, speeds: tuple[float, ...]
) -> float:
    """Time of the slowest rank."""
    last = len(weights) - 1
    return max(
        (sum(weights[layer] + head * (layer == last) for stage in stages for layer in stage)) / speed
        for stages, speed in zip(table, speeds, strict=True)
    )


@settings(max_examples=examples(25, 300), deadline=None)
@given(
    st.sampled_from(("1f1b", "interleaved", "zbv")),
    st.integers(2, 4),
    st.lists(st.sampled_from((1.0, 1.0, 0.4, 3.5)), min_size=8, max_size=11),
    st.sampled_from((0.0, 0.5, 2.4)),
    st.tuples(*[st.sampled_from((1.0, 1.0, 1.5))] * 4),
)
def test_no_cut_is_faster_by_more_than_a_layer(
    name: str, pipeline: int, weights: list[float], head: float, four: tuple[float, ...]
) -> None:
    speeds, layers = four[:pipeline], len(weights)
    mean = sum(weights) / layers
    weights, head = [weight / mean for weight in weights], head / mean
    counted = balanced_stages(name, pipeline, layers, head, None, speeds)
    table = balanced_by_weight(counted, tuple(weights), head, speeds)
    texts = tuple(tuple(f"{stage.start}-{stage.stop - 1}" for stage in stages) for stages in table)
    assert len(texts) == pipeline and {len(stages) for stages in texts} == {STAGES_PER_RANK.get(name, 1)}
    owners = [rank for _, rank in sorted((stage.start, rank) for rank, stages in enumerate(table) for stage in stages)]
    before = [0.0, *accumulate(weights)]
    best = float("inf")
    for cut in combinations(range(1, layers), len(owners) - 1):
        ranks = [0.0] * pipeline
        for owner, (first, stop) in zip(owners, pairwise((0, *cut, layers)), strict=True):
            ranks[owner] += (before[stop] - before[first] + head * (stop == layers)) / speeds[owner]
        best = min(best, max(ranks))
    found = slowest(table, weights, head, speeds)
    assert best - 1e-9 <= found <= best / (1 - LEAST_GAIN) + max(weights) / min(speeds)
    assert found <= slowest(counted, weights, head, speeds)


def test_long_global_layers_of_gemma_are_spread_over_the_stages() -> None:
    """A global layer of 131,072 tokens takes as long as 3.7 local ones.

    FLOPs by hand, in units of 6 for each token: linear layers 94.4 M, scores and values of a local layer 2 · 2,048 · 1,020, of a global one
    2 · 2,048 · 65,536; the head 10.5 M.
    """
    run = load_run(None, f"{GEMMA} train.seq_len=131072".split())
    linear = 2560 * (2048 + 2 * 1024) + 2048 * 2560 + 3 * 2560 * 10240
    local, whole = linear + 2 * 2048 * (1024 - 1024**2 / 2**18), linear + 2 * 2048 * 65536
    weights = [whole if layer % 6 == 5 else local for layer in range(34)]
    plan = with_stages(run, "1f1b", 4, 1)
    table = stage_table(plan, 4, 34)
    head = 2560 * 4096

    def time(cut: tuple[int, ...]) -> float:
        return max(sum(weights[a:b]) + head * (b == 34) for a, b in pairwise((0, *cut, 34)))

    best = min(map(time, combinations(range(1, 34), 3)))
    assert slowest(table, weights, head, (1.0,) * 4) == pytest.approx(best)
    counted = balanced_stages("1f1b", 4, 34, head / local)
    assert best < slowest(counted, weights, head, (1.0,) * 4) - local


def test_layers_of_nearly_equal_time_are_cut_by_their_number() -> None:
    """The first dense layers of DeepSeek-V3 have the FLOPs of eight experts and the shared one."""
    words = "model=deepseek-v3 cluster.gpu=H800 cluster.nodes=16 train.seq_len=4096 train.global_batch=1024"
    run = load_run(None, words.split())
    for pipeline in (2, 4, 8, 16):
        table = stage_table(with_stages(run, "1f1b", pipeline, 1), pipeline, 61)
        assert table == balanced_stages("1f1b", pipeline, 61, head_in_layers(run))
