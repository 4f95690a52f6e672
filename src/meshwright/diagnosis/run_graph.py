"""Finds the dependencies of a step in runs of this program, from the recorded operations of one step (`run_spans`).

- Each rank runs its operations one after another.
- A receive also needs the send of the other rank.
- Waits for collectives end at the same time on all ranks of a stage.
- The gradient norm, and the small all-reduces at the start and the end of a step, end at the same time on all ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.diagnosis.operations import CODE_OF, MODEL_COMPUTE_TYPES, TYPES, OperationTable
from meshwright.diagnosis.step_graph import GraphBuilder, Node, StepGraph

ALL_RANKS = ("gradient-norm", "step-all-reduce")
"""Operations that end at the same time on all ranks."""
OPTIONAL = ("collective-wait", "garbage-collection")
"""Operations that precede a compute operation in some steps only.

Their `sequence` is the position of that compute operation in the step.
"""
RECEIVER_OFFSET = {"forward": 1, "backward": -1}
"""Direction of a message → number of the receiving model chunk minus number of the sending one."""


class GraphMessage(NamedTuple):
    """Identifies a message: its direction, the model chunk that receives it, and its micro-batch."""

    direction: str
    """"forward" (activations) or "backward" (gradients)."""
    receiving_chunk: int
    """Model chunk that receives the message."""
    microbatch: int


def run_graph(table: OperationTable) -> StepGraph:
    """Return the graph of the steps of `table`. The last step of data-parallel rank 0 is the template."""
    builder = GraphBuilder()
    sends: dict[GraphMessage, int] = {}
    receives: dict[GraphMessage, int] = {}
    common: dict[tuple[str, int], list[int]] = {}
    template = table.select((table.dp == 0) & (table.step == table.steps[-1]))
    for stage in range(table.stages):
        entries = template.select(np.flatnonzero(template.stage == stage))
        optional = _optional(table, stage)
        previous: list[int] = []
        computes = 0
        for index in np.argsort(entries.start_ns, kind="stable").tolist():
            name = TYPES[entries.type[index]]
            sequence = int(entries.sequence[index])
            if name in OPTIONAL:
                continue
            if name in MODEL_COMPUTE_TYPES:
                for code in optional.get(computes, ()):
                    previous = [_add_optional(builder, Node(stage, code, computes), previous)]
                computes += 1
            node = builder.add(Node(stage, CODE_OF[name], sequence))
            builder.depend(node, *previous)
            if name.endswith("-send"):
                sends[_message(entries, index, name)] = node
                continue  # the host does not wait for a send
            if name.endswith("-recv"):
                receives[_message(entries, index, name)] = node
            elif name in ALL_RANKS:
                common.setdefault((name, sequence), []).append(node)
            previous = [node]
    for message, receive in receives.items():
        if message in sends:
            builder.communicate(sends[message], receive)
    for members in common.values():
        builder.communicate(*members, across_dp=True, blocking=True)
    return builder.build()


def _optional(table: OperationTable, stage: int) -> dict[int, list[int]]:
    """Return the types of the optional operations before each compute operation: position of the compute operation →
    types.

    An operation counts if any step has it.
    """
    mask = table.is_type(*OPTIONAL) & (table.stage == stage)
    pairs = np.unique(np.stack((table.sequence[mask], table.type[mask])), axis=1)
    found: dict[int, list[int]] = {}
    for position, code in pairs.T.tolist():
        found.setdefault(position, []).append(code)
    return found


def _add_optional(builder: GraphBuilder, node: Node, previous: list[int]) -> int:
    """Add an optional operation after the nodes `previous`, and return its index."""
    index = builder.add(node, optional=True)
    builder.depend(index, *previous)
    if TYPES[node.type] == "collective-wait":
        builder.communicate(index, across_dp=True, blocking=True)
    return index


def _message(entries: OperationTable, index: int, name: str) -> GraphMessage:
    """Return what identifies the message of an operation. A send and its receive have equal results."""
    direction, _, end = name.partition("-")
    chunk = int(entries.virtual_stage[index]) + (RECEIVER_OFFSET[direction] if end == "send" else 0)
    return GraphMessage(direction, chunk, int(entries.microbatch[index]))
