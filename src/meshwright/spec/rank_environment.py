"""The number and host of a rank, and the address at which ranks meet, from the environment variables of the launcher.

Without torch.
"""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.spec.errors import BadInput

ATTEMPT_VARIABLE = "MESHWRIGHT_ATTEMPT"
"""Environment variable with the number of the attempt, for ranks that an agent started."""
COORDINATOR_VARIABLE = "MESHWRIGHT_COORDINATOR"
"""Environment variable with HOST:PORT of the coordinator of a run on several hosts."""
HOST_VARIABLE = "MESHWRIGHT_HOST"
"""Environment variable with the name of the machine, for cases in which the hostname is another: a pod has a hostname
of its own.
"""
STORE_SOCKET = "MESHWRIGHT_STORE_FD"
"""Environment variable with the file descriptor of rank 0's listening socket (local launch only)."""
HIGHEST_NUMBER = 2**31 - 1
"""Highest valid number of an environment variable."""
HIGHEST_PORT = 2**16 - 1
_REMEDY = (
    "start the ranks with torchrun or srun, which set it, or unset RANK (under Slurm, SLURM_PROCID) to start them here"
)


def machine_name(env: Mapping[str, str] = os.environ) -> str:
    """Return the name of this machine."""
    return env.get(HOST_VARIABLE) or socket.gethostname()


