"""Lists the strategies that the search tries: a high-memory and a low-memory setting of reshard, recompute, offload."""

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
    """Settings of the layers at one end (high-memory or low-memory) of a strategy."""

    reshard: bool
    recompute: Recompute
    offload: Offload = "none"


@dataclass(frozen=True)
class Strategy:
    """Two settings of layers: `low_memory` for as few layers as the memory requires, and `high_memory` for the others."""

    high_memory: StrategyEnd
    low_memory: StrategyEnd
    gradients: Gradients = "shard"

    def layer(self, end: StrategyEnd, text: str = "all") -> LayerStrategy:
        """The layer strategy of one end for the range of layers `text`."""
        return LayerStrategy(
            range=text, reshard=end.reshard, gradients=self.gradients, recompute=end.recompute, offload=end.offload
        )


OFFLOAD_PAIRS: tuple[tuple[Offload, Offload], ...] = (("none", "activations"), ("optimizer", "both"))
"""Values of offload that differ in activations only: (without, with)."""

PLAIN = Strategy(StrategyEnd(False, "none"), StrategyEnd(False, "none"))
"""Strategy without reshard, recompute and offload."""


@dataclass(frozen=True)
class StrategySet:
    """The strategies that are tried, and the distinct layer settings that occur in them."""

    strategies: tuple[Strategy, ...]
    grid: OptionGrid
    high_memory: np.ndarray
    """Index into `options` of each strategy's high-memory end."""
    low_memory: np.ndarray
    adds_activation_offload: np.ndarray
    """By strategy, whether only the low-memory end offloads activations."""
    classes: tuple[np.ndarray, ...]
    """Indices of strategies with the same recompute mode and activation offload; the closed form has a similar error for them."""

    @property
    def options(self) -> tuple[LayerStrategy, ...]:
        return self.grid.options


def strategy_set_of(run: RunSpec, offloads: tuple[Offload, ...]) -> StrategySet:
    grid = OptionGrid(
        gradients=gradient_modes(run),
        offloads=offloads,
        recomputes=recomputes(run),
        reshards=tuple(_reshard_modes(pins_of(run))),
    )
    return _strategies_between(tuple(_strategy_ends(run, offloads)), grid)


def lower_memory_strategies(run: RunSpec, strategy: Strategy) -> list[Strategy]:
    """Strategies that save more memory than this one, the first the least: with reshard, then also with more recompute."""
    end = strategy.low_memory
    modes = recomputes(run)
    freed = replace(end, reshard=_reshard_modes(pins_of(run))[-1])
    ends = [freed, *(replace(freed, recompute=mode) for mode in modes[modes.index(end.recompute) + 1 :])]
    return [replace(strategy, high_memory=end, low_memory=low_memory) for low_memory in ends if low_memory != end]


def lowest_memory_end(run: RunSpec) -> tuple[StrategyEnd, Gradients]:
    pins = pins_of(run)
    return StrategyEnd(_reshard_modes(pins)[-1], recomputes(run)[-1]), gradient_modes(run)[0]


def gradient_modes(run: RunSpec) -> tuple[Gradients, ...]:
    """Values of `gradients` that are tried."""
    pinned = pins_of(run).gradients
    return ("shard", "whole") if pinned is None else (pinned,)


def recomputes(run: RunSpec) -> tuple[Recompute, ...]:
    """Recompute modes that the search tries, from the least to the most memory saved."""
    pinned = pins_of(run).recompute
    if pinned is not None:
        return (pinned,)
    modes = tuple(mode for mode in RECOMPUTE_MODES if mode != "all_but_attention" or _attention_is_costly(run))
    return tuple(mode for mode in modes if mode in RECOMPUTES_MATMULS) if mlp_tile_of(run) else modes


def _reshard_modes(pins: PlanKeys) -> list[bool]:
    return [False, True] if pins.reshard is None else [pins.reshard]


def _attention_is_costly(run: RunSpec) -> bool:
    """Whether the FLOPs of attention scores are at least 15% of all others; else recomputing them costs little."""
    others = flops_per_token(run.model, 1, causal=True)
    return flops_per_token(run.model, run.train.seq_len, causal=True) >= 1.15 * others


@lru_cache(maxsize=8)
def _strategies_between(pairs: tuple[tuple[StrategyEnd, StrategyEnd], ...], grid: OptionGrid) -> StrategySet:
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
    """(high-memory, low-memory) ends of all strategies.

    Both are equal, or differ in one of reshard, recompute and offload of activations.
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
