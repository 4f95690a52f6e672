"""Faults of processes: a process is killed, stopped, slowed down, asked to end, or started twice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from meshwright.chaos.cgroup import MemoryGroup, memory_group_obstacle
from meshwright.chaos.processes import send, state
from meshwright.chaos.scenario import Scenario, Stage
from meshwright.checkpoint.format.verify import list_checkpoints
from meshwright.spec.errors import EXIT_BAD_INPUT, EXIT_PREEMPTED

CONTINUES = "training continues by itself from the newest checkpoint with the losses of an undisturbed run"
"""End of the promise of scenarios in which supervision restarts the ranks."""
RESUMES = "the same command continues with the losses of an undisturbed run"
"""End of the promise of scenarios in which the command must be started again."""
RESTART_SECONDS = 15.0
"""Most seconds between the end of a process and the next step."""
HANG_SECONDS = 8.0
"""Most seconds until a hang of CPU ranks is detected: 5 s, 3 steps, and the time between two checks."""
SLOW_SECONDS = 6.0
"""A rank is slow for at least this many seconds."""
SLOW_STEPS = 8
"""A rank is slow for at least this many steps."""
LONGEST_TURN = 0.1
"""A slow rank runs for the duration of a step, but at most for this many seconds, before it is stopped."""
STOPPED_TURNS = 3
"""A slow rank is stopped for this many times as long as it has run."""


def after(step: Callable[[Stage], int], disturb: Callable[[Stage], None]) -> Callable[[Stage], None]:
    """Return a play that starts the job, disturbs it when it has finished a step, and waits for its end."""

    def play(stage: Stage) -> None:
        stage.start().until_step(step(stage))
        disturb(stage)
        stage.job.wait()

    return play


def middle(stage: Stage) -> int:
    """Return a step in the middle of the run, half way between two checkpoints."""
    template = stage.template
    return template.steps // 2 // template.every * template.every + (template.every + 1) // 2


def signal_rank(rank: int, number: int) -> Callable[[Stage], None]:
    """Return a disturbance that sends SIGKILL or SIGSTOP to `rank`; a negative rank counts from the end.

    The incident must name the rank.
    """

    def disturb(stage: Stage) -> None:
        chosen = rank % stage.template.ranks
        stage.expect_incident("killed" if number == signal.SIGKILL else "hang", chosen)
        stage.signal(stage.job.ranks()[chosen], number)

    return disturb


def stop_rank(stage: Stage) -> None:
    """Stop the last rank. The job must print that this rank makes no progress."""
    signal_rank(-1, signal.SIGSTOP)(stage)
    stage.job.until_printed(f"rank {stage.template.ranks - 1} has made no progress", seconds=60)


def slow_rank(stage: Stage) -> None:
    """Stop and continue the last rank alternately, for some steps or until the job ends.

    The rank is stopped while it computes. If a rank stops inside a collective, all ranks wait, as they would for a slow
    network.
    """
    job = stage.job
    rank = stage.template.ranks - 1
    pid = job.ranks()[rank]
    turn = min(LONGEST_TURN, job.step_seconds)
    stage.expect_straggler(rank)
    stage.mark()
    deadline = time.monotonic() + SLOW_SECONDS
    step = job.last_step
    while job.process.poll() is None and (time.monotonic() < deadline or job.last_step < step + SLOW_STEPS):
        await_running(pid, turn)
        for number, turns in ((signal.SIGSTOP, STOPPED_TURNS), (signal.SIGCONT, 1)):
            send(pid, number)
            time.sleep(turns * turn)
            job.poll()


def await_running(pid: int, seconds: float) -> None:
    """Wait until the main thread of a process is running instead of waiting, but for at most `seconds`."""
    deadline = time.monotonic() + seconds
    while state(pid) != "R" and time.monotonic() < deadline:
        time.sleep(2e-4)


def end_and_continue(disturb: Callable[[Stage], None]) -> Callable[[Stage], None]:
    """Return a play that disturbs the job, checks that it ends with a checkpoint of its last step, and starts the
    command again.
    """

    def play(stage: Stage) -> None:
        job = stage.start()
        disturb(stage)
        code = job.wait()
        stage.expect(code == EXIT_PREEMPTED, f"the first start ended with code {code} instead of {EXIT_PREEMPTED}")
        records = list_checkpoints(stage.run)
        good = [record["step"] for record in records if record["ok"]]
        stage.expect(len(good) == len(records), "a checkpoint is damaged or incomplete")
        last = stage.losses()[-1][0]
        stage.expect(good[-1:] == [last], f"the newest checkpoint is of step {good[-1:]}, the last step was {last}")
        stage.start().wait()

    return play


def terminate(stage: Stage) -> None:
    """Send SIGTERM to the launcher in the middle of the run."""
    stage.job.until_step(middle(stage))
    stage.signal(stage.job.process.pid, signal.SIGTERM)


def terminate_during_save(stage: Stage) -> None:
    """Send SIGTERM to the launcher as soon as the folder of an unfinished checkpoint exists."""
    job = stage.job
    checkpoints = stage.run / "checkpoints"
    job.until_step(middle(stage))
    while not any(name.endswith(".partial") for name in os.listdir(checkpoints)):
        stage.require(job.process.poll() is None, "the job ended before the next checkpoint")
        time.sleep(0.0005)
    stage.signal(job.process.pid, signal.SIGTERM)
    stage.notes.append("a checkpoint was being written")


def start_twice(stage: Stage) -> None:
    """Start the command again while it runs. The second start must end, and must not affect the first."""
    first = stage.start()
    first.until_step(2)
    stage.mark()
    second = stage.start()
    code = second.wait(60)
    stage.expect(code == EXIT_BAD_INPUT, f"the second start ended with code {code} instead of {EXIT_BAD_INPUT}")
    stage.expect("wait for it" in second.output, "the second start does not say that another one runs")
    stage.notes.append("the second start was refused")
    stage.jobs.reverse()
    first.wait()


def kill_launcher(stage: Stage) -> None:
    """Kill the launcher, which is agent and coordinator.

    No rank may survive, and starting the command again must continue the run.
    """
    job = stage.start()
    job.until_step(middle(stage))
    stage.signal(job.process.pid, signal.SIGKILL)
    job.wait()
    orphans = stage.orphans()
    stage.expect(not orphans, f"{len(orphans)} processes still ran after the launcher was killed")
    stage.start().wait()


def exhaust_memory(stage: Stage) -> None:
    """Let another program use up the memory of the job's control group, until the kernel kills a rank."""
    group = MemoryGroup()
    stage.on_close(group.close)
    job = stage.start()
    group.add(job.process.pid)
    job.until_step(middle(stage))
    stage.mark()
    stage.expect_incident("killed", stage.template.ranks - 1)
    victim = job.ranks()[stage.template.ranks - 1]
    group.exhaust(victim)
    job.until(lambda: state(victim) in ("Z", "X", ""), "the kernel's kill of a rank", seconds=60)
    group.release()
    job.wait()


