"""Lists the strategies that the search tries.

A strategy has two settings of reshard, recompute and offload: one for layers that may use much memory, one for layers
that must use little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

import numpy as np

from meshwright.planner.candidate import mlp_tile_of, pins_of
from meshwright.planner.option_grid import OptionGrid
from meshwright.spec.model import flops_per_token
from meshwright.spec.plan import (
    RECOMPUTE_MODES,
    RECOMPUTES_MATMULS,
    Gradients,
    LayerStrategy,
    Offload,
    Recompute,
)
from meshwright.spec.plan_keys import PlanKeys
from meshwright.spec.run import RunSpec


@dataclass(frozen=True)
class StrategyEnd:
    """One of the two settings of a strategy: for its high-memory layers, or for its low-memory layers."""

    reshard: bool
    """Whether gathered weights are freed after each use."""
    recompute: Recompute
    """Which activations are computed again in the backward."""
    offload: Offload = "none"
    """Which tensors are in host memory."""


@dataclass(frozen=True)
class Strategy:
    """Two settings of layers.

    As few layers as the memory requires have the setting `low_memory`; the others have `high_memory`.
    """

    high_memory: StrategyEnd
    low_memory: StrategyEnd
    gradients: Gradients = "shard"
    """Value of `gradients`. Both settings have it."""

    def layer(self, end: StrategyEnd, text: str = "all") -> LayerStrategy:
        """Return the layer strategy with the setting `end`, for the range of layers `text` such as "0-7"."""
        return LayerStrategy(
            range=text, reshard=end.reshard, gradients=self.gradients, recompute=end.recompute, offload=end.offload
        )


OFFLOAD_PAIRS: tuple[tuple[Offload, Offload], ...] = (("none", "activations"), ("optimizer", "both"))
"""Values of offload that differ in activations only: (without, with)."""

PLAIN = Strategy(StrategyEnd(False, "none"), StrategyEnd(False, "none"))
"""The strategy without reshard, recompute and offload."""


@dataclass(frozen=True)
class StrategySet:
    """The strategies that are tried, and the layer settings that occur in them."""

    strategies: tuple[Strategy, ...]
    """The strategies."""
    grid: OptionGrid
    """All combinations of the settings' values."""
    high_memory: np.ndarray
    """Index into `options` of each strategy's high-memory setting, shape (strategies,)."""
    low_memory: np.ndarray
    """Index into `options` of each strategy's low-memory setting, shape (strategies,)."""
    adds_activation_offload: np.ndarray
    """Whether only the low-memory setting of a strategy offloads activations, shape (strategies,)."""
    classes: tuple[np.ndarray, ...]
    """Indices of strategies with the same recompute mode and activation offload.

    The closed form has similar errors for them.
    """

    @property
    def options(self) -> tuple[LayerStrategy, ...]:
        """Return all combinations of settings, in the order of the grid."""
        return self.grid.options


def strategy_set_of(run: RunSpec, offloads: tuple[Offload, ...]) -> StrategySet:
    """Return the strategies that obey the run's pins, with the values `offloads` of offload."""
    grid = OptionGrid(
        gradients=gradient_modes(run),
        offloads=offloads,
        recomputes=recomputes(run),
        reshards=tuple(_reshard_modes(pins_of(run))),
    )
    return _strategies_between(tuple(_strategy_ends(run, offloads)), grid)


def lower_memory_strategies(run: RunSpec, strategy: Strategy) -> list[Strategy]:
    """Return strategies that need less memory than `strategy`: first one with reshard, then also with more and more
    recomputation.
    """
    end = strategy.low_memory
    modes = recomputes(run)
    freed = replace(end, reshard=_reshard_modes(pins_of(run))[-1])
    ends = [freed, *(replace(freed, recompute=mode) for mode in modes[modes.index(end.recompute) + 1 :])]
    return [replace(strategy, high_memory=end, low_memory=low_memory) for low_memory in ends if low_memory != end]


