"""What a person asks of a plan, answered in sentences with numbers: what limits its step, and why another plan lost.

Both read `plan.predicted`; nothing is simulated here, apart from plans without what only memory asks for (`limits`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from meshwright.costs.machine_rates import machine_of
from meshwright.costs.plan_costs import as_nodes, number
from meshwright.planner.candidate import HEADROOM, Candidate, moves_activations, peak_bytes, pins_of, usable_by_rank
from meshwright.planner.finalists import ALIKE, complexity
from meshwright.planner.reprice import repriced
from meshwright.simulator.step_simulation import memory_of
from meshwright.spec.chips import CHIPS
from meshwright.spec.errors import BadInput
from meshwright.spec.layout import Layout
from meshwright.spec.plan import CONTEXT_AXES, RECOMPUTE_MODES, Plan, Predicted
from meshwright.spec.run import RunSpec

MOVES = {
    "pipeline": "activations between stages",
    "replicate": "gradient sums over replicas",
    "shard": "gathers of weights and reductions of gradients",
    "context_ring": "keys and values round the ring",
    "context_ulysses": "heads exchanged for tokens",
    "context": "a sequence's keys and values",
    "tensor": "tokens gathered and sums scattered in each layer",
    "expert": "tokens to their experts and back",
    "offload": "copies to and from host memory",
}
"""What travels along an axis."""
SIMPLER = "the simpler plan is taken"
ROOMIER = "the plan that leaves more memory free is taken"
STEADIER = "the plan that loses less on a slower network is taken"
SAFER = "the plan with more margin, in memory or for a slower network, is taken"
MATTERS = 0.01
"""Share of a step from which a part of it is worth a sentence."""


@dataclass(frozen=True)
class Limit:
    """One thing that a step's time goes to."""

    name: str
    """compute, the axis whose communication shows, bubble, host, or memory."""
    seconds: float
    """What would be won if it cost nothing."""
    text: str


def limits(run: RunSpec, plan: Plan) -> tuple[Limit, ...]:
    """What limits the step of `plan`, largest first; empty where no step time is predicted."""
    said = plan.predicted
    if said is None or said.step_seconds is None or said.breakdown is None:
        return ()
    step, parts = said.step_seconds, said.breakdown
    found = [Limit("compute", parts.compute, _compute_text(said, parts.compute))]
    for axis, seconds in parts.exposed.items():
        where, what = border(run, plan, axis), MOVES.get(axis, "its communication")
        found.append(Limit(axis, seconds, f"{axis} {where}: {what}, {_share(seconds, step)} not hidden behind compute"))
    many = f"{plan.batch.accumulate} micro-batch{'es' * (plan.batch.accumulate > 1)} on {plan.axis_size('pipeline')} pipeline ranks"
    found.append(
        Limit("bubble", parts.bubble, f"bubble: {_share(parts.bubble, step)} waiting for other stages, {many}")
    )
    found.append(Limit("host", parts.host, f"host: {_share(parts.host, step)} in which the device waits for launches"))
    found += _memory_limits(run, plan, said)
    return tuple(sorted((one for one in found if one.seconds > MATTERS * step), key=lambda one: -one.seconds))


def border(run: RunSpec, plan: Plan, axis: str) -> str:
    """The link that `axis` runs over, in words with its rate."""
    cluster = as_nodes(run.cluster)
    if axis == "offload":
        return "on the host link"
    inner = {"context": CONTEXT_AXES}.get(axis, (axis,))
    across = any(one.axis in inner and one.crosses == "node" for one in plan.mesh)
    if axis == "expert":
        layout = Layout.of(plan, cluster.ranks_per_node)
        across = any(map(layout.crosses_nodes, layout.expert_groups()))
    rate = ""
    if cluster.gpu in CHIPS:
        machine = machine_of(cluster, plan.precision.compute)
        rate = f" ({number(machine.nic if across else machine.link) / 1e9:.4g} GB/s a GPU)"
    return f"{'between nodes' if across else 'inside a node'}{rate}"


