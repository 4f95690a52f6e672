"""The dependencies of a step in our own runs, from the recorded operations of one step (`run_spans`).

Every rank runs its operations one after another. A receive also needs the send at the other end. Waits for collectives end
on all ranks of a stage together; the gradient norm and the small sums at the ends of a step end on all ranks together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.diagnosis.operations import CODE_OF, MODEL_COMPUTE_TYPES, TYPES, OperationTable
from meshwright.diagnosis.step_graph import GraphBuilder, Node, StepGraph

ALL_RANKS = ("gradient-norm", "step-all-reduce")
"""Operations that end on all ranks together."""
OPTIONAL = ("collective-wait", "garbage-collection")
"""Operations before a compute operation in some steps; `sequence` is its position among the compute operations."""
RECEIVER_OFFSET = {"forward": 1, "backward": -1}
"""By direction, the distance from the sending to the receiving model chunk."""


class GraphMessage(NamedTuple):
    direction: str
    receiving_chunk: int
    microbatch: int


def run_graph(table: OperationTable) -> StepGraph:
    """The graph of the steps of `table`, from the last step of data-parallel rank 0."""
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
                continue  # the host continues at once
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
    """By position of a compute operation, the types of the optional operations that precede it in any step."""
    mask = table.is_type(*OPTIONAL) & (table.stage == stage)
    pairs = np.unique(np.stack((table.sequence[mask], table.type[mask])), axis=1)
    found: dict[int, list[int]] = {}
    for position, code in pairs.T.tolist():
        found.setdefault(position, []).append(code)
    return found


def _add_optional(builder: GraphBuilder, node: Node, previous: list[int]) -> int:
    index = builder.add(node, optional=True)
    builder.depend(index, *previous)
    if TYPES[node.type] == "collective-wait":
        builder.communicate(index, across_dp=True, blocking=True)
    return index


def _message(entries: OperationTable, index: int, name: str) -> GraphMessage:
    direction, _, end = name.partition("-")
    chunk = int(entries.virtual_stage[index]) + (RECEIVER_OFFSET[direction] if end == "send" else 0)
    return GraphMessage(direction, chunk, int(entries.microbatch[index]))
