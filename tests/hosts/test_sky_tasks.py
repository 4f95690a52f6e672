"""SkyPilot's own loader reads the rendered tasks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.launch.kubernetes import Container
from meshwright.launch.skypilot import skypilot_yaml
from tests.hosts.sky import TOKEN, loaded, sky_obstacle
from tests.launch.scheduler import job_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sky_obstacle() is not None, reason=str(sky_obstacle())),
]
CONTAINER = Container("registry.example/meshwright:1", "shared")


def test_the_loader_reads_hosts_devices_volume_and_recovery(tmp_path: Path) -> None:
    file = tmp_path / "run.sky.yaml"
    file.write_text(skypilot_yaml(job_of("supervision.spares=1"), CONTAINER))
    task = loaded(file, tmp_path)
    assert (task["name"], task["nodes"], task["accelerators"]) == ("nightly-8b", 5, {"H100": 8})
    assert task["volumes"] == {"/workspace": "shared"} and task["secrets"] == {"MESHWRIGHT_TOKEN": TOKEN}
    assert "registry.example/meshwright:1" in str(task["image"])
    assert task["recovery"]["recover_on_exit_codes"] == [75] and task["recovery"]["max_restarts_on_errors"] == 0
    assert task["run"].rstrip().endswith("done") and "meshwright train" in task["run"]


def test_the_loader_reads_a_run_on_one_host_without_devices(tmp_path: Path) -> None:
    file = tmp_path / "run.sky.yaml"
    job = job_of("cluster.gpu=cpu", "cluster.nodes=1", "checkpoint.mirror=s3://bucket/runs")
    file.write_text(skypilot_yaml(job, replace(CONTAINER, claim=None)))
    task = loaded(file, tmp_path)
    assert (task["nodes"], task["cpus"], task["accelerators"], task["volumes"]) == (1, "8+", None, {})


def test_a_mistake_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.sky.yaml"
    file.write_text(skypilot_yaml(job_of(), CONTAINER).replace("num_nodes", "num_node"))
    with pytest.raises(AssertionError, match="num_node"):
        loaded(file, tmp_path)