def started_by_launcher(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun, Slurm's srun or a Kubernetes job started this process as one rank of several.

    Raises BadInput if SLURM_NTASKS is no valid number of ranks.
    """
    return "RANK" in env or (_is_slurm_task(env) and not is_node_agent(env))


def is_node_agent(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is the agent of its node: Slurm or Kubernetes started it as the only one there, and a
    coordinator is named.

    In Kubernetes, the files of `meshwright launch` name the coordinator, and each pod of an indexed job is a node. A
    process with the variable RANK is a rank, not an agent.
    """
    if "RANK" in env or not env.get(COORDINATOR_VARIABLE):
        return False
    return "JOB_COMPLETION_INDEX" in env or (_is_slurm_task(env) and one_task_per_node(env))


def one_task_per_node(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether every node of this Slurm step has exactly one task.

    Raises BadInput if one of Slurm's variables is no number.
    """
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE")  # for example 1(x4), or 2(x3),1
    if tasks is not None:
        return re.fullmatch(r"1(\(x\d+\))?", tasks) is not None
    if "SLURM_NTASKS_PER_NODE" in env:
        return _number(env, "SLURM_NTASKS_PER_NODE", 1) == 1
    return _number(env, "SLURM_NTASKS", 1, default=1) == _number(env, "SLURM_NNODES", 1, default=0)


def _is_slurm_task(env: Mapping[str, str]) -> bool:
    """Return whether this process is one of several tasks of a Slurm step."""
    return "SLURM_PROCID" in env and _number(env, "SLURM_NTASKS", 1, default=1) > 1


def check_tasks(gpus_per_node: int, env: Mapping[str, str] = os.environ) -> None:
    """Raise BadInput if Slurm started one task per node for several ranks, and no coordinator is named for agents."""
    if "RANK" in env or not _is_slurm_task(env) or is_node_agent(env) or gpus_per_node == 1:
        return
    if one_task_per_node(env):
        raise BadInput(
            f"Slurm started one task per node and cluster.gpus_per_node is {gpus_per_node}; set {COORDINATOR_VARIABLE} and "
            "MESHWRIGHT_TOKEN_FILE, so that each task is the agent of its node (`meshwright launch --to slurm` writes such "
            f"a script), or start one task per device: srun --ntasks-per-node={gpus_per_node}"
        )


@dataclass(frozen=True)
class RankEnvironment:
    """What the launcher says about one rank."""

    rank: int
    """Number of the rank among all ranks."""
    ranks: int
    """Number of all ranks."""
    local_rank: int
    """Number of the rank on its host."""
    local_ranks: int
    """Number of ranks on its host."""
    address: str
    """Address of rank 0's host, where the ranks meet."""
    port: int
    """Port at that address."""

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> RankEnvironment:
        """Read torchrun's variables (Kubernetes operators set them too) or Slurm's.

        Without either, this is the only rank.

        Raises BadInput if a variable is missing, no number or out of range, and if several ranks do not know where to
        meet.
        """
        if "RANK" in env:
            ranks = _number(env, "WORLD_SIZE", 1)
            rank = _number(env, "RANK", 0, ranks - 1, "below WORLD_SIZE")
            # A Kubernetes operator that starts one process per pod does not set variables of local ranks.
            alone = "LOCAL_RANK" not in env
            local_ranks = _number(
                env, "LOCAL_WORLD_SIZE", 1, ranks, "at most WORLD_SIZE", default=1 if alone else ranks
            )
            local_rank = _number(env, "LOCAL_RANK", 0, local_ranks - 1, "below LOCAL_WORLD_SIZE", default=0)
        elif started_by_launcher(env):
            ranks = _number(env, "SLURM_NTASKS", 1)
            rank = _number(env, "SLURM_PROCID", 0, ranks - 1, "below SLURM_NTASKS")
            per_node = max(1, ranks // _number(env, "SLURM_NNODES", 1, default=1))
            # An allocation may allow more tasks per node than this step has.
            local_ranks = min(ranks, _number(env, "SLURM_NTASKS_PER_NODE", 1, default=per_node))
            local_rank = _number(env, "SLURM_LOCALID", 0, ranks - 1, "below SLURM_NTASKS")
        else:
            rank = 0
            ranks = 1
            local_rank = 0
            local_ranks = 1
        if ranks > 1 and ATTEMPT_VARIABLE not in env:  # an agent sets an address that all hosts can reach
            _check_meeting_point(rank, ranks, local_ranks, env.get("MASTER_ADDR"), env.get("MASTER_PORT"))
        port = _number(env, "MASTER_PORT", 0, HIGHEST_PORT, "a port", default=0)
        return cls(rank, ranks, local_rank, local_ranks, env.get("MASTER_ADDR") or "127.0.0.1", port)


def _number(
    env: Mapping[str, str],
    name: str,
    least: int,
    most: int = HIGHEST_NUMBER,
    limit: str = "",
    default: int | None = None,
) -> int:
    """Return the integer in an environment variable, or `default` if the launcher did not set it.

    `limit` describes `most` for messages.

    Raises BadInput with the variable, its value and the valid range.
    """
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise BadInput(f"{name} is not set in the environment; expected {_range(least, most, limit)}; {_REMEDY}")
    try:
        value = int(text) if len(text) < 20 else None
    except ValueError:
        value = None
    if value is None or not least <= value <= most:
        raise BadInput(f"{name} is {text[:40]!r} in the environment; expected {_range(least, most, limit)}; {_REMEDY}")
    return value


def _range(least: int, most: int, limit: str) -> str:
    """Return the valid range of a number as text."""
    return f"an integer from {least} to {most} ({limit})" if limit else f"an integer ≥ {least}"


def _check_meeting_point(rank: int, ranks: int, local_ranks: int, address: str | None, port: str | None) -> None:
    """Raise BadInput if the address of rank 0 is missing, or if other hosts cannot reach it."""
    if not address or not port:
        raise BadInput(
            f"rank {rank} of {ranks}: MASTER_ADDR and MASTER_PORT must name rank 0's host (torchrun sets them; under srun "
            "export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1) and a free MASTER_PORT)"
        )
    if ranks > local_ranks and address in ("localhost", "127.0.0.1", "::1"):
        raise BadInput(
            f"MASTER_ADDR is {address}, which other hosts cannot reach, but the job has {ranks} ranks on several hosts"
        )


PROGRAM_STOP = signal.SIGRTMIN
"""The signal by which the program that started the run asks it to stop, for example by `meshwright.StopTraining`."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask a run to stop.

    SIGHUP is one of them unless this process ignores it, as under nohup.
    """
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, PROGRAM_STOP)
    return signals if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (*signals, signal.SIGHUP)
