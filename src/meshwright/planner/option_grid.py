"""All combinations of layer settings as array axes: a cost of one setting is computed once for each of its values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod

import numpy as np

from meshwright.spec.plan import Gradients, LayerStrategy, Offload, Recompute
from meshwright.workload.arrays import Array
from meshwright.workload.layouts import Layouts, strategy_columns


@dataclass(frozen=True)
class OptionGrid:
    """Combinations of layer settings.

    An array of costs has an axis for each setting and one for points. Axes on which a cost does not depend have length 1.
    """

    gradients: tuple[Gradients, ...]
    offloads: tuple[Offload, ...]
    recomputes: tuple[Recompute, ...]
    reshards: tuple[bool, ...]

    @cached_property
    def options(self) -> tuple[LayerStrategy, ...]:
        """The combinations, in the order of the axes."""
        return tuple(
            LayerStrategy(reshard=reshard, gradients=gradients, recompute=recompute, offload=offload)
            for gradients, offload, recompute, reshard in product(
                self.gradients, self.offloads, self.recomputes, self.reshards
            )
        )

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes of settings; offload has two, of the optimizer and of activations."""
        optimizer = len({option.optimizer_offloaded for option in self.options})
        return len(self.gradients), optimizer, len(self.offloads) // optimizer, len(self.recomputes), len(self.reshards)

    @cached_property
    def offloads_optimizer(self) -> np.ndarray:
        """By combination, 1 where the optimizer's state is offloaded, else 0."""
        return np.array([float(option.optimizer_offloaded) for option in self.options])

    @cached_property
    def _columns(self) -> dict[str, np.ndarray]:
        by_option = [strategy_columns(option) for option in self.options]
        return {
            name: _without_constant_axes(np.array([columns[name] for columns in by_option]).reshape(*self.shape, 1))
            for name in by_option[0]
        }

    def layouts(self, layout: Layouts) -> Layouts:
        """`layout` under every combination: fields that a setting decides get that setting's axis."""
        return replace(layout, **self._columns)

    def spread(self, by_option: np.ndarray) -> np.ndarray:
        """An array (combinations, points) with an axis for each setting."""
        return by_option.reshape(*self.shape, by_option.shape[-1])

    def flat(self, costs: Array, points: int) -> np.ndarray:
        """Costs with an axis for each setting as an array (combinations, points)."""
        return np.broadcast_to(costs, (*self.shape, points)).reshape(prod(self.shape), points)


def _without_constant_axes(column: np.ndarray) -> np.ndarray:
    """`column` with one value along each axis on which it does not depend.

    A column that does not depend on the second option has one value along it:

    >>> _without_constant_axes(np.array([[1, 1, 1], [2, 2, 2]])).shape
    (2, 1)
    """
    for axis in range(column.ndim):
        first = column.take([0], axis)
        column = first if (column == first).all() else column
    return column
