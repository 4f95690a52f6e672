"""Expert placement that follows the loads: decides when experts change places, and keeps their original numbers.

In each layer a rank owns the experts at consecutive positions. Every `placement_every` steps experts may move to other positions, in the
same way on all ranks. Loads that a run reports, records and replays are always given by the experts' original numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from meshwright.policies.expert_owners import better_owners, even_owners, position_order


class ExpertOwners:
    """Which expert is at which position, in all layers with experts; `first` is the first such layer.

    `shape` has the numbers of layers, ranks and experts. The `copied` most loaded experts of a layer are present on all ranks anyway, so
    their owner does not matter. `move` exchanges the state of layers, given the new order of their positions (`ExpertMoves.move`).
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        *,
        every: int,
        copied: int,
        ranks_per_node: int,
        first: int,
        move: Callable[[Mapping[int, np.ndarray]], None],
        device: torch.device,
    ) -> None:
        self._shape = shape
        self._every = every
        self._copied = copied
        self._ranks_per_node = ranks_per_node
        self._first = first
        self._move = move
        layers, _, experts = shape
        self.numbers = np.tile(np.arange(experts), (layers, 1))
        """Original number of the expert at each position, `(layers, experts)`."""
        self.positions = torch.empty(layers, experts, dtype=torch.int64, device=device)
        """Position of the expert with each original number, `(layers, experts)`."""
        self._upload()

    def due(self, step: int) -> bool:
        """Whether owners may change just before `step`."""
        return step > 1 and (step - 1) % self._every == 0

    def balance(self, loads: np.ndarray) -> np.ndarray | None:
        """Move experts so that the owners' loads are balanced. `loads` `(layers, experts)` are given by position.

        Returns, for each layer, the old position of the expert at each new position; None if no layer gains. Collective over a stage; the
        result is equal on all ranks.
        """
        layers, ranks, experts = self._shape
        even = even_owners(layers, experts, ranks)
        order = position_order(better_owners(loads, even, self._copied, ranks, self._ranks_per_node), ranks)
        changed = np.flatnonzero((order != np.arange(experts)).any(1)).tolist()
        if not changed:
            return None
        self._move({self._first + layer: order[layer] for layer in changed})
        self.numbers = np.take_along_axis(self.numbers, order, axis=1)
        self._upload()
        return order

    def by_number(self, loads: Tensor) -> Tensor:
        """Reorder `loads` `(layers, experts)` from the experts' positions to their original numbers."""
        return loads.gather(1, self.positions)

    def restore(self, numbers: np.ndarray) -> None:
        """Set the original number of the expert at each position, from a loaded checkpoint."""
        self.numbers = numbers
        self._upload()

    def _upload(self) -> None:
        self.positions.copy_(torch.from_numpy(np.argsort(self.numbers, axis=1)))
