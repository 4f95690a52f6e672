"""Costs of serving instances on a cluster: seconds of their steps, sizes of their caches, and rates at which cache blocks move."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.config.profile_file import load_profile
from meshwright.costs.collective_costs import all_reduce, all_to_all, link_rate, port_rate, rank_group
from meshwright.costs.constants import Constants, at_release, constant_arrays
from meshwright.costs.device_rates import Machine
from meshwright.costs.machine_rates import chip_of, machine_of, with_measurements
from meshwright.costs.plan_costs import STACK, number
from meshwright.costs.serve_constants import usual_constants
from meshwright.costs.serve_work import DeviceWork, device_work
from meshwright.costs.serving_software import (
    ServingSoftware,
    matmul_format,
    software_constants,
    software_exchange,
    software_table,
)
from meshwright.costs.step_times import ExchangeTime, InstanceStepTimes
from meshwright.spec.chips import Chip
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.deployment import InstanceSpec, Quantisation, ServingSoftwareName
from meshwright.spec.engine import EngineSettings
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.inference_layout import rank_dimensions, split_error
from meshwright.spec.model import ModelSpec
from meshwright.spec.serve_profile import EngineProfile
from meshwright.workload.cache_size import (
    HOST_SHARE,
    CacheRoom,
    activation_bytes,
    bytes_per_block,
    cache_bytes_per_block,
    device_cache_bytes,
    layer_groups,
    most_blocks,
)

OTHER_BYTES = 1 << 30
"""Bytes of a GPU's memory for the driver's context and CUDA graphs, in addition to weights, cache and activations of a step."""
SUM_SECONDS = 7.1e-6
"""Latency of an all-reduce between two tensor ranks over fast links: NCCL on H200s in a CUDA graph.

On CPUs it is longer, but still short compared with a step.
"""
RANK_SECONDS = 1.6e-6
"""Latency that each further tensor rank adds to an all-reduce."""
TRANSFER_SECONDS = 1e-3
"""Latency of a transfer between two instances, in addition to the time for its bytes."""


@dataclass(frozen=True, kw_only=True)
class InstanceCosts:
    """Costs and sizes of one instance, the input of the serving simulator."""

    times: InstanceStepTimes
    """Gives the seconds of the instance's steps."""
    blocks: int
    """Cache blocks of all expert groups together, including the unused block 0."""
    tokens_per_block: int
    window: int | None
    """Positions that a query attends to at most, if all layers have a window; None: at least one layer attends to all positions."""
    sequences: int
    """The most requests that hold cache blocks at a time, in all expert groups together."""
    overlap: bool
    """Whether the host plans a step while the device still computes the step before it."""
    request_seconds: float = 0.0
    """Seconds from a request's arrival at the server until it arrives at the engine."""
    block_bytes: float
    """Bytes of keys and values in a block, over all tensor ranks of a group."""
    port_bytes_per_s: float
    """Bytes per second at which the blocks of one request are sent to or from the instance."""

    @property
    def groups(self) -> int:
        """Number of expert groups: each has its own requests, and the groups divide the experts among them."""
        return self.times.groups


