"""Finds the dependencies of a step in the public traces: Megatron's pipeline of forwards and backwards with recorded
messages.

The rules come from "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI'25) and its
artifact:

- Operations of one stream run in the order of their starts.
- Receive, compute and send of a micro-batch follow each other.
- The k-th send of a channel belongs to the k-th receive.
- The parameters of a model chunk are gathered before its first forward.
- Its gradients are reduced after its last backward if reductions overlap with compute, otherwise after all backwards.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.diagnosis.operations import CODE_OF, P2P_TYPES, TYPES, OperationTable
from meshwright.diagnosis.step_graph import GraphBuilder, Node, StepGraph
from meshwright.spec.errors import BadInput

CLOCK_RESOLUTION_NS = 50_000
"""Tolerance in nanoseconds, when times of a message and of a compute operation are compared."""
PEER_OF = {
    "forward-send": ("forward-recv", 1),
    "forward-recv": ("forward-send", -1),
    "backward-send": ("backward-recv", -1),
    "backward-recv": ("backward-send", 1),
}
"""Type of a message → (type of the operation on the other rank, number of that rank's stage minus number of this
stage).
"""


class TraceOperation(NamedTuple):
    """An operation of a stage in the step that is the template. Times are in nanoseconds."""

    start: int
    """Start of the operation."""
    sequence: int
    """Number among the operations of the same type."""
    type: str
    """Type of the operation, a name in `operations.TYPES`."""
    node: int
    """Index of its node in the graph."""
    end: int
    """End of the operation."""
    chunk: int
    """Model chunk on the pipeline rank."""
    virtual_stage: int
    """Model chunk in the whole pipeline."""


Stage = dict[str, list[TraceOperation]]
"""Operations of a stage by type, in the order of their starts."""


def trace_graph(table: OperationTable) -> StepGraph:
    """Return the graph of a public trace. The first step of data-parallel rank 0 is the template.

    Raises BadInput if messages and compute operations do not match.
    """
    builder = GraphBuilder()
    first = table.select((table.dp == 0) & (table.step == table.steps[0]))
    stages = [_operations(builder, first, stage) for stage in range(table.stages)]
    _add_messages(builder, stages)
    overlapped = bool(table.is_type("separate-grads-all-reduce").any())
    for stage in stages:
        _add_streams(builder, stage)
        _add_parameter_gathers(builder, stage)
        _add_closing(builder, stage, overlapped)
    _add_collectives(builder, stages)
    return builder.build()


def _operations(builder: GraphBuilder, first: OperationTable, number: int) -> Stage:
    """Return the operations of stage `number` by type. Raises BadInput if it has no forward or no backward."""
    stage: Stage = {name: [] for name in TYPES}
    for index in np.flatnonzero(first.stage == number).tolist():
        name = TYPES[first.type[index]]
        start = int(first.start_ns[index])
        sequence = int(first.sequence[index])
        node = builder.add(Node(number, CODE_OF[name], sequence))
        end = start + int(first.duration_ns[index])
        stage[name].append(
            TraceOperation(start, sequence, name, node, end, int(first.chunk[index]), int(first.virtual_stage[index]))
        )
    for name, operations in stage.items():
        operations.sort()
        if name in ("forward-compute", "backward-compute") and not operations:
            raise BadInput(f"the trace has no {name} of stage {number} in step {first.steps[0]}")
    return stage


def _compute(stage: Stage) -> list[TraceOperation]:
    """Return forwards and backwards in the order of their starts."""
    return sorted(stage["forward-compute"] + stage["backward-compute"])


def _add_streams(builder: GraphBuilder, stage: Stage) -> None:
    """Add the dependencies inside each stream.

    The streams are compute, each type of message, and gathers with reductions.
    """
    compute = _compute(stage)
    builder.chain([operation.node for operation in compute])
    for name in P2P_TYPES:
        builder.chain([operation.node for operation in stage[name]])
    builder.chain([operation.node for operation in sorted(stage["params-all-gather"] + stage["grads-reduce-scatter"])])
    first_backward = next(index for index, operation in enumerate(compute) if operation.type == "backward-compute")
    if first_backward >= 2:  # the first backward message is posted with the last forward of the warm-up
        for name in ("backward-recv", "backward-send"):
            for operation in stage[name][:1]:
                builder.depend(operation.node, compute[first_backward - 2].node)


def _add_messages(builder: GraphBuilder, stages: list[Stage]) -> None:
    """Add the dependencies of messages on compute operations and on the other rank."""
    chunks = 1 + max(operation.virtual_stage for stage in stages for operation in stage["forward-compute"])
    channels: dict[tuple[int, str], list[int]] = {}
    for number, stage in enumerate(stages):
        for name in P2P_TYPES:
            matched = _match_compute(stage, name, number, len(stages))
            real: list[int] = []
            for operation, index in matched:
                compute = stage[name.replace("send", "compute").replace("recv", "compute")]
                _add_compute_dependency(builder, operation, compute, index)
                if index is not None and 0 <= compute[index].virtual_stage + PEER_OF[name][1] < chunks:
                    real.append(operation.node)
                else:  # recorded, although nothing was sent
                    builder.communicate(operation.node)
            channels[number, name] = real
    for (number, name), sends in channels.items():
        if name.endswith("send"):
            peer_type, distance = PEER_OF[name]
            peer = (number + distance) % len(stages)
            receives = channels[peer, peer_type]
            if len(sends) != len(receives):
                raise BadInput(
                    f"stage {number} has {len(sends)} {name}, stage {peer} has {len(receives)} {peer_type}; expected equal numbers"
                )
            for send, receive in zip(sends, receives, strict=True):
                builder.communicate(send, receive)


def _match_compute(stage: Stage, name: str, number: int, stages: int) -> list[tuple[TraceOperation, int | None]]:
    """Return each message of this type with the index of its compute operation.

    The result is None for a message that was never launched.

    Receives that start after the start of the last compute operation were never launched, nor were sends that end
    before the end of the first one. The first receive of a stage may be missing.
    """
    compute = stage[name.replace("send", "compute").replace("recv", "compute")]
    if name.endswith("recv"):
        last_start = max(operation.start for operation in compute) + CLOCK_RESOLUTION_NS
        launched = [operation.start <= last_start for operation in stage[name]]
    else:
        first_end = min(operation.end for operation in compute) - CLOCK_RESOLUTION_NS
        launched = [operation.end >= first_end for operation in stage[name]]
    count = sum(launched)
    allowed = {len(compute)} | ({0, len(compute) - 1} if number in (0, stages - 1) else set())
    if count not in allowed:
        raise BadInput(f"stage {number} has {count} {name} for {len(compute)} compute operations; expected one each")
    following = iter(range(name.endswith("recv") and 0 < count < len(compute), len(compute)))
    return [
        (operation, next(following) if known else None) for operation, known in zip(stage[name], launched, strict=True)
    ]


def _add_compute_dependency(
    builder: GraphBuilder, message: TraceOperation, compute: list[TraceOperation], index: int | None
) -> None:
    """Add the dependency of a message on compute operations.

    A send follows its compute operation. A receive follows the previous compute operation and precedes its own.
    """
    if index is None:
        return
    if message.type.endswith("send"):
        builder.depend(message.node, compute[index].node)
        return
    builder.depend(compute[index].node, message.node)
    if index:
        builder.depend(message.node, compute[index - 1].node)


def _add_parameter_gathers(builder: GraphBuilder, stage: Stage) -> None:
    """Make the first forward of each model chunk follow the last gather of its parameters."""
    last_gather = {operation.chunk: operation for operation in stage["params-all-gather"]}
    for chunk, gather in last_gather.items():
        forwards = [operation for operation in stage["forward-compute"] if operation.chunk == chunk]
        if forwards:
            builder.depend(forwards[0].node, gather.node)


def _add_closing(builder: GraphBuilder, stage: Stage, overlapped: bool) -> None:
    """Add the operations after the last backward, one after another.

    `overlapped`: reductions run while the backward computes.
    """
    compute = _compute(stage)
    last_compute = max(compute, key=lambda operation: operation.end)
    reductions = stage["grads-reduce-scatter"]
    names = ["gc", "layernorm-grads-all-reduce", "embedding-grads-all-reduce"]
    names += ["separate-grads-all-reduce" if overlapped else "grads-reduce-scatter"]
    names += ["optimizer-clip-main-grad", "optimizer"]
    closing = [operation.node for name in names for operation in stage[name]]
    builder.chain([last_compute.node, *closing])
    if overlapped and reductions:
        after_gc = closing[len(stage["gc"]) :]
        builder.depend(after_gc[0], reductions[-1].node)
        first_reduction = {operation.chunk: operation for operation in reversed(reductions)}
        for chunk, reduction in first_reduction.items():
            backwards = [operation for operation in stage["backward-compute"] if operation.chunk == chunk]
            if backwards:
                builder.depend(reduction.node, max(backwards, key=lambda operation: operation.end).node)


def _add_collectives(builder: GraphBuilder, stages: list[Stage]) -> None:
    """Add the collectives: of each stage over the data-parallel ranks, of the tied embedding, and of the gradient norm."""
    for stage in stages:
        for name in ("params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"):
            for operation in stage[name]:
                builder.communicate(operation.node, across_dp=True)
    for name, across_dp in (("embedding-grads-all-reduce", False), ("optimizer-clip-main-grad", True)):
        members = [operation.node for stage in stages for operation in stage[name]]
        if members:
            builder.communicate(*members, across_dp=across_dp)
