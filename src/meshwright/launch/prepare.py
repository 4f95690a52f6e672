"""From a loaded run file to a run folder its ranks can start from: data resolved, plan chosen, resume decided.

A run folder holds config.yaml (resolved), plan.yaml, environment.json, lease.json, assignment.json, metrics.jsonl, checkpoints/, logs/
and report.html.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from meshwright.config.load import load_plan, plan_yaml, resolved_yaml
from meshwright.data.corpus import STDLIB
from meshwright.data.manifest import Manifest, locate
from meshwright.data.source import DataSource, has_validation, open_data
from meshwright.data.stdlib import VOCABULARY, ensure_stdlib, stdlib_folder
from meshwright.durable.writes import remove_partials, write_durable
from meshwright.launch.corpus import check_tokenizer, check_unchanged
from meshwright.launch.disk import check_disk
from meshwright.launch.folder import continues, is_finished, take_over
from meshwright.launch.machine import host_memory_bytes
from meshwright.models.families import export_obstacle
from meshwright.observe.sinks import check_sinks
from meshwright.planner.candidate import (
    HOST_HEADROOM,
    Candidate,
    host_budget,
    host_excess_bytes,
    idle_fields,
    overfull_ranks,
    untrainable,
)
from meshwright.planner.devices import choose_devices
from meshwright.planner.explain import shortfall
from meshwright.planner.fixes import search_or_suggest_fixes
from meshwright.planner.reprice import predict
from meshwright.schedules.plan_schedule import stage_schedule
from meshwright.simulator.step_simulation import host_bytes
from meshwright.spec.chips import GiB
from meshwright.spec.errors import BadInput, Damaged, MeshwrightError, OutOfResources, attach_key
from meshwright.spec.fields import to_plain
from meshwright.spec.plan import Plan
from meshwright.spec.rank_environment import started_by_launcher
from meshwright.spec.run import Assignment, RunSpec

VOCABULARY_MULTIPLE = 128
"""A model's vocabulary taken from a tokenizer is rounded up to this: whole tiles of the head's matrix product."""

Note = Callable[[str], None]
T = TypeVar("T")


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
    if run.model.vocab_size:
        return run
    if source.vocab_size is None:
        raise BadInput(
            f"model.vocab_size is not set and {', '.join(run.data.mix)} has no tokenizer to take it from; set model.vocab_size",
            key="model.vocab_size",
        )
    return _for_tokens(run, source.vocab_size)


def open_run_data(run: RunSpec) -> DataSource:
    """The run's training data; opening it finds what is wrong with it before any rank starts."""
    return open_data(run.data, seq_len=run.train.seq_len, seed=run.seed, vocab_size=run.model.vocab_size or None)


def check_validation(run: RunSpec, note: Note) -> None:
    """Raise BadInput or Damaged when the validation data cannot be read, or is not of the training data's tokenizer."""
    if not has_validation(run.data, run.train.seq_len):
        if has_validation(run.data, 0):
            note(
                f"no validation: what was held out fills no sequence of {run.train.seq_len:,} tokens; data.validation may name other text"
            )
        return
    vocabulary = run.model.vocab_size or None
    source = open_data(run.data, seq_len=run.train.seq_len, seed=run.seed, vocab_size=vocabulary, split="validation")
    ours, theirs = _tokenizer_digests(open_run_data(run)), _tokenizer_digests(source)
    if ours and theirs and not theirs <= ours:
        raise BadInput(
            f"data.validation: {run.data.validation} was prepared with another tokenizer than {', '.join(run.data.mix)}; "
            "prepare it with the tokenizer.json of the training data"
        )


def _tokenizer_digests(source: DataSource) -> set[str]:
    manifests = [opened.directory.manifest for opened in source.sources.values()]
    return {manifest.tokenizer.digest for manifest in manifests if manifest}


def needs_stdlib(run: RunSpec) -> bool:
    """Whether the run reads the built-in corpus, which is prepared on first use."""
    return STDLIB in (*run.data.mix, run.data.validation) and not Path(STDLIB).exists()


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


def plan_for(run: RunSpec) -> tuple[Plan, tuple[Candidate, ...]]:
    """The plan in the run's plan file, or the planner's choice around its pins of what this release can train, over all devices; and every
    candidate, the chosen one first."""
    if isinstance(run.plan, str) and run.plan != "auto":
        return given_plan(run), ()
    answer = search_or_suggest_fixes(run, memory_bytes=device_memory(run))
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
    plan, _ = plan_for(run)
    refuse_untrainable(run, plan)
    for said in idle_fields(plan):
        note(said)
    return plan


