"""Chooses, for samples of unequal lengths, between a static context axis and a number of ranks for each sample (hybrid).

Global batches are drawn from the histogram of lengths with the run's seed, and simulated (`simulator.sample_layouts`). Each layout
has the least recomputation that fits into memory. Hybrid layouts are also simulated with less recomputation and with offload of long
samples (`slot_offloads`). Hybrid layouts keep weights gathered and gradients whole for the step; static layouts do so if that fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from meshwright.costs.machine_rates import is_guessed
from meshwright.costs.plan_costs import pricing
from meshwright.planner.candidate import OFFLOAD_PENALTY_UNMEASURED, fits, memory_budget, pins_of
from meshwright.planner.finalists import SAME_TIME_TOLERANCE
from meshwright.planner.sample_plans import layout_times, plan_of
from meshwright.planner.slot_offloads import SEVERAL, offload_layouts
from meshwright.simulator.sample_layouts import LayoutTimes, PlayedSteps, SampleLayout, play_batches
from meshwright.simulator.step_simulation import memory_of
from meshwright.spec.divisors import divisors
from meshwright.spec.plan import RECOMPUTE_MODES, LayerStrategy
from meshwright.spec.run import RunSpec
from meshwright.workload.expected_lengths import LengthHistogram
from meshwright.workload.plan_bytes import fullest

BATCHES = 32
"""Global batches that are simulated for the best layouts."""
COMPARED_BATCHES = 4
"""Global batches that are simulated for all layouts, to find the best ones."""
LEADING = 3
"""For each kind, static and hybrid, this number of the best layouts is simulated with all batches."""
GRANULE = 128
"""Capacities are rounded up to multiples of this number of tokens, if they have at least so many."""


@dataclass(frozen=True)
class PlayedLayout:
    """A layout that fits into memory, with its simulated steps."""

    layout: SampleLayout
    strategy: LayerStrategy
    """The strategy of all layers."""
    memory_bytes: int
    """Bytes of memory that the fullest rank needs."""
    times: LayoutTimes
    steps: PlayedSteps

    @property
    def seconds(self) -> float:
        """Mean seconds of a step."""
        return float(self.steps.seconds.mean())


@dataclass(frozen=True)
class SampleChoice:
    """The best layouts for batches of unequal samples."""

    longest: int
    """Tokens of the longest sample."""
    tokens: int
    """Tokens of a global batch."""
    layouts: tuple[PlayedLayout, ...] = ()
    """The chosen layout, then the others, fastest first; empty if no layout can be simulated."""
    obstacle: str = ""
    """The reason why no layout can be simulated; empty if there is one."""

    def leading(self, *, hybrid: bool) -> PlayedLayout | None:
        """Return the fastest hybrid or static layout, or None if there is none."""
        return next((played for played in self.layouts if played.layout.hybrid == hybrid), None)


def choose_sample_layout(
    run: RunSpec,
    histogram: LengthHistogram,
    memory_bytes: int | None = None,
    *,
    batches: int = BATCHES,
    static: bool = True,
) -> SampleChoice:
    """Simulate the layouts of the run's ranks for batches of unequal samples, and choose the best.

    A batch has `train.global_batch_tokens` tokens, or `train.global_batch` · `train.seq_len` tokens; samples are cut at `seq_len`. The best
    layouts are simulated with `batches` batches. Without `static`, only hybrid layouts are considered. A static layout must divide the
    batch into whole sequences for each of its groups of context ranks.
    """
    longest = min(run.train.seq_len, histogram.longest)
    tokens = step_tokens(run)
    if obstacle := _obstacle(run):
        return SampleChoice(longest, tokens, obstacle=obstacle)
    drawn = [draw_batch(histogram, tokens, longest, run.seed, number) for number in range(batches)]
    budget = memory_budget(run, memory_bytes)
    played = []
    for layout in sample_layouts(run, longest):
        strategy = _least_recompute(run, layout, budget) if static or layout.hybrid else None
        if strategy is not None:
            played.append(_played(run, layout, strategy, _memory_bytes(run, layout, strategy), drawn))
        offloading = offload_layouts(run, layout, strategy, budget) if layout.hybrid else ()
        played += [_played(run, *offloaded, drawn) for offloaded in offloading]
    leading = [replace(each, steps=play_batches(each.layout, each.times, drawn)) for each in _leading(played)]
    obstacle = "" if leading else f"no layout of {run.cluster.ranks} data, context or hybrid ranks fits into memory"
    return SampleChoice(longest, tokens, _with_choice_first(leading), obstacle)


def _played(
    run: RunSpec, layout: SampleLayout, strategy: LayerStrategy, memory_bytes: int, drawn: Sequence[np.ndarray]
) -> PlayedLayout:
    times = layout_times(run, layout, strategy)
    return PlayedLayout(layout, strategy, memory_bytes, times, play_batches(layout, times, drawn[:COMPARED_BATCHES]))


def step_tokens(run: RunSpec) -> int:
    """Return the tokens of a step, on all ranks."""
    return run.train.global_batch_tokens or run.train.global_batch * run.train.seq_len


def draw_batch(histogram: LengthHistogram, tokens: int, longest: int, seed: int, number: int) -> np.ndarray:
    """Draw the lengths `(S,)` of the samples of global batch `number`. The last sample is cut so that all have `tokens` tokens together."""
    lengths = histogram.draw(tokens, longest, np.random.default_rng([seed, number]))
    lengths[-1] -= int(lengths.sum()) - tokens
    return lengths


def sample_layouts(run: RunSpec, longest: int) -> Iterator[SampleLayout]:
    """Yield the layouts of the run's ranks that can hold its longest sample: static context axes, and hybrid layouts by capacity."""
    ranks = run.cluster.ranks
    sequence = run.train.seq_len
    pins = pins_of(run)
    for context in divisors(ranks):
        if step_tokens(run) % (ranks // context * sequence) or sequence % (2 * context):
            continue
        for ring, ulysses in dict.fromkeys(((context, 1), (1, context))):
            pinned = (pins.context_ring or ring, pins.context_ulysses or ulysses) == (ring, ulysses)
            if pinned and _heads_divide(run, ulysses):
                yield SampleLayout(ranks, sequence // context, ring, ulysses)
    if pins.context_ring is None and pins.context_ulysses is None:
        sizes = {size for power in range(ranks.bit_length()) for size in (2**power, 3 * 2**power) if size <= ranks}
        for size in sorted(sizes | {ranks}):
            yield SampleLayout(ranks, _capacity(longest, size), hybrid=True, heads=run.model.kv_heads)


def _obstacle(run: RunSpec) -> str:
    """Return the reason why no layout of the run can be simulated, or an empty string."""
    pins = pins_of(run)
    pinned = [key for key in ("pipeline", "tensor") if (getattr(pins, key) or 1) > 1]
    if pinned:
        return f"with pinned {' and '.join(pinned)} ranks unequal samples are not played"
    if (
        is_guessed(run.cluster)
        or pricing(run.model, run.train, plan_of(run, SampleLayout(1, 2), LayerStrategy())[1], run.cluster) is None
    ):
        return "rates of the devices are not known (`meshwright profile --out FILE` measures them)"
    return ""


def _heads_divide(run: RunSpec, ulysses: int) -> bool:
    """Whether `ulysses` ranks can divide the key/value heads evenly, and fit inside a node."""
    return run.model.kv_heads % ulysses == 0 and ulysses <= run.cluster.ranks_per_node


def _capacity(longest: int, size: int) -> int:
    """Return the capacity with which `size` ranks can hold a sample of `longest` tokens.

    A sample of 10,000 tokens needs 2,500 tokens on each of 4 ranks, which is rounded up to 20 · 128:

    >>> _capacity(longest=10_000, size=4)
    2560
    """
    granule = GRANULE if longest // size >= GRANULE else 2
    return granule * ceil(longest / (size * granule))


def _leading(played: Sequence[PlayedLayout]) -> Iterator[PlayedLayout]:
    for hybrid in (False, True):
        yield from sorted((each for each in played if each.layout.hybrid == hybrid), key=_compared_seconds)[:LEADING]


def _compared_seconds(played: PlayedLayout) -> float:
    """Mean seconds of a step, and more with offload, whose copies no run has measured beside hybrid ranks."""
    return played.seconds * (OFFLOAD_PENALTY_UNMEASURED if played.layout.offload else 1.0)


def _with_choice_first(played: Sequence[PlayedLayout]) -> tuple[PlayedLayout, ...]:
    """The fastest first, or the fastest static one where the two cannot be told apart: it is simpler."""
    ordered = sorted(played, key=_compared_seconds)
    static = next((each for each in ordered if not each.layout.hybrid), None)
    if static is not None and static.seconds <= ordered[0].seconds * (1 + SAME_TIME_TOLERANCE):
        ordered.remove(static)
        ordered.insert(0, static)
    return tuple(ordered)


def _least_recompute(run: RunSpec, layout: SampleLayout, budget: int | None) -> LayerStrategy | None:
    """The strategy with the least recompute that fits; static ranks may free weights and gather them again."""
    pinned = pins_of(run).recompute
    modes = RECOMPUTE_MODES if pinned is None else (pinned,)
    gathers = (True,) if layout.hybrid else (True, False)
    for gather_once in gathers:
        for recompute in modes:
            strategy = LayerStrategy(
                reshard=not gather_once, gradients="whole" if gather_once else "shard", recompute=recompute
            )
            if fits(*plan_of(run, layout, strategy, SEVERAL), budget):
                return strategy
    return None


def _memory_bytes(run: RunSpec, layout: SampleLayout, strategy: LayerStrategy) -> int:
    changed, plan = plan_of(run, layout, strategy, SEVERAL)
    return sum(fullest(memory_of(changed.model, changed.train, plan, cpu=run.cluster.is_cpu)).values())
