"""Replays the operations of recorded steps with other durations.

Arrays have the shape (node, dp, step). A node is an operation of the `StepGraph`, dp a data-parallel rank. All steps and data-parallel
ranks share one graph and are replayed at the same time. Times are in seconds; each replayed step starts at 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.diagnosis.operations import OperationTable
from meshwright.diagnosis.step_graph import StepGraph
from meshwright.spec.errors import BadInput

CLOCK_ERROR_SECONDS = 0.01
"""Small negative time differences between ranks are clock errors.

Below minus this value, operations were matched wrongly, and 0 is used.
"""


@dataclass(frozen=True, eq=False)
class OperationTimes:
    """Times of the operations in complete steps. Shapes are (node, dp, step) unless stated otherwise."""

    graph: StepGraph
    steps: np.ndarray
    """Step numbers, (step)."""
    skipped_steps: int
    """Number of steps in the table that were left out because operations are missing."""
    present: np.ndarray
    """Whether the operation was recorded."""
    start: np.ndarray
    duration: np.ndarray
    work: np.ndarray
    """The operation's own part of the duration. For communication, it is the transfer after the last peer has started."""
    launch_delay: np.ndarray
    """Time from the end of the operation's last dependency to its start."""
    step_seconds: np.ndarray
    """Time from the first start to the last end over all ranks, (step)."""
    rank: np.ndarray
    """Global rank, (stage, dp)."""
    virtual_stage: np.ndarray
    """Model chunk in the whole pipeline, (node); −1 if the node has none."""
    microbatch: np.ndarray
    """Micro-batch, (node); −1 if the node has none."""
    attention_work: np.ndarray
    """Attention work of the operation's micro-batch; −1 if it has none or if it was not recorded."""

    @property
    def stage_count(self) -> int:
        return len(self.rank)


def measure_steps(table: OperationTable, graph: StepGraph) -> OperationTimes:
    """Arrange the operations of `table` by the nodes of `graph`. Raises BadInput if no step is complete."""
    steps = table.steps
    width = int(table.sequence.max()) + 1 if len(table) else 1
    keys = np.array([(node.stage * 64 + node.type) * width + node.sequence for node in graph.nodes], dtype=np.int64)
    order = np.argsort(keys)
    # One integer for each (stage, type, sequence): 64 exceeds the number of types, and `width` exceeds every sequence number.
    entry_keys = (table.stage.astype(np.int64) * 64 + table.type) * width + table.sequence
    node = order[np.minimum(np.searchsorted(keys[order], entry_keys), len(keys) - 1)]
    known = keys[node] == entry_keys
    node = node[known]
    dp = table.dp[known]
    step = np.searchsorted(steps, table.step)[known]
    first = np.full(len(steps), np.iinfo(np.int64).max)
    np.minimum.at(first, step, table.start_ns[known])
    shape = (len(graph.nodes), table.dp_size, len(steps))
    start = np.zeros(shape)
    duration = np.zeros(shape)
    present = np.zeros(shape, dtype=bool)
    start[node, dp, step] = (table.start_ns[known] - first[step]) * 1e-9
    duration[node, dp, step] = table.duration_ns[known] * 1e-9
    present[node, dp, step] = True
    attention_work = np.full(shape, -1)
    attention_work[node, dp, step] = table.attention_work[known]
    complete = present[~graph.optional].all(axis=(0, 1))
    if not complete.any():
        raise BadInput(_incomplete(graph, present, steps))
    start = start[..., complete]
    duration = duration[..., complete]
    present = present[..., complete]
    rank = np.full((table.stages, table.dp_size), -1)
    rank[table.stage, table.dp] = table.rank
    virtual_stage = np.full(len(graph.nodes), -1)
    microbatch = np.full(len(graph.nodes), -1)
    virtual_stage[node] = table.virtual_stage[known]
    microbatch[node] = table.microbatch[known]
    return OperationTimes(
        graph=graph,
        steps=steps[complete],
        skipped_steps=int((~complete).sum()),
        present=present,
        start=start,
        duration=duration,
        work=_work(graph, start, duration),
        launch_delay=_launch_delay(graph, start, duration, present),
        step_seconds=(start + duration).max(axis=(0, 1)),
        rank=rank,
        virtual_stage=virtual_stage,
        microbatch=microbatch,
        attention_work=attention_work[..., complete],
    )


def _incomplete(graph: StepGraph, present: np.ndarray, steps: np.ndarray) -> str:
    """An error message that names the first missing operation."""
    missing = ~present & ~graph.optional[:, None, None]
    node, dp, step = (int(index[0]) for index in np.nonzero(missing))
    return f"no step has the operations of every rank; step {steps[step]} lacks {graph.nodes[node]}, data-parallel rank {dp}"


def _work(graph: StepGraph, start: np.ndarray, duration: np.ndarray) -> np.ndarray:
    """The own part of each duration; see `OperationTimes.work`."""
    work = duration.copy()
    for group in graph.groups:
        members = list(group.members)
        if group.blocking:
            shortest = duration[members].min(axis=0)
            work[members] = shortest.min(axis=0, keepdims=True) if group.across_dp else shortest
        elif graph.communicates[members[0]]:
            last_start = start[members].max(axis=0)
            if group.across_dp:
                last_start = last_start.max(axis=0, keepdims=True)
            transfer = start[members] + duration[members] - last_start
            work[members] = np.where(transfer <= -CLOCK_ERROR_SECONDS, 0.0, transfer)
    return work


def _launch_delay(graph: StepGraph, start: np.ndarray, duration: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Time from the end of the last dependency to the start. A missing operation is taken to end together with its dependencies."""
    end = np.where(present, start + duration, 0.0)
    delay = np.zeros_like(start)
    for member in (member for number in graph.order for member in graph.groups[number].members):
        before = graph.before[member]
        ready = end[list(before)].max(axis=0) if before else np.zeros_like(start[member])
        delay[member] = start[member] - ready
        end[member] = np.where(present[member], end[member], ready)
    return np.where((delay <= -CLOCK_ERROR_SECONDS) | ~present, 0.0, delay)


def replay(graph: StepGraph, work: np.ndarray, launch_delay: np.ndarray | None = None) -> np.ndarray:
    """The time of each step, (step) seconds, if operations take `work` (node, dp, step) and start `launch_delay` after dependencies."""
    end: list[np.ndarray] = [np.zeros(0)] * len(graph.nodes)
    last = np.zeros(work.shape[1:])
    for number in graph.order:
        group = graph.groups[number]
        starts = [_start(graph, member, end, work, launch_delay) for member in group.members]
        start = starts[0] if len(starts) == 1 else np.maximum.reduce(starts)
        if group.across_dp:
            start = start.max(axis=0, keepdims=True)
        for member in group.members:
            end[member] = start + work[member]
            np.maximum(last, end[member], out=last)
    return last.max(axis=0)


def _start(
    graph: StepGraph, member: int, end: list[np.ndarray], work: np.ndarray, launch_delay: np.ndarray | None
) -> np.ndarray:
    """Start of a node in each dp and step, before it waits for other members of its group."""
    before = graph.before[member]
    if not before:
        start = np.zeros(work.shape[1:])
    elif len(before) == 1:
        start = end[before[0]]
    else:
        start = np.maximum.reduce([end[index] for index in before])
    return start if launch_delay is None else start + launch_delay[member]
