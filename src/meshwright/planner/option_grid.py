"""All combinations of layer settings as axes of arrays, so that a cost that depends on one setting is computed once per
value.
"""

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

    An array of costs has five axes of settings (`shape`), and a last axis of points of the search. If a cost does not
    depend on a setting, its axis has length 1, and NumPy broadcasts it.
    """

    gradients: tuple[Gradients, ...]
    """Values of `gradients`."""
    offloads: tuple[Offload, ...]
    """Values of `offload`."""
    recomputes: tuple[Recompute, ...]
    """Values of `recompute`."""
    reshards: tuple[bool, ...]
    """Values of `reshard`."""

    @cached_property
    def options(self) -> tuple[LayerStrategy, ...]:
        """Return all combinations, in the order of the axes."""
        return tuple(
            LayerStrategy(reshard=reshard, gradients=gradients, recompute=recompute, offload=offload)
            for gradients, offload, recompute, reshard in product(
                self.gradients, self.offloads, self.recomputes, self.reshards
            )
        )

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Return the lengths of the axes of settings: (gradients, optimizer offload, activation offload, recompute,
        reshard).
        """
        # A value of `offload` says whether the optimizer's state is offloaded, and whether activations are. Each has an axis.
        optimizer_values = len({option.optimizer_offloaded for option in self.options})
        activation_values = len(self.offloads) // optimizer_values
        return len(self.gradients), optimizer_values, activation_values, len(self.recomputes), len(self.reshards)

    @cached_property
    def offloads_optimizer(self) -> np.ndarray:
        """Return an array of shape (combinations,): 1 if the combination offloads the optimizer's state, else 0."""
        return np.array([float(option.optimizer_offloaded) for option in self.options])

    @cached_property
    def _columns(self) -> dict[str, np.ndarray]:
        """Return the columns of `Layouts` that settings decide.

        Each has the axes of the settings, and a last axis of length 1.
        """
        by_option = [strategy_columns(option) for option in self.options]
        return {
            name: _without_constant_axes(np.array([columns[name] for columns in by_option]).reshape(*self.shape, 1))
            for name in by_option[0]
        }

    def layouts(self, layout: Layouts) -> Layouts:
        """Return `layout` under every combination of settings.

        A field of shape (points,) that a setting decides is replaced by an array with the axis of that setting.
        """
        return replace(layout, **self._columns)

    def spread(self, by_option: np.ndarray) -> np.ndarray:
        """Return an array of shape (combinations, points) with the axes of the settings: shape (*self.shape, points)."""
        return by_option.reshape(*self.shape, by_option.shape[-1])

    def flat(self, costs: Array, points: int) -> np.ndarray:
        """Return costs with the axes of the settings as an array of shape (combinations, points)."""
        return np.broadcast_to(costs, (*self.shape, points)).reshape(prod(self.shape), points)


def _without_constant_axes(column: np.ndarray) -> np.ndarray:
    """Return `column` with length 1 along each axis on which its values do not depend.

    This column does not depend on the second axis:

    >>> _without_constant_axes(np.array([[1, 1, 1], [2, 2, 2]])).shape
    (2, 1)
    """
    for axis in range(column.ndim):
        first = column.take([0], axis)
        column = first if (column == first).all() else column
    return column
