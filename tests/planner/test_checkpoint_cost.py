"""Predicted cost of checkpoints: closed forms of bytes, copies, stall and interval, and why training waits."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from meshwright.config.load import load_run
from meshwright.launch.prepare import plan_for
from meshwright.planner.checkpoint_cost import (
    HOST_COPY_RATE,
    WRITE_RATE,
    CheckpointCost,
    SaveRates,
    checkpoint_cost,
    checkpoint_sentences,
)
from meshwright.spec.model import parameter_count
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PACKED = 10 / 12
"""Bytes of a parameter's state in host memory over those in a checkpoint."""


RUN = (
    "model={preset: llama3-1b}",
    "train={steps: 10, global_batch: 8, seq_len: 8192}",
    "cluster={gpu: H100, gpus_per_node: 2}",
)


@cache
def planned(*overrides: str) -> tuple[RunSpec, Plan]:
    run = load_run(None, [*RUN, *overrides])
    return run, plan_for(run)[0]


def cost_of(*overrides: str) -> CheckpointCost:
    cost = checkpoint_cost(*planned(*overrides))
    assert cost is not None
    return cost


def test_the_copy_is_hidden_by_a_long_step_and_stalls_behind_a_short_one() -> None:
    run, plan = planned()
    assert plan.predicted is not None and plan.predicted.step_seconds is not None
    cost = checkpoint_cost(run, plan)
    assert cost is not None and cost.beside_training
    assert cost.bytes == cost.host_bytes == 12 * parameter_count(run.model)
    assert cost.copy_seconds == pytest.approx(cost.bytes / 2 / 55e9) and cost.stall_seconds == 0
    short = replace(plan.predicted, step_seconds=0.05, memory_peak_bytes=80 << 30)
    stalled = checkpoint_cost(run, replace(plan, predicted=short))
    assert stalled is not None and stalled.stall_seconds is not None
    assert cost.copy_seconds - 0.05 < stalled.stall_seconds < cost.copy_seconds
    assert stalled.interval_seconds is not None and cost.interval_seconds is not None
    assert stalled.interval_seconds >= cost.interval_seconds
    assert "stalls training" in "\n".join(checkpoint_sentences(run, stalled))


def test_room_in_device_memory_hides_a_copy_that_takes_longer_than_the_step() -> None:
    run, plan = planned()
    assert plan.predicted is not None
    short = replace(plan, predicted=replace(plan.predicted, step_seconds=0.05))
    cost = checkpoint_cost(run, short)
    assert cost is not None and cost.stall_seconds == 0
    assert cost.copy_seconds is not None and cost.device_copy_bytes is not None
    excess = cost.bytes / 2 * (1 - 0.05 / cost.copy_seconds)
    # Copies are of whole groups of parameters, 32 on a rank; at most three groups more than necessary are copied.
    assert excess <= cost.device_copy_bytes <= excess + cost.bytes / 2 * 3 / 32
    assert "from a copy in device memory, hidden by" in "\n".join(checkpoint_sentences(run, cost))


def test_an_update_in_host_memory_waits_for_its_snapshot_unless_memory_allows_second_buffers() -> None:
    """State of 14.8 GB on one host: a snapshot needs as much again, second buffers 10 bytes of 12.

    While a snapshot copies the state, the optimizer may not overwrite it. It writes its results to second buffers of the same size, or
    waits for the copy if host memory has no room for them.
    """
    offload = ("plan.offload=optimizer", "plan.offload_fraction=1", "plan.compute=bf16")
    roomy, tight = (cost_of(*offload, f"cluster.host_memory_gib={gib}") for gib in (200, 45))
    assert roomy.host_bytes == pytest.approx((1 + PACKED) * roomy.bytes, rel=1e-3) and tight.host_bytes == tight.bytes
    run, plan = planned(*offload, "cluster.host_memory_gib=45")
    assert plan.predicted is not None
    waits = checkpoint_cost(run, plan, step_seconds=0.3)
    assert waits is not None and waits.copy_seconds is not None and waits.stall_seconds is not None
    assert waits.copy_seconds == pytest.approx(PACKED * waits.bytes / 2 / HOST_COPY_RATE)
    assert waits.copy_seconds - 0.3 <= waits.stall_seconds < waits.copy_seconds
    run, plan = planned(*offload, "cluster.host_memory_gib=200")
    hidden = checkpoint_cost(run, plan, step_seconds=0.3)
    assert hidden is not None and hidden.stall_seconds == 0


