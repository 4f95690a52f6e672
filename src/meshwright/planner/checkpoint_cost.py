"""Predicts what checkpoints cost a run: host memory, waits of training, the interval between checkpoints, and storage bandwidth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.costs.machine_rates import machine_of
from meshwright.costs.offload_costs import host_rate, rate_both_ways
from meshwright.costs.partner_copies import PORT_SHARE, partner_rate
from meshwright.costs.plan_costs import as_nodes, matmul_dtype, number
from meshwright.planner.candidate import host_budget, memory_budget, trainer_bytes
from meshwright.policies.checkpoint_times import auto_interval
from meshwright.policies.partner_host import (
    REPLICA_SENTENCE,
    REPLICATE,
    choose_partner_hosts,
    choose_replicas,
    partner_sentence,
)
from meshwright.policies.snapshot_copies import SNAPSHOT_GROUPS, STATE_BYTES, PassTimes, plan_device_copies
from meshwright.simulator.step_simulation import host_bytes
from meshwright.spec.job import ASYNC_BYTES
from meshwright.spec.layout import Layout
from meshwright.spec.model import trained_parameter_count
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec
from meshwright.workload.plan_bytes import optimizer_on_host

HOST_COPY_RATE = 10e9
"""Bytes per second that one rank copies within host memory: a guess."""
WRITE_RATE = 2.62e9
"""Bytes per second that one rank writes to storage.

Measured by `benchmarks/checkpoint_stall.py` with one rank on H200 hosts with 16 cores, to tmpfs: 2.3 to 3.0 GB/s. The planner does not know
whether a run's storage is slower.
"""
REPLICA_PARTS = 2
"""If a rank has a replica on another host, its snapshot has two parts: the rank's own part of the state, and the replica's part."""
PARTNER_COPIES = 2
"""A host has memory for two copies of each snapshot of its partner host: a complete one, and one that is arriving."""
SLOWDOWN = 0.01
"""Relative slow-down of steps while a save is copied and written, an upper bound.

On one H200 it was within the variation of steps (-0.6%).
"""


@dataclass(frozen=True)
class SaveRates:
    """Bytes per second of one rank's save. Machines on which they were measured replace the defaults."""

    write: float = WRITE_RATE
    """Rate from host memory to storage."""
    host_copy: float | None = None
    """Rate within host memory. None: GPU ranks use `HOST_COPY_RATE`, and CPU ranks have no prediction."""


@dataclass(frozen=True)
class CheckpointCost:
    """The predicted cost of checkpoints for one run and plan. Seconds are None if the rates of the devices are not known."""

    bytes: int
    """Size of one checkpoint in bytes."""
    beside_training: bool
    """Whether a checkpoint is written while training continues."""
    reason: str
    """Reason why training waits for a save; empty if it does not."""
    host_bytes: int
    """Bytes of one host's memory for checkpoints.

    They are snapshots, copies of a partner host's snapshots and, if there is room, second buffers of an optimizer in host memory.
    """
    copy_seconds: float | None = None
    """Seconds to copy a rank's state to host memory."""
    device_copy_bytes: int | None = None
    """Bytes of a rank's state that are first copied within device memory, so that the next update need not wait for them."""
    stall_seconds: float | None = None
    """Seconds that the update of the next step waits for copies."""
    writing_seconds: float | None = None
    """Seconds to write a rank's state from host memory to storage."""
    cost_seconds: float | None = None
    """Seconds of training that a save costs: the stall, and slower steps while it is copied and written."""
    interval_seconds: float | None = None
    """Time from one checkpoint to the next."""
    storage_bytes_per_second: float | None = None
    """Average rate at which all ranks together write to storage."""
    partner: str | None = None
    """A sentence about the choice of partner hosts, or of replicas in their place; None if no other host keeps a copy."""
    partner_seconds: float | None = None
    """Seconds to copy a rank's snapshot to its partner host at the limited rate; 0 if a replica has the same state anyway."""
    partner_link_share: float | None = None
    """Largest share of a rank's network port that this copy uses."""


