"""Simulated step times for batches of unequal samples: with a static context axis, or with samples balanced over all ranks."""

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
    """How samples are divided among ranks: with a static context axis (`ring`, `ulysses`), or `hybrid`, balanced for each sample."""

    ranks: int
    """Data and context ranks together."""
    capacity: int
    """Tokens of a micro-batch on one rank."""
    ring: int = 1
    """Size of the static axis of ring attention."""
    ulysses: int = 1
    """Size of the static axis that exchanges tokens for heads."""
    hybrid: bool = False
    """Whether the balancer chooses the number of ranks for each sample; `ring` and `ulysses` are then not used."""
    offload: SlotOffload | None = None
    """If set, micro-batches of long samples may have more tokens, because some layers' activations are copied to the host."""
    heads: int = 1
    """Key/value heads. Hybrid ranks can exchange tokens for heads only if their number divides the heads."""

    @property
    def longest_part(self) -> int:
        """Tokens of the longest sample that one rank holds."""
        return self.offload.capacity if self.offload else self.capacity

    @property
    def context(self) -> int:
        """Size of the static context axis."""
        return self.ring * self.ulysses


@dataclass(frozen=True)
class LayoutTimes:
    """Times of samples and micro-batches under a layout."""

    time: SampleTime
    """Seconds of a sample by its length. `fixed` is the time that each micro-batch needs in addition to its samples."""
    ring: RingTime
    step_seconds: float
    """Seconds of a step in addition to its micro-batches: first gather, reduction of gradients, optimizer."""
    exchange: float = 0.0
    """Seconds per token of a rank to exchange tokens for heads on the static `ulysses` axis. Hybrid layouts use `time.exchange`."""


@dataclass(frozen=True)
class PlayedSteps:
    """The simulated step of each batch; each array is `(batches,)`.

    Two steps take 2 and 3 seconds. With evenly divided arithmetic they would take 2 seconds each, so the efficiency is 4 / 5:

    >>> steps = PlayedSteps(np.array([2.0, 3.0]), np.array([1000, 1000]), np.array([2.0, 2.0]), np.zeros(2))
    >>> steps.efficiency, steps.tokens_per_second, steps.quantile(0.5)
    (0.8, 400.0, 2.5)
    """

    seconds: np.ndarray
    tokens: np.ndarray
    ideal: np.ndarray
    """Seconds if the arithmetic of all samples were divided evenly, without messages, waits and padding."""
    padding: np.ndarray
    """Share of the tokens in micro-batches that are padding."""

    @property
    def efficiency(self) -> float:
        """Ideal seconds of all batches together, divided by their simulated seconds."""
        return float(self.ideal.sum() / self.seconds.sum())

    @property
    def tokens_per_second(self) -> float:
        return float(self.tokens.sum() / self.seconds.sum())

    def quantile(self, share: float) -> float:
        """Seconds of a step that the share `share` of all steps do not exceed."""
        return float(np.quantile(self.seconds, share))


def play_batches(layout: SampleLayout, times: LayoutTimes, batches: Sequence[np.ndarray]) -> PlayedSteps:
    """Simulate a step for each of `batches`, which are the lengths `(S,)` of the samples of a global batch.

    Raises BadInput for a sample that is too long for all ranks together.
    """
    play = _balanced if layout.hybrid else _static
    played = [play(layout, times, lengths) for lengths in batches]
    seconds, padding = (np.array(values) for values in zip(*played, strict=True))
    ideal = np.array([float(times.time.shared(lengths).sum()) / layout.ranks for lengths in batches])
    tokens = np.array([int(lengths.sum()) for lengths in batches])
    return PlayedSteps(seconds + times.step_seconds, tokens, ideal, padding)


def _static(layout: SampleLayout, times: LayoutTimes, lengths: np.ndarray) -> tuple[float, float]:
    """Return the seconds of a batch with a static context axis, and its share of padding.

    Samples that fit in no sequence wait for a later step. The seconds are scaled up, so that they count for the tokens of all samples.
    """
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
    """Return the seconds of a batch whose samples the balancer places, and its share of padding.

    The balancer assumes the same time per token for each ring. The simulation distinguishes rings within a node from larger rings.
    """
    ring_seconds = float(times.ring.seconds(np.ones(1), layout.ranks)[0]) if layout.ranks > 1 else 0.0
    time = replace(times.time, ring=ring_seconds)
    balance = balance_samples(
        lengths, RankPool(layout.ranks, layout.capacity, time, offload=layout.offload, heads=layout.heads)
    )
    parts = SampleParts(balance.sample, balance.parts, balance.rank, balance.slot, balance.by_heads)
    ends = play_parts(parts, lengths, layout.ranks, times.time, times.ring)
    return float(ends.max()), balance.padding
