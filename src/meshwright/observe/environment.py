"""Versions, devices and code commit of a run, for its environment.json. They include no host or user name."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import meshwright
from meshwright.spec.host_limits import usable_cores
from meshwright.spec.secrets import without_secrets

GIT_SECONDS = 10.0
"""Seconds to wait for an answer of git."""


def environment() -> dict[str, Any]:
    """Return facts about software and hardware as JSON values. Facts that are unknown or do not apply are left out."""
    facts: dict[str, Any] = {
        "meshwright": meshwright.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "numpy": _version("numpy"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu_cores": usable_cores(),
        "memory_bytes": _memory_bytes(),
        **_devices(),
    }
    return {key: value for key, value in facts.items() if value is not None}


def _devices() -> dict[str, Any]:
    """Return facts about the GPUs of this process and their software; only the device "cpu" without GPUs."""
    import torch  # imported here because `meshwright report` uses this package and starts without torch

    if not torch.cuda.is_available():
        return {"device": "cpu"}
    properties = torch.cuda.get_device_properties(0)
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    return {
        "device": properties.name,
        "device_count": torch.cuda.device_count(),
        "device_memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, nccl)) if isinstance(nccl, tuple) else nccl,
        "driver": _driver(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _memory_bytes() -> int | None:
    names = os.sysconf_names
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if "SC_PHYS_PAGES" in names else None


def _driver() -> str | None:
    """Return the version of NVIDIA's kernel driver, from a file of the driver that is quick to read; None without it."""
    path = Path("/proc/driver/nvidia/version")
    words = path.read_text(encoding="utf-8").split() if path.is_file() else []
    return next((word for word in words if word[:1].isdigit() and word.count(".") >= 1), None)


def _commit() -> str | None:
    """Return the commit of the source checkout, with `+changes` if files differ from it.

    None for an installed package, or if git does not answer.
    """
    package = Path(meshwright.__file__).resolve().parent
    top = package.parent.parent
    if package.parent.name != "src" or not (top / ".git").exists() or not shutil.which("git"):
        return None
    try:
        commit = _git(top, "rev-parse", "HEAD")
        changed = _git(top, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.TimeoutExpired):
        # E.g. sources on a busy network file system: the run starts without the commit.
        return None
    return f"{commit}+changes" if commit and changed else commit


def _git(folder: Path, *arguments: str) -> str | None:
    process = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=GIT_SECONDS,
        check=False,
        env=without_secrets(),
    )
    return process.stdout.strip() or None if process.returncode == 0 else None
