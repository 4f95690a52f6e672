"""Explains in sentences why a plan was chosen, or why there is no plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from meshwright.costs.machine_rates import is_guessed
from meshwright.planner.candidate import (
    HEADROOM,
    HOST_HEADROOM,
    Candidate,
    host_budget,
    host_excess_bytes,
    host_gib,
    kernel_gathers_reason,
    kernel_token_exchange_reason,
    nearest_values,
    overfull_ranks,
    peak_bytes,
    pins_of,
    untrainable,
)
from meshwright.planner.expert_reasons import uneven_loads_reason
from meshwright.planner.explain import (
    micro_batches_text,
    on_layers,
    reason_for,
    seconds_text,
    shortfall_parts,
    why_not_distinguished,
)
from meshwright.planner.finalists import SAME_TIME_TOLERANCE
from meshwright.planner.layout_search import LAYOUT_OPTIONS
from meshwright.planner.moves import MOVES, Move
from meshwright.schedules.registry import entry_of, refusal
from meshwright.simulator.step_simulation import host_bytes
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.plan import RECOMPUTE_MODES, Plan
from meshwright.spec.run import RunSpec
from meshwright.workload.copy_options import COPY_OPTIONS, GATHERS, TOKENS, CopyOption

SINGLE_RANK_NAMES = {
    "pipeline": "no pipeline",
    "tensor": "no tensor ranks",
    "context": "no context ranks",
    "replicate": "no replicas",
    "expert ranks": "all experts on each rank",
}
"""How a sentence names an axis that has one rank."""
GRADIENTS = {"whole": "kept whole between micro-batches", "shard": "reduced after every micro-batch"}
"""How a sentence describes the values of the setting `gradients`."""
KERNEL_REASONS: Mapping[CopyOption, Callable[[RunSpec, Plan], str | None]] = {
    GATHERS: kernel_gathers_reason,
    TOKENS: kernel_token_exchange_reason,
}
"""Functions that return why NCCL kernels are used instead of copy engines, for cases in which step times did not
decide.
"""
TRANSFERS = frozenset(option.transfer_name for option in COPY_OPTIONS)
"""Names of the transfers for which kernels or copy engines can be chosen."""
TRANSPORT_NAMES = {"copy_engine": "copy engines", "nccl": "kernels"}
"""How a sentence names what carries a transfer."""


def reasons(
    best: Candidate, others: Sequence[Candidate], run: RunSpec, fits: Callable[[Plan], bool] = lambda plan: False
) -> tuple[str, ...]:
    """Return one sentence for each choice in `best`, compared with the plans `others`.

    `fits` returns whether a plan fits into memory.
    """
    plan = best.plan
    pins = pins_of(run)
    guessed = is_guessed(run.cluster)
    sentences = [_guess_note(run.cluster)] if guessed else []
    free = [option for option in (*LAYOUT_OPTIONS, *MOVES) if option.free(run)]
    sentences += [_compare_values(best, others, option.name, option.value, guessed) for option in free if option.value]
    sentences += _layer_reasons(plan, run, fits)
    sentences += [option.why(run, plan, fits) for option in free if isinstance(option, Move)]
    sentences += _host_memory(plan, run)
    sentences += _transport_reasons(best, others, run)
    sentences.append(uneven_loads_reason(run, plan))
    if refused := untrainable(plan):
        sentences.append(refused)
    pinned = [key for key, value in vars(pins).items() if value is not None]
    sentences += ["pinned by the run file: " + ", ".join(pinned)] * bool(pinned)
    return tuple(sentence for sentence in sentences if sentence)


def _guess_note(cluster: ClusterSpec) -> str:
    """Return the sentence that says that the device's rates are guessed."""
    device = "a CPU" if cluster.is_cpu else cluster.gpu
    return f"plans are compared with guessed rates of {device}; a prediction of step times needs a profile (meshwright profile)"


