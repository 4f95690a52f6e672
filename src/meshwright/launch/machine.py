"""Detects the devices, cores and memory of this host, without torch."""

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
"""Device files of GPUs that nvidia-smi may not list: in a container without nvidia-smi, of another vendor, or under WSL."""
NVIDIA_SMI_SECONDS = 60.0
"""Seconds to wait for nvidia-smi. It covers a host with eight GPUs whose driver must be loaded first."""


def found_cluster(env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the `cluster` section for `cluster: auto`.

    It describes the ranks that a launcher has started, if there is one; otherwise this host's GPUs, or one CPU rank.
    """
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
    """Whether this host has the devices of `cluster`. `here` is a result of `found_cluster`, to avoid a new detection.

    Clusters of several hosts count as elsewhere.
    """
    if cluster.is_cpu or cluster.nodes > 1:
        return cluster.nodes == 1
    here = here or found_cluster()
    return cluster.gpu == here["gpu"] and cluster.gpus_per_node <= int(here["gpus_per_node"])


def check_devices(cluster: ClusterSpec) -> None:
    """Raise BadInput if this host lacks the GPUs of a local run. For GPUs unknown to nvidia-smi, torch checks later."""
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
    """Return the number of GPUs that nvidia-smi lists and CUDA_VISIBLE_DEVICES allows."""
    return len(_gpu_names())


def host_memory_bytes() -> int:
    """Return the bytes of memory that may be used: this host's memory, or a lower limit of the batch system or container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(limit.limit for limit in cgroup_memory())])


def rank_threads(cluster: ClusterSpec) -> int:
    """Return the number of CPU threads of one rank: its share of the usable cores, but at most 8 if it computes on a GPU."""
    cores_per_rank = max(1, usable_cores() // cluster.gpus_per_node)
    return cores_per_rank if cluster.is_cpu else min(8, cores_per_rank)


def _gpu_names() -> list[str]:
    return _query("name")


def _gpu_memory_gib() -> float:
    return float(_query("memory.total")[0].split()[0]) / 1024


def _query(field: str) -> list[str]:
    """Return nvidia-smi's value of a field for each visible GPU, in the order of CUDA_VISIBLE_DEVICES; empty without
    GPUs.

    nvidia-smi does not list MIG devices. A MIG device therefore gets the value of the first GPU.

    Raises OutOfResources if nvidia-smi does not answer.
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
    if visible is not None and visible.startswith("MIG-"):  # a process can use only one MIG device
        return values[:1]
    return [values[index] for index in visible_indices([identity.strip() for identity, _, _ in lines], visible)]