def lowest_memory_end(run: RunSpec) -> tuple[StrategyEnd, Gradients]:
    """Return the layer setting and the value of `gradients` that need the least device memory, without offload."""
    pins = pins_of(run)
    return StrategyEnd(_reshard_modes(pins)[-1], recomputes(run)[-1]), gradient_modes(run)[0]


def gradient_modes(run: RunSpec) -> tuple[Gradients, ...]:
    """Return the values of `gradients` that are tried."""
    pinned = pins_of(run).gradients
    return ("shard", "whole") if pinned is None else (pinned,)


def recomputes(run: RunSpec) -> tuple[Recompute, ...]:
    """Return the recompute modes that are tried, from the least to the most memory saved."""
    pinned = pins_of(run).recompute
    if pinned is not None:
        return (pinned,)
    modes = tuple(mode for mode in RECOMPUTE_MODES if mode != "all_but_attention" or _attention_is_costly(run))
    return tuple(mode for mode in modes if mode in RECOMPUTES_MATMULS) if mlp_tile_of(run) else modes


def _reshard_modes(pins: PlanKeys) -> list[bool]:
    """Return the values of `reshard` that are tried."""
    return [False, True] if pins.reshard is None else [pins.reshard]


def _attention_is_costly(run: RunSpec) -> bool:
    """Return whether the FLOPs of attention scores are at least 15% of all other FLOPs.

    If not, it costs little to recompute attention.
    """
    others = flops_per_token(run.model, 1, causal=True)
    return flops_per_token(run.model, run.train.seq_len, causal=True) >= 1.15 * others


@lru_cache(maxsize=8)
def _strategies_between(pairs: tuple[tuple[StrategyEnd, StrategyEnd], ...], grid: OptionGrid) -> StrategySet:
    """Return the strategies with these (high-memory, low-memory) settings, for each value of `gradients` in the grid."""
    strategies = [
        Strategy(high_memory, low_memory, gradients)
        for gradients in grid.gradients
        for high_memory, low_memory in pairs
    ]
    ends = [[strategy.layer(strategy.high_memory), strategy.layer(strategy.low_memory)] for strategy in strategies]
    option_index = {option: index for index, option in enumerate(grid.options)}
    high_memory, low_memory = np.array([[option_index[option] for option in pair] for pair in ends]).T
    adds_activation_offload = [
        not strategy.layer(strategy.high_memory).activations_offloaded
        and strategy.layer(strategy.low_memory).activations_offloaded
        for strategy in strategies
    ]
    keys = [
        (strategy.low_memory.recompute, strategy.low_memory.offload in ("activations", "both"))
        for strategy in strategies
    ]
    classes = tuple(np.flatnonzero([key == distinct for key in keys]) for distinct in dict.fromkeys(keys))
    return StrategySet(tuple(strategies), grid, high_memory, low_memory, np.array(adds_activation_offload), classes)


def _strategy_ends(run: RunSpec, offloads: Sequence[Offload]) -> list[tuple[StrategyEnd, StrategyEnd]]:
    """Return the (high-memory, low-memory) settings of all strategies.

    The two settings are equal, or differ in exactly one of reshard, recompute and activation offload.
    """
    reshard_options = _reshard_modes(pins_of(run))
    recompute_options = recomputes(run)
    pairs: list[tuple[StrategyEnd, StrategyEnd]] = []
    for offload in offloads:
        pairs += [
            (end, end)
            for end in (
                StrategyEnd(reshard, mode, offload) for mode in recompute_options for reshard in reshard_options
            )
        ]
        pairs += [
            (StrategyEnd(False, mode, offload), StrategyEnd(True, mode, offload))
            for mode in recompute_options
            if len(reshard_options) == 2
        ]
        pairs += [
            (StrategyEnd(reshard, high_memory, offload), StrategyEnd(reshard, low_memory, offload))
            for reshard in reshard_options
            for high_memory, low_memory in combinations(recompute_options, 2)
        ]
    for without, with_activations in OFFLOAD_PAIRS:
        if {without, with_activations} <= set(offloads):
            pairs += [
                (StrategyEnd(reshard, mode, without), StrategyEnd(reshard, mode, with_activations))
                for mode in recompute_options
                for reshard in reshard_options
            ]
    return pairs