def on_used_devices(run: RunSpec, note: Note) -> RunSpec:
    """The run on the devices of this host that `train` starts ranks on: all, or a part of them where that is faster (`planner.devices`),
    of which `note` hears.

    Runs of several hosts, plan files and ranks that a launcher started keep the devices that they have. A run that has no plan is left as
    it is, for its preparation to refuse.
    """
    fixed = isinstance(run.plan, str) and run.plan != "auto"
    if fixed or run.cluster.nodes > 1 or started_by_launcher() or not run.train.global_batch % run.cluster.ranks:
        return run
    asked = on_this_host(with_vocabulary(run))
    try:
        idle = (chosen := choose_devices(asked, memory_bytes=device_memory(run))).idle
    except MeshwrightError:
        return run
    if idle is None:
        return run
    note(idle.sentence)
    return replace(run, cluster=replace(chosen.run.cluster, host_memory_gib=run.cluster.host_memory_gib))


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
    if any(overfull_ranks(run, plan, memory)):
        return f"{shortfall(run, plan, memory)}; lower batch.micro_batch, shard over more ranks, or set recompute or offload in layers"
    if over := host_excess_bytes(run, plan):
        said = "" if run.cluster.host_memory_gib else ", a guess where it is not given"
        return (
            f"offloaded data is {over / 1e9:.1f} GB over the {host_budget(run) / 1e9:.1f} of each host that may be used "
            f"({HOST_HEADROOM:.0%} of cluster.host_memory_gib{said}); offload fewer layers, or use more nodes"
        )
    return None


class Attempt(Protocol):
    """Runs one check and returns what `work` returns. An implementation raises the check's error, or records it and returns None.

    `key` is the run-file key to blame, `expected` what should be there. `needs` are other keys that must be valid before the check makes
    sense; where they are not, it is not run.
    """

    def __call__(self, key: str, expected: str, work: Callable[[], T], needs: Sequence[str] = ()) -> T | None: ...


@dataclass(frozen=True)
class Readiness:
    """What the checks before a start found."""

    run: RunSpec
    """The run, with `vocab_size` taken from its data."""
    resumes: bool = False
    finished: bool = False
    plan: Plan | None = None


def check_start(
    run: RunSpec, runs: Path, attempt: Attempt, note: Note, *, build_stdlib: bool, fresh: bool = False
) -> Readiness:
    """Run every check between a loaded run and its start, for `check` and `train` alike, through `attempt`.

    `build_stdlib` prepares the built-in corpus on its first use; if False, checks that need it are skipped then. With `fresh`, an existing
    run of this name is not compared: the caller chooses another name. A run that trains holds its folder's lock.
    """
    folder = runs / run.name
    run = _check_data(run, attempt, note, build_stdlib=build_stdlib)
    known = bool(run.model.vocab_size)
    run = with_vocabulary(run)
    resumes = None
    if known and not fresh:  # without its vocabulary a run would seem to differ from every earlier run
        same_name = "a new name, or a run with the same configuration"
        resumes = attempt("name", same_name, lambda: continues(run, folder), ("seed", "model", "data", "train"))
    if resumes and is_finished(run, folder):
        note(f"{folder} is finished: {run.train.steps} of {run.train.steps} steps; nothing is changed in it")
        return Readiness(run, resumes=True, finished=True)
    attempt("observe", "packages that are installed", lambda: check_sinks(run.observe))
    if resumes:
        unchanged = "the data of the run's checkpoints"
        attempt("data.mix", unchanged, lambda: check_unchanged(run, folder, open_run_data(run), note))
    else:
        attempt("model.init", "weights of this model and tokenizer", lambda: check_init(run, note), ("model", "data"))
    attempt("model", "a model", lambda: _note_export(run, note))
    plan = attempt("plan", "a plan that fits the cluster", lambda: _make_plan(run, note), ("model", "train", "cluster"))
    seconds = plan.predicted.step_seconds if plan is not None and plan.predicted is not None else None
    room = "room for the run's checkpoints"
    attempt("checkpoint", room, lambda: check_disk(run, folder, seconds), ("model", "name"))
    return Readiness(run, resumes=bool(resumes), plan=plan)


def _note_export(run: RunSpec, note: Note) -> None:
    if obstacle := export_obstacle(run.model):
        note(f"this model trains, and cannot be exported to a Hugging Face folder: {obstacle}")


