from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.launch import machine
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.rank_environment import check_tasks, is_node_agent, started_by_launcher


def test_without_gpus_one_cpu_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_query", lambda field: [])
    assert machine.found_cluster() == {"gpu": "cpu", "nodes": 1, "gpus_per_node": 1}


def test_known_and_unknown_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "host_memory_bytes", lambda: 2 << 40)
    monkeypatch.setattr(machine, "_query", lambda field: ["NVIDIA H100 80GB HBM3"] * 8)
    assert machine.found_cluster() == {"gpu": "H100", "nodes": 1, "gpus_per_node": 8, "host_memory_gib": 2048}
    answers = {"name": ["NVIDIA TITAN RTX"], "memory.total": ["24576 MiB"]}
    monkeypatch.setattr(machine, "_query", answers.__getitem__)
    assert machine.found_cluster() == {
        "gpu": "NVIDIA TITAN RTX",
        "nodes": 1,
        "gpus_per_node": 1,
        "memory_gib": 24.0,
        "host_memory_gib": 2048,
    }


def test_a_driver_that_hangs_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "NVIDIA_SMI_SECONDS", 0.1)
    with pytest.raises(OutOfResources, match=r"nvidia-smi gave no answer in 0.1 s: .* set CUDA_VISIBLE_DEVICES= "):
        machine.found_cluster()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.found_cluster()["gpu"] == "cpu"


@pytest.fixture
def two_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with an A100, two H100s and another A100, by a program in place of nvidia-smi."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\nfield=${1##*,}\n"
        "for gpu in 'GPU-a1 A100-SXM4-80GB 81920' 'GPU-b2 H100 81559' 'GPU-b3 H100 81559' 'GPU-a4 A100-SXM4-80GB 81920'; do\n"
        '  set -- $gpu\n  if [ "$field" = name ]; then echo "$1, NVIDIA $2"; else echo "$1, $3 MiB"; fi\ndone\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize(
    ("visible", "gpu", "count"),
    [
        (None, "A100", 4),
        ("1,2", "H100", 2),
        ("2", "H100", 1),
        (" 3 , 1", "A100", 2),
        ("GPU-b2,GPU-b3", "H100", 2),
        ("GPU-b3,nothing,0", "H100", 1),
        ("1,9,2", "H100", 1),
        ("-1,1", "cpu", 1),
        ("MIG-c7384736-a75d-5afc-978f-d2f1294409fd", "A100", 1),
    ],
)
def test_the_gpus_are_those_that_the_environment_names(
    two_kinds: None, visible: str | None, gpu: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = machine.found_cluster()
    assert (found["gpu"], found["gpus_per_node"]) == (gpu, count)
    assert machine.visible_gpus() == (0 if gpu == "cpu" else count)


def test_a_local_run_on_gpus_that_are_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(visible_gpus: int, cluster: ClusterSpec, nodes: tuple[str, ...] = ()) -> str:
        monkeypatch.setattr(machine, "_query", lambda field: ["NVIDIA H100 80GB HBM3"] * visible_gpus)
        monkeypatch.setattr(machine, "_DEVICE_NODES", nodes)
        try:
            machine.check_devices(cluster)
        except BadInput as error:
            return str(error)
        return ""

    two = ClusterSpec(gpu="H100", gpus_per_node=2)
    assert refusal(0, two).startswith("cluster.gpu is H100 and this host has no GPU; set cluster=auto")
    assert refusal(1, two).startswith(
        "cluster.gpus_per_node is 2 and this host shows 1 GPU; set cluster.gpus_per_node=1"
    )
    assert refusal(2, two) == refusal(0, ClusterSpec()) == ""
    assert refusal(0, two, ("null",)) == ""  # of a make that nvidia-smi does not know
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "no GPU (CUDA_VISIBLE_DEVICES is empty)" in refusal(0, two, ("null",))


@pytest.mark.parametrize(
    ("env", "launched"),
    [
        ({}, False),
        ({"RANK": "0"}, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, False),
    ],
)
def test_who_started_this_process(env: dict[str, str], launched: bool) -> None:
    assert started_by_launcher(env) is launched


def test_auto_under_a_launcher_is_the_whole_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "host_memory_bytes", lambda: 2 << 40)
    monkeypatch.setattr(machine, "_query", lambda field: ["NVIDIA H200"] * 8)
    env = {
        "RANK": "3",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }
    assert machine.found_cluster(env) == {"gpu": "H200", "nodes": 2, "gpus_per_node": 8, "host_memory_gib": 2048}


