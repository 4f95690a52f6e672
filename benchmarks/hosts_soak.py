"""A run on three emulated hosts with random faults for two hours. `make soak-hosts`; needs root.

    python benchmarks/hosts_soak.py [--faults 200] [--minutes 120] [--seed 0] [--rate 400mbit] [--patience 1] [--out FILE] [--runs DIR]

Two hosts train with two CPU ranks each, a third one is spare; each has a network, a hostname and a /dev/shm of its own, and
all share the run's folder, a file system of its own. Random faults begin by a schedule, each one only when the run trains
with all its hosts. A fault kills a rank, an agent, the coordinator's process, a host with all its processes or the
coordinator's host; it cuts a link for up to 15 s, makes it slow, or fills the disk. What was killed or cut comes back after
some seconds. Then an undisturbed run trains as many steps on hosts of its own.

Checked: the run trains again after each fault within `LIMITS`; every step is in its metrics once, with the loss of the
undisturbed run bit for bit; at its end no process, no half-written file, no namespace and no mount is left. Prints a line for
each fault; exit code 1 if something does not hold, 3 if this machine cannot make such hosts.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from faults import make_run, write_record
from meshwright.chaos.hosts import Links, host_name, namespace_obstacle
from meshwright.chaos.job import NotReached
from meshwright.chaos.processes import children, send, training_ranks
from meshwright.chaos.scenario import Stage, Template
from meshwright.chaos.storage_faults import mount, mount_obstacle, remount
from meshwright.chaos.suite import undo_on_sigterm
from meshwright.launch.lease_store import LEASE_FOLDER, FolderLeases
from meshwright.policies.coordinator_lease import CoordinatorLease
from meshwright.spec.errors import EXIT_PREEMPTED

HOSTS, TRAINING, RANKS_PER_HOST = 3, 2, 2
EVERY = 200
"""Steps between two checkpoints."""
LIMITS = {"lose-coordinator": 20.0, "lose-host": 25.0, "kill-agent": 25.0, "cut-link": 25.0}
"""Most seconds from a fault until the run trains again; the time for which a link is cut or a disk full is added."""
RESTART_SECONDS = 15.0
"""The same for other faults."""
STEPS_AFTER = 10
"""Steps after that of a fault with which the run counts as recovered."""
START_SECONDS = 600.0
"""Time of the undisturbed run beside that of its steps, which were trained with faults before."""
PATIENCE_SECONDS = 300.0
"""Seconds without a step after which the soak gives up."""


class Soak:
    """The disturbed run."""

    def __init__(self, stage: Stage, drawn: random.Random) -> None:
        self.stage, self.drawn = stage, drawn
        self.folder = mount(stage, "-t", "tmpfs", "-o", "size=50%", "none", within="")
        self.job = stage.start()
        self.agents = dict(enumerate(self.job.processes))
        self.restarts = False
        """Whether the last fault has to end the attempt."""

    def coordinator(self) -> tuple[int, int]:
        """Process and host of the coordinator."""
        lease = coordinator_lease(self.stage)
        return lease.pid, next(host for host in self.agents if host_name(host) == lease.host)

    def training(self) -> list[int]:
        """Hosts whose ranks train."""
        members = self.job.states[-1][1]["members"]
        pids = [int(member.rpartition("/")[2]) for member in members]
        return [host for host, agent in self.agents.items() if agent.pid in pids and training_ranks(agent.pid)]

    def kill_rank(self) -> float:
        host = self.drawn.choice(self.training())
        self.restarts = True
        send(self.drawn.choice(sorted(training_ranks(self.agents[host].pid).values())), signal.SIGKILL)
        return 0.0

    def kill_agent(self) -> float:
        host = self.drawn.choice(self.training())
        self.restarts = True
        self._kill(host)
        self._later(host, self.drawn.uniform(1, 5))
        return 0.0

    def kill_coordinator(self) -> float:
        send(self.coordinator()[0], signal.SIGKILL)
        return 0.0

    def lose_host(self) -> float:
        self._lose(self.drawn.choice([host for host in self.training() if host != self.coordinator()[1]]))
        return 0.0

    def lose_coordinator(self) -> float:
        process, host = self.coordinator()
        self._lose(host, process)
        return 0.0

    def cut_link(self) -> float:
        assert self.stage.hosts is not None
        host, seconds = self.drawn.choice(self.training()), self.drawn.uniform(1, 15)
        connect = self.drawn.choice([self.stage.hosts.set_link, self.stage.hosts.set_reachable])
        connect(host, False)
        self.stage.pause(seconds)
        connect(host, True)
        return seconds

    def slow_link(self) -> float:
        assert self.stage.hosts is not None
        host, seconds = self.drawn.choice(self.training()), self.drawn.uniform(5, 15)
        self.stage.hosts.set_rate(host, "1mbit")
        self.stage.pause(seconds)
        self.stage.hosts.set_rate(host, self.stage.links.rate)
        return seconds

    def fill_disk(self) -> float:
        status, seconds = os.statvfs(self.folder), self.drawn.uniform(2, 10)
        remount(self.folder, f"size={max(status.f_blocks - status.f_bfree, 1) * status.f_frsize}")
        self.stage.pause(seconds)
        remount(self.folder, "size=50%")
        return seconds

    def _kill(self, host: int) -> None:
        self.job.forget(self.agents[host])
        send(self.agents[host].pid, signal.SIGKILL)

    def _lose(self, host: int, *more: int) -> None:
        """End all processes of a host and cut its link; it comes back after some seconds."""
        assert self.stage.hosts is not None
        self.restarts = host in self.training()
        self.stage.hosts.set_link(host, False)
        agent = self.agents[host].pid
        processes = [*children(agent), *more]
        self._kill(host)
        for pid in processes:
            send(pid, signal.SIGKILL)
        self._later(host, self.drawn.uniform(5, 15))

    def _later(self, host: int, seconds: float) -> None:
        """Start the agent of a host again, after some seconds in which the run is observed."""
        assert self.stage.hosts is not None
        self.stage.pause(seconds)
        self.stage.hosts.set_link(host, True)
        self.stage.launch(host)
        self.agents[host] = self.job.processes[-1]

    def faults(self) -> dict[str, Callable[[], float]]:
        """Each kind of fault by its name; it returns the seconds for which it lasted and its end was waited for."""
        return {
            "kill-rank": self.kill_rank,
            "kill-agent": self.kill_agent,
            "kill-coordinator": self.kill_coordinator,
            "lose-host": self.lose_host,
            "lose-coordinator": self.lose_coordinator,
            "cut-link": self.cut_link,
            "slow-link": self.slow_link,
            "fill-disk": self.fill_disk,
        }

    def is_whole(self) -> bool:
        """Whether the run trains, and the third host is ready to replace one."""
        if not self.job.steps:
            return False
        state = self.job.states[-1][1]
        ready = {int(name.rpartition("/")[2]) for name in state["ready"]}
        others = {agent.pid for agent in self.agents.values()} - {self.agents[host].pid for host in self.training()}
        return state["status"] == "running" and len(self.training()) == TRAINING and bool(others) and others <= ready


def make_stage(file: Path, folder: Path, links: Links) -> Stage:
    """A run on two of three hosts that goes on until it is asked to end."""
    words = (
        str(file),
        f"cluster.nodes={TRAINING}",
        f"cluster.gpus_per_node={RANKS_PER_HOST}",
        "train.steps=10000000",
        f"checkpoint.every={EVERY}",
        "checkpoint.keep=3",
        "checkpoint.mode=async",
        "supervision.spares=1",
        "supervision.restarts=20",
    )
    folder.mkdir(parents=True)
    return Stage(Template(words, file.stem, 0, TRAINING * RANKS_PER_HOST, EVERY), folder, hosts=HOSTS, links=links)


def disturb(soak: Soak, count: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Disturb the run `count` times within `seconds`; yields each fault and how long the run took to train again."""
    job, faults = soak.job, soak.faults()
    names = [list(faults)[number % len(faults)] for number in range(count)]
    soak.drawn.shuffle(names)
    began = time.monotonic()
    for number, name in enumerate(names):
        job.until(soak.is_whole, "the run on all its hosts", PATIENCE_SECONDS)
        while time.monotonic() < began + number * seconds / count:
            soak.stage.pause(0.1)
        newest, attempt = job.last_step, job.attempt
        moment, before, soak.restarts = time.monotonic(), len(job.steps), False
        lasted = faults[name]()
        if soak.restarts:
            job.until(lambda attempt=attempt: job.attempt > attempt, f"the attempt after {attempt}", PATIENCE_SECONDS)
        job.until(lambda newest=newest: job.last_step > newest + STEPS_AFTER, f"steps after {newest}", PATIENCE_SECONDS)
        times = [moment, *(when for when, _ in job.steps[before:])]
        recovered = max(after - earlier for earlier, after in pairwise(times))
        limit = LIMITS.get(name, RESTART_SECONDS) + lasted
        yield {
            "fault": name,
            "step": newest,
            "lasted": round(lasted, 2),
            "standstill": round(recovered, 2),
            "limit": limit,
        }


