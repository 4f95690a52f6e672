"""Runs a job on this host's devices: from the run's description to the job's exit code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.checkpoint.format.inventory import describe_continuation
from meshwright.connections.limits import raise_file_limit
from meshwright.events.messages import Message
from meshwright.events.terminal import write_line
from meshwright.launch.agent import Agent, starts_spares
from meshwright.launch.coordinator import Coordinator
from meshwright.launch.defect_report import DefectReporter
from meshwright.launch.folder import folder_lock
from meshwright.launch.health_monitor import health_monitor
from meshwright.launch.local import POLL_SECONDS, Listener, forward_signals, rank_starter
from meshwright.launch.machine import check_devices
from meshwright.launch.metrics_endpoint import MetricsEndpoint, metrics_endpoint
from meshwright.launch.orphans import end_orphans
from meshwright.launch.progress_file import ProgressFile
from meshwright.spec.errors import EXIT_COMMUNICATION, EXIT_DONE, EXIT_REPEATED, BadInput, Interrupted
from meshwright.spec.rank_environment import PROGRAM_STOP, machine_name
from meshwright.spec.run import RunSpec

if TYPE_CHECKING:
    from meshwright.launch.prepare import Note, PreparedRun

HOST = "this host"
"""Name of the only agent."""


def run_job(
    run: RunSpec,
    runs: Path,
    *,
    profile: tuple[int, int] | None = None,
    timeline: tuple[int, int] | None = None,
    replay: Path | None = None,
    note: Note = lambda text: None,
    announce: Callable[[PreparedRun], None] = lambda prepared: None,
    listener: Listener | None = None,
) -> int:
    """Start the ranks on this host, prepare the run while they import, and train. Return the job's exit code.

    `run` is started in the folder `runs`/NAME. `profile`, `timeline` and `replay` are passed to `prepare_run`. `note`
    receives remarks during the preparation. `announce` is called with the prepared run before it begins. `listener`
    receives the messages of the ranks. If it raises an exception, the run stops after the current step with a
    checkpoint, and the exception is raised again here.

    Raises the errors of `prepare_run`, BadInput for a cluster of several hosts, and Interrupted at the second Ctrl-C.
    """
    if run.cluster.nodes > 1:
        raise BadInput(
            f"cluster.nodes is {run.cluster.nodes}: start the ranks with a launcher on every node, e.g. "
            f"torchrun --nnodes {run.cluster.nodes} --nproc-per-node {run.cluster.gpus_per_node} --rdzv-backend c10d "
            "--rdzv-endpoint HOST:PORT -m meshwright train …"
        )
    if run.train.global_batch % run.cluster.ranks and run.train.global_batch_tokens is None:
        # If the batch divides evenly, using fewer devices is never faster (`planner.devices`), and the planner need not
        # be imported.
        from meshwright.launch.prepare import on_used_devices

        run = on_used_devices(run, note)
    check_devices(run.cluster)
    raise_file_limit()
    folder = runs / run.name
    guard = _Guard(listener)
    start = rank_starter(run.cluster, folder)
    with (
        folder_lock(folder),
        metrics_endpoint(run.observe.prometheus, folder) as endpoint,
        health_monitor(run) as health,
        closing(Agent(HOST, start, folder, listener=guard, spares=starts_spares(run), health=health)) as agent,
    ):
        guard.agent = agent
        end_orphans(folder)
        from meshwright.launch.prepare import prepare_run  # imported late, while the ranks import

        prepared = prepare_run(run, runs, profile=profile, note=note, timeline=timeline, replay=replay)
        if prepared is None:
            return EXIT_DONE
        announce(prepared)
        try:
            code = _supervise(agent, prepared, endpoint)
        except Interrupted as end:
            raise Interrupted(f"{end}; {describe_continuation(folder)}") from None
        if guard.error is not None:
            raise guard.error
    if code in (EXIT_COMMUNICATION, EXIT_REPEATED):
        write_line(f"meshwright: {describe_continuation(folder)}")
    return code


def _supervise(agent: Agent, prepared: PreparedRun, endpoint: MetricsEndpoint) -> int:
    """Run attempts of a prepared run until one succeeds or the run gives up. Return the exit code."""
    from meshwright.launch.attempts import hang_seconds, opening_state, rules_of, write_attempt

    run = prepared.assignment.run
    folder = prepared.folder
    coordinator = Coordinator(
        folder,
        rules_of(run, others_may_join=False),
        run.cluster.gpus_per_node,
        partial(write_attempt, prepared),
        state=opening_state(folder),
        hang_seconds=hang_seconds(run),
    )
    progress = ProgressFile(folder, coordinator.progress)
    with closing(coordinator), closing(progress), forward_signals(agent.stop, agent.kill_at_once):
        while coordinator.code is None:
            agent.poll(POLL_SECONDS)
            report = agent.report()
            directive = coordinator.receive(report)
            coordinator.tick()
            progress.update()
            endpoint.update(report.ranks, report.findings)
            agent.obey(directive)
        agent.obey(coordinator.receive(agent.report()))  # if the job ended at once, this still collects its evidence
    agent.close_attempt()
    with closing(DefectReporter(run)) as report_defect:
        for exclusion in coordinator.state.excluded:
            report_defect(machine_name(), f"{exclusion.verdict}: {exclusion.cause}")
    for line in coordinator.outcome(folder / "logs"):
        write_line(line if line.startswith("  ") else f"meshwright: {line}")
    return coordinator.code


class _Guard:
    """Passes messages to the listener until it raises. Then it keeps the exception and asks the ranks to stop."""

    def __init__(self, listener: Listener | None) -> None:
        self._listener = listener
        self.agent: Agent | None = None
        self.error: BaseException | None = None

    def __call__(self, rank: int, message: Message) -> None:
        if self._listener is None or self.error is not None:
            return
        try:
            self._listener(rank, message)
        except BaseException as error:
            self.error = error
            assert self.agent is not None, "ranks send nothing before they begin"
            self.agent.stop(PROGRAM_STOP)