def checkpoint_cost(
    run: RunSpec, plan: Plan, step_seconds: float | None = None, rates: SaveRates | None = None
) -> CheckpointCost | None:
    """Return the cost of the run's checkpoints, or None for a run that writes only the last one.

    `step_seconds` is the time of a step; if it is None, the plan's prediction is used. `rates` replace the assumed rates.
    """
    rates = rates or SaveRates()
    spec = run.checkpoint
    cluster = as_nodes(run.cluster)
    if not spec.every:
        return None
    whole = trained_parameter_count(run.model) * STATE_BYTES
    rank_bytes = whole / plan.ranks
    step = step_seconds or (plan.predicted.step_seconds if plan.predicted is not None else None)
    interval = step * spec.every if step is not None and spec.every != "auto" else None
    in_memory = _InMemory.of(run, plan)
    staged = in_memory.parts * rank_bytes
    reserved = (in_memory.parts + in_memory.received) * rank_bytes * cluster.gpus_per_node
    reason = _reason_to_wait(run, plan, rank_bytes, reserved, in_memory)
    if reason:
        return CheckpointCost(whole, False, reason, 0, interval_seconds=interval)
    offloaded = optimizer_on_host(run.model, plan, cluster.nodes) / cluster.gpus_per_node
    second_buffers = offloaded * cluster.gpus_per_node
    if reserved + second_buffers > _host_memory_left(run, plan):
        second_buffers = 0.0
    copies = _Copies()
    cost = None
    writing = rank_bytes / rates.write
    if step is not None and cluster.is_cpu and rates.host_copy is not None:
        copies = _processor_copies(step, staged, rates.host_copy)
    elif step is not None and not cluster.is_cpu:
        host_copy = rates.host_copy or HOST_COPY_RATE
        waits = bool(offloaded and not second_buffers)
        # Each replica updates all of its state, and copies only its parts of that.
        staged_on_host = offloaded * in_memory.parts / plan.axis_size(REPLICATE)
        copies = _copies(run, plan, step, staged, staged_on_host, host_copy, waits=waits)
    if copies.seconds is not None and copies.stall_seconds is not None:
        save = copies.seconds + writing
        cost = copies.stall_seconds + SLOWDOWN * save
        if spec.every == "auto":
            interval = auto_interval(cost, save, cluster.nodes, cluster.host_mtbf_hours)
    return CheckpointCost(
        bytes=whole,
        beside_training=True,
        reason="",
        host_bytes=int(reserved + second_buffers),
        copy_seconds=copies.seconds,
        device_copy_bytes=copies.device_copy_bytes,
        stall_seconds=copies.stall_seconds,
        writing_seconds=writing,
        cost_seconds=cost,
        interval_seconds=interval,
        storage_bytes_per_second=whole / interval if interval else None,
        partner=in_memory.choice,
        partner_seconds=rank_bytes / partner_rate(run.cluster) if in_memory.received else in_memory.nothing_sent,
        partner_link_share=PORT_SHARE if in_memory.received else in_memory.nothing_sent,
    )


def snapshot_bytes(run: RunSpec, plan: Plan) -> int:
    """Bytes of a CPU rank's own memory that snapshots of its state fill while training continues; 0 on GPUs, whose snapshots are in host
    memory, and where training waits for saves.
    """
    if not run.cluster.is_cpu or not run.checkpoint.every:
        return 0
    rank_bytes = trained_parameter_count(run.model) * STATE_BYTES / plan.ranks
    in_memory = _InMemory.of(run, plan)
    snapshots = (in_memory.parts + in_memory.received) * rank_bytes
    reserved = snapshots * as_nodes(run.cluster).gpus_per_node
    return 0 if _reason_to_wait(run, plan, rank_bytes, reserved, in_memory) else int(snapshots)


@dataclass(frozen=True)
class _InMemory:
    """Snapshots in a host's memory, counted per rank of the host.

    `parts` counts copies of the rank's own state, `received` those of another host's snapshot.
    """

    parts: int = 1
    received: int = 0
    choice: str | None = None
    """The choice of partner hosts or replicas in words; None if other hosts keep nothing."""

    @classmethod
    def of(cls, run: RunSpec, plan: Plan) -> _InMemory:
        if run.checkpoint.partner == "none":
            return cls()
        layout = Layout.of(plan, run.cluster.gpus_per_node)
        partners = choose_partner_hosts(layout)
        if partners is None:
            return cls()
        if choose_replicas(layout) is not None:
            return cls(REPLICA_PARTS, 0, REPLICA_SENTENCE)
        return cls(1, PARTNER_COPIES, partner_sentence(partners))

    @property
    def nothing_sent(self) -> float | None:
        """Figure of copies to a partner host where none are sent: 0 with replicas, None if other hosts keep nothing."""
        return None if self.choice is None else 0.0


@dataclass(frozen=True)
class _Copies:
    """Copies of a rank's state: duration, bytes that are first copied on the device, and how long the update waits."""

    seconds: float | None = None
    device_copy_bytes: int | None = None
    stall_seconds: float | None = None


def _processor_copies(step: float, rank_bytes: float, rate: float) -> _Copies:
    """The copies of a CPU rank, whose state is in host memory, beside a step of `step` seconds.

    The seconds of its update are not known and counted as 0, so the stall is a lower bound.
    """
    stall = plan_device_copies(_in_groups(rank_bytes), PassTimes(step, 0.0, rate), room=0).stall_seconds
    return _Copies(rank_bytes / rate, 0, stall)