def _compare_values(
    best: Candidate, others: Sequence[Candidate], name: str, value: Callable[[Plan], object], guessed: bool = False
) -> str:
    """Return a sentence that compares the chosen value of a setting with the fastest plans that have other values of
    it.

    It states how much longer those plans take, or why their times cannot be distinguished. `value` returns the value of
    the setting in a plan.
    """
    # The runner-ups are simulated plans. An estimate that differs from theirs only by its error would be another number
    # for the same thing.
    nearest = nearest_values(best, others, value, SAME_TIME_TOLERANCE)
    compared = [(value(other.plan), other) for other in nearest]
    if not compared:
        return ""
    slower = [
        (_other_value_text(name, other_value), _difference_text(best, other, guessed))
        for other_value, other in compared
        if not why_not_distinguished(best, other)
    ]
    gaps = [f"{setting} {'' if index else 'takes '}{gap} longer" for index, (setting, gap) in enumerate(slower)]
    texts = [", ".join(gaps)] if gaps else []
    undecided: dict[str, list[str]] = {}
    for other_value, other in compared:
        if why := why_not_distinguished(best, other):
            undecided.setdefault(f"{why}: {reason_for(best.plan, other.plan)}", []).append(
                _other_value_text(name, other_value)
            )
    texts += [f"{' and '.join(settings)} {why}" for why, settings in undecided.items()]
    return f"{_value_text(name, value(best.plan))}: the best plan found {'; '.join(texts)}"


def _transport_reasons(best: Candidate, others: Sequence[Candidate], run: RunSpec) -> Iterator[str]:
    """Yield the reasons why kernels or copy engines gather weights and exchange tokens, if the search could choose."""
    for option, kernel_reason in KERNEL_REASONS.items():
        ranks = option.ranks(best.plan)
        if ranks == 1 or option.pin(pins_of(run)) is not None or run.cluster.is_cpu:
            continue
        why = kernel_reason(run, best.plan) if option.transport(best.plan) == "nccl" else None
        comparable = [candidate for candidate in others if option.ranks(candidate.plan) == ranks]
        yield (
            f"{option.transfer_name} by kernels: {why}"
            if why
            else _compare_values(best, comparable, option.transfer_name, option.transport)
        )


def _value_text(name: str, value: object) -> str:
    """Return a setting and its value, for a sentence.

    >>> _value_text("tensor", 2)
    'tensor 2'
    """
    if name == "gradients":
        return f"gradients {GRADIENTS[str(value)]}"
    if name in TRANSFERS:
        return f"{name} by {TRANSPORT_NAMES[str(value)]}"
    return SINGLE_RANK_NAMES[name] if name in SINGLE_RANK_NAMES and value == 1 else f"{name} {value}"


def _other_value_text(name: str, value: object) -> str:
    """Return the value of another plan for the same setting, for a sentence: "with 4", "without"."""
    if name == "gradients":
        return f"with them {GRADIENTS[str(value)]}"
    if name in TRANSFERS:
        return f"with {TRANSPORT_NAMES[str(value)]}"
    return "without" if name in SINGLE_RANK_NAMES and value == 1 else f"with {value}"


def _difference_text(best: Candidate, other: Candidate, guessed: bool) -> str:
    """Return how much longer the other plan takes: in seconds, or in percent of the best step if the device's rates are
    `guessed`.
    """
    behind = other.behind(best)
    return f"{behind / best.seconds:.0%}" if guessed else seconds_text(behind)


def _layer_reasons(plan: Plan, run: RunSpec, fits: Callable[[Plan], bool]) -> Iterator[str]:
    """Yield why some layers recompute activations or offload."""
    pins = pins_of(run)
    total = run.model.layers
    low_memory = [layer for layer in plan.layers if layer.recompute != "none"]
    if low_memory and pins.recompute is None and pins.layers is None:
        larger_plan = replace(plan, layers=tuple(replace(layer, recompute="none") for layer in plan.layers))
        too_large = f"without it {micro_batches_text(plan)} do not fit into memory"
        by_mode = {mode: [layer for layer in low_memory if layer.recompute == mode] for mode in RECOMPUTE_MODES}
        modes = [f"{mode} on {on_layers(layers, total)}" for mode, layers in by_mode.items() if layers]
        yield f"recompute {' and '.join(modes)}: {'without it a step is no faster' if fits(larger_plan) else too_large}"
    if pins.offload is not None:
        return
    for offload in sorted({layer.offload for layer in plan.layers} - {"none"}):
        layers_text = on_layers([layer for layer in plan.layers if layer.offload == offload], total)
        yield f"offload {offload} on {layers_text}: without it only a slower plan fits into memory"