def test_the_interval_shrinks_with_the_number_of_hosts() -> None:
    batch = "train.global_batch=512"
    few, many = (cost_of(batch, f"cluster.nodes={nodes}") for nodes in (16, 64))
    assert few.interval_seconds is not None and many.interval_seconds is not None
    assert 60 <= many.interval_seconds < few.interval_seconds <= 1800


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("checkpoint.mode=sync", "checkpoint.mode is sync"),
        ("cluster.host_memory_gib=10", "snapshots need 14.8 GB of host memory on each host"),
    ],
)
def test_training_waits_for_a_reason(override: str, reason: str) -> None:
    cost = cost_of(override)
    assert not cost.beside_training and cost.host_bytes == 0 and reason in cost.reason


def measured_saves(name: str) -> list[dict[str, Any]]:
    """The runs of llama3-1b on one H200 in a file of results, a save every 16 steps: asynchronous, then any synchronous."""
    lines = json.loads((RESULTS / name).read_text(encoding="utf-8"))["lines"]
    return [line for line in lines if line["kind"] == "run"]


@pytest.mark.parametrize(
    "name", [f"2026-11-24-checkpoint-{name}-H200.json" for name in ("stall", "saves", "checksums")]
)
def test_predictions_agree_with_measured_saves(name: str) -> None:
    """Bytes, host memory, time to storage and its bandwidth within 10%.

    `mean_step_beside` of a result is the mean time of steps during which a save was running, seconds.

    In the older results `staging` includes the wait for the end of the step on the device, so only the newest compares the copy's time.
    """
    asynchronous = measured_saves(name)[0]
    one_h200 = ("cluster={gpu: H200, gpus_per_node: 1}", "train.global_batch=4", "checkpoint.every=16")
    cost = checkpoint_cost(*planned(*one_h200), step_seconds=asynchronous["median_step_seconds"])
    assert cost is not None and cost.beside_training
    saves = asynchronous["saves"]
    for save in saves:
        assert cost.bytes == cost.host_bytes == pytest.approx(save["megabytes"] * 1e6, rel=0.01)
    assert cost.writing_seconds == pytest.approx(mean(save["writing"] for save in saves), rel=0.1)
    if "checksums" in name:
        assert cost.copy_seconds == pytest.approx(mean(save["staging"] for save in saves), rel=0.1)
    bandwidth = saves[0]["megabytes"] * 1e6 / (16 * asynchronous["mean_step_beside"])
    assert cost.storage_bytes_per_second == pytest.approx(bandwidth, rel=0.1)


def test_the_stall_predicted_for_the_measured_runs_is_within_the_variation_of_steps() -> None:
    """No stall is predicted. Steps beside saves exceed the median by less than steps of a run that waits for saves."""
    asynchronous, waiting = measured_saves("2026-11-24-checkpoint-saves-H200.json")
    run, plan = planned("cluster={gpu: H200, gpus_per_node: 1}", "train.global_batch=4")
    cost = checkpoint_cost(run, plan, step_seconds=asynchronous["median_step_seconds"])
    assert cost is not None and cost.stall_seconds == 0
    variation = max(waiting["step_seconds"][6:]) - waiting["median_step_seconds"]
    assert all(0 < stall < variation < 0.03 for stall in asynchronous["stall_seconds"])


