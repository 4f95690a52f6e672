"""One run of real processes with interruptions: stop signals, a killed rank, a damaged checkpoint."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshwright.chaos.processes import training_ranks
from meshwright.checkpoint.format.manifest import read_manifest, steps_in
from meshwright.checkpoint.format.verify import list_checkpoints
from meshwright.events.start import PHASES
from meshwright.observe.metrics import read_metrics, scan_metrics
from tests.training.tiny import make_tiny

STEPS = 80
LISTENING = "0A"
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


@dataclass(frozen=True)
class End:
    """How one start of the command ended: what it printed, seconds from the act to the end, checkpoints then intact."""

    code: int
    output: str
    seconds: float
    checkpoints: list[int]
    pids: dict[int, int]


class Job:
    """A running `meshwright train`."""

    def __init__(self, arguments: list[object], run: Path, env: dict[str, str] | None = None) -> None:
        self.run = run
        self._output = run.parent / f"said-{time.monotonic_ns()}"
        command = [sys.executable, "-m", "meshwright", *map(str, arguments)]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **(env or {})})

    def ranks(self) -> dict[int, int]:
        """Process id by rank of the ranks that train; spares, which wait for a restart, are left out."""
        return training_ranks(self.process.pid)

    def end(self, act: Callable[[dict[int, int]], None]) -> End:
        """Do something to the job (given its ranks' process ids) and wait for its end."""
        pids = self.ranks()
        started = time.monotonic()
        act(pids)
        code = self.process.wait(180)
        return End(code, self.output(), time.monotonic() - started, intact(self.run), pids)

    def output(self) -> str:
        return self._output.read_text()


def until(done: Callable[[], bool], job: Job) -> None:
    """Wait for something that a running job does."""
    deadline = time.monotonic() + 180
    while not done():
        assert job.process.poll() is None and time.monotonic() < deadline, job.output()
        threading.Event().wait(0.02)


def last_step(run: Path) -> int:
    file = run / "metrics.jsonl"
    return max((line["step"] for line in scan_metrics(file)[0]), default=0) if file.exists() else 0


def last_status(run: Path) -> str:
    """Status of the newest job by its journal."""
    return json.loads((run / "supervision.jsonl").read_text().splitlines()[-1])["status"]


def intact(run: Path) -> list[int]:
    return [checkpoint["step"] for checkpoint in list_checkpoints(run) if checkpoint["committed"] and checkpoint["ok"]]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def listening(pids: list[int]) -> list[str]:
    """Local addresses, as the kernel writes them, that the processes listen at."""
    links = [link for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()]
    sockets = {os.readlink(link) for link in links if link.is_symlink()}
    tables = [path for path in map(Path, ("/proc/net/tcp", "/proc/net/tcp6")) if path.exists()]  # a kernel without IPv6
    connections = [line.split() for path in tables for line in path.read_text().splitlines()[1:]]
    return [
        connection[1].split(":")[0]
        for connection in connections
        if connection[3] == LISTENING and f"socket:[{connection[9]}]" in sockets
    ]


def stopped(pid: int) -> bool:
    """Whether every thread of a process has stopped."""
    return all(status(task)["State"].startswith("T") for task in Path(f"/proc/{pid}/task").iterdir())


def pending(pid: int, number: int) -> bool:
    """Whether a signal has been sent to a stopped process."""
    return bool(int(status(Path(f"/proc/{pid}"))["ShdPnd"], 16) >> (number - 1) & 1)


def status(process: Path) -> dict[str, str]:
    lines = (process / "status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


@dataclass(frozen=True)
class Story:
    run: Path
    sockets: list[str]
    preempted: End
    interrupted: End
    damaged: str
    finished: list[End]


class Starts:
    """Starts of one command on one run; what still runs is killed at the end."""

    def __init__(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        tiny = make_tiny(tmp_path_factory.getbasetemp() / "tiny")
        runs = tmp_path_factory.mktemp("runs")
        self.run = runs / "tiny"
        self._arguments = ["train", tiny, f"train.steps={STEPS}", "supervision.restarts=0", "--runs", runs]
        self._jobs: list[Job] = []

    def __enter__(self) -> Starts:
        return self

    def __exit__(self, *error: object) -> None:
        for job in self._jobs:
            job.process.kill()
            job.process.wait()

    def start(self, env: dict[str, str] | None = None) -> Job:
        self._jobs.append(Job(self._arguments, self.run, env))
        return self._jobs[-1]

    def begin(self) -> Job:
        """The command, three steps on from where the run was."""
        before = (intact(self.run) or [0])[-1] if self.run.exists() else 0
        job = self.start()
        if before:
            until(lambda: f"resumed after step {before}" in job.output(), job)
        until(lambda: last_step(self.run) >= before + 3, job)
        return job


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with Starts(tmp_path_factory) as starts:
        yield tell(starts)


def tell(starts: Starts) -> Story:
    run, job = starts.run, starts.begin()
    sockets = listening([job.process.pid, *job.ranks().values()])
    job.process.send_signal(signal.SIGSTOP)
    until(lambda: stopped(job.process.pid), job)
    before = last_step(run)
    until(lambda: last_step(run) >= before + 3, job)  # the ranks train on while their launcher is stopped
    job.process.send_signal(signal.SIGCONT)
    preempted = job.end(lambda pids: job.process.send_signal(signal.SIGTERM))
    job = starts.start()
    until(lambda: last_status(run) == "running", job)  # the run is prepared, and signals are passed on
    interrupted = job.end(lambda pids: job.process.send_signal(signal.SIGINT))
    newest = run / "checkpoints" / f"step-{interrupted.checkpoints[-1]:08d}"
    damage(newest / "tensors-00001.safetensors")
    launched = [starts.start(environment) for environment in places_of_a_launcher()]
    finished = [job.end(lambda pids: None) for job in launched]
    return Story(run, sockets, preempted, interrupted, newest.name, finished)


@pytest.mark.slow
def test_a_job_that_was_stopped_commits_nothing_once_another_took_over(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The lock of a stopped process is removed by hand; the second job's rank is started by a launcher."""
    tiny, run = make_tiny(tmp_path_factory.getbasetemp() / "tiny"), tmp_path / "tiny"
    checkpoints = ["checkpoint.every=20", "checkpoint.keep=3"]
    arguments = ["train", tiny, "cluster.gpus_per_node=1", "train.steps=200", *checkpoints, "--runs", tmp_path]
    jobs = [Job(arguments, run)]
    try:
        until(lambda: last_step(run) >= 25, jobs[0])
        stopping = [jobs[0].process.pid, *jobs[0].ranks().values()]
        for pid in stopping:
            os.kill(pid, signal.SIGSTOP)
        until(lambda: all(stopped(pid) for pid in stopping), jobs[0])
        steps_before = intact(run)
        (run / ".lock").unlink()
        jobs.append(Job(arguments, run, {"RANK": "0", "WORLD_SIZE": "1"}))
        second = jobs[1].end(lambda pids: None)
        assert second.code == 0 and f"resumed after step {steps_before[-1]}" in second.output
        metrics = (run / "metrics.jsonl").read_bytes()
        for pid in stopping:
            os.kill(pid, signal.SIGCONT)
        assert jobs[0].process.wait(180) == 2, jobs[0].output()
    finally:
        for job in jobs:
            job.process.kill()
            job.process.wait()
    output = rf"{run} was taken over by process {jobs[1].process.pid} on \S+ \(epoch 2; this job has epoch 1\)"
    assert re.search(output, jobs[0].output()) and "Traceback" not in jobs[0].output()
    assert intact(run) == [160, 180, 200] and (run / "metrics.jsonl").read_bytes() == metrics
    assert [read_manifest(path).epoch for path in steps_in(run / "checkpoints")] == [2, 2, 2]
    assert not [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]


def interrupt_twice(job: Job, pids: dict[int, int]) -> None:
    """While the ranks do not answer, as in a collective that hangs; the second signal is sent when the first has arrived."""
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
    until(lambda: all(stopped(pid) for pid in pids.values()), job)
    job.process.send_signal(signal.SIGINT)
    until(lambda: all(pending(pid, signal.SIGINT) for pid in pids.values()), job)
    job.process.send_signal(signal.SIGINT)


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def places_of_a_launcher() -> list[dict[str, str]]:
    """Two ranks' variables as torchrun sets them, with a port that the kernel just had free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "GLOO_SOCKET_IFNAME": "lo"}
    return [{"RANK": n, "LOCAL_RANK": n, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **meet} for n in "01"]


def test_sigterm_writes_a_checkpoint_and_ends_with_75(story: Story) -> None:
    assert story.preempted.code == 75 and len(story.preempted.checkpoints) == 1
    (step,) = story.preempted.checkpoints
    assert (
        3 <= step < STEPS and f"ended on request after step {step}; started again, the run " in story.preempted.output
    )


def test_sigint_writes_a_checkpoint_and_ends_with_130(story: Story) -> None:
    """Sent while the ranks still import torch: it waits until they listen, and counts after the first step."""
    assert story.interrupted.code == 130 and "Traceback" not in story.interrupted.output
    first, second = story.interrupted.checkpoints
    assert first == story.preempted.checkpoints[0] and second == first + 1
    assert f"resumed after step {first}" in story.interrupted.output
    assert f"interrupted after step {second}" in story.interrupted.output
    assert story.interrupted.output.count("Ctrl-C: ending after the running step; a second one ends at once") == 1


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_with_5_and_a_second_sigint_ends_ranks_that_do_not_answer(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with Starts(tmp_path_factory) as starts:
        job = starts.begin()
        saved = job.end(lambda pids: job.process.send_signal(signal.SIGTERM)).checkpoints
        job = starts.begin()
        lost = job.end(lambda pids: os.kill(pids[1], signal.SIGKILL))
        log = (starts.run / "logs" / "rank-00000.log").read_text()
        job = starts.begin()
        killed = job.end(lambda pids: interrupt_twice(job, pids))
    assert lost.code == 5 and lost.seconds < 60
    assert "rank 1 was killed by signal 9" in lost.output and "the last step it finished is" in lost.output
    assert f"continues after step {saved[-1]}, from " in lost.output
    assert "communication failed" in log
    assert killed.code == 130
    ended = f"ended at once; started again, the run {starts.run.name} continues after step {saved[-1]}, from "
    assert ended in killed.output and f"resumed after step {saved[-1]}" in killed.output
    assert lost.checkpoints == killed.checkpoints == saved
    assert not [pid for end in (lost, killed) for pid in end.pids.values() if alive(pid)]


def test_no_process_is_left(story: Story) -> None:
    ends = (story.preempted, story.interrupted)
    assert [len(end.pids) for end in ends] == [2, 2]
    assert not [pid for end in ends for pid in end.pids.values() if alive(pid)]


def test_a_damaged_checkpoint_is_passed_over_and_named(story: Story) -> None:
    output = story.finished[0].output
    assert f"resumed after step {story.interrupted.checkpoints[0]}" in output
    assert story.damaged in output and "tensors-00001.safetensors" in output and "trying the next older one" in output
    assert story.damaged in (story.run / "logs" / "rank-00000.log").read_text()


def test_ranks_that_a_launcher_started_join_and_finish_the_run(story: Story) -> None:
    assert [end.code for end in story.finished] == [0, 0], story.finished
    assert [path.name for path in sorted((story.run / "logs").iterdir())] == ["rank-00000.log", "rank-00001.log"]
    assert f"step {STEPS}/{STEPS}" in story.finished[0].output
    # Torch says so on hosts without a name service.
    assert [line for line in story.finished[1].output.splitlines() if "[c10d] The hostname of" not in line] == []
    assert intact(story.run)[-1] == STEPS and json.loads((story.run / "summary.json").read_text())["steps"] == STEPS


def test_the_metrics_are_those_of_one_run(story: Story) -> None:
    lines = [line for line in read_metrics(story.run / "metrics.jsonl") if line["kind"] == "step"]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert sum(line["loss"] for line in lines[-10:]) < sum(line["loss"] for line in lines[:10]) - 5


def test_every_start_says_how_long_it_took_and_its_phases_add_up(story: Story) -> None:
    """Starts undone by a resume from an older checkpoint are gone with their steps; a launcher's ranks have the last."""
    starts = [line for line in read_metrics(story.run / "metrics.jsonl") if line["kind"] == "start"]
    assert [line["step"] for line in starts] == [0, *story.preempted.checkpoints, *story.preempted.checkpoints]
    for line in starts:
        assert set(line["phases"]) <= set(PHASES) and all(seconds >= 0 for seconds in line["phases"].values())
        assert sum(line["phases"].values()) == pytest.approx(line["seconds"])
        assert line["phases"]["imports"] > 0.1 and line["phases"]["first step"] > 0
        assert line["compiler"].get("compiled", 0) == 0
    assert f"start took {starts[-1]['seconds']:.1f} s: " in story.finished[0].output


def test_a_local_run_listens_on_loopback_only(story: Story) -> None:
    assert story.sockets and set(story.sockets) <= LOOPBACK
