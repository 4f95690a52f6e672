"""Joins a job: selects this rank's device, determines its node, and connects the ranks by a store and process groups.

A local launch passes rank 0 a socket that already listens on 127.0.0.1, so no socket listens beyond loopback. Under torchrun, Slurm or
Kubernetes the usual environment variables apply.
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

from meshwright.connections.accept import listen_at
from meshwright.parallel.rendezvous import raise_file_limit, reach
from meshwright.spec.chips import GiB
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput, CommunicationFailure
from meshwright.spec.listen_address import address_text
from meshwright.spec.network import network_environment
from meshwright.spec.rank_environment import STORE_SOCKET, RankEnvironment

STORE_BIND = "MESHWRIGHT_STORE_BIND"
"""Environment variable with the address on which rank 0's store listens. Without it and without `STORE_SOCKET`: on all interfaces."""


@dataclass(frozen=True)
class World:
    """The ranks of a job, as this rank sees them.

    `control` is a Gloo group over all ranks for small CPU messages; the default group communicates tensors. `node_ranks` is the number of
    ranks per node if it differs from the launcher's ranks per host: one host can emulate several nodes.
    """

    environment: RankEnvironment
    device: torch.device
    control: dist.ProcessGroup
    node_ranks: int | None = None
    limit: timedelta = timedelta(minutes=10)
    """Time after which a collective fails."""

    @property
    def rank(self) -> int:
        return self.environment.rank

    @property
    def ranks(self) -> int:
        return self.environment.ranks

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which prints and writes for the job."""
        return self.environment.rank == 0

    @property
    def device_group(self) -> dist.ProcessGroup | None:
        """NCCL's group of all ranks; None on CPU ranks."""
        return world_group() if self.device.type == "cuda" else None

    @property
    def ranks_per_node(self) -> int:
        return self.node_ranks or self.environment.local_ranks

    def node(self, rank: int) -> int:
        """Index of the node of `rank`; the ranks of a node are consecutive."""
        return rank // self.ranks_per_node

    def refuse_across_nodes(self, ranks: Sequence[int], feature: str) -> None:
        """Raise BadInput if `ranks` are on several nodes.

        Call it before ranks connect by anything except NCCL or a socket: symmetric memory, CUDA IPC, shared host memory. Such a connection
        works between emulated nodes, which share a host, but not between real nodes.
        """
        other = next((rank for rank in ranks if self.node(rank) != self.node(ranks[0])), None)
        if other is not None:
            raise BadInput(
                f"{feature} between rank {ranks[0]} (node {self.node(ranks[0])}) and rank {other} (node {self.node(other)}): "
                f"nodes share no memory; keep it to the {self.ranks_per_node} ranks of one node"
            )

    def refuse_unmapped(self, ranks: Sequence[int], feature: str) -> None:
        """Raise BadInput if this rank's device cannot map the memory of the devices of `ranks`. All these ranks are on its node."""
        own_device = self.device.index
        for rank in ranks:
            peer_device = own_device + rank - self.rank  # consecutive ranks of a host have consecutive devices
            if rank != self.rank and not torch.cuda.can_device_access_peer(own_device, peer_device):
                raise BadInput(
                    f"{feature}: device {own_device} cannot map the memory of device {peer_device}; expected devices joined by NVLink "
                    f"or another peer-to-peer link; leave {feature.partition(' = ')[0]} out"
                )

    def split(self, parts: Sequence[Sequence[int]], description: str, options: Any = None) -> dist.ProcessGroup:
        """Create one group for each of `parts`, a partition of all ranks, and return the group of this rank. Collective over all ranks.

        One split of NCCL's world communicator creates all groups, without the store and without a barrier. `description` names the groups
        in logs. `options` configure the new NCCL communicators; None: they are configured as the world's.
        """
        if self.device.type == "cuda":
            partition = [list(part) for part in parts]
            return _present(
                dist.split_group(None, partition, timeout=self.limit, pg_options=options, group_desc=description)
            )
        # Gloo cannot split. Each rank creates only its own group, together with the group's members. torch names a group by its ranks and
        # by how many groups the rank created before, so every rank must be in exactly one part.
        members = next(list(part) for part in parts if self.rank in part)
        return _present(
            dist.new_group(members, timeout=self.limit, use_local_synchronization=True, group_desc=description)
        )

    def leave(self) -> None:
        """Destroy the process groups."""
        dist.destroy_process_group()


