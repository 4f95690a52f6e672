"""What this host has, found without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

from meshwright.spec.cluster import chip_from_device_name


def found_cluster() -> dict[str, Any]:
    """The `cluster` section that `auto` stands for: this host's GPUs, or one CPU rank."""
    names = _gpu_names()
    if not names:
        return {"gpu": "cpu", "nodes": 1, "gpus_per_node": 1}
    chip = chip_from_device_name(names[0])
    section: dict[str, Any] = {"gpu": chip or names[0], "nodes": 1, "gpus_per_node": len(names)}
    if chip is None:
        section["memory_gib"] = _gpu_memory_gib()
    return section


def host_memory_bytes() -> int:
    """Physical memory of this host, or the container's limit when that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit:
            text = limit.read().strip()
    except OSError:
        return total
    return min(total, int(text)) if text.isdigit() else total


def started_by_launcher(env: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun, Slurm's srun or a Kubernetes job started this process as one rank of several."""
    return "RANK" in env or ("SLURM_PROCID" in env and int(env.get("SLURM_NTASKS", "1")) > 1)


def _gpu_names() -> list[str]:
    return _query("name")


def _gpu_memory_gib() -> float:
    return float(_query("memory.total")[0].split()[0]) / 1024


def _query(field: str) -> list[str]:
    """One line per visible GPU from nvidia-smi; empty when there is none."""
    if shutil.which("nvidia-smi") is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return []
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    lines = [line.strip() for line in answer.stdout.splitlines() if line.strip()] if answer.returncode == 0 else []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return lines[: len(visible.split(","))] if visible else lines