class ServeCosts:
    """Computes the costs of instances of one model on a cluster. Raises BadInput for a device whose rates are not known.

    The rates of this program's engine come from the first of these sources that exists:

    1. `profile`, a measurement of the engine on such a device;
    2. a measurement in `cluster.profile` with these formats, preferably one with this model;
    3. the datasheet.

    `software` selects another server, by name or by its constants. Its costs always come from the datasheet.
    """

    def __init__(
        self,
        model: ModelSpec,
        cluster: ClusterSpec,
        quantisation: Quantisation | None = None,
        settings: EngineSettings | None = None,
        profile: EngineProfile | None = None,
        software: ServingSoftwareName | ServingSoftware | None = None,
    ) -> None:
        self.model = model
        self.cluster = cluster
        self.software = software_table().software[software] if isinstance(software, str) else software
        """The constants of another server; None for this program's engine."""
        self.quantisation = quantisation or Quantisation()
        self.settings = settings or EngineSettings()
        self.profile = None if self.software else profile or _profile_of(model, cluster, self.quantisation)
        """The measurement of the engine that is used, if there is one."""
        chip = _known_chip(cluster)
        weights = self.quantisation.weights
        matmuls = "bf16" if cluster.is_cpu else matmul_format(chip, weights)
        self._machine, self._k = _rates(cluster, chip, matmuls)
        measured = self.profile is not None and (self.profile.weights, self.profile.kv_cache) == (
            weights,
            self.quantisation.kv_cache,
        )
        experts = self.quantisation.experts or weights
        expert_peak = number(self._machine.peak)
        if experts != weights:
            expert_peak = number(machine_of(cluster, matmul_format(chip, experts)).peak)
        if self.software is not None:
            self.constants = software_constants(
                self.software, device_work(model), self._machine, chip, self.quantisation, expert_peak
            )
        elif self.profile is not None and measured:
            self.constants = self.profile.constants
        else:
            self.constants = usual_constants(self._machine, weights, experts, expert_peak, self.quantisation.kv_cache)
        """Constants from which the seconds of a step on one device are computed."""
        self.overlap = not cluster.is_cpu if self.profile is None else self.profile.overlap
        datasheet_items = 4 if cluster.is_cpu else 2
        self._items = self.profile.item_bytes if self.profile else datasheet_items
        self._known: dict[tuple[int, int, int], InstanceCosts | OutOfResources] = {}

    @property
    def context(self) -> int:
        """The most tokens of prompt and answer together that an instance serves."""
        return min(self.settings.context or self.model.max_seq_len, self.model.max_seq_len)

    def of(self, instance: InstanceSpec) -> InstanceCosts:
        """Return the costs of an instance with this specification. Results are cached.

        Raises OutOfResources if the cache cannot hold even one request of `context` tokens, and BadInput if the model cannot be divided
        among so many tensor or expert ranks.
        """
        key = instance.tensor, instance.expert, instance.token_budget
        if key not in self._known:
            try:
                self._known[key] = self._instance(*key)
            except OutOfResources as error:
                self._known[key] = error
        known = self._known[key]
        if isinstance(known, OutOfResources):
            raise known
        return known

    def _instance(self, tensor: int, expert: int, token_budget: int) -> InstanceCosts:
        if error := split_error(self.model, tensor):
            raise BadInput(f"tensor: expected {error}, got {tensor}")
        if expert > 1 and (not self.model.experts or self.model.experts % expert):
            raise BadInput(f"expert: expected a divisor of model.experts = {self.model.experts}, got {expert}")
        settings = self.settings
        formats = self.quantisation
        experts = formats.experts
        if self.software is None and experts is None and formats.weights == "fp8" and expert > 1:
            experts = "bf16"  # this engine rounds only experts that devices do not share to fp8 (`serve.formats`)
        work = device_work(self.model, tensor, expert, weights=formats.weights, experts=experts, **self._item_sizes())
        rank = rank_dimensions(self.model, tensor)
        size = settings.tokens_per_block
        block_bytes = cache_bytes_per_block(rank, size, self._item_sizes()["cache_item"])
        blocks = settings.cache_blocks or self._blocks(work, rank, token_budget)
        copies = 1 if self.model.kv_rank else min(tensor, self.model.kv_heads)
        crosses = self.cluster.nodes > 1
        rate = number((port_rate if crosses else link_rate)(self._machine, self._k))
        return InstanceCosts(
            times=InstanceStepTimes(work, self.constants, groups=expert, exchange=self._exchange(tensor, expert)),
            blocks=1 + expert * (blocks - 1),
            tokens_per_block=size,
            window=_window(self.model),
            sequences=expert * settings.sequences,
            overlap=self.overlap,
            request_seconds=self.software.request_seconds if self.software else 0.0,
            block_bytes=float(copies * block_bytes),
            port_bytes_per_s=rate * copies,
        )

    def _item_sizes(self) -> dict[str, int]:
        return {"item": self._items, "cache_item": 1 if self.quantisation.kv_cache else self._items}

    def _blocks(self, work: DeviceWork, rank: ModelSpec, token_budget: int) -> int:
        """Return how many cache blocks one group has, by the formula that the engine uses."""
        settings = self.settings
        step_tokens = token_budget + self.settings.sequences
        if self.cluster.is_cpu:
            total = self.cluster.memory_bytes() or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            available = HOST_SHARE * total
        else:
            total = number(self._machine.memory)
            other = self.profile.other_bytes if self.profile is not None else OTHER_BYTES
            activations = activation_bytes(rank, self._items, settings.sequences, step_tokens)
            available = device_cache_bytes(total - work.stored_bytes - other, total, activations)
        groups = layer_groups(rank)
        size = settings.tokens_per_block
        sizes = [bytes_per_block(group, size, self._item_sizes()["cache_item"]) for group in groups]
        room = CacheRoom(self.context, settings.sequences, step_tokens, size)
        blocks = room.blocks_within(available, groups, sizes)
        needed = most_blocks(self.context, 1, size)
        if blocks < needed:
            if available <= 0:
                weights = work.stored_bytes / 2**30
                memory = total / 2**30
                raise OutOfResources(f"the weights take {weights:.1f} GiB of a device, which has {memory:.1f} GiB")
            bytes_needed = sum(map(math.prod, zip(room.group_blocks(groups, needed), sizes, strict=True)))
            raise OutOfResources(
                f"the cache of one request of {self.context} tokens takes {bytes_needed / 2**30:.2f} GiB of a device, and "
                f"{max(available, 0) / 2**30:.2f} GiB are free beside the weights"
            )
        return blocks

    def _exchange(self, tensor: int, expert: int) -> ExchangeTime:
        """Return the communication of a step: all-reduces over tensor ranks, and exchanges of tokens with the experts of other groups."""
        machine = self._machine
        k = self._k
        spec = self.model
        token_bytes = float(spec.hidden * self._items)
        if self.software is not None:
            sums = 2 * spec.layers if tensor > 1 else 0
            exchanges = 2 * spec.routed_layers if expert > 1 else 0
            sent = (2 * sums * (tensor - 1) / tensor + exchanges * spec.experts_per_token) * token_bytes
            return software_exchange(self.software, machine, tensor * expert, sums + exchanges, sent)
        fixed = each = 0.0
        if tensor > 1:
            group = rank_group(machine, k, float(tensor), 1.0)
            count = spec.layers * (1 if spec.parallel_block else 2) + 1
            latency = number(all_reduce(group, k, 0.0))
            each = count * (number(all_reduce(group, k, token_bytes)) - latency)
            fixed = count * (latency if number(group.domains) > 1 else SUM_SECONDS + RANK_SECONDS * (tensor - 2))
        if expert > 1:
            group = rank_group(machine, k, float(expert), float(tensor))
            routed = spec.routed_layers
            latency = number(all_to_all(group, k, machine, 0.0))
            sent = spec.experts_per_token * token_bytes / tensor
            fixed += 2 * routed * latency
            each += 2 * routed * (number(all_to_all(group, k, machine, sent)) - latency)
        return ExchangeTime(fixed, each)


