"""Joining a job: who am I, on which device and node, and the store and process groups that connect the ranks.

A local launch hands rank 0 a socket that already listens on 127.0.0.1, so nothing listens beyond loopback. Under torchrun, Slurm or
Kubernetes the usual environment variables are obeyed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from math import gcd
from typing import Any

import torch
import torch.distributed as dist

from meshwright.parallel.rendezvous import raise_file_limit, reach
from meshwright.spec.chips import GiB
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput, CommunicationFailure
from meshwright.spec.network import network_environment
from meshwright.spec.rank_environment import RankEnvironment

STORE_SOCKET = "MESHWRIGHT_STORE_FD"
"""Environment variable with the file descriptor of rank 0's listening socket (local launch only)."""


@dataclass(frozen=True)
class World:
    """A joined job.

    `control` is a Gloo group over all ranks for small messages between hosts' processors; the default group carries tensors. `node_ranks`
    is the number of ranks on a node, where that is not what the launcher started on a host (emulated nodes).
    """

    environment: RankEnvironment
    device: torch.device
    control: dist.ProcessGroup
    node_ranks: int | None = None
    limit: timedelta = timedelta(minutes=10)
    """How long a collective may take."""

    @property
    def rank(self) -> int:
        return self.environment.rank

    @property
    def ranks(self) -> int:
        return self.environment.ranks

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for the job."""
        return self.environment.rank == 0

    @property
    def ranks_per_node(self) -> int:
        return self.node_ranks or self.environment.local_ranks

    def node(self, rank: int) -> int:
        """The node `rank` lives on; nodes are filled in rank order."""
        return rank // self.ranks_per_node

    def refuse_across_nodes(self, ranks: Sequence[int], what: str) -> None:
        """Raise BadInput when `ranks` live on several nodes.

        Asked before any path between ranks that is not NCCL or a socket is set up (symmetric memory, CUDA IPC, shared host memory):
        emulated nodes share one host's memory, and such a path would work between them where real nodes have none.
        """
        other = next((rank for rank in ranks if self.node(rank) != self.node(ranks[0])), None)
        if other is not None:
            raise BadInput(
                f"{what} between rank {ranks[0]} (node {self.node(ranks[0])}) and rank {other} (node {self.node(other)}): "
                f"nodes share no memory; keep it to the {self.ranks_per_node} ranks of one node"
            )

    def refuse_unmapped(self, ranks: Sequence[int], what: str) -> None:
        """Raise BadInput when this rank's device cannot map the memory of those of `ranks`, which all live on its node."""
        here = self.device.index
        for rank in ranks:
            peer = here + rank - self.rank  # consecutive ranks of a host have consecutive devices
            if rank != self.rank and not torch.cuda.can_device_access_peer(here, peer):
                raise BadInput(
                    f"{what}: device {here} cannot map the memory of device {peer}; expected devices joined by NVLink or another "
                    f"peer-to-peer link; leave {what.partition(' = ')[0]} out"
                )

    def split(self, parts: Sequence[Sequence[int]], what: str, options: Any = None) -> dist.ProcessGroup:
        """This rank's group, where `parts` divides all ranks into groups; collective over all ranks, in one order.

        NCCL splits the world's communicator once for all parts, whatever their number: no store, no barrier. `what` is for logs; `options`
        are NCCL's, left out the world's.
        """
        if self.device.type == "cuda":
            rows = [list(part) for part in parts]
            return _present(dist.split_group(None, rows, timeout=self.limit, pg_options=options, group_desc=what))
        # Gloo cannot split. The members alone meet; torch names the group after its ranks and the number of groups made here before,
        # which is why every rank must be in exactly one part.
        mine = next(list(part) for part in parts if self.rank in part)
        return _present(dist.new_group(mine, timeout=self.limit, use_local_synchronization=True, group_desc=what))

    def leave(self) -> None:
        dist.destroy_process_group()


