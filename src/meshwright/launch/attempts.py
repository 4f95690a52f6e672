"""What an attempt of a supervised run starts from: its lease, its checkpoint and its samples."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from meshwright.checkpoint.verify import list_checkpoints
from meshwright.durable.writes import write_durable
from meshwright.launch.coordinator import read_state
from meshwright.launch.folder import take_over
from meshwright.launch.prepare import Prepared
from meshwright.policies.hang import CPU_SECONDS, GPU_SECONDS
from meshwright.policies.restart import RestartPolicy
from meshwright.policies.supervision import Rules, State
from meshwright.spec.fields import to_plain
from meshwright.spec.run import Assignment, RunSpec


def rules_of(run: RunSpec) -> Rules:
    """The settings of a run that decide about its restarts."""
    policy = RestartPolicy(run.supervision.restarts, run.supervision.on_repeated_failure)
    return Rules(run.cluster.nodes, run.train.global_batch, policy)


def hang_seconds(run: RunSpec) -> float:
    """Least seconds without progress that count as a hang."""
    return run.supervision.hang_seconds or (CPU_SECONDS if run.cluster.is_cpu else GPU_SECONDS)


def opening_state(folder: Path) -> State:
    """The state of a job that starts in a run's folder: nothing is done, but skipped samples stay skipped."""
    earlier = read_state(folder)
    return State(checkpoints=checkpoint_steps(folder), skipped=earlier.skipped if earlier else ())


def job_state(folder: Path) -> State:
    """The state of the job in a run's folder that is not over, for a coordinator that is started again; else an opening state."""
    earlier = read_state(folder)
    if earlier is None or earlier.status == "finished" or not earlier.attempt:
        return opening_state(folder)
    if earlier.status == "preparing":  # its ranks have not begun
        earlier = replace(earlier, status="gathering", attempt=earlier.attempt - 1)
    return replace(earlier, checkpoints=checkpoint_steps(folder), ready=())


def prepared_before(folder: Path) -> Prepared:
    """The run of a job that goes on, as its first attempt was prepared."""
    return Prepared(Assignment.read(folder / "assignment.json"), folder, resumes=True)


def checkpoint_steps(folder: Path) -> tuple[int, ...]:
    """Steps of the checkpoints in a run's folder whose names and sizes are right, ascending."""
    return tuple(record["step"] for record in list_checkpoints(folder, contents=False) if record["ok"])


def write_attempt(prepared: Prepared, state: State) -> Path:
    """Write the assignment of the state's attempt and return its file.

    Each attempt takes the lease anew, so that a rank of an earlier one that still runs commits nothing.
    """
    first = prepared.assignment
    lease = first.lease if state.attempt == 1 else take_over(prepared.folder)
    assignment = replace(
        first,
        lease=lease,
        attempt=state.attempt,
        resume_at_most=state.restart.resume_at_most,
        skip_samples=state.skipped,
    )
    file = prepared.folder.absolute() / "assignment.json"
    write_durable(file, json.dumps(to_plain(assignment)))
    return file