def lost(run: RunSpec, best: Candidate, other: Candidate) -> str:
    """Why `other` was not taken in place of `best`, both plans for `run`."""
    if not other.fits:
        return f"does not fit: {shortfall(run, other.plan)}"
    mine, theirs = best.plan.predicted, other.plan.predicted
    if mine is None or theirs is None or mine.step_seconds is None or theirs.step_seconds is None:
        return _costlier(best.plan, other.plan)
    behind = other.behind(best)
    if why := alike(best, other):
        return f"{why}: {reason_for(best.plan, other.plan) if behind < 0 else _costlier(best.plan, other.plan)}"
    if other.simulated != best.simulated:
        return f"{_longer(behind)} by the quick estimate, behind others of its kind"
    worse = _worse(mine, theirs)
    name, most = max(worse.items(), key=lambda item: item[1], default=("", 0.0))
    return f"{_longer(behind)}: {name} {_longer(most)}" if name else _longer(behind)


def reason_for(best: Plan, other: Plan) -> str:
    """Why `best` is taken of two plans that cannot be told apart (`finalists.simplest`)."""
    if complexity(best) <= complexity(other):
        return SIMPLER
    fuller = peak_bytes(other) > peak_bytes(best) and any(len(stages) > 1 for stages in other.schedule.stages)
    crosses = any(axis.crosses == "node" for axis in other.mesh)
    if fuller == crosses:
        return SAFER
    return ROOMIER if fuller else STEADIER


def alike(best: Candidate, other: Candidate) -> str:
    """Why a prediction does not say that `other` takes longer than the chosen plan; empty where it does.

    One rule for all that is said of two plans: within `ALIKE` of each other they cannot be told apart, and the simplest is taken. A plan
    that seems faster by more was left for a reason, which is named.
    """
    behind, least = other.behind(best), ALIKE * best.seconds
    if behind > least:
        return ""
    if behind >= -least:
        return f"cannot be told apart (within {ALIKE:.0%})"
    if moves_activations(other.plan) and not moves_activations(best.plan):
        return "gains too little to pin the host's memory for"
    return "cannot be told apart " + (
        "by the quick estimate" if other.simulated != best.simulated else "within the 80% band"
    )


def shortfall(run: RunSpec, plan: Plan, usable_bytes: float | None = None) -> str:
    """Which pipeline rank of `plan` needs more than it may use, by how much, and what fills it."""
    rows = memory_of(run.model, run.train, plan, cpu=run.cluster.is_cpu)
    needs = [sum(kinds.values()) for kinds in rows]
    limits = usable_by_rank(run, plan, usable_bytes or HEADROOM * (run.cluster.memory_bytes() or 0))
    rank = max(range(len(rows)), key=lambda at: needs[at] - limits[at])
    need, usable = needs[rank], limits[rank]
    kinds = sorted(rows[rank].items(), key=lambda item: -item[1])
    largest = ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in kinds[:3])
    where = f"pipeline rank {rank}" if len(rows) > 1 else "a rank"
    if need <= usable:
        return f"{where} needs {need / 1e9:.1f} GB of the {usable / 1e9:.1f} that may be used ({largest} GB)"
    over = f"{(need - usable) / 1e9:.1f} GB over the {usable / 1e9:.1f} that may be used"
    return f"{where} needs {need / 1e9:.1f} GB, {over} ({largest} GB)"


def parts_of(said: Predicted) -> dict[str, float]:
    """The breakdown as one row: compute, exposed AXIS, bubble, host, in seconds, without what is nothing."""
    if said.breakdown is None:
        return {}
    exposed = {f"exposed {axis}": seconds for axis, seconds in said.breakdown.exposed.items()}
    row = {"compute": said.breakdown.compute, **exposed, "bubble": said.breakdown.bubble, "host": said.breakdown.host}
    return {name: seconds for name, seconds in row.items() if seconds > 0}


def _worse(mine: Predicted, theirs: Predicted) -> Mapping[str, float]:
    """By how many seconds each part of `theirs` is longer."""
    before = parts_of(mine)
    more = {name: seconds - before.get(name, 0.0) for name, seconds in parts_of(theirs).items()}
    return {name: seconds for name, seconds in more.items() if seconds > 0}


