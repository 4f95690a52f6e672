"""Suggests changes of a run under which a plan fits into memory. A search tries each change, the cheapest first.

The order of the changes:

- a pin is removed (a pin is a plan key that the run file sets);
- less of an offloaded optimizer's state, narrower moments, narrower gradient sums;
- shorter sequences, which change the training a little;
- chips with more memory;
- more nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from meshwright.planner.candidate import SearchResult, peak_bytes, pins_of
from meshwright.planner.devices import DeviceChoice, choose_devices
from meshwright.planner.search import search
from meshwright.spec.chips import CHIPS
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.plan import Moments, Plan
from meshwright.spec.plan_keys import PlanKeys
from meshwright.spec.run import RunSpec

MAX_FIXES = 3
"""Maximum number of changes that are suggested."""
TRIES = 32
"""Maximum number of changes that are tried.

If none helps, all tries together take a tenth of the time of a full search.
"""
DOUBLINGS = 6
"""Maximum number of times that sequences are halved, or the number of nodes is doubled."""
MEMORY_PINS = (
    "micro_batch",
    "recompute",
    "offload",
    "reshard",
    "gradients",
    "accumulation",
    "layers",
    "schedule",
    "stages",
    "replicate",
    "shard",
    "tensor",
    "pipeline",
    "context_ring",
    "context_ulysses",
    "expert",
)
"""Pins that affect memory, the cheapest to give up first."""


@dataclass(frozen=True)
class Fix:
    """A change under which a plan fits into memory."""

    words: str
    """The override to type, or the pin to remove from the run file."""
    plan: Plan
    """The plan with that change."""

    @property
    def text(self) -> str:
        """Return the change with the step time and the memory of its plan, as printed."""
        predicted = self.plan.predicted
        seconds = f"{predicted.step_seconds:.2f} s a step, " if predicted and predicted.step_seconds else ""
        return f"{self.words}: {seconds}{peak_bytes(self.plan) / 1e9:.1f} GB a rank"


def search_or_suggest_fixes(run: RunSpec, *, memory_bytes: int | None = None, trainable: bool = True) -> SearchResult:
    """Return the result of `search`. If it raises OutOfResources, suggested changes are added to the message."""
    with _suggesting_fixes(run, memory_bytes, trainable):
        return search(run, memory_bytes=memory_bytes, trainable=trainable)


def choose_or_suggest_fixes(run: RunSpec, *, memory_bytes: int | None = None, trainable: bool = True) -> DeviceChoice:
    """Return the result of `choose_devices`.

    If it raises OutOfResources, suggested changes are added to the message.
    """
    with _suggesting_fixes(run, memory_bytes, trainable):
        return choose_devices(run, memory_bytes=memory_bytes, trainable=trainable)


@contextmanager
def _suggesting_fixes(run: RunSpec, memory_bytes: int | None, trainable: bool) -> Iterator[None]:
    """Add suggested fixes to an OutOfResources error that the block raises."""
    try:
        yield
    except OutOfResources as error:
        suggestions = fixes(run, memory_bytes=memory_bytes, trainable=trainable)
        lines = "".join(f"\n  {number}. {fix.text}" for number, fix in enumerate(suggestions, 1))
        raise OutOfResources(
            f"{error}\nChanges that make it fit, the smallest first:{lines}" if suggestions else str(error)
        ) from error


def fixes(
    run: RunSpec, *, memory_bytes: int | None = None, trainable: bool = True, max_fixes: int = MAX_FIXES
) -> tuple[Fix, ...]:
    """Return up to `max_fixes` changes, the cheapest first, with each of which a search finds a plan that fits."""
    fixes_found: list[Fix] = []
    fitting: list[RunSpec] = []
    tries = 0
    for steps in _changes_in_steps(run, chips=memory_bytes is None):
        for words, changed in steps:
            if len(fixes_found) == max_fixes or tries == TRIES:
                return tuple(fixes_found)
            if any(_includes_changes_of(changed, fixed) for fixed in fitting):
                continue
            tries += 1
            plan = _plan_for(changed, memory_bytes, trainable)
            if plan is not None:
                fixes_found.append(Fix(words, plan))
                fitting.append(changed)
                break  # a larger step of the same change costs more
    return tuple(fixes_found)


def _includes_changes_of(run: RunSpec, fixed: RunSpec) -> bool:
    """Return whether `run` has at least the changes of `fixed`. Since `fixed` fits, `run` fits too, but costs more."""
    own_pins = vars(pins_of(run))
    fixed_pins = vars(pins_of(fixed))
    return (
        run.train.seq_len <= fixed.train.seq_len
        and run.cluster.nodes >= fixed.cluster.nodes
        and (run.cluster.memory_bytes() or 0) >= (fixed.cluster.memory_bytes() or 0)
        and all(pin is None or pin == fixed_pins[name] for name, pin in own_pins.items())
    )


def _changes_in_steps(run: RunSpec, *, chips: bool) -> Iterator[Iterable[tuple[str, RunSpec]]]:
    """Yield the changes of the run, the cheapest first, then combinations of two changes.

    Each change is an iterable of steps from small to large, each as (the words to type, the changed run).
    """
    pinned = [*_unpinned(run)]
    yield pinned
    yield _less_host_state(run)
    yield _narrower_moments(run)
    yield _narrower_sums(run)
    unpinned_words, unpinned = pinned[-1] if pinned else ("", run)
    for base, before in ((run, ""), (unpinned, f"{unpinned_words} and ")) if pinned else ((run, ""),):
        larger = [*_larger_chips(base)] if chips else []
        yield _prefixed(before, _shorter(base))
        yield _prefixed(before, larger)
        yield _prefixed(before, _more_nodes(base))
        if larger:
            chip, most = larger[-1]
            yield _prefixed(f"{before}{chip} ", _more_nodes(most))
    shorter_and_more = (
        (f"{first} {more}", grown) for first, shorter in _shorter(unpinned) for more, grown in _more_nodes(shorter)
    )
    yield _prefixed(f"{unpinned_words} and " if pinned else "", shorter_and_more)


def _prefixed(before: str, steps: Iterable[tuple[str, RunSpec]]) -> Iterator[tuple[str, RunSpec]]:
    """Yield the steps with `before` in front of their words."""
    return ((before + words, run) for words, run in steps)


def _plan_for(run: RunSpec, memory_bytes: int | None, trainable: bool) -> Plan | None:
    """Return the best plan of a run; None if it has none."""
    try:
        return search(run, memory_bytes=memory_bytes, trainable=trainable).best.plan
    except (BadInput, OutOfResources):
        return None


def _unpinned(run: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    """Yield the run without each single one of its pins, then without all of them."""
    pins = pins_of(run)
    given = [name for name in MEMORY_PINS if getattr(pins, name) is not None]
    for name in given:
        yield f"without plan.{name}", replace(run, plan=replace(pins, **{name: None}))
    if len(given) > 1:
        yield "without " + ", ".join(f"plan.{name}" for name in given), replace(run, plan=_only_others(pins))


def _less_host_state(run: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    """Yield the run with a smaller share of the optimizer's state in host memory, if its offload is pinned."""
    pins = pins_of(run)
    if pins.offload in ("optimizer", "both"):
        for share in (0.75, 0.5, 0.25):
            if share < (pins.offload_fraction or 1.0):
                yield f"plan.offload_fraction={share}", replace(run, plan=replace(pins, offload_fraction=share))