def test_measured_rates_replace_those_that_are_assumed() -> None:
    """Writes and copies of offloaded state take bytes over rate; CPU ranks have a prediction with measured rates only."""
    run, plan = planned(
        "plan.offload=optimizer", "plan.offload_fraction=1", "plan.compute=bf16", "cluster.host_memory_gib=50"
    )
    cost = checkpoint_cost(run, plan, 0.3, SaveRates(write=1e9, host_copy=5e9))
    assert cost is not None
    assert cost.writing_seconds == pytest.approx(cost.bytes / 2 / 1e9)
    assert cost.copy_seconds == pytest.approx(PACKED * cost.bytes / 2 / 5e9)
    small = ("model={preset: llama-nano}", "train.seq_len=128", "checkpoint.mode=async")
    run, plan = planned("cluster={gpu: cpu, gpus_per_node: 2}", *small)
    assumed = checkpoint_cost(run, plan, 2.0)
    assert assumed is not None and assumed.copy_seconds is assumed.stall_seconds is None
    assert assumed.writing_seconds == pytest.approx(assumed.bytes / 2 / WRITE_RATE)
    measured = checkpoint_cost(run, plan, 2.0, SaveRates(host_copy=assumed.bytes / 2 / 3.0))
    assert measured is not None
    assert measured.copy_seconds == pytest.approx(3.0) and measured.stall_seconds == pytest.approx(1.0)


def test_a_run_without_checkpoints_has_no_cost() -> None:
    assert checkpoint_cost(*planned("checkpoint.every=0")) is None
    each = cost_of("checkpoint.every=100")
    assert each.interval_seconds is not None and each.storage_bytes_per_second == pytest.approx(
        each.bytes / each.interval_seconds
    )


def test_a_partner_host_takes_memory_of_two_copies_and_a_tenth_of_the_port() -> None:
    hosts = ("cluster.nodes=2", "cluster.network.port_gb_per_s=25", "plan.shard=4")
    alone, cost = cost_of(*hosts), cost_of(*hosts, "checkpoint.partner=host")
    assert alone.partner is alone.partner_seconds is None
    assert cost.host_bytes == pytest.approx(3 * alone.host_bytes, abs=3)
    assert cost.partner_link_share == 0.1
    assert cost.partner_seconds == pytest.approx(cost.bytes / 4 / 2.5e9)
    assert "a copy takes" in "\n".join(checkpoint_sentences(planned(*hosts)[0], cost))
    single = cost_of("checkpoint.partner=host")
    assert single.partner is None and single.host_bytes == cost_of().host_bytes


def test_a_replica_on_another_host_takes_memory_of_one_copy_and_nothing_is_sent() -> None:
    """Two hosts with a whole replica each: a rank copies twice what it writes, which is half of its shard."""
    hosts = ("cluster.nodes=2", "cluster.network.port_gb_per_s=25", "plan.replicate=2", "plan.shard=2")
    alone, cost = cost_of(*hosts), cost_of(*hosts, "checkpoint.partner=host")
    assert cost.host_bytes == cost.bytes == 2 * alone.host_bytes
    assert cost.partner_seconds == cost.partner_link_share == 0 and cost.writing_seconds == alone.writing_seconds
    assert cost.copy_seconds == pytest.approx(cost.bytes / 2 / 55e9)
    text = "\n".join(checkpoint_sentences(planned(*hosts)[0], cost))
    assert "its replica on another host writes, so nothing is sent" in text and "a copy takes" not in text


def test_training_waits_if_memory_holds_the_snapshots_but_not_the_copies_of_a_partner() -> None:
    """A host's snapshots take 7.4 GB; with the partner's two copies that is 22.2 GB."""
    hosts = ("cluster.nodes=2", "plan.shard=4", "cluster.host_memory_gib=18")
    assert cost_of(*hosts).beside_training
    cost = cost_of(*hosts, "checkpoint.partner=host")
    assert not cost.beside_training
    assert "snapshots and copies for checkpoint.partner need 22.2 GB of host memory" in cost.reason


def test_the_memory_of_cpu_ranks_has_the_snapshot_that_is_written_during_training() -> None:
    cpu = "cluster={gpu: cpu, gpus_per_node: 2}"
    run, plan = planned(cpu, "train.seq_len=512")
    assert plan.predicted is not None
    assert plan.predicted.memory_bytes["snapshot"] == 12 * parameter_count(run.model) // 2
    assert plan.predicted.memory_peak_bytes == sum(plan.predicted.memory_bytes.values())
    for waits in ("checkpoint.mode=sync", "checkpoint.every=0"):
        _, waiting = planned(cpu, "train.seq_len=512", waits)
        assert waiting.predicted is not None and "snapshot" not in waiting.predicted.memory_bytes
    _, on_gpus = planned()
    assert on_gpus.predicted is not None and "snapshot" not in on_gpus.predicted.memory_bytes
