"""The devices, cores and memory of this host, detected without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.launch.gpu_readings import visible_indices
from meshwright.spec.chips import GiB
from meshwright.spec.cluster import ClusterSpec, chip_from_device_name
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.host_limits import cgroup_memory, usable_cores
from meshwright.spec.rank_environment import RankEnvironment, started_by_launcher
from meshwright.spec.secrets import without_secrets

_DEVICE_NODES = ("nvidia[0-9]*", "kfd", "dxg")
"""Device files of GPUs that nvidia-smi may not list: in a container without it, of another vendor, under WSL."""
NVIDIA_SMI_SECONDS = 60.0
"""Time in which nvidia-smi answers on a host with eight GPUs whose driver must first be loaded, with a margin."""


def found_cluster(env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The `cluster` section for `auto`: this host's GPUs or one CPU rank, or the ranks that a launcher started."""
    names = _gpu_names()
    section: dict[str, Any] = {"gpu": "cpu", "nodes": 1, "gpus_per_node": max(1, len(names))}
    if names:
        section["host_memory_gib"] = round(host_memory_bytes() / GiB, 1)
        section["gpu"] = chip_from_device_name(names[0]) or names[0]
        if section["gpu"] == names[0]:
            section["memory_gib"] = _gpu_memory_gib()
    if started_by_launcher(env):
        environment = RankEnvironment.from_environment(env)
        section |= {"nodes": environment.ranks // environment.local_ranks, "gpus_per_node": environment.local_ranks}
    return section


def is_here(cluster: ClusterSpec, here: Mapping[str, Any] | None = None) -> bool:
    """Whether this machine (`here`, as returned by `found_cluster`) has the devices of `cluster`."""
    if cluster.is_cpu or cluster.nodes > 1:
        return cluster.nodes == 1
    here = here or found_cluster()
    return cluster.gpu == here["gpu"] and cluster.gpus_per_node <= int(here["gpus_per_node"])


def check_devices(cluster: ClusterSpec) -> None:
    """Raise BadInput if this host lacks the GPUs of a local run. Torch checks GPUs that nvidia-smi does not know."""
    if cluster.is_cpu:
        return
    count = visible_gpus()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if count == 0 and (hidden or not any(list(Path("/dev").glob(name)) for name in _DEVICE_NODES)):
        reason = " (CUDA_VISIBLE_DEVICES is empty)" if hidden else ""
        raise BadInput(
            f"cluster.gpu is {cluster.gpu} and this host has no GPU{reason}; set cluster=auto to train on what it has, or cluster.gpu=cpu; "
            "`meshwright plan` needs no GPU"
        )
    if 0 < count < cluster.gpus_per_node:
        raise BadInput(
            f"cluster.gpus_per_node is {cluster.gpus_per_node} and this host shows {count} GPU{'s' * (count > 1)}; set "
            f"cluster.gpus_per_node={count}, or cluster=auto to take what is here"
        )


def visible_gpus() -> int:
    """Number of GPUs that nvidia-smi lists and CUDA_VISIBLE_DEVICES allows."""
    return len(_gpu_names())


def host_memory_bytes() -> int:
    """Physical memory of this host, or the lowest limit of the batch system or the container when that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(limit.limit for limit in cgroup_memory())])


def rank_threads(cluster: ClusterSpec) -> int:
    """CPU threads of one rank: its share of the usable cores; a rank that computes on a GPU needs only a few."""
    cores_per_rank = max(1, usable_cores() // cluster.gpus_per_node)
    return cores_per_rank if cluster.is_cpu else min(8, cores_per_rank)


def _gpu_names() -> list[str]:
    return _query("name")


def _gpu_memory_gib() -> float:
    return float(_query("memory.total")[0].split()[0]) / 1024


def _query(field: str) -> list[str]:
    """Return nvidia-smi's value of a field for each visible GPU, in the order of CUDA_VISIBLE_DEVICES; empty without GPUs.

    nvidia-smi lists no MIG devices: one of them has the value of the first GPU. Raises OutOfResources if nvidia-smi does
    not answer.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shutil.which("nvidia-smi") is None or visible == "":
        return []
    command = ["nvidia-smi", f"--query-gpu=uuid,{field}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=NVIDIA_SMI_SECONDS,
            check=False,
            env=without_secrets(),
        )
    except subprocess.TimeoutExpired:
        raise OutOfResources(
            f"nvidia-smi gave no answer in {NVIDIA_SMI_SECONDS:g} s: a GPU of this host or its driver hangs; see `dmesg`, or "
            "set CUDA_VISIBLE_DEVICES= (empty) for a command that needs no GPU"
        ) from None
    lines = (
        [line.partition(",") for line in answer.stdout.splitlines() if "," in line] if answer.returncode == 0 else []
    )
    values = [value.strip() for _, _, value in lines]
    if visible is not None and visible.startswith("MIG-"):  # a process can use one
        return values[:1]
    return [values[index] for index in visible_indices([identity.strip() for identity, _, _ in lines], visible)]
