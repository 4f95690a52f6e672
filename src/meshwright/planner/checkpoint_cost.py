"""Cost of a plan's checkpoints: host memory, stall of training, interval, and storage bandwidth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.costs.machine_rates import machine_of
from meshwright.costs.offload_costs import host_rate
from meshwright.costs.plan_costs import as_nodes, number, products
from meshwright.planner.candidate import host_budget, memory_budget, peak_bytes
from meshwright.policies.checkpoint_times import auto_interval
from meshwright.policies.snapshot_copies import SNAPSHOT_GROUPS, STATE_BYTES, StepTimes, plan_device_copies
from meshwright.simulator.step_simulation import host_bytes
from meshwright.spec.job import ASYNC_BYTES, CheckpointSpec
from meshwright.spec.model import parameter_count
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec

HOST_COPY_RATE = 10e9
"""Bytes a second that one rank copies from host memory to host memory: a guess."""
WRITE_RATE = 2e9
"""Bytes a second that the writer of one rank brings to storage: a guess."""
SLOWDOWN = 0.01
"""Slow-down of steps while a save is copied and written; a guess.

`benchmarks/checkpoint_stall.py` measures it.
"""


@dataclass(frozen=True)
class CheckpointCost:
    """The prediction for one run and plan. Seconds are None where the rates of the devices are not known."""

    bytes: int
    """One checkpoint."""
    beside_training: bool
    """Whether it is written while training goes on."""
    reason: str
    """Why training waits for it; empty where it does not."""
    host_bytes: int
    """Host memory of one host that snapshots take."""
    copy_seconds: float | None = None
    """Copy of a rank's state to host memory."""
    device_copy_bytes: int | None = None
    """Part of a rank's state that is first copied within device memory, so that the next update does not wait for it."""
    stall_seconds: float | None = None
    """How long the update of the next step waits for copies."""
    cost_seconds: float | None = None
    """What a save costs training: the stall, and slower steps while it is copied and written."""
    interval_seconds: float | None = None
    """Time from one checkpoint to the next."""
    storage_bytes_per_second: float | None = None
    """What all ranks write on average."""


def checkpoint_cost(run: RunSpec, plan: Plan, step_seconds: float | None = None) -> CheckpointCost | None:
    """The cost of the run's checkpoints, or None for a run that writes none but the last.

    A step takes `step_seconds`, or what the plan predicts where that is None.
    """
    spec, cluster = run.checkpoint, as_nodes(run.cluster)
    if not spec.every:
        return None
    whole = parameter_count(run.model) * STATE_BYTES
    rank_bytes = whole / plan.ranks
    step = step_seconds or (plan.predicted.step_seconds if plan.predicted is not None else None)
    interval = step * spec.every if step is not None and spec.every != "auto" else None
    reason = _reason_to_wait(run, plan, spec, rank_bytes)
    if reason:
        return CheckpointCost(whole, False, reason, 0, interval_seconds=interval)
    in_host = any(layer.offload != "none" for layer in plan.layers)
    copy = stall = cost = device_copies = None
    if step is not None and not cluster.is_cpu:
        machine = machine_of(cluster, products(plan.precision, cluster))
        copy = rank_bytes / (HOST_COPY_RATE if in_host else number(host_rate(machine)))
        times = StepTimes.of_step(step, rank_bytes, number(machine.hbm), rank_bytes / copy)
        room = 0 if in_host else max(0, (memory_budget(run) or 0) - peak_bytes(plan))
        device_copies = plan_device_copies([rank_bytes / SNAPSHOT_GROUPS] * SNAPSHOT_GROUPS, times, room)
        stall = device_copies.stall_seconds
        save = copy + rank_bytes / WRITE_RATE
        cost = stall + SLOWDOWN * save
        if spec.every == "auto":
            interval = auto_interval(cost, save, cluster.nodes, cluster.host_mtbf_hours)
    bandwidth = whole / interval if interval else None
    snapshots = int(rank_bytes * cluster.gpus_per_node)
    copied = None if device_copies is None else device_copies.bytes
    return CheckpointCost(whole, True, "", snapshots, copy, copied, stall, cost, interval, bandwidth)


def checkpoint_sentences(run: RunSpec, cost: CheckpointCost) -> Iterator[str]:
    """The prediction in words."""
    if not cost.beside_training:
        yield f"{_gigabytes(cost.bytes)} each, written while training waits: {cost.reason}"
        return
    yield f"{_gigabytes(cost.bytes)} each, written beside training from {_gigabytes(cost.host_bytes)} of host memory a host"
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
            f"checkpoint.every auto: {cost.interval_seconds:,.0f} s between two, the Young-Daly interval √(2 · cost · MTBF) within 1 and "
            f"30 minutes; one costs training {cost.cost_seconds:.2f} s, and a host runs {run.cluster.host_mtbf_hours:,.0f} hours between "
            "failures (cluster.host_mtbf_hours); a run goes on by the cost that it measures"
        )
    if cost.storage_bytes_per_second is not None:
        yield f"storage takes {cost.storage_bytes_per_second / 1e9:.2f} GB/s on average"


def _reason_to_wait(run: RunSpec, plan: Plan, spec: CheckpointSpec, rank_bytes: float) -> str:
    if spec.mode == "sync":
        return "checkpoint.mode is sync"
    if spec.mode == "auto" and rank_bytes < ASYNC_BYTES:
        return f"a rank's state is less than {ASYNC_BYTES >> 20} MB"
    snapshots = rank_bytes * as_nodes(run.cluster).gpus_per_node
    offloaded = sum(host_bytes(run.model, run.train, plan, run.cluster.nodes))
    left = host_budget(run) - offloaded
    if snapshots > left:
        return f"snapshots need {_gigabytes(snapshots)} of host memory on each host, and {_gigabytes(max(0.0, left))} are left"
    return ""


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.1f} GB"
