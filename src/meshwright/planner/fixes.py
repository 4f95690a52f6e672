"""What would make a run fit that does not: changes tried one by one, each with the plan that a search then finds.

Cheapest first: what the run file pins for no reason of the model's, then what changes the training a little (shorter sequences), then other
chips, then more nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from meshwright.planner.candidate import Answer, peak_bytes, pins_of
from meshwright.planner.devices import Choice, choose_devices
from meshwright.planner.search import search
from meshwright.spec.chips import CHIPS
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.plan import Plan, PlanPins
from meshwright.spec.run import RunSpec

WANTED = 3
TRIES = 32
"""Changes that are searched; one under which nothing can fit takes a tenth of a search."""
DOUBLINGS = 6
"""Times that sequences are halved, and nodes doubled, before that way is given up."""
MEMORY_PINS = (
    "micro_batch", "recompute", "offload", "reshard", "gradients", "layers", "schedule", "stages", "replicate", "shard", "tensor",
    "pipeline", "context_ring", "context_ulysses", "expert",
)  # fmt: skip
"""Pins that decide memory, those first that cost least to give up."""


@dataclass(frozen=True)
class Fix:
    """One change that makes the run fit."""

    words: str
    """What to type, or to take out of the run file."""
    plan: Plan
    """What then runs."""

    @property
    def text(self) -> str:
        said = self.plan.predicted
        seconds = f"{said.step_seconds:.2f} s a step, " if said and said.step_seconds else ""
        return f"{self.words}: {seconds}{peak_bytes(self.plan) / 1e9:.1f} GB a rank"


def search_or_fixes(run: RunSpec, *, memory_bytes: int | None = None, trainable: bool = True) -> Answer:
    """`search`, whose OutOfResources also says what would make the run fit."""
    with _fixes_named(run, memory_bytes, trainable):
        return search(run, memory_bytes=memory_bytes, trainable=trainable)


def choose_or_fixes(run: RunSpec, *, memory_bytes: int | None = None, trainable: bool = True) -> Choice:
    """`choose_devices`, whose OutOfResources also says what would make the run fit."""
    with _fixes_named(run, memory_bytes, trainable):
        return choose_devices(run, memory_bytes=memory_bytes, trainable=trainable)


@contextmanager
def _fixes_named(run: RunSpec, memory_bytes: int | None, trainable: bool) -> Iterator[None]:
    """Add to an OutOfResources of the block what would make the run fit."""
    try:
        yield
    except OutOfResources as error:
        ways = fixes(run, memory_bytes=memory_bytes, trainable=trainable)
        told = "".join(f"\n  {number}. {fix.text}" for number, fix in enumerate(ways, 1))
        raise OutOfResources(f"{error}\nWhat makes it fit, cheapest first:{told}" if ways else str(error)) from error


def fixes(
    run: RunSpec, *, memory_bytes: int | None = None, trainable: bool = True, wanted: int = WANTED
) -> tuple[Fix, ...]:
    """Up to `wanted` changes under each of which a search finds a plan that fits, cheapest first."""
    found: list[Fix] = []
    fitting: list[RunSpec] = []
    tries = 0
    for way in _ways(run, chips=memory_bytes is None):
        for words, changed in way:
            if len(found) == wanted or tries == TRIES:
                return tuple(found)
            if any(_changes_more(changed, one) for one in fitting):
                continue
            tries += 1
            plan = _plan_for(changed, memory_bytes, trainable)
            if plan is not None:
                found.append(Fix(words, plan))
                fitting.append(changed)
                break  # a further step on the same way costs more
    return tuple(found)


def _changes_more(run: RunSpec, fixed: RunSpec) -> bool:
    """Whether all that makes `fixed` fit is changed in `run` too, as far or further."""
    left, kept = vars(pins_of(run)), vars(pins_of(fixed))
    return (
        run.train.seq_len <= fixed.train.seq_len
        and run.cluster.nodes >= fixed.cluster.nodes
        and (run.cluster.memory_bytes() or 0) >= (fixed.cluster.memory_bytes() or 0)
        and all(pin is None or pin == kept[name] for name, pin in left.items())
    )


def _ways(run: RunSpec, *, chips: bool) -> Iterator[Iterable[tuple[str, RunSpec]]]:
    """Ways to change the run, cheapest first, each in steps; then two of them at once, for a run that needs both."""
    pinned = [*_unpinned(run)]
    yield pinned
    words, free = pinned[-1] if pinned else ("", run)
    for base, before in ((run, ""), (free, f"{words} and ")) if pinned else ((run, ""),):
        larger = [*_larger_chips(base)] if chips else []
        yield _said(before, _shorter(base))
        yield _said(before, larger)
        yield _said(before, _more_nodes(base))
        if larger:
            chip, most = larger[-1]
            yield _said(f"{before}{chip} ", _more_nodes(most))
    both = ((f"{first} {more}", grown) for first, shorter in _shorter(free) for more, grown in _more_nodes(shorter))
    yield _said(f"{words} and " if pinned else "", both)


def _said(before: str, way: Iterable[tuple[str, RunSpec]]) -> Iterator[tuple[str, RunSpec]]:
    return ((before + words, run) for words, run in way)


def _plan_for(run: RunSpec, memory_bytes: int | None, trainable: bool) -> Plan | None:
    try:
        return search(run, memory_bytes=memory_bytes, trainable=trainable).best.plan
    except (BadInput, OutOfResources):
        return None


def _unpinned(run: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    """Each pin given up alone, then all of them."""
    pins = pins_of(run)
    given = [name for name in MEMORY_PINS if getattr(pins, name) is not None]
    for name in given:
        yield f"without plan.{name}", replace(run, plan=replace(pins, **{name: None}))
    if len(given) > 1:
        yield "without " + ", ".join(f"plan.{name}" for name in given), replace(run, plan=_only_others(pins))


def _only_others(pins: PlanPins) -> PlanPins:
    return replace(pins, **dict.fromkeys(MEMORY_PINS))


def _shorter(run: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    """Half the sequence length, with as many tokens a step, and half of that."""
    train = run.train
    for halved in range(1, DOUBLINGS + 1):
        seq, odd = divmod(train.seq_len, 2**halved)
        if odd or seq < 1024:
            return
        batch = train.global_batch * 2**halved
        words = f"train.seq_len={seq} train.global_batch={batch}"
        yield words, replace(run, train=replace(train, seq_len=seq, global_batch=batch))


def _larger_chips(run: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    """The chip's own family with more memory, least first."""
    own = CHIPS.get(run.cluster.gpu)
    if own is None or run.cluster.groups or run.cluster.memory_gib is not None:
        return
    larger = (
        chip for chip in CHIPS.values() if chip.generation == own.generation and chip.memory_bytes > own.memory_bytes
    )
    for chip in sorted(larger, key=lambda chip: chip.memory_bytes):
        yield f"cluster.gpu={chip.name}", replace(run, cluster=replace(run.cluster, gpu=chip.name))


def _more_nodes(run: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    """Twice the nodes, and twice that."""
    if run.cluster.groups or run.cluster.emulate_nodes > 1:
        return
    for doubled in range(1, DOUBLINGS + 1):
        nodes = run.cluster.nodes * 2**doubled
        yield f"cluster.nodes={nodes}", replace(run, cluster=replace(run.cluster, nodes=nodes))