def _check_data(run: RunSpec, attempt: Attempt, note: Note, *, build_stdlib: bool) -> RunSpec:
    """The run with the vocabulary of its data, every source of which is looked for before any is opened or prepared."""
    expected, found = "prepared data", True
    for name in run.data.mix:
        found &= attempt(f"data.mix.{name}", expected, lambda name=name: _check_source(run, name), ("data",)) or False
    validation = run.data.validation
    if validation:
        found &= attempt("data.validation", expected, lambda: _check_exists(validation), ("data",)) or False
    if not found or (lacks_stdlib(run) and not build_stdlib):
        return run
    fitting = "prepared data with a tokenizer that the model fits"
    resolved = attempt("data.mix", fitting, lambda: resolve_data(run, note), ("data", "model", "train.seq_len"))
    if resolved is not None:
        attempt("data.validation", fitting, lambda: check_validation(resolved, note))
    return resolved or run


def _check_source(run: RunSpec, name: str) -> bool:
    """Open one source of a mixture, so that what is wrong with it is found by its name; the built-in corpus may be missing yet."""
    if not (name == STDLIB and lacks_stdlib(run)):
        _check_exists(name)
        open_run_data(replace(run, data=replace(run.data, mix={name: 1.0}, validation=None)))
    return True


def _check_exists(name: str) -> bool:
    """Raise BadInput for data that is not there; the built-in corpus may be missing yet."""
    if name != STDLIB or Path(name).exists():
        locate(Path(name))
    return True


def _make_plan(run: RunSpec, note: Note) -> Plan:
    """The plan with what is predicted for this machine: the figures in a plan file may come from another one."""
    plan = predict(run, training_plan(run, note))
    check_host_memory(run, plan)
    return plan


def _raise_on_failure(key: str, expected: str, work: Callable[[], T], needs: Sequence[str] = ()) -> T:
    """The Attempt of a start: the first check that fails ends it, with an error that carries its key."""
    del expected, needs
    with attach_key(key):
        return work()


def prepare_run(
    run: RunSpec,
    runs: Path,
    *,
    profile: tuple[int, int] | None,
    note: Note,
    timeline: tuple[int, int] | None = None,
) -> Prepared | None:
    """Make or reopen the run's folder and write what its ranks need; None for a run that is finished, which is left as it is.

    Raises the first error of `check_start`: BadInput when a run of this name exists with another configuration, when data or weights are
    not there, or a package is missing, and OutOfResources when the devices, the disk or the host's memory are too small.
    """
    ready = check_start(run, runs, _raise_on_failure, note, build_stdlib=True)
    if ready.finished:
        return None
    run, plan, resumes, folder = ready.run, ready.plan, ready.resumes, runs / run.name
    assert plan is not None  # or a check raised
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("logs", "checkpoints"):
        (folder / name).mkdir(exist_ok=True)
    lease = take_over(folder)
    remove_partials(folder)
    write_durable(folder / "config.yaml", resolved_yaml(run))
    write_durable(folder / "plan.yaml", plan_yaml(plan))
    tokenizer = open_run_data(run).tokenizer_file
    if tokenizer is not None:
        write_durable(folder / "tokenizer.json", tokenizer.read_bytes())
    assignment = Assignment(run=run, plan=plan, folder=str(folder), lease=lease, profile=profile, timeline=timeline)
    write_durable(folder / "assignment.json", json.dumps(to_plain(assignment)))
    return Prepared(assignment, folder, resumes)


def check_init(run: RunSpec, note: Note) -> None:
    """Raise BadInput when the weights that the run starts from are not there or not its model's, or their tokenizer is not the corpus'."""
    if run.model.init != "scratch":
        from meshwright.checkpoint.initial import check_initial  # needs torch

        check_initial(run.model, run.model.init)
        if not lacks_stdlib(run):
            check_tokenizer(run, open_run_data(run), note)


def check_host_memory(run: RunSpec, plan: Plan) -> None:
    """Raise OutOfResources when this host cannot hold what its ranks let wait in host memory."""
    activations, optimizer = host_bytes(run.model, run.train, plan, run.cluster.nodes)
    need, there = activations + optimizer, host_memory_bytes()
    if need > there:
        raise OutOfResources(
            f"plan.offload: activations take {activations / 1e9:.1f} and the optimizer {optimizer / 1e9:.1f} GB of host memory, and "
            f"this host has {there / 1e9:.1f} GB; offload fewer layers (plan.layers), or use more nodes"
        )