def _narrower_moments(run: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    """Yield the run with moments in narrower formats, which round, if the offload of the optimizer is pinned."""
    pins = pins_of(run)
    narrower: dict[Moments, tuple[Moments, ...]] = {"fp32": ("bf16", "int8"), "bf16": ("int8",), "int8": ()}
    if pins.offload in ("optimizer", "both"):
        for moments in narrower[pins.moments or "fp32"]:
            yield f"plan.moments={moments}, which rounds", replace(run, plan=replace(pins, moments=moments))


def _narrower_sums(run: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    """Yield the run with gradient sums in bf16, which rounds, if the offload of the optimizer is pinned."""
    pins = pins_of(run)
    if pins.offload in ("optimizer", "both") and pins.accumulation != "bf16":
        yield "plan.accumulation=bf16, which rounds", replace(run, plan=replace(pins, accumulation="bf16"))


def _only_others(pins: PlanKeys) -> PlanKeys:
    """Return the pins without those that affect memory."""
    return replace(pins, **dict.fromkeys(MEMORY_PINS))


def _shorter(run: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    """Yield the run with its sequence length halved 1, 2, 3, … times, and with the same number of tokens per step."""
    train = run.train
    for halved in range(1, DOUBLINGS + 1):
        seq, odd = divmod(train.seq_len, 2**halved)
        if odd or seq < 1024:
            return
        batch = train.global_batch * 2**halved
        words = f"train.seq_len={seq} train.global_batch={batch}"
        yield words, replace(run, train=replace(train, seq_len=seq, global_batch=batch))


def _larger_chips(run: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    """Yield the run on chips of the same generation with more memory, the smallest first.

    Only chips whose nodes have at least as many devices are tried.
    """
    own = CHIPS.get(run.cluster.gpu)
    if own is None or run.cluster.groups or run.cluster.memory_gib is not None:
        return
    larger = (
        chip
        for chip in CHIPS.values()
        if chip.generation == own.generation and chip.memory_bytes > own.memory_bytes and chip.per_node >= own.per_node
    )
    for chip in sorted(larger, key=lambda chip: chip.memory_bytes):
        yield f"cluster.gpu={chip.name}", replace(run, cluster=replace(run.cluster, gpu=chip.name))


def _more_nodes(run: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    """Yield the run with its number of nodes doubled 1, 2, 3, … times."""
    if run.cluster.groups or run.cluster.emulate_nodes > 1:
        return
    for doubled in range(1, DOUBLINGS + 1):
        nodes = run.cluster.nodes * 2**doubled
        yield f"cluster.nodes={nodes}", replace(run, cluster=replace(run.cluster, nodes=nodes))