def _costlier(best: Plan, other: Plan) -> str:
    """The first thing that costs time in `other` and not in `best`, where seconds do not tell."""
    mine, theirs = best.layers[0], other.layers[0]
    leaner = RECOMPUTE_MODES.index(theirs.recompute) > RECOMPUTE_MODES.index(mine.recompute)
    crossing = [any(axis.axis == "shard" and axis.crosses == "node" for axis in plan.mesh) for plan in (best, other)]
    told = (
        (leaner, f"computes activations twice (recompute {theirs.recompute})"),
        (theirs.offload != mine.offload and theirs.offload != "none", f"copies to host memory (offload {theirs.offload})"),
        (theirs.reshard and not mine.reshard, "gathers weights twice"),
        (crossing[1] and not crossing[0], "shards across nodes"),
        (other.batch.micro_batch < best.batch.micro_batch, "smaller products to hide gathers under"),
        (peak_bytes(other) - peak_bytes(best) > 5e7, f"needs {(peak_bytes(other) - peak_bytes(best)) / 1e9:.1f} GB more"),
    )  # fmt: skip
    return next((text for true, text in told if true), SIMPLER)


def _compute_text(said: Predicted, seconds: float) -> str:
    assert said.step_seconds is not None
    text = f"compute: {_share(seconds, said.step_seconds)} is arithmetic"
    return text + (
        f", at {said.mfu * said.step_seconds / seconds:.0%} of the chip's peak" if said.mfu and seconds else ""
    )


def _memory_limits(run: RunSpec, plan: Plan, said: Predicted) -> list[Limit]:
    """What is there only because memory is short, and would go faster without: recomputation, further gathers, small micro-batches."""
    budget, found = run.cluster.memory_bytes(), []
    if budget is None or said.step_seconds is None:
        return []
    for what, roomy in _roomier(run, plan):
        # Only what does not fit is worth its price.
        rows = memory_of(run.model, run.train, roomy, cpu=run.cluster.is_cpu)
        usable = usable_by_rank(run, plan, HEADROOM * budget)
        if all(sum(kinds.values()) <= limit for kinds, limit in zip(rows, usable, strict=True)):
            continue
        free = repriced(run, roomy).predicted
        assert free is not None and free.step_seconds is not None
        won = said.step_seconds - free.step_seconds
        if won > 0:
            text = f"memory: {what[0]} {_share(won, said.step_seconds)}; {what[1]} {shortfall(run, roomy)}"
            found.append(Limit("memory", won, text))
    return found


def _roomier(run: RunSpec, plan: Plan) -> Iterator[tuple[tuple[str, str], Plan]]:
    """(what costs time, without what), and the plan without it."""
    pins, batch = pins_of(run), plan.batch
    if any(layer.recompute != "none" for layer in plan.layers):
        mode = max((layer.recompute for layer in plan.layers), key=RECOMPUTE_MODES.index)
        layers = tuple(replace(layer, recompute="none") for layer in plan.layers)
        yield (f"recompute {mode} takes", "without it"), replace(plan, layers=layers)
    if pins.reshard is None and pins.layers is None and any(layer.reshard for layer in plan.layers):
        layers = tuple(replace(layer, reshard=False) for layer in plan.layers)
        yield ("gathering weights again takes", "with them kept"), replace(plan, layers=layers)
    if pins.micro_batch is None and not batch.accumulate % 2 and batch.accumulate // 2 >= plan.axis_size("pipeline"):
        larger = replace(batch, micro_batch=2 * batch.micro_batch, accumulate=batch.accumulate // 2)
        with suppress(BadInput):  # the schedule needs other numbers of micro-batches
            yield (
                (f"micro-batches of {batch.micro_batch} cost", f"with {larger.micro_batch}"),
                _checked(run, replace(plan, batch=larger)),
            )


def _checked(run: RunSpec, plan: Plan) -> Plan:
    """`plan`; raises BadInput when its schedule cannot be made."""
    memory_of(run.model, run.train, plan, cpu=run.cluster.is_cpu)
    return plan


def _share(seconds: float, step: float) -> str:
    return f"{seconds_text(seconds)} ({seconds / step:.0%})"


def _longer(seconds: float) -> str:
    return f"+{seconds_text(seconds)}"


def seconds_text(value: float) -> str:
    """Seconds with two digits behind the point, or milliseconds with three digits."""
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1e3:#.3g} ms"
