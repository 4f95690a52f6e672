"""Runs on three emulated hosts with random faults for two hours. `make soak-hosts`; needs root.

    python benchmarks/hosts_soak.py --faults 200 --minutes 120                # one run, 200 faults
    python benchmarks/hosts_soak.py --faults 200 --minutes 18 --at-once 7     # seven runs with 29 faults each, for 16 cores

Two hosts train with two CPU ranks each, a third one is spare; each has a network, a hostname and a /dev/shm of its own, and
all share the run's folder, a file system of its own. Random faults begin by a schedule, each one only when the run trains
with all its hosts. A fault kills a rank, an agent, the coordinator's process, a host with all its processes or the
coordinator's host; it cuts a link for up to 15 s, makes it slow, or fills the disk. What was killed or cut comes back after
some seconds. With `--at-once N` there are N such runs at the same time, each on hosts of its own; their faults are drawn with
the seeds SEED to SEED + N - 1. An undisturbed run on hosts of its own trains as many steps: at the same time where there are
two cores for each run, otherwise afterwards.

Checked: a run trains again after each fault within `LIMITS`; every step is in its metrics once, with the loss of the
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
from concurrent.futures import ThreadPoolExecutor
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
CORES = 2
"""Cores for a run, with which its limits hold."""
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
    """A disturbed run."""

    def __init__(self, stage: Stage, seed: int) -> None:
        """Start the run of `stage`, whose faults are drawn with `seed`."""
        self.stage = stage
        self.seed = seed
        self.drawn = random.Random(seed)
        self.results: list[dict[str, Any]] = []
        """Each fault, and how long the run took to train again."""
        self.wrong: list[str] = []
        """What did not hold during the faults."""
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
    """Disturb the run `count` times within `seconds`; yields each fault and how long the run took to train again.

    After `seconds` no fault begins, so there are fewer where the run takes longer to train again.
    """
    job, faults = soak.job, soak.faults()
    names = [list(faults)[number % len(faults)] for number in range(count)]
    soak.drawn.shuffle(names)
    began = time.monotonic()
    for number, name in enumerate(names):
        job.until(soak.is_whole, "the run on all its hosts", PATIENCE_SECONDS)
        while time.monotonic() < began + number * seconds / count:
            soak.stage.pause(0.1)
        if time.monotonic() > began + seconds:
            return
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
            "seed": soak.seed,
            "fault": name,
            "step": newest,
            "lasted": round(lasted, 2),
            "standstill": round(recovered, 2),
            "limit": limit,
        }


def play(soak: Soak, count: int, seconds: float, patience: float) -> None:
    """Disturb a run `count` times and end it; what did not hold is in `soak.wrong`."""
    try:
        for result in disturb(soak, count, seconds):
            soak.results.append(result)
            late = result["standstill"] > patience * result["limit"]
            if late:
                soak.wrong.append(f"{result['fault']} at step {result['step']}: {result['standstill']} s")
            values = "{seed:>4} {fault:17} at step {step:>7}: lasted {lasted:5.1f} s, no step for {standstill:5.1f} s"
            print(f"{values.format(**result)}{'  LATE' if late else ''}", flush=True)
        if (code := end(soak.stage)) != EXIT_PREEMPTED:
            soak.wrong.append(f"the run ended with code {code}, not {EXIT_PREEMPTED}")
    except NotReached as error:
        soak.wrong.append(f"{error}\n{soak.job.output[-3000:]}")


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


def network_namespaces() -> list[str]:
    """Names of this machine's network namespaces."""
    return subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout.split()


def left_behind(run: Path) -> list[str]:
    """Half-written files of a run that has ended."""
    return [str(path.relative_to(run)) for path in run.rglob("*") if ".partial" in path.name or ".tmp" in path.name]


def check(soak: Soak, calm: Stage) -> list[str]:
    """What does not hold at the end of a run; `calm` is the undisturbed one."""
    wrong = []
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
    parser.add_argument("--faults", type=int, default=200, help="of all runs together")
    parser.add_argument("--minutes", type=float, default=120.0, help="time over which the faults of a run begin")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="number of runs with faults")
    parser.add_argument("--seed", type=int, default=0, help="of the first run's faults")
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
    namespaces = network_namespaces()
    began = time.monotonic()
    soaks: list[Soak] = []
    wrong: list[str] = []
    seeds = range(arguments.seed, arguments.seed + arguments.at_once)
    beside = len(os.sched_getaffinity(0)) >= CORES * (len(seeds) + 1)
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(len(seeds)) as threads:
        file, runs = make_run(Path(temporary) / "tiny"), arguments.runs or Path(temporary) / "runs"
        calm, *disturbed = (
            make_stage(file, runs / name, Links(arguments.rate))
            for name in ("calm", *(f"seed-{seed}" for seed in seeds))
        )
        try:
            if beside:
                calm.start()
            soaks += [Soak(stage, seed) for stage, seed in zip(disturbed, seeds, strict=True)]
            shares = [
                arguments.faults // len(soaks) + (number < arguments.faults % len(soaks))
                for number in range(len(soaks))
            ]
            seconds = 60 * arguments.minutes
            list(threads.map(lambda soak, count: play(soak, count, seconds, arguments.patience), soaks, shares))
            last = max(len(stage.losses()) for stage in disturbed)
            if not beside:
                calm.start()
            calm.job.until(lambda: calm.job.last_step >= last, f"step {last}", seconds + START_SECONDS)
            end(calm)
            for soak in soaks:
                wrong += [f"seed {soak.seed}: {text}" for text in (*soak.wrong, *check(soak, calm))]
        except NotReached as error:
            wrong.append(f"{error}\n{calm.job.output[-3000:]}")
        finally:
            # Without processes, the runs that still go on end with NotReached.
            for stage in (calm, *disturbed):
                stage.close()
        steps = sum(len(stage.losses()) for stage in disturbed)
    wrong += [f"namespace {name} is left" for name in network_namespaces() if name not in namespaces]
    wrong += [f"{stage.run} is still mounted" for stage in disturbed if os.path.ismount(stage.run)]
    results = [result for soak in soaks for result in soak.results]
    by_fault = defaultdict(list)
    for result in results:
        by_fault[result["fault"]].append(result["standstill"])
    for name, standstills in sorted(by_fault.items()):
        print(
            f"{name:17} {len(standstills):>3} times, no step for {statistics.median(standstills):.1f} s, at most {max(standstills):.1f} s"
        )
    minutes = (time.monotonic() - began) / 60
    print(
        f"{len(results)} of {arguments.faults} faults in {minutes:.1f} minutes, {steps} steps: {'; '.join(wrong) or 'nothing was lost'}"
    )
    write_record(
        arguments.out,
        seeds=list(seeds),
        patience=arguments.patience,
        asked=arguments.faults,
        minutes=minutes,
        steps=steps,
        faults=results,
        wrong=wrong,
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
