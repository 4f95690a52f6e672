"""Joining a job: who am I, on which device, and the store and process groups that connect the ranks.

A local launch hands rank 0 a socket that already listens on 127.0.0.1, so nothing listens beyond loopback. Under torchrun, Slurm or
Kubernetes the usual environment variables are obeyed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from meshwright.spec.errors import BadInput
from meshwright.spec.place import Place

STORE_SOCKET = "MESHWRIGHT_STORE_FD"
"""Environment variable with the file descriptor of rank 0's listening socket (local launch only)."""


@dataclass(frozen=True)
class World:
    """A joined job.

    `control` is a Gloo group over all ranks for small messages between hosts' processors; the default group carries tensors.
    """

    place: Place
    device: torch.device
    control: dist.ProcessGroup

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def ranks(self) -> int:
        return self.place.ranks

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for the job."""
        return self.place.rank == 0

    def leave(self) -> None:
        dist.destroy_process_group()


def join(place: Place, *, cpu: bool, timeout_seconds: int) -> World:
    """Connect this process to the job and choose its device.

    Raises BadInput when the host has no device for the rank.
    """
    device = _device(place, cpu)
    store = _store(place, timeout_seconds)
    limit = timedelta(seconds=timeout_seconds)
    if device.type == "cpu":
        dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.ranks, timeout=limit)
        return World(place, device, _present(dist.group.WORLD))
    dist.init_process_group(
        "nccl", store=store, rank=place.rank, world_size=place.ranks, timeout=limit, device_id=device
    )
    return World(place, device, _present(dist.new_group(backend="gloo", timeout=limit)))


def _present(group: object) -> dist.ProcessGroup:
    """torch's types allow for a group this rank is not in; these groups hold every rank."""
    assert isinstance(group, dist.ProcessGroup)
    return group


def _device(place: Place, cpu: bool) -> torch.device:
    if cpu:
        return torch.device("cpu")
    found = torch.cuda.device_count()
    if place.local_rank >= found:
        raise BadInput(
            f"local rank {place.local_rank} has no GPU: this host shows {found}; lower cluster.gpus_per_node"
        )
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def _store(place: Place, timeout_seconds: int) -> dist.Store:
    """The key-value store ranks meet at.

    torch's TCPStore listens on all interfaces unless it is handed a socket; for ranks of one host it is.
    """
    descriptor = os.environ.get(STORE_SOCKET) if place.rank == 0 else None
    if place.ranks == 1 and descriptor is None:
        return dist.HashStore()
    return dist.TCPStore(
        place.address,
        place.port,
        place.ranks,
        is_master=place.rank == 0 and not _agent_hosts_store(),
        timeout=timedelta(seconds=timeout_seconds),
        master_listen_fd=None if descriptor is None else int(descriptor),
    )


def _agent_hosts_store() -> bool:
    """torchrun's agent already serves a store at MASTER_PORT when it says so."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
