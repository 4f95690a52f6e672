"""Starts an attempt of a supervised run: takes its lease, and chooses its checkpoint and its samples."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from meshwright.checkpoint.format.inventory import present_steps
from meshwright.durable.writes import write_durable
from meshwright.launch.coordinator import NoPlanForHosts
from meshwright.launch.corpus import recorded_skips
from meshwright.launch.folder import take_over
from meshwright.launch.prepare import Note, PreparedRun, training_plan
from meshwright.launch.state_file import read_state
from meshwright.policies.hang import CPU_SECONDS, GPU_SECONDS
from meshwright.policies.host_tests import Suspect
from meshwright.policies.restart import RestartPolicy
from meshwright.policies.skipped_samples import merge_skips
from meshwright.policies.supervision import Rules, State
from meshwright.spec.errors import EXIT_DONE, BadInput, Damaged, MeshwrightError, OutOfResources
from meshwright.spec.failures import as_meshwright_error
from meshwright.spec.fields import to_sealed_json
from meshwright.spec.run import Assignment, RunSpec


class RunFinished(MeshwrightError):
    """The run's last step is in a checkpoint, so the job has nothing left to do."""

    exit_code = EXIT_DONE


def rules_of(run: RunSpec, *, others_may_join: bool = True) -> Rules:
    """The settings of a run that decide how it restarts."""
    policy = RestartPolicy(run.supervision.restarts, run.supervision.on_repeated_failure)
    persists = run.train.on_nonfinite != "stop" or run.train.on_spike not in ("stop", "ignore")
    return Rules(
        run.cluster.nodes,
        run.train.global_batch,
        policy,
        run.supervision.wait_seconds,
        batch_ramp=run.train.batch_ramp,
        test_at_end=persists and run.supervision.restarts > 0,
        saves=run.supervision.restarts > 0 and (run.checkpoint.every != 0 or run.checkpoint.at_end),
        others_may_join=others_may_join,
    )


def hang_seconds(run: RunSpec) -> float:
    """Seconds without progress that count as a hang, at least."""
    return run.supervision.hang_seconds or (CPU_SECONDS if run.cluster.is_cpu else GPU_SECONDS)


def opening_state(folder: Path) -> State:
    """The state of a new job in a run's folder. Samples that an earlier job skipped stay skipped.

    A host that the earlier job excluded is tested before it trains.
    """
    earlier = read_state(folder) or State()
    skipped = merge_skips(recorded_skips(folder), earlier.skipped)
    suspects = tuple(Suspect(exclusion.host) for exclusion in earlier.excluded)
    steps = present_steps(folder)
    return State(checkpoints=steps, present=steps, skipped=skipped, suspects=suspects, job=secrets.token_hex(8))


def finished_state(folder: Path) -> State | None:
    """The state of the last job in a run's folder, if it is over and some agents may not know this yet; else None."""
    earlier = read_state(folder)
    return earlier if earlier is not None and earlier.status == "finished" and earlier.job else None


def job_state(folder: Path) -> State:
    """The state from which a restarted coordinator continues: that of the job in the folder if it is not over, else an opening state."""
    earlier = read_state(folder)
    if earlier is None or earlier.status == "finished" or not earlier.attempt:
        return opening_state(folder)
    if earlier.status == "preparing":  # its ranks have not begun, so the attempt is prepared again
        earlier = replace(earlier, status="gathering", attempt=earlier.attempt - 1, tests=(), testing=())
    steps = present_steps(folder)
    return replace(earlier, checkpoints=steps, present=steps, ready=(), not_before=0.0, short_since=None)


def prepared_before(run: RunSpec, folder: Path, note: Note) -> PreparedRun | None:
    """The prepared run of a job that continues, on all its hosts, as its last attempt used it. None if its file is damaged.

    Ranks that are training do not need the file any more. It is prepared again for the next attempt.
    """
    try:
        last = Assignment.read(folder / "assignment.json")
    except (Damaged, OSError) as error:
        note(f"{as_meshwright_error(error)}; the next attempt is prepared anew")
        return None
    first = replace(
        last, run=replace(last.run, cluster=replace(last.run.cluster, nodes=run.cluster.nodes), plan=run.plan)
    )
    if last.run.cluster.nodes != run.cluster.nodes:
        first = replace(first, plan=training_plan(first.run, lambda text: None))
    return PreparedRun(first, folder, resumes=True)


def write_attempt(source: PreparedRun | Callable[[], PreparedRun | None], state: State) -> Path:
    """Write the assignment of the state's attempt, and return its path. `source` is the prepared run, or a function that prepares it.

    Each attempt takes a new lease, so that a rank of an earlier attempt that is still running can commit nothing. Raises NoPlanForHosts,
    and RunFinished if `source` returns None.
    """
    prepared = source if isinstance(source, PreparedRun) else source()
    if prepared is None:
        raise RunFinished("the run is finished")
    first = prepared.assignment
    on_hosts = _on_hosts(first, len(state.members))
    lease = first.lease if state.attempt == 1 else take_over(prepared.folder)
    assignment = replace(
        on_hosts,
        lease=lease,
        attempt=state.attempt,
        resume_at_most=state.restart.resume_at_most,
        skip_samples=state.skipped,
    )
    file = prepared.folder.absolute() / "assignment.json"
    write_durable(file, to_sealed_json(assignment))
    return file


def _on_hosts(first: Assignment, hosts: int) -> Assignment:
    """The run's assignment for `hosts` hosts. If these are not all hosts, it has a new plan with the same batch and samples.

    Raises NoPlanForHosts if there is no such plan.
    """
    run = first.run
    if hosts == run.cluster.nodes:
        return first
    run = replace(
        run, cluster=replace(run.cluster, nodes=hosts), plan="auto" if isinstance(run.plan, str) else run.plan
    )
    try:
        return replace(first, run=run, plan=training_plan(run, lambda text: None))
    except (BadInput, OutOfResources) as error:
        raise NoPlanForHosts(str(error).splitlines()[0]) from error