def join(environment: RankEnvironment, cluster: ClusterSpec, *, timeout_seconds: int) -> World:
    """Connect this process to the other ranks of the job over the cluster's network, and choose its device.

    Raises BadInput if the host has no device for the rank or the ranks of a node are not consecutive, OutOfResources if the limit of open
    files is too low, and CommunicationFailure if the other ranks cannot be reached.
    """
    for name, value in network_environment(cluster, environment.local_rank).items():
        os.environ.setdefault(name, value)
    # Each pipeline channel has its own communicator, which is what this warning of torch recommends.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    network = cluster.network
    limit = timedelta(seconds=(network.timeout_seconds if network else None) or timeout_seconds)
    device = _device(environment, cluster.is_cpu)
    if device.type == "cuda" and cluster.memory_gib is not None:
        limit_device_memory(int(cluster.memory_gib * GiB), device)
    raise_file_limit(environment.ranks)
    try:
        store = open_store(environment, limit)
    except dist.DistError as error:
        address = f"{environment.address}:{environment.port}"
        raise CommunicationFailure(
            f"rank {environment.rank}, rendezvous at {address}: {str(error).splitlines()[0]}"
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
    """Return the number of ranks per node: the launcher's ranks per host, divided further by NCCL_HOSTID if it is set. Collective.

    Raises BadInput on every rank if the ranks of a node are not consecutive.
    """
    first = environment.rank - environment.local_rank
    name = f"{first} {os.environ.get('NCCL_HOSTID', '')}"
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True)
    numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(environment.ranks)]
    dist.all_gather(numbers, torch.tensor([number]), group=control)
    return block_size([int(node) for node in numbers])


def block_size(nodes: Sequence[int]) -> int:
    """Return the number of ranks per node, given the node number of every rank.

    If nodes have different numbers of ranks, it is their largest common divisor: 6, 6 and 4 ranks on three nodes count as eight nodes of 2
    ranks. Raises BadInput if the ranks of a node are not consecutive, because the mesh's layout assumes that they are.
    """
    blocks = [(node, len(list(ranks))) for node, ranks in groupby(nodes)]
    order = list(dict.fromkeys(nodes))
    if len(blocks) > len(order):
        raise BadInput(
            f"the ranks are on nodes {', '.join(str(order.index(node)) for node in nodes)}; expected consecutive ranks on each node"
        )
    return gcd(*(size for _, size in blocks))


def world_group() -> dist.ProcessGroup:
    """The group of all ranks of a joined job."""
    return _present(dist.group.WORLD)


def _present(group: object) -> dist.ProcessGroup:
    """Narrow the type. On ranks outside a group torch returns another object, but these groups always contain this rank."""
    assert isinstance(group, dist.ProcessGroup)
    return group


def _device(environment: RankEnvironment, cpu: bool) -> torch.device:
    if cpu:
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if environment.local_rank >= gpus:
        remedy = (
            "lower cluster.gpus_per_node" if gpus else "set cluster=auto to use this host's devices, or cluster.gpu=cpu"
        )
        raise BadInput(f"local rank {environment.local_rank} has no GPU: torch finds {gpus} on this host; {remedy}")
    device = torch.device("cuda", environment.local_rank)
    torch.cuda.set_device(device)
    return device


def limit_device_memory(memory: int, device: torch.device) -> None:
    """Limit torch's allocator to `memory` bytes if the device has more. An allocation beyond the limit raises OutOfMemoryError."""
    total = torch.cuda.get_device_properties(device).total_memory
    if memory < total:
        torch.cuda.set_per_process_memory_fraction(memory / total, device)


def open_store(environment: RankEnvironment, limit: timedelta) -> dist.Store:
    """Open the key-value store that connects the ranks.

    torch's TCPStore listens on all interfaces unless it is given a socket. A local launch passes rank 0 such a socket. The socket stays
    open when the store closes, so that a process can open another store.
    """
    descriptor = _store_socket(environment) if environment.rank == 0 else None
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
        master_listen_fd=descriptor,
    )
    # torchrun's store survives a restart of the ranks and still contains the addresses of the previous attempt.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt {attempt}", store) if _agent_hosts_store() else store


def _store_socket(environment: RankEnvironment) -> int | None:
    """Return the descriptor of the socket for rank 0's store: inherited from the launcher, or bound here; None: torch creates one."""
    if STORE_SOCKET in os.environ:
        return os.dup(int(os.environ[STORE_SOCKET]))  # the store closes its descriptor
    if STORE_BIND not in os.environ or environment.ranks == 1:
        return None
    address = (os.environ[STORE_BIND], environment.port)
    try:
        return listen_at(address).detach()
    except OSError as error:
        at = address_text(*address)
        raise CommunicationFailure(f"rank 0 cannot listen at {at}: {error.strerror or error}") from error


def _agent_hosts_store() -> bool:
    """Whether torchrun's agent already serves a store at MASTER_PORT."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
