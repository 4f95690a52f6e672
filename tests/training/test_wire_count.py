"""Bytes between nodes, counted by the kernel, appear in the metrics beside the prediction."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from meshwright.observe.metrics import read_metrics
from meshwright.parallel.world import World
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.network import NetworkSpec
from meshwright.spec.run import Assignment
from meshwright.training import wire_count
from meshwright.training.wire_count import WireCount, interface_between_nodes
from tests.distributed import cases_training as cases
from tests.distributed.pool import Pool
from tests.network import PRIVATE_NETWORK, OwnSockets, private_network_problem
from tests.training.tiny import make_tiny, prepared

PLANS = {"pipeline": ["plan.pipeline=2", "plan.schedule=zbv"], "replicas": ["plan.replicate=2"]}


class Sent:
    """A counter that says what it is told."""

    def __init__(self) -> None:
        self.total = 0

    def bytes(self) -> int:
        return self.total


OVERRIDES = [
    "cluster.gpus_per_node=2",
    "cluster.emulate_nodes=2",
    "plan.micro_batch=2",
    "train.steps=6",
    "train.seq_len=128",
    "model.max_seq_len=128",
    "model.hidden=128",
    "model.head_dim=32",
    "model.layers=4",
    "train.validate_every=3",
]


@pytest.fixture
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.getbasetemp() / "tiny")


def run_on_two_nodes(world: World, assignment: Assignment) -> cases.Seen:
    """A rank counts by its own sockets: they alone carry what goes to the other, and other programs are left out."""
    with mock.patch.object(wire_count, "Traffic", OwnSockets):
        return cases.run(replace(world, node_ranks=1), assignment)


@pytest.mark.skipif(OwnSockets.start() is None, reason="the kernel does not count the bytes of a socket")
def test_ranks_on_two_emulated_nodes_count_what_was_predicted(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    assignment = prepared(tiny, tmp_path, *OVERRIDES, *PLANS["pipeline"]).assignment
    assert [result.error for result in pool.run(run_on_two_nodes, 2, assignment)] == [None] * 2
    assert_counted(tmp_path / "tiny")


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_a_run_on_two_emulated_nodes_counts_what_was_predicted(tiny: Path, tmp_path: Path, plan: str) -> None:
    if (problem := private_network_problem()) is not None:
        pytest.skip(f"a run cannot have a network of its own: {problem}")
    command = [*PRIVATE_NETWORK, sys.executable, "-m", "meshwright", "train", str(tiny), "--runs", str(tmp_path)]
    answer = subprocess.run(
        [*command, *OVERRIDES, *PLANS[plan]], text=True, capture_output=True, timeout=120, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert assert_counted(tmp_path / "tiny") in answer.stdout
    if plan == "pipeline":
        assert "plan: PP 2, zero-bubble V (zbv), micro-batch 2 × 4" in answer.stdout
        assert "pipeline 2 (PP, between nodes) = 2 ranks" in (tmp_path / "tiny" / "report.html").read_text()


def assert_counted(run: Path) -> str:
    """Assert that the steps of a run record as many bytes as were predicted; returns the run's line about them."""
    records = read_metrics(run / "metrics.jsonl")
    steps = [record for record in records if record["kind"] == "step"]
    predicted = {record["predicted_wire_bytes"] for record in steps}
    assert len(steps) == 6
    assert len(predicted) == 1
    # The other bytes of a step, such as its sums of losses, are few; the start's fall into the first step.
    for record in steps[1:]:
        assert record["predicted_wire_bytes"] <= record["counted_wire_bytes"] <= 1.1 * record["predicted_wire_bytes"]
    output = [
        record["text"] for record in records if record["kind"] == "event" and "bytes between nodes" in record["text"]
    ]
    mean = sum(record["counted_wire_bytes"] for record in steps) / 6e6
    assert output == [
        f"bytes between nodes per step: {mean:,.1f} MB counted, {steps[0]['predicted_wire_bytes'] / 1e6:,.1f} MB predicted"
    ]
    return output[0]


def test_pauses_are_left_out_and_steps_add_up() -> None:
    sent = Sent()
    count = WireCount(predicted=100.4, hosts=1, counting=sent)  # type: ignore[arg-type]
    sent.total = 110
    assert count.step() == {"counted_wire_bytes": 110, "predicted_wire_bytes": 100}
    sent.total = 5000
    count.pause()
    sent.total = 5090
    assert count.step() == {"counted_wire_bytes": 90, "predicted_wire_bytes": 100}
    assert (count.counted, count.steps) == (200, 2)


def test_ranks_that_do_not_count_record_nothing() -> None:
    count = WireCount(predicted=1.0, hosts=1, counting=None)
    count.pause()
    assert count.step() == {}


@pytest.mark.parametrize(
    ("cluster", "interface"),
    [
        (ClusterSpec(gpu="H200", gpus_per_node=4), None),
        (ClusterSpec(gpu="H200", gpus_per_node=4, emulate_nodes=2), "lo"),
        (ClusterSpec(gpu="cpu", gpus_per_node=2, emulate_nodes=2), "lo"),
        (ClusterSpec(gpu="cpu", gpus_per_node=4, emulate_nodes=2), None),
        (ClusterSpec(gpu="H200", nodes=2, network=NetworkSpec(interface="eth1")), "eth1"),
        (ClusterSpec(gpu="H200", nodes=2, network=NetworkSpec(fabric="tcp")), None),
        (ClusterSpec(gpu="H200", nodes=1, network=NetworkSpec(interface="eth1")), None),
    ],
)
def test_only_an_interface_without_other_traffic_is_counted(cluster: ClusterSpec, interface: str | None) -> None:
    assert interface_between_nodes(cluster) == interface


def test_hosts_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts' counts, as the sum over all ranks would leave them: each sent 300 in two steps."""
    monkeypatch.setattr(dist, "all_reduce", lambda sums, group: sums.mul_(2))
    count = WireCount(predicted=280e6, hosts=2, counting=Sent(), counted=int(300e6), steps=2)  # type: ignore[arg-type]
    assert count.line(None) == "bytes between nodes per step: 300.0 MB counted, 280.0 MB predicted"  # type: ignore[arg-type]
    assert count.step() == {}
    assert WireCount(1.0, 2, None, missing=True, counted=1, steps=1).line(None) is None  # type: ignore[arg-type]