PROCESS_FAULTS = (
    Scenario(
        name="kill-rank",
        promise=f"After SIGKILL of a rank {CONTINUES}, and no process is left behind.",
        play=after(middle, signal_rank(-1, signal.SIGKILL)),
        detect_within=1.0,
        recover_within=RESTART_SECONDS,
    ),
    Scenario(
        name="kill-rank0",
        promise=f"After SIGKILL of rank 0, which holds the store and writes the metrics, {CONTINUES}.",
        play=after(middle, signal_rank(0, signal.SIGKILL)),
        detect_within=1.0,
        recover_within=RESTART_SECONDS,
    ),
    Scenario(
        name="stop-rank",
        promise=f"A rank that hangs is named, and {CONTINUES}.",
        play=after(middle, stop_rank),
        detect_within=HANG_SECONDS,
        recover_within=HANG_SECONDS + RESTART_SECONDS,
    ),
    Scenario(
        name="slow-rank",
        promise="A rank that runs only a quarter of the time is no hang but a straggler, which is named; the losses stay the same.",
        play=after(middle, slow_rank),
        restarts=False,
    ),
    Scenario(
        name="sigterm",
        promise=f"After SIGTERM the run ends with code 75 and a checkpoint of its last step, and {RESUMES}.",
        play=end_and_continue(terminate),
    ),
    Scenario(
        name="sigterm-during-save",
        promise=f"SIGTERM while a checkpoint is written ends the run with code 75 and undamaged checkpoints, and {RESUMES}.",
        play=end_and_continue(terminate_during_save),
    ),
    Scenario(
        name="double-start",
        promise="A second start of a running run ends with code 2, and the first one trains as if nothing had happened.",
        play=start_twice,
        restarts=False,
    ),
    Scenario(
        name="oom-host",
        promise=f"When the kernel kills a rank because host memory is exhausted, {CONTINUES}.",
        play=exhaust_memory,
        recover_within=RESTART_SECONDS,
        unavailable=memory_group_obstacle,
    ),
    Scenario(
        name="kill-launcher",
        promise=f"After SIGKILL of the launcher, which is agent and coordinator, no rank survives, and {RESUMES}.",
        play=kill_launcher,
    ),
)
