"""Rules of the hybrid axis: `plan.hybrid`, `plan.capacity`, and a plan file whose mesh has the axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.config.run_values import RunValues
from meshwright.spec.errors import Mistake
from meshwright.spec.hybrid import (
    REFUSED_BESIDE,
    SCHEDULES,
    capacity_error,
    exchanged_heads,
    hybrid_error,
    schedules_of,
)
from meshwright.spec.plan import REFUSED_SCHEDULES

_LAYERED = "breadth_first"


def hybrid(run: RunValues) -> Iterator[Mistake]:
    """Pinned hybrid ranks: all ranks but those of pipelines and tensor parallelism, for samples of any length."""
    ranks, capacity, tensor = run("plan.hybrid"), run("plan.capacity"), run("plan.tensor") or 1
    if not ranks:
        if run("plan.samples"):
            yield from _slots(run, 1)
        elif capacity:
            yield run.mistake("plan.capacity", "no such key without plan.hybrid, whose slots it sizes", "none")
        if run("plan.hybrid_attention"):
            yield run.mistake("plan.hybrid_attention", "no such key without plan.hybrid", "none")
        return
    if run("data.packing") not in (None, "none"):
        yield run.mistake("plan.hybrid", "data.packing = none beside it: hybrid ranks divide samples of any length")
        return
    if error := _conflict(run, {axis: run(f"plan.{axis}") or 1 for axis in REFUSED_BESIDE}):
        yield run.mistake("plan.hybrid", error)
        return
    nodes, per_node = run("cluster.nodes"), run("cluster.gpus_per_node")
    beside, cluster = tensor * _pipeline(run), (nodes or 0) * (per_node or 0)
    if cluster and ranks * beside != cluster:
        factors = (("plan.pipeline", _pipeline(run)), ("plan.tensor", tensor))
        divided = "".join(f" ÷ {key} {size}" for key, size in factors if size > 1)
        nearest = None if cluster % beside else str(cluster // beside)
        yield run.mistake("plan.hybrid", f"all of the cluster's {cluster} ranks{divided}", nearest)
    yield from _slots(run, ranks)
    heads = exchanged_heads(run("model.kv_heads") or 1, tensor)
    if run("plan.hybrid_attention") == "ulysses" and not any(heads % k == 0 for k in range(2, ranks + 1)):
        expected = f"ring: no number of ranks from 2 to {ranks} divides a rank's {heads} key/value heads"
        yield run.mistake("plan.hybrid_attention", expected, "ring")
    if ranks % (experts := run("plan.expert") or 1):
        yield run.mistake("plan.expert", f"a divisor of plan.hybrid = {ranks}", str(math.gcd(ranks, experts)))
    yield from _kept(run)


def _slots(run: RunValues, ranks: int) -> Iterator[Mistake]:
    """Slots of `ranks` ranks together hold the longest sample."""
    capacity, longest, longer = run("plan.capacity"), run("train.seq_len"), run("plan.offload_capacity") or 0
    if capacity and longest and (wrong := capacity_error(capacity, ranks, run("plan.tensor") or 1, longest, longer)):
        yield run.mistake("plan.capacity", wrong[0], str(wrong[1]))


def _conflict(run: RunValues, sizes: Mapping[str, int]) -> str | None:
    """What of the run's model, or of other axes of these sizes, hybrid ranks cannot have."""
    return hybrid_error(
        sizes,
        windowed=_windowed(run),
        by_length=run("model.longrope") is not None,
        altered_scores=bool(run("model.sinks")) or run("model.score_cap") is not None,
    )


def _windowed(run: RunValues) -> bool:
    """Whether some layers attend to a window; a kind of layer has the model's where it does not set its own, and 0 is none."""
    window, kinds = run("model.sliding_window"), run("model.blocks") or {}
    windows = [kind.get("sliding_window", window) for kind in kinds.values()] or [window]
    return any(isinstance(size, int) and size > 0 for size in windows)


def _pipeline(run: RunValues) -> int:
    """Pipeline ranks by the pins."""
    return max(run("plan.pipeline") or 1, len(run("plan.stages") or ()))


def _kept(run: RunValues) -> Iterator[Mistake]:
    """Yield the mistakes of settings by which one micro-batch has a collective of its own.

    Units must stay gathered and gradients whole, or the order must be layered.
    """
    schedule, allowed = run("plan.schedule"), schedules_of(_pipeline(run))
    if schedule not in (None, *allowed, *REFUSED_SCHEDULES):
        yield run.mistake("plan.schedule", f"{_either(allowed)}, as plan.hybrid is {run('plan.hybrid')}", SCHEDULES[0])
    if schedule == _LAYERED:
        return
    reason = f"as ranks of plan.hybrid run different numbers of micro-batches (or plan.schedule = {_LAYERED})"
    if run("plan.reshard"):
        yield run.mistake("plan.reshard", f"false, {reason}", "false")
    if run("plan.gradients") == "shard":
        yield run.mistake("plan.gradients", f"whole, {reason}", "whole")
    if any(_collects(layer) for layer in run("plan.layers") or ()):
        yield run.mistake("plan.layers", f"reshard false and gradients whole in every range, {reason}", None, "another")


def _either(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _collects(layer: Any) -> bool:
    """Whether a range of layers gathers or reduces in each micro-batch."""
    return layer.get("reshard", True) or layer.get("gradients", "shard") == "shard"