def _window(model: ModelSpec) -> int | None:
    """Return the largest attention window of the layers; None if some layers have none, because these decide how many requests fit."""
    windows = [group.window for group in layer_groups(model)]
    return None if None in windows else max(window for window in windows if window is not None)


def _known_chip(cluster: ClusterSpec) -> Chip:
    chip = chip_of(cluster)
    if chip is None:
        raise BadInput(
            f"cluster.gpu: the rates of {cluster.gpu} are not known; `meshwright profile` on it measures them",
            key="cluster.gpu",
        )
    return chip


def _rates(cluster: ClusterSpec, chip: Chip, matmuls: str) -> tuple[Machine, Constants]:
    constants = at_release(constant_arrays([(chip.generation, STACK)]), np.zeros(1))
    k, machine = with_measurements(constants, machine_of(cluster, matmuls), cluster, matmuls)
    return machine, k


def _profile_of(model: ModelSpec, cluster: ClusterSpec, formats: Quantisation) -> EngineProfile | None:
    """Return a measurement in the cluster's profile with these formats: one of this model if there is one, else the first."""
    measured: Sequence[EngineProfile] = load_profile(cluster.profile).engine if cluster.profile else ()
    same = [entry for entry in measured if (entry.weights, entry.kv_cache) == (formats.weights, formats.kv_cache)]
    shape = replace(model, max_seq_len=1)
    return next((entry for entry in same if replace(entry.model, max_seq_len=1) == shape), next(iter(same), None))
