"""Limits of control groups and of the affinity mask, with the files of several systems."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshwright.spec.host_limits import cgroup_memory, usable_cores

GiB = 1 << 30


def tree(folder: Path, files: dict[str, str], membership: str) -> tuple[Path, Path]:
    """Write `files` below a folder of control groups; returns it and the file with a process's groups."""
    for name, text in files.items():
        (folder / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup" / name).write_text(text)
    (folder / "membership").write_text(membership)
    return folder / "cgroup", folder / "membership"


JOB = "system.slice/slurmstepd.scope/job_7"
CONTAINER = {
    "memory.max": f"{8 * GiB}\n",
    "memory.current": f"{3 * GiB}\n",
    "memory.stat": f"anon 7\ninactive_file {GiB}\n",
}
SLURM = {
    f"{JOB}/{name}": text
    for name, text in {**CONTAINER, "step_0/memory.max": "max\n", "step_0/memory.current": f"{GiB}\n"}.items()
}
FIRST_VERSION = {
    "memory.limit_in_bytes": f"{8 * GiB}\n",
    "memory.usage_in_bytes": f"{3 * GiB}\n",
    "memory.stat": f"inactive_file 5\ntotal_inactive_file {GiB}\n",
}
MEMORY = {
    "container": (CONTAINER, "0::/\n"),
    "job of Slurm": (SLURM, f"0::/{JOB}/step_0\n"),
    "version 1": ({f"memory/job/7/{name}": text for name, text in FIRST_VERSION.items()}, "3:cpu:/\n2:memory:/job/7\n"),
    "version 1, container": (
        {f"memory/{name}": text for name, text in FIRST_VERSION.items()},
        "4:memory:/docker/a:b\n",
    ),
    "group above the namespace": (CONTAINER, "0::/../../job_7\n"),
}


@pytest.mark.parametrize("name", MEMORY)
def test_limits_of_memory(name: str, tmp_path: Path) -> None:
    (limit,) = cgroup_memory(*tree(tmp_path, *MEMORY[name]))
    assert (limit.limit, limit.left) == (8 * GiB, 6 * GiB)


def test_limits_of_all_groups_above_count(tmp_path: Path) -> None:
    files = {f"a/b/{name}": text for name, text in CONTAINER.items()} | {
        "a/memory.max": "7\n",
        "a/memory.current": "9\n",
    }
    limits = cgroup_memory(*tree(tmp_path, files, "0::/a/b\n"))
    assert [(limit.limit, limit.left) for limit in limits] == [(8 * GiB, 6 * GiB), (7, 0)]


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"memory.max": "max\n", "memory.current": "5\n"},
        {"memory.max": "\n", "memory.current": "x\n"},
        {"memory.limit_in_bytes": "9223372036854771712\n", "memory.usage_in_bytes": "5\n"},
    ],
)
@pytest.mark.parametrize("membership", ["", "0::/\n", "1:name=systemd:/\n0::/elsewhere\n", "no groups\n"])
def test_hosts_without_limits(files: dict[str, str], membership: str, tmp_path: Path) -> None:
    cgroups, groups = tree(tmp_path, files, membership)
    assert cgroup_memory(cgroups, groups) == []
    assert usable_cores(cgroups, groups) == usable_cores(cgroups, tmp_path / "missing")


CORES = {
    "container": ({"cpu.max": "250000 100000\n"}, "0::/\n", 3),
    "no limit": ({"cpu.max": "max 100000\n"}, "0::/\n", 64),
    "job of Slurm": ({f"{JOB}/cpu.max": "400000 100000\n", "cpu.max": "max 100000\n"}, f"0::/{JOB}/step_0\n", 4),
    "version 1": ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "7:cpu,cpuacct:/\n", 1),
    "version 1, no limit": ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "7:cpu:/\n", 64),
    "more than the mask": ({"cpu.max": "9900000 100000\n"}, "0::/\n", 64),
}


@pytest.mark.parametrize("name", CORES)
def test_limits_of_cores(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    *files, cores = CORES[name]
    assert usable_cores(*tree(tmp_path, *files)) == cores


def test_cores_outside_the_affinity_mask_are_not_used() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
