"""One rank's place in a job, as the launcher that started it says. Torch-free."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.spec.errors import BadInput


def started_by_launcher(env: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun, Slurm's srun or a Kubernetes job started this process as one rank of several."""
    return "RANK" in env or ("SLURM_PROCID" in env and int(env.get("SLURM_NTASKS", "1")) > 1)


@dataclass(frozen=True)
class Place:
    """One rank's place in the job, from its environment."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    address: str
    port: int

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Place:
        """Read torchrun's variables (also set by Kubernetes operators), or Slurm's; alone on this host when neither is there.

        Raises BadInput when several ranks do not know where to meet.
        """
        if "RANK" in env:
            rank, ranks, local_rank = int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", 0))
            # An operator that starts one process a pod says nothing about local ranks.
            local_ranks = int(env.get("LOCAL_WORLD_SIZE", ranks if "LOCAL_RANK" in env else 1))
        elif int(env.get("SLURM_NTASKS", 1)) > 1:
            rank, ranks, local_rank = int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"]), int(env["SLURM_LOCALID"])
            local_ranks = int(env.get("SLURM_NTASKS_PER_NODE", ranks // int(env.get("SLURM_NNODES", 1))))
        else:
            rank, ranks, local_rank, local_ranks = 0, 1, 0, 1
        address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
        if ranks > 1:
            _check_meeting_point(rank, ranks, local_ranks, address, port)
        return cls(rank, ranks, local_rank, local_ranks, address or "127.0.0.1", int(port or 0))


def _check_meeting_point(rank: int, ranks: int, local_ranks: int, address: str | None, port: str | None) -> None:
    if address is None or port is None:
        raise BadInput(
            f"rank {rank} of {ranks}: MASTER_ADDR and MASTER_PORT must name rank 0's host (torchrun sets them; under srun "
            "export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1) and a free MASTER_PORT)"
        )
    if ranks > local_ranks and address in ("localhost", "127.0.0.1", "::1"):
        raise BadInput(
            f"MASTER_ADDR is {address}, which other hosts cannot reach, but the job has {ranks} ranks on several hosts"
        )


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask a run to stop: SIGHUP is one unless this process ignores it, as under nohup."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    return signals if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (*signals, signal.SIGHUP)
