"""From a loaded run file to a run folder its ranks can start from: data resolved, plan chosen, resume decided.

A run folder holds config.yaml (resolved), plan.yaml, environment.json, assignment.json, metrics.jsonl, checkpoints/, logs/, report.html.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.data.corpus import STDLIB
from meshwright.data.manifest import Manifest, locate
from meshwright.data.source import DataSource, has_validation, open_data
from meshwright.data.stdlib import VOCABULARY, ensure_stdlib, stdlib_folder
from meshwright.files.durable import remove_partials, write_durable
from meshwright.launch.disk import check_disk, checkpoints_line
from meshwright.launch.folder import continues, is_finished
from meshwright.launch.machine import host_memory_bytes
from meshwright.observe.sinks import check_sinks
from meshwright.planner.candidate import (
    HOST_HEADROOM,
    Candidate,
    host_budget,
    idle_fields,
    over_by_rank,
    over_host,
    untrainable,
)
from meshwright.planner.explain import shortfall
from meshwright.planner.fixes import search_or_fixes
from meshwright.planner.reprice import repriced
from meshwright.schedules.of_plan import stage_schedule
from meshwright.simulator.of_plan import host_bytes
from meshwright.spec.chips import GiB
from meshwright.spec.errors import BadInput, Damaged, OutOfResources
from meshwright.spec.fields import to_plain
from meshwright.spec.load import load_plan, plan_yaml, resolved_yaml
from meshwright.spec.plan import Plan
from meshwright.spec.run import Assignment, RunSpec

VOCABULARY_MULTIPLE = 128
"""A model's vocabulary taken from a tokenizer is rounded up to this: whole tiles of the head's matrix product."""

Note = Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    """A run that may start: its folder exists, and `assignment` is written in it."""

    assignment: Assignment
    folder: Path
    resumes: bool


def resolve_data(run: RunSpec, note: Note) -> RunSpec:
    """Prepare the built-in corpus if it is asked for, open the data, and give a model without a vocabulary its tokenizer's.

    Raises BadInput when the data cannot be read or a model's vocabulary cannot be known, and Damaged (see `data.damaged`).
    """
    if lacks_stdlib(run):
        note(f"preparing Python's standard library as training text in {stdlib_folder()}")
        ensure_stdlib(stdlib_folder(), shown=True)
    source = open_run_data(run)
    if not has_validation(run.data, run.train.seq_len) and has_validation(run.data, 0):
        note(
            f"no validation: what was held out fills no sequence of {run.train.seq_len:,} tokens; data.validation may name other text"
        )
    if run.model.vocab_size:
        return run
    if source.vocab_size is None:
        raise BadInput(
            f"model.vocab_size is not set and {', '.join(run.data.mix)} has no tokenizer to take it from; set model.vocab_size"
        )
    return _for_tokens(run, source.vocab_size)


def open_run_data(run: RunSpec) -> DataSource:
    """The run's training data; opening it finds what is wrong with it before any rank starts."""
    return open_data(run.data, seq_len=run.train.seq_len, seed=run.seed, vocab_size=run.model.vocab_size or None)


def needs_stdlib(run: RunSpec) -> bool:
    """Whether the run reads the built-in corpus, which is prepared on first use."""
    return STDLIB in run.data.mix and not Path(STDLIB).exists()


def lacks_stdlib(run: RunSpec) -> bool:
    """Whether this is the first use."""
    return needs_stdlib(run) and not stdlib_folder().exists()


def with_vocabulary(run: RunSpec) -> RunSpec:
    """The run with a vocabulary to plan for: its data's, or the built-in tokenizer's size when that is not there yet."""
    return run if run.model.vocab_size else _for_tokens(run, _tokens_of_data(run) or VOCABULARY)