def _host_memory(plan: Plan, run: RunSpec) -> list[str]:
    """Return sentences about the memory of each host that the plan's offload uses."""
    sizes = host_bytes(run.model, run.train, plan, run.cluster.nodes)
    labelled = zip(("activations take", "the optimizer takes", "sums of gradients take"), sizes, strict=True)
    return [
        f"{label} {size / 1e9:.1f} GB of each host's memory{_guess_suffix(run)}" for label, size in labelled if size
    ]


def _guess_suffix(run: RunSpec) -> str:
    """Return a remark that the size of host memory is a guess, if `cluster.host_memory_gib` is not set."""
    known = run.cluster.host_memory_gib is not None or run.cluster.is_cpu
    return "" if known else f"; assumes {host_gib(run):,.0f} GiB per host, because cluster.host_memory_gib is not set"


def nothing_fits(run: RunSpec, candidates: Sequence[Candidate], budget: int) -> str:
    """Return why no plan fits into `budget` bytes per device, in lines of one fact each. They describe the plan that needs
    least memory.
    """
    smallest = min(
        candidates, key=lambda candidate: (host_excess_bytes(run, candidate.plan), peak_bytes(candidate.plan))
    ).plan
    need, largest = shortfall_parts(run, smallest, budget)
    lines = [need, f"its largest parts: {largest}", f"usable is {HEADROOM:.0%} of a device"]
    if over := host_excess_bytes(run, smallest):
        usable = host_budget(run)
        needs = f"offloaded data needs {(usable + over) / 1e9:.1f} GB of each host"
        host_lines = [
            f"{needs}, {over / 1e9:.1f} GB more than the usable {usable / 1e9:.1f} GB",
            f"usable is {HOST_HEADROOM:.0%} of cluster.host_memory_gib{_guess_suffix(run)}",
        ]
        lines = host_lines + (lines if any(overfull_ranks(run, smallest, budget)) else [])
    return "no plan fits into memory: in the plan that needs least, " + "\n  ".join(lines)


def no_layout(run: RunSpec) -> str:
    """Return why the pins and sizes of the run allow no layout."""
    pins = pins_of(run)
    cluster = run.cluster
    batch = run.train.global_batch
    pipeline = pins.pipeline or len(pins.stages or ()) or 1
    model_ranks = pipeline * prod(size or 1 for size in (pins.tensor, pins.context_ring, pins.context_ulysses))
    data = cluster.ranks // model_ranks
    if pins.schedule and model_ranks * data == cluster.ranks and data and batch % (data * (pins.micro_batch or 1)) == 0:
        micro_batches = batch // (data * (pins.micro_batch or 1))
        allowed = entry_of(pins.schedule).stages_per_rank
        per_rank = len(pins.stages[0]) if pins.stages else allowed.start
        if refused := refusal(pins.schedule, pipeline, micro_batches, per_rank):
            definition = "micro-batches are train.global_batch ÷ data ranks ÷ micro-batch size"
            return f"no plan: {refused}; {definition if per_rank in allowed else 'plan.stages lists the stages of each rank'}"
    if pins.expert and (refused := _expert_misfit(run, pins.expert)):
        return f"no plan: {refused}"
    heads = run.model.heads
    seq = run.train.seq_len
    return (
        f"no plan: train.global_batch {batch} must be a multiple of the data ranks (the cluster's {cluster.ranks} ranks ÷ pinned pipeline, "
        "tensor and context; times plan.micro_batch if pinned), plan.replicate × plan.shard that number, and pinned tensor and context "
        f"ranks must divide the model's {heads} heads and the sequence's {seq} tokens"
    )


def _expert_misfit(run: RunSpec, expert: int) -> str | None:
    """Return why experts cannot be divided over `expert` ranks together with the pinned axes; None if they can."""
    pins = pins_of(run)
    experts = run.model.experts
    tensor = pins.tensor or 1
    data_ranks = run.cluster.ranks
    for size in (pins.pipeline, pins.replicate, pins.tensor):
        data_ranks //= size or 1
    if experts % (expert * tensor) == 0 and data_ranks % expert == 0:
        return None
    tensor_text = f" × {tensor} tensor ranks" if tensor > 1 else ""
    return (
        f"plan.expert {expert}{tensor_text} must divide the model's {experts} experts, and plan.expert the {data_ranks} ranks that the "
        "shard and context axes have together"
    )
