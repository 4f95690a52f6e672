"""The commands of docs/how-to/schedulers.md, as a reader types them: on a Slurm and a Ray cluster of two emulated hosts, and for SkyPilot.

A block with the option `on=NAME` belongs to the scheduler NAME; `at=N` runs on host N, in the background.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest

from meshwright.chaos.hosts import INTERFACE, Hosts, address, namespace_obstacle
from meshwright.data.prepare import prepare
from meshwright.data.stdlib import VOCABULARY, stdlib_folder
from meshwright.observe.metrics import read_metrics
from tests.docs.pages import Block, blocks
from tests.hosts.sky import loaded, parsed, sky_obstacle
from tests.hosts.slurm import Slurm, slurm_obstacle

pytestmark = pytest.mark.slow
PAGE = "docs/how-to/schedulers.md"
SECONDS = 240


def transcript(name: str) -> list[Block]:
    """The blocks of a scheduler, in the order of the page."""
    found = [block for block in blocks(PAGE) if block.option("on") == name]
    assert found
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the hosts share, with `meshwright` in `bin`, and a few files in place of the standard library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-c]*.py"))
    (tmp_path / "text").mkdir()
    for file in [file for file in modules if 4_000 < file.stat().st_size < 32_000][:12]:
        shutil.copy(file, tmp_path / "text")
    prepare([str(tmp_path / "text")], f"train:{VOCABULARY}", stdlib_folder(), held_out=0.1)
    (tmp_path / "bin").mkdir()
    for name, code in (("meshwright", "-m meshwright"), ("python", ""), ("ray", "-m ray.scripts.scripts")):
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {code} "$@"\n')
        program.chmod(0o755)
    (tmp_path / "shared").mkdir()
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    """Variables of a shell on a host, with a home folder that all hosts share."""
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HOME": str(folder), "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}


def bash(block: Block) -> list[str]:
    return ["bash", "-euo", "pipefail", "-c", block.text.replace("FIRST", address(0))]


def run(prefix: Sequence[str], block: Block, folder: Path, env: Mapping[str, str]) -> str:
    """What a block prints. It ends with code 0."""
    command = [*prefix, "env", "-C", str(folder / "shared"), *bash(block)]
    answer = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert answer.returncode == 0, f"{block.location}: {answer.returncode}\n{answer.stdout}\n{answer.stderr}"
    return answer.stdout + answer.stderr


def check_trained(folder: Path, hosts: int) -> None:
    """Whether all steps of the run are there, and its agents were on `hosts` hosts."""
    found = folder / "shared" / "runs" / "first"
    steps = [line["step"] for line in read_metrics(found / "metrics.jsonl") if line["kind"] == "step"]
    assert steps == list(range(1, 9))
    assert len(read_members(found)) == hosts


def read_members(run: Path) -> set[str]:
    members = json.loads((run / "supervision.jsonl").read_text().splitlines()[-1])["members"]
    return {name.partition("/")[0] for name in members}


@pytest.mark.skipif(slurm_obstacle() is not None, reason=f"Slurm of two hosts: {slurm_obstacle()}")
def test_slurm(folder: Path) -> None:
    with closing(Hosts(2, folder)) as hosts, closing(Slurm(hosts, 2, folder / "slurm")) as slurm:
        for block in transcript("slurm"):
            slurm.run(bash(block), folder / "shared", environment(folder), seconds=SECONDS)
    check_trained(folder, 2)


@pytest.fixture
def background() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that end with the test, with all that they started."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in reversed(processes):
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.skipif(namespace_obstacle() is not None, reason=f"two hosts: {namespace_obstacle()}")
@pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")
def test_ray(folder: Path, background: list[subprocess.Popen[bytes]]) -> None:
    env = environment(folder)
    with closing(Hosts(2, folder, shared=(folder,))) as hosts:  # Ray finds its cluster by files in /tmp
        for block in transcript("ray"):
            if (host := block.option("at")) is None:
                run(hosts.prefix(0), block, folder, env)
                continue
            with (folder / "ray.log").open("ab") as log:
                command = [*hosts.prefix(int(host)), *bash(block)]
                started = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
            background.append(started)
            wait_for(folder / "ray.log", int(host) + 1)
        check_trained(folder, 2)


def wait_for(log: Path, nodes: int) -> None:
    """Wait until as many nodes say that they have started."""
    deadline = time.monotonic() + 60
    while log.read_text(errors="replace").count("Ray runtime started") < nodes:
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.2)


@pytest.mark.skipif(sky_obstacle() is not None, reason=str(sky_obstacle()))
def test_skypilot(folder: Path) -> None:
    render, start = transcript("skypilot")
    run((), render, folder, environment(folder))
    task = loaded(folder / "shared" / "first.sky.yaml", folder)
    assert (task["name"], task["nodes"], task["cpus"]) == ("first", 2, "1+")
    token, launch = start.text.splitlines()
    made = subprocess.run(
        ["bash", "-c", f"{token}; echo $MESHWRIGHT_TOKEN"], capture_output=True, text=True, check=True
    )
    assert len(made.stdout.strip()) == 64
    command, *arguments = shlex.split(launch)
    assert command == "sky"
    found = parsed(arguments, folder)
    assert found["command"] == "launch" and found["entrypoint"] == ["first.sky.yaml"]
    assert "MESHWRIGHT_TOKEN" in str(found["secret"])