@pytest.mark.parametrize(
    ("cluster", "is_this_machine"),
    [
        (ClusterSpec(gpu="H200", gpus_per_node=8), True),
        (ClusterSpec(gpu="H200", gpus_per_node=2), True),
        (ClusterSpec(gpus_per_node=64), True),
        (ClusterSpec(gpu="H200", gpus_per_node=16), False),
        (ClusterSpec(gpu="H100", gpus_per_node=8), False),
        (ClusterSpec(gpu="H200", gpus_per_node=8, nodes=2), False),
        (ClusterSpec(nodes=2), False),
    ],
)
def test_which_clusters_are_this_machine(
    cluster: ClusterSpec, is_this_machine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_query", lambda field: ["NVIDIA H200"] * 8)
    assert machine.is_here(cluster) is is_this_machine


def test_host_memory_is_plausible() -> None:
    assert 1 << 28 < machine.host_memory_bytes() < 1 << 50


NODE_TASK = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_NNODES": "4"}
COORDINATOR = {"MESHWRIGHT_COORDINATOR": "node1:29400"}


@pytest.mark.parametrize(
    ("env", "agent"),
    [
        (NODE_TASK | COORDINATOR, True),
        (NODE_TASK, False),
        (NODE_TASK | COORDINATOR | {"SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, True),
        (NODE_TASK | COORDINATOR | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, False),
        (NODE_TASK | COORDINATOR | {"SLURM_STEP_TASKS_PER_NODE": "2,1(x2)"}, False),
        (COORDINATOR | {"SLURM_PROCID": "3", "SLURM_NTASKS": "32", "SLURM_NNODES": "4"}, False),
        (NODE_TASK | COORDINATOR | {"SLURM_NTASKS_PER_NODE": "8"}, False),
        (NODE_TASK | COORDINATOR | {"RANK": "0", "WORLD_SIZE": "4"}, False),  # torchrun under Slurm
        (COORDINATOR | {"JOB_COMPLETION_INDEX": "0"}, True),
        (COORDINATOR | {"JOB_COMPLETION_INDEX": "0", "RANK": "0"}, False),
        ({"JOB_COMPLETION_INDEX": "0"}, False),
        (COORDINATOR, False),
        ({}, False),
    ],
)
def test_a_task_is_its_nodes_agent_if_it_is_alone_there_and_a_coordinator_is_named(
    env: dict[str, str], agent: bool
) -> None:
    assert is_node_agent(env) is agent
    assert not (agent and started_by_launcher(env))


def test_one_task_per_node_of_several_devices_needs_a_coordinator() -> None:
    with pytest.raises(BadInput, match=r"cluster\.gpus_per_node is 8; set MESHWRIGHT_COORDINATOR"):
        check_tasks(8, NODE_TASK)
    check_tasks(8, NODE_TASK | COORDINATOR)
    check_tasks(1, NODE_TASK)
    check_tasks(8, {"SLURM_PROCID": "3", "SLURM_NTASKS": "32", "SLURM_NNODES": "4"})
    check_tasks(8, {})


def test_auto_finds_the_devices_of_an_agents_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "host_memory_bytes", lambda: 2 << 40)
    monkeypatch.setattr(machine, "_query", lambda field: ["NVIDIA H200"] * 8)
    assert machine.found_cluster(NODE_TASK | COORDINATOR)["gpus_per_node"] == 8