def _copies(
    run: RunSpec, plan: Plan, step: float, rank_bytes: float, offloaded: float, host_copy: float, *, waits: bool
) -> _Copies:
    """The copies of `rank_bytes` of state of which `offloaded` are in host memory, beside a step of `step` seconds.

    `host_copy` is the rate of copies within host memory.
    `waits`: the update of the state in host memory waits for its copy, as there are no second buffers.
    """
    cluster = as_nodes(run.cluster)
    machine = machine_of(cluster, matmul_dtype(plan.precision, cluster))
    on_device = rank_bytes - offloaded
    link = number(host_rate(machine))
    times = PassTimes.of_step(step, on_device, number(machine.hbm), link)
    free_bytes = max(0, (memory_budget(run) or 0) - trainer_bytes(plan))
    device_copies = plan_device_copies(_in_groups(on_device), times, free_bytes)
    stall = device_copies.stall_seconds
    if waits:
        update = min(step, offloaded / number(rate_both_ways(machine)))
        host_times = PassTimes(step - update, update, host_copy)
        stall = max(stall, plan_device_copies(_in_groups(offloaded), host_times, room=0).stall_seconds)
    return _Copies(max(on_device / link, offloaded / host_copy), device_copies.bytes, stall)


def _in_groups(count: float) -> list[float]:
    return [count / SNAPSHOT_GROUPS] * SNAPSHOT_GROUPS


def checkpoint_sentences(run: RunSpec, cost: CheckpointCost) -> Iterator[str]:
    """Sentences that state the prediction."""
    if not cost.beside_training:
        yield f"{_gigabytes(cost.bytes)} each, written while training waits: {cost.reason}"
        return
    yield f"{_gigabytes(cost.bytes)} each, written during training from {_gigabytes(cost.host_bytes)} of host memory per host"
    if cost.copy_seconds is not None and cost.stall_seconds is not None:
        hidden = (
            f"stalls training {cost.stall_seconds:.2f} s"
            if cost.stall_seconds
            else "hidden by the next forward and backward"
        )
        first = (
            f", {_gigabytes(cost.device_copy_bytes)} of it from a copy in device memory"
            if cost.device_copy_bytes
            else ""
        )
        yield f"the copy of a rank's state to host memory takes {cost.copy_seconds:.2f} s{first}, {hidden}"
    if run.checkpoint.every == "auto" and cost.interval_seconds is not None and cost.cost_seconds is not None:
        yield (
            f"checkpoint.every auto: {cost.interval_seconds:,.0f} s between two saves, the Young-Daly interval √(2 · cost · MTBF) "
            f"within 1 and 30 minutes; a save costs training {cost.cost_seconds:.2f} s, and a host runs "
            f"{run.cluster.host_mtbf_hours:,.0f} hours between failures "
            "(cluster.host_mtbf_hours); a run then adjusts the interval to the cost that it measures"
        )
    if cost.storage_bytes_per_second is not None:
        yield f"saves write {cost.storage_bytes_per_second / 1e9:.2f} GB/s to storage on average"
    if cost.partner is not None and cost.partner_link_share:
        yield (
            f"copies in a partner host's memory: {cost.partner}; a copy takes {cost.partner_seconds:.2f} s "
            f"with at most {cost.partner_link_share:.0%} of a rank's port"
        )
    elif cost.partner is not None:
        yield f"copies in another host's memory: {cost.partner}"


def _reason_to_wait(run: RunSpec, plan: Plan, rank_bytes: float, reserved: float, in_memory: _InMemory) -> str:
    """Return why training waits for saves, which need `reserved` bytes of each host's memory beside it; empty if it goes on."""
    mode = run.checkpoint.mode
    if mode == "sync":
        return "checkpoint.mode is sync"
    if mode == "auto" and rank_bytes < ASYNC_BYTES and in_memory.choice is None:
        return f"a rank's state is less than {ASYNC_BYTES >> 20} MB"
    free_bytes = _host_memory_left(run, plan)
    if reserved > free_bytes:
        snapshots = "snapshots" if in_memory.choice is None else "snapshots and copies for checkpoint.partner"
        return f"{snapshots} need {_gigabytes(reserved)} of host memory on each host, and {_gigabytes(max(0.0, free_bytes))} are free"
    return ""


def _host_memory_left(run: RunSpec, plan: Plan) -> float:
    """Bytes of one host's memory that the plan's offloaded data leave to snapshots."""
    return host_budget(run) - sum(host_bytes(run.model, run.train, plan, run.cluster.nodes))


def _gigabytes(count: float) -> str:
    """Bytes as text; a few are told in MB.

    1.5 · 10⁹ and 13.4 · 10⁶ bytes:

    >>> _gigabytes(1.5e9), _gigabytes(13.4e6)
    ('1.5 GB', '13 MB')
    """
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.0f} MB"
