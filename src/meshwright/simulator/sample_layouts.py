"""Step times of batches of unequal samples under a static context axis, or with samples balanced over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.policies.sample_balance import RankPool, balance_samples
from meshwright.policies.sample_time import SampleTime
from meshwright.simulator.sample_steps import RingTime, SampleParts, play_parts, static_seconds
from meshwright.spec.plan import SlotOffload


@dataclass(frozen=True)
class SampleLayout:
    """Division of samples among ranks."""

    ranks: int
    capacity: int
    """Tokens of a micro-batch on a rank."""
    ring: int = 1
    """Static ranks that pass keys and values round a ring."""
    ulysses: int = 1
    """Static ranks that exchange heads for tokens."""
    hybrid: bool = False
    """Whether each sample gets ranks of its own number."""
    offload: SlotOffload | None = None
    """Longer micro-batches for long samples."""
    heads: int = 1
    """Key/value heads, which hybrid ranks that exchange tokens for heads divide."""

    @property
    def longest_part(self) -> int:
        """Tokens of the longest sample that one rank holds."""
        return self.offload.capacity if self.offload else self.capacity

    @property
    def context(self) -> int:
        """Static context ranks."""
        return self.ring * self.ulysses


@dataclass(frozen=True)
class LayoutTimes:
    """Times of a layout's micro-batches."""

    time: SampleTime
    """Time of samples on a rank; `fixed` contains the time of each micro-batch beside its samples."""
    ring: RingTime
    step_seconds: float
    """Seconds of a step beside its micro-batches: first gather, reduction of gradients, optimizer."""
    exchange: float = 0.0
    """Seconds per token of a rank to exchange heads for tokens with `SampleLayout.ulysses`; hybrid: `time.exchange`."""


@dataclass(frozen=True)
class PlayedSteps:
    """Figures of each batch, `(batches,)` each.

    Two steps of 2 and 3 seconds, of which even arithmetic would take 4:

    >>> steps = PlayedSteps(np.array([2.0, 3.0]), np.array([1000, 1000]), np.array([2.0, 2.0]), np.zeros(2))
    >>> steps.efficiency, steps.tokens_per_second, steps.quantile(0.5)
    (0.8, 400.0, 2.5)
    """

    seconds: np.ndarray
    tokens: np.ndarray
    ideal: np.ndarray
    """Seconds if the arithmetic of all samples were divided evenly, without messages, waits and padding."""
    padding: np.ndarray
    """Share of the micro-batches' tokens that no sample fills."""

    @property
    def efficiency(self) -> float:
        """Ideal over played time of all batches."""
        return float(self.ideal.sum() / self.seconds.sum())

    @property
    def tokens_per_second(self) -> float:
        return float(self.tokens.sum() / self.seconds.sum())

    def quantile(self, share: float) -> float:
        """Seconds of a step that the share `share` of all steps do not exceed."""
        return float(np.quantile(self.seconds, share))


def play_batches(layout: SampleLayout, times: LayoutTimes, batches: Sequence[np.ndarray]) -> PlayedSteps:
    """Play global batches, each the lengths `(S,)` of its samples. Raises BadInput for a sample that the ranks cannot hold."""
    play = _balanced if layout.hybrid else _static
    played = [play(layout, times, lengths) for lengths in batches]
    seconds, padding = (np.array(values) for values in zip(*played, strict=True))
    ideal = np.array([float(times.time.shared(lengths).sum()) / layout.ranks for lengths in batches])
    tokens = np.array([int(lengths.sum()) for lengths in batches])
    return PlayedSteps(seconds + times.step_seconds, tokens, ideal, padding)


def _static(layout: SampleLayout, times: LayoutTimes, lengths: np.ndarray) -> tuple[float, float]:
    """Seconds of all tokens, where some samples wait for a later step, and padding."""
    time = replace(times.time, linear=times.time.linear + times.exchange)
    groups = layout.ranks // layout.context
    ring = times.ring
    if layout.ring == 1:
        ring = replace(ring, bytes_per_token=0.0)
    seconds, packed = static_seconds(lengths, groups, layout.context, layout.capacity, time, ring)
    tokens = int(lengths.sum())
    sequence = layout.capacity * layout.context * groups
    return seconds * tokens / packed, 1 - packed / (max(1, round(tokens / sequence)) * sequence)


def _balanced(layout: SampleLayout, times: LayoutTimes, lengths: np.ndarray) -> tuple[float, float]:
    """Seconds and padding, as the balancer places samples; rings take their time by where their ranks are."""
    ring_seconds = float(times.ring.seconds(np.ones(1), layout.ranks)[0]) if layout.ranks > 1 else 0.0
    time = replace(times.time, ring=ring_seconds)
    balance = balance_samples(
        lengths, RankPool(layout.ranks, layout.capacity, time, offload=layout.offload, heads=layout.heads)
    )
    parts = SampleParts(balance.sample, balance.parts, balance.rank, balance.slot, balance.by_heads)
    ends = play_parts(parts, lengths, layout.ranks, times.time, times.ring)
    return float(ends.max()), balance.padding