def coordinator_lease(stage: Stage) -> CoordinatorLease:
    """The lease of a run's coordinator; waits until a process holds it."""
    leases = FolderLeases(stage.run / LEASE_FOLDER)
    while (lease := leases.read()) is None or lease.released:
        stage.pause(0.5)
    return lease


def end(stage: Stage) -> int:
    """Ask a run to end, at its coordinator; returns its exit code."""
    send(coordinator_lease(stage).pid, signal.SIGTERM)
    return stage.job.wait(PATIENCE_SECONDS)


def left_behind(run: Path) -> list[str]:
    """Half-written files of a run that has ended."""
    return [str(path.relative_to(run)) for path in run.rglob("*") if ".partial" in path.name or ".tmp" in path.name]


def check(soak: Soak, calm: Stage, code: int) -> list[str]:
    """What does not hold at the end of the run."""
    wrong = [] if code == EXIT_PREEMPTED else [f"the run ended with code {code}, not {EXIT_PREEMPTED}"]
    found = soak.stage.losses()
    if [step for step, _ in found] != list(range(1, len(found) + 1)):
        wrong.append("a step is missing in the metrics, or there twice")
    if found != (expected := calm.losses()[: len(found)]):
        first = next((a for a, b in zip(found, expected, strict=False) if a != b), len(expected))
        wrong.append(f"losses differ from those of the undisturbed run from {first} on")
    wrong += [f"{len(left)} processes are left" for left in [soak.stage.orphans()] if left]
    return wrong + [f"half-written: {name}" for name in left_behind(soak.stage.run)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", default="400mbit")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="factor for all limits, for a machine with other work"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=Path)
    arguments = parser.parse_args()
    if obstacle := namespace_obstacle() or mount_obstacle():
        print(f"this machine cannot make the hosts of the soak: {obstacle}")
        sys.exit(3)
    undo_on_sigterm()
    namespaces = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout.split()
    began, results, wrong = time.monotonic(), list[dict[str, Any]](), list[str]()
    with tempfile.TemporaryDirectory() as temporary:
        file, runs = make_run(Path(temporary) / "tiny"), arguments.runs or Path(temporary) / "runs"
        calm, disturbed = (make_stage(file, runs / name, Links(arguments.rate)) for name in ("calm", "disturbed"))
        try:
            soak = Soak(disturbed, random.Random(arguments.seed))
            try:
                for result in disturb(soak, arguments.faults, 60 * arguments.minutes):
                    results.append(result)
                    late = result["standstill"] > arguments.patience * result["limit"]
                    wrong += [f"{result['fault']} at step {result['step']}: {result['standstill']} s"] if late else []
                    values = "{fault:17} at step {step:>7}: lasted {lasted:5.1f} s, no step for {standstill:5.1f} s"
                    print(f"{len(results):>4} {values.format(**result)}{'  LATE' if late else ''}", flush=True)
                code = end(disturbed)
                last = len(disturbed.losses())
                calm.start().until(
                    lambda: calm.job.last_step >= last, f"step {last}", 60 * arguments.minutes + START_SECONDS
                )
                end(calm)
                wrong += check(soak, calm, code)
            except NotReached as error:
                wrong.append(f"{error}\n{disturbed.job.output[-3000:]}")
        finally:
            calm.close()
            disturbed.close()
        steps = len(disturbed.losses())
    left = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    wrong += [f"namespace {name} is left" for name in left.split() if name not in namespaces]
    if os.path.ismount(disturbed.run):
        wrong.append(f"{disturbed.run} is still mounted")
    by_fault = defaultdict(list)
    for result in results:
        by_fault[result["fault"]].append(result["standstill"])
    for name, seconds in sorted(by_fault.items()):
        print(
            f"{name:17} {len(seconds):>3} times, no step for {statistics.median(seconds):.1f} s, at most {max(seconds):.1f} s"
        )
    minutes = (time.monotonic() - began) / 60
    print(f"{len(results)} faults in {minutes:.1f} minutes, {steps} steps: {'; '.join(wrong) or 'nothing was lost'}")
    write_record(
        arguments.out,
        seed=arguments.seed,
        patience=arguments.patience,
        minutes=minutes,
        steps=steps,
        faults=results,
        wrong=wrong,
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