def _for_tokens(run: RunSpec, count: int) -> RunSpec:
    return replace(run, model=replace(run.model, vocab_size=-(-count // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE))


def _tokens_of_data(run: RunSpec) -> int | None:
    """Tokens of the tokenizer that the run's data was made with; None where no data says it. What else is wrong with the data is no matter
    of the plan's: `resolve_data` says it."""
    sizes = []
    for name in run.data.mix:
        try:
            folder, foreign = locate(stdlib_folder() if name == STDLIB and needs_stdlib(run) else Path(name))
            sizes += [] if foreign else [Manifest.read(folder).tokenizer.vocab_size]
        except (BadInput, Damaged):
            continue
    return max(sizes, default=None)


def plan_for(run: RunSpec, *, trainable: bool = False) -> tuple[Plan, tuple[Candidate, ...]]:
    """The plan in the run's plan file, or the planner's choice around its pins, and every candidate, the chosen one first.

    `trainable` chooses among what this release can train.
    """
    if isinstance(run.plan, str) and run.plan != "auto":
        return given_plan(run), ()
    answer = search_or_fixes(run, memory_bytes=device_memory(run), trainable=trainable)
    return answer.best.plan, (answer.best, *answer.others)


def given_plan(run: RunSpec) -> Plan:
    """The plan in the run's plan file. What it says of why it was chosen is of before it was edited.

    Raises BadInput, which names the file, where its schedule cannot be made for so many ranks and micro-batches.
    """
    plan = load_plan(Path(str(run.plan)), run.cluster)
    try:
        stage_schedule(plan, run.model.layers)
    except BadInput as refused:
        raise BadInput(f"{run.plan}: {refused}") from None
    return replace(plan, why=(f"as {os.path.relpath(str(run.plan))} says",))


def device_memory(run: RunSpec) -> int | None:
    """A CPU rank's share of this host's memory; None for GPUs, whose cluster says it."""
    return host_memory_bytes() // run.cluster.gpus_per_node if run.cluster.is_cpu else None


def on_this_host(run: RunSpec) -> RunSpec:
    """The run, with this host's memory where its cluster of GPUs does not say."""
    if run.cluster.is_cpu or run.cluster.host_memory_gib is not None:
        return run
    return replace(run, cluster=replace(run.cluster, host_memory_gib=host_memory_bytes() / GiB))


def training_plan(run: RunSpec, note: Note) -> Plan:
    """The plan of a run that will train; `note` hears what of it gains nothing. Raises BadInput and OutOfResources as `refuse_untrainable`
    does."""
    run = on_this_host(run)
    plan, _ = plan_for(run, trainable=True)
    refuse_untrainable(run, plan)
    for said in idle_fields(plan):
        note(said)
    return plan


def refuse_untrainable(run: RunSpec, plan: Plan) -> None:
    """Raise BadInput for a plan that this release can only plan, and OutOfResources for one that does not fit; a plan file is named."""
    named = f"{run.plan}: " if isinstance(run.plan, str) and run.plan != "auto" else ""
    if refused := untrainable(plan, mixture=run.model.experts > 0):
        raise BadInput(named + refused)
    if over := misfit(run, plan):
        raise OutOfResources(f"{named}does not fit: {over}")


def misfit(run: RunSpec, plan: Plan) -> str | None:
    """What a rank of the plan needs beyond its device's memory, or what it lets wait beyond the host's, and which keys lower that; None
    where all fits. A plan that a person wrote may fill the share of a device that a search leaves free."""
    memory = run.cluster.memory_bytes() or device_memory(run)
    if any(over_by_rank(run, plan, memory)):
        return f"{shortfall(run, plan, memory)}; lower batch.micro_batch, shard over more ranks, or set recompute or offload in layers"
    if over := over_host(run, plan):
        said = "" if run.cluster.host_memory_gib else ", a guess where it is not given"
        return (
            f"what waits in host memory is {over / 1e9:.1f} GB over the {host_budget(run) / 1e9:.1f} of each host that may be used "
            f"({HOST_HEADROOM:.0%} of cluster.host_memory_gib{said}); offload fewer layers, or use more nodes"
        )
    return None


def prepare_run(
    run: RunSpec,
    runs: Path,
    *,
    profile: tuple[int, int] | None,
    note: Note,
    timeline: tuple[int, int] | None = None,
) -> Prepared | None:
    """Make or reopen the run's folder and write what its ranks need; a run that is finished is said to be, and left as it is.

    Raises BadInput when a run of this name exists with another configuration, when the weights it starts from are not there, or a package
    it asks for is missing, and OutOfResources when the devices, the disk or the host's memory are too small.
    """
    run, folder = resolve_data(run, note), runs / run.name
    resumes = continues(run, folder)
    if resumes and is_finished(run, folder):
        note(f"{folder} is finished: {run.train.steps} of {run.train.steps} steps; nothing is changed in it")
        return None
    check_sinks(run.observe)
    if not resumes:
        check_init(run)
    if line := checkpoints_line(run):
        note(line)
    # What the run is held to; a plan file's own figures may be of another machine.
    plan = repriced(run, training_plan(run, note))
    check_disk(run, folder, None if run.cluster.is_cpu or plan.predicted is None else plan.predicted.step_seconds)
    check_host_memory(run, plan)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("logs", "checkpoints"):
        (folder / name).mkdir(exist_ok=True)
    remove_partials(folder)
    write_durable(folder / "config.yaml", resolved_yaml(run))
    write_durable(folder / "plan.yaml", plan_yaml(plan))
    tokenizer = open_run_data(run).tokenizer_file
    if tokenizer is not None:
        write_durable(folder / "tokenizer.json", Path(tokenizer).read_bytes())
    assignment = Assignment(run=run, plan=plan, folder=str(folder), profile=profile, timeline=timeline)
    write_durable(folder / "assignment.json", json.dumps(to_plain(assignment)))
    return Prepared(assignment, folder, resumes)


def check_init(run: RunSpec) -> None:
    """Raise BadInput when the weights that the run starts from are not there or not its model's."""
    if run.model.init != "scratch":
        from meshwright.checkpoint.initial import check_initial  # needs torch

        check_initial(run.model, run.model.init)


def check_host_memory(run: RunSpec, plan: Plan) -> None:
    """Raise OutOfResources when this host cannot hold what its ranks let wait in host memory."""
    activations, optimizer = host_bytes(run.model, run.train, plan, run.cluster.nodes)
    need, there = activations + optimizer, host_memory_bytes()
    if need > there:
        raise OutOfResources(
            f"plan.offload: activations take {activations / 1e9:.1f} and the optimizer {optimizer / 1e9:.1f} GB of host memory, and "
            f"this host has {there / 1e9:.1f} GB; offload fewer layers (plan.layers), or use more nodes"
        )
