"""`StepGraph`: the operations of one step and their dependencies. All data-parallel ranks and steps share one graph."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from meshwright.diagnosis.operations import TYPES
from meshwright.spec.errors import BadInput


class Node(NamedTuple):
    """An operation that every step and every data-parallel rank has: number `sequence` of its type on its stage."""

    stage: int
    type: int
    """Index into `TYPES`."""
    sequence: int

    def __str__(self) -> str:
        return f"{TYPES[self.type]} {self.sequence} of stage {self.stage}"


class TransferGroup(NamedTuple):
    """The nodes of one communication. Its transfer starts only when every member has started."""

    members: tuple[int, ...]
    across_dp: bool
    """Whether the nodes of all data-parallel ranks take part together."""
    blocking: bool = False
    """Whether recorded durations are waits that all end together. Then the shortest is the transfer, even if clocks are inexact."""


@dataclass(frozen=True, eq=False)
class StepGraph:
    """The operations and dependencies. A node is identified by its index in `nodes`."""

    nodes: tuple[Node, ...]
    before: tuple[tuple[int, ...], ...]
    """For each node, the nodes of the same data-parallel rank that must end before it starts."""
    groups: tuple[TransferGroup, ...]
    """Communications. A node that does not communicate is a group of its own."""
    communicates: np.ndarray
    """For each node, whether it is a transfer, which starts when all nodes of its group have started."""
    optional: np.ndarray
    """For each node, whether it may be missing in a step or on a rank. Its duration is then 0."""
    order: tuple[int, ...]
    """Indices of `groups` in an order in which every group comes after the nodes that it depends on."""

    @property
    def types(self) -> np.ndarray:
        """For each node, the index of its type in `TYPES`."""
        return np.array([node.type for node in self.nodes])

    @property
    def stages(self) -> np.ndarray:
        """For each node, its pipeline stage."""
        return np.array([node.stage for node in self.nodes])


class GraphBuilder:
    """Collects nodes, dependencies and communication groups."""

    def __init__(self) -> None:
        self.index_of: dict[Node, int] = {}
        self._before: dict[int, list[int]] = defaultdict(list)
        self._groups: list[TransferGroup] = []
        self._optional: set[int] = set()

    def add(self, node: Node, *, optional: bool = False) -> int:
        """Add `node` if it is new. Returns its index."""
        index = self.index_of.setdefault(node, len(self.index_of))
        if optional:
            self._optional.add(index)
        return index

    def depend(self, node: int, *before: int) -> None:
        """Let `node` start only after each of `before` has ended."""
        self._before[node] += before

    def chain(self, nodes: Sequence[int]) -> None:
        """Let each of `nodes` start only after the one before it has ended."""
        for first, second in pairwise(nodes):
            self.depend(second, first)

    def communicate(self, *members: int, across_dp: bool = False, blocking: bool = False) -> None:
        """Make `members` one communication."""
        self._groups.append(TransferGroup(members, across_dp, blocking))

    def build(self) -> StepGraph:
        """Build the graph. Raises BadInput if dependencies form a cycle."""
        count = len(self.index_of)
        communicates = np.zeros(count, dtype=bool)
        for group in self._groups:
            communicates[list(group.members)] = True
        alone = (TransferGroup((index,), False) for index in range(count) if not communicates[index])
        groups = (*self._groups, *alone)
        optional = np.zeros(count, dtype=bool)
        optional[list(self._optional)] = True
        nodes = tuple(self.index_of)
        before = tuple(tuple(dict.fromkeys(self._before[index])) for index in range(count))
        return StepGraph(nodes, before, groups, communicates, optional, _sorted(nodes, before, groups))


def _sorted(nodes: Sequence[Node], before: Sequence[Iterable[int]], groups: Sequence[TransferGroup]) -> tuple[int, ...]:
    """Indices of the groups in topological order. Raises BadInput if dependencies form a cycle."""
    group_of = {member: number for number, group in enumerate(groups) for member in group.members}
    missing = [0] * len(groups)
    after: list[list[int]] = [[] for _ in groups]
    for number, group in enumerate(groups):
        needed = {group_of[index] for member in group.members for index in before[member]}
        missing[number] = len(needed)
        for other in needed:
            after[other].append(number)
    ready = deque(number for number, count in enumerate(missing) if not count)
    order: list[int] = []
    while ready:
        order.append(ready.popleft())
        for number in after[order[-1]]:
            missing[number] -= 1
            if not missing[number]:
                ready.append(number)
    if len(order) < len(groups):
        blocked = next(group for number, group in enumerate(groups) if missing[number])
        raise BadInput(f"the recorded operations have cyclic dependencies, for example at {nodes[blocked.members[0]]}")
    return tuple(order)