def join(environment: RankEnvironment, cluster: ClusterSpec, *, timeout_seconds: int) -> World:
    """Connect this process to the job over the cluster's network, and choose its device.

    Raises BadInput when the host has no device for the rank, or when the ranks of a node are not consecutive, OutOfResources when too few
    files may be open, and CommunicationFailure when the other ranks cannot be reached.
    """
    for name, value in network_environment(cluster, environment.local_rank).items():
        os.environ.setdefault(name, value)
    # Transfers between two ranks have communicators of their own, which is what torch would advise at each of them.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    network = cluster.network
    limit = timedelta(seconds=(network.timeout_seconds if network else None) or timeout_seconds)
    device = _device(environment, cluster.is_cpu)
    if device.type == "cuda" and cluster.memory_gib is not None:
        keep_to(int(cluster.memory_gib * GiB), device)
    raise_file_limit(environment.ranks)
    try:
        store = _store(environment, limit)
    except dist.DistError as error:
        at = f"{environment.address}:{environment.port}"
        raise CommunicationFailure(
            f"rank {environment.rank}, rendezvous at {at}: {str(error).splitlines()[0]}"
        ) from error
    if device.type == "cpu":
        dist.init_process_group("gloo", store=store, rank=environment.rank, world_size=environment.ranks, timeout=limit)
        control = world_group()
    else:
        dist.init_process_group(
            "nccl", store=store, rank=environment.rank, world_size=environment.ranks, timeout=limit, device_id=device
        )
        control = _present(dist.new_group(backend="gloo", timeout=limit))
    return World(environment, device, control, _ranks_per_node(environment, control), limit)


def _ranks_per_node(environment: RankEnvironment, control: dist.ProcessGroup) -> int:
    """Ranks on a node as the launcher says, divided further where NCCL was told so (NCCL_HOSTID); collective.

    Raises BadInput on every rank when nodes are not blocks of consecutive ranks.
    """
    first = environment.rank - environment.local_rank
    name = f"{first} {os.environ.get('NCCL_HOSTID', '')}"
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True)
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(environment.ranks)]
    dist.all_gather(found, torch.tensor([number]), group=control)
    return block_size([int(answer) for answer in found])


def block_size(nodes: Sequence[int]) -> int:
    """Ranks per node, from the node names of all ranks.

    If nodes have different numbers of ranks, the largest common divisor: 6, 6 and 4 ranks on three nodes are laid out as
    eight nodes of 2. Raises BadInput if the ranks of a node are not consecutive, which the layout assumes.
    """
    blocks = [(node, len(list(ranks))) for node, ranks in groupby(nodes)]
    order = list(dict.fromkeys(nodes))
    if len(blocks) > len(order):
        raise BadInput(
            f"the ranks live on nodes {', '.join(str(order.index(node)) for node in nodes)}; expected those of one node one after another"
        )
    return gcd(*(size for _, size in blocks))


def world_group() -> dist.ProcessGroup:
    """The group of all ranks of a joined job."""
    return _present(dist.group.WORLD)


def _present(group: object) -> dist.ProcessGroup:
    """torch's types allow for a group this rank is not in; these groups hold every rank."""
    assert isinstance(group, dist.ProcessGroup)
    return group


def _device(environment: RankEnvironment, cpu: bool) -> torch.device:
    if cpu:
        return torch.device("cpu")
    found = torch.cuda.device_count()
    if environment.local_rank >= found:
        remedy = (
            "lower cluster.gpus_per_node" if found else "say cluster=auto to train on what it has, or cluster.gpu=cpu"
        )
        raise BadInput(f"local rank {environment.local_rank} has no GPU: torch finds {found} on this host; {remedy}")
    device = torch.device("cuda", environment.local_rank)
    torch.cuda.set_device(device)
    return device


def keep_to(memory: int, device: torch.device) -> None:
    """Let torch's allocator have `memory` bytes of a device that has more; asked for more, it raises OutOfMemoryError."""
    owned = torch.cuda.get_device_properties(device).total_memory
    if memory < owned:
        torch.cuda.set_per_process_memory_fraction(memory / owned, device)


def _store(environment: RankEnvironment, limit: timedelta) -> dist.Store:
    """The key-value store ranks meet at.

    torch's TCPStore listens on all interfaces unless it is handed a socket; for ranks of one host it is.
    """
    descriptor = os.environ.get(STORE_SOCKET) if environment.rank == 0 else None
    if environment.ranks == 1 and descriptor is None:
        return dist.HashStore()
    if environment.rank:
        reach(environment, limit)
    store = dist.TCPStore(
        environment.address,
        environment.port,
        environment.ranks,
        is_master=environment.rank == 0 and not _agent_hosts_store(),
        timeout=limit,
        master_listen_fd=None if descriptor is None else int(descriptor),
    )
    # The agent's store outlives ranks that it starts again, and still holds the addresses of those before.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt {attempt}", store) if _agent_hosts_store() else store


def _agent_hosts_store() -> bool:
    """torchrun's agent already serves a store at MASTER_PORT when it says so."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
