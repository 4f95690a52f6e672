"""Slots with offload: closed forms of their layers, and plans that have them where no other is as fast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.config.load import load_run
from meshwright.planner.candidate import memory_budget
from meshwright.planner.search import search
from meshwright.planner.slot_offloads import offloaded_layers, slot_offload
from meshwright.policies.sample_time import SampleTime
from meshwright.spec.plan import SlotOffload
from meshwright.spec.run import RunSpec


def test_as_many_layers_are_offloaded_as_the_longer_slot_needs() -> None:
    """Twice the tokens of 32 layers: 16 must leave the device, and two of the offloaded ones are on it at any time."""
    assert offloaded_layers(16, 32, 32) == 18
    assert (16 / 32) * 32 == 32 - 18 + 2
    assert offloaded_layers(24, 32, 32) == 10 and offloaded_layers(2, 32, 32) == 32
    assert offloaded_layers(1, 32, 32) is None, "two layers stay on the device in any case"


def test_without_rates_every_sample_that_does_not_fit_takes_longer_slots() -> None:
    offload = SlotOffload(capacity=200, layers=6, shortest=101)
    assert slot_offload(None, SampleTime(1e-3, 1.0), 100, 200, 4, 8) == (offload, True)


def samples_run(folder: Path, nodes: int, *words: str) -> RunSpec:
    """Three of a thousand samples have up to 256K tokens."""
    ranges = [{"first": 64, "last": 1024, "documents": 997}, {"first": 32_768, "last": 262_144, "documents": 3}]
    (folder / "lengths.json").write_text(json.dumps({"ranges": ranges}))
    return load_run(
        None,
        [
            "model.preset=llama3-8b",
            "model.max_seq_len=262144",
            "cluster.gpu=H100",
            f"cluster.nodes={nodes}",
            "cluster.gpus_per_node=8",
            "train.seq_len=262144",
            f"train.global_batch_tokens={16 << 18}",
            "data.packing=none",
            f"data.lengths={folder / 'lengths.json'}",
            *words,
        ],
    )


@pytest.mark.slow
def test_the_search_takes_offload_where_long_samples_would_cross_more_nodes(tmp_path: Path) -> None:
    run = samples_run(tmp_path, 4)
    best = search(run).best.plan
    assert best.samples is not None and best.samples.offload is not None and best.predicted is not None
    offload, budget = best.samples.offload, memory_budget(run, None)
    assert offload.layers == offloaded_layers(best.samples.capacity, offload.capacity, 32)
    assert best.samples.capacity < offload.capacity and offload.shortest <= 32 * best.samples.capacity + 1
    assert "and, with offload," in best.why[0]
    assert budget is not None and best.predicted.memory_peak_bytes <= budget


@pytest.mark.slow
def test_pinned_slots_count_their_memory(tmp_path: Path) -> None:
    pins = ["plan.hybrid=32", "plan.recompute=all_but_attention", "plan.offload=none"]
    longer = ["plan.capacity=8192", "plan.offload_capacity=16384"]
    with_offload = search(samples_run(tmp_path, 4, *pins, *longer)).best.plan
    assert with_offload.samples is not None and with_offload.samples.offload is not None
    assert with_offload.samples.offload.layers == 18 and with_offload.predicted is not None
    shorter, same = (
        search(samples_run(tmp_path, 4, *pins, f"plan.capacity={tokens}")).best.plan for tokens in (8192, 16384)
    )
    assert shorter.predicted is not None and same.predicted is not None
    low, high = shorter.predicted.memory_peak_bytes, same.predicted.memory_peak_bytes
    assert low <= with_offload.predicted.memory_peak_bytes < high
