"""Prepares a run's folder from a loaded run file, so that ranks can start: opens the data, chooses the plan, checks a
resume.

A run's folder contains config.yaml (resolved), plan.yaml, environment.json, lease.json, assignment.json, metrics.jsonl,
checkpoints/, logs/ and report.html.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from meshwright.checkpoint.mirror.copies import fetch_newest
from meshwright.checkpoint.mirror.store import check_mirror
from meshwright.config.load import load_plan, plan_yaml, resolved_yaml
from meshwright.config.yaml_positions import read_yaml
from meshwright.data.inputs import STDLIB
from meshwright.data.manifest import Manifest, locate
from meshwright.data.source import DataSource, has_validation, open_data, same_text
from meshwright.data.stdlib import VOCABULARY, ensure_stdlib, stdlib_folder
from meshwright.data.step_samples import lengths_of_step
from meshwright.data.streams.open import lanes_for, stream_tokenizer
from meshwright.durable.writes import remove_partials, write_durable
from meshwright.events.waiting import telling
from meshwright.families.folder import export_obstacle
from meshwright.launch.corpus import check_tokenizer, check_unchanged
from meshwright.launch.disk import check_disk
from meshwright.launch.fine_tuning import fine_tuning_lines
from meshwright.launch.folder import check_state, continues, is_finished, take_over
from meshwright.launch.machine import host_memory_bytes
from meshwright.launch.text_files import keep_towers_of, write_text_files
from meshwright.observe.sinks import check_sinks
from meshwright.planner.batch_ramp import ramp_misfit
from meshwright.planner.candidate import (
    HOST_HEADROOM,
    Candidate,
    host_budget,
    host_excess_bytes,
    idle_fields,
    overfull_ranks,
    slot_run,
    training_refusal,
)
from meshwright.planner.devices import choose_devices
from meshwright.planner.explain import shortfall
from meshwright.planner.fixes import search_or_suggest_fixes
from meshwright.planner.reprice import predict
from meshwright.schedules.plan_schedule import stage_schedule
from meshwright.simulator.step_simulation import host_bytes
from meshwright.spec.chips import GiB
from meshwright.spec.errors import BadConfig, BadInput, Damaged, MeshwrightError, OutOfResources, Refusal, attach_key
from meshwright.spec.fields import to_sealed_json
from meshwright.spec.host_limits import usable_cores
from meshwright.spec.plan import Plan
from meshwright.spec.preference import BETAS, START
from meshwright.spec.rank_environment import started_by_launcher
from meshwright.spec.run import Assignment, ModelSection, RunSpec

VOCABULARY_MULTIPLE = 128
"""A vocabulary size taken from a tokenizer is rounded up to a multiple of this, so that the head's matmul has whole tiles."""

MOST_USUAL_RATE = 1.0
"""Learning rate above which a start asks whether the value is a mistake."""
UNUSUAL = 10
"""A start asks whether `preference.beta` is a mistake if it is more than this many times the usual value."""
MANY_EPOCHS = 4
"""If a run reads a source more often than this, a start says so.

Source: Muennighoff et al. 2023, "Scaling data-constrained language models".
"""
MEASURED_SAMPLES = 1024
"""Number of samples from which the mean length of all samples is estimated."""
MOST_SOURCES = 6
"""Most sources of a mixture that are shown."""
SAME_TOKENIZER = "prepare it with the tokenizer.json and --eos of the training data"
Note = Callable[[str], None]
"""Receives a line for the user."""
T = TypeVar("T")


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to start.

    Its `folder` exists and contains `assignment`. `resumes`: whether it continues from there.
    """

    assignment: Assignment
    folder: Path
    resumes: bool
    data_lines: tuple[str, ...] = ()
    """Lines for the user about the data."""


def resolve_data(run: RunSpec, note: Note) -> RunSpec:
    """Return the run with what follows from its data: lanes, steps, document mask and vocabulary size.

    The built-in corpus is prepared if the run uses it. Raises BadInput if the data cannot be read or the vocabulary
    size is unknown, and Damaged for damaged data (see `data.damaged`).
    """
    if run.rl is not None:
        run.rl.reward.check_path()
    if lacks_stdlib(run):
        note(f"preparing Python's standard library as training text in {stdlib_folder()}")
        ensure_stdlib(stdlib_folder(), shown=True)
    if run.data.streamed and run.data.lanes is None:
        run = replace(run, data=replace(run.data, lanes=lanes_for(run.train.global_batch)))
    source = open_run_data(run)
    for name, each in source.sources.items():
        if each.packing is not None and each.packing.truncated:
            note(f"{name}: {each.packing}")
    run = with_steps(run, source)
    _check_epochs(run, source, note)
    run = replace(run, data=replace(run.data, document_mask=source.document_mask))
    if run.model.vocab_size:
        return run
    if source.vocab_size is None:
        raise BadInput(
            f"model.vocab_size is not set and {', '.join(run.data.mix)} has no tokenizer to take it from; set model.vocab_size",
            key="model.vocab_size",
        )
    return _with_vocabulary_of(run, source.vocab_size)


def _check_epochs(run: RunSpec, source: DataSource, note: Note) -> None:
    """Report sources that the run reads too often. Raise BadInput if the run exceeds its own `data.max_epochs`."""
    most = run.data.max_epochs
    for name, epochs in planned_epochs(run, source).items():
        if epochs <= (most or MANY_EPOCHS):
            continue
        passes = f"data.mix: {name}: {run.train.steps:,} steps read it {epochs:,.1f} times"
        if most is not None:
            raise BadInput(
                f"{passes}, data.max_epochs is {most:g}; train fewer steps or add text", key="data.max_epochs"
            )
        note(f"{passes}; a model learns little from more than {MANY_EPOCHS} passes (data.max_epochs refuses them)")


def with_steps(run: RunSpec, source: DataSource) -> RunSpec:
    """Return the run with `train.epochs` converted to `train.steps`; unchanged if it has no epochs.

    Raises BadInput if the warm-up is as long as all steps.
    """
    if run.train.epochs is None:
        return run
    steps = steps_of_epochs(run, source, run.train.epochs)
    if 0 < steps <= run.train.warmup_steps:
        raise BadInput(
            f"train.warmup_steps {run.train.warmup_steps:,}: expected fewer than the {steps:,} steps of train.epochs {run.train.epochs:g}",
            key="train.warmup_steps",
        )
    return replace(run, train=replace(run.train, steps=steps, epochs=None))


def steps_of_epochs(run: RunSpec, source: DataSource, epochs: float) -> int:
    """Return the number of steps that read `epochs` times as many samples as all sources together have, rounded up."""
    samples = max(math.ceil(epochs * source.windows), 1)
    tokens = run.train.global_batch_tokens
    if tokens is None:
        return run.train.batches.steps_of(samples)
    steps = first = 0
    while first < samples:
        steps = steps + 1
        first = first + len(lengths_of_step(source, first, tokens))
    return steps


def planned_epochs(run: RunSpec, source: DataSource) -> dict[str, float]:
    """Return how often the run reads each source, by the source's name.

    With `train.global_batch_tokens`, a step's number of samples varies. It is then estimated from the mean length of
    the first `MEASURED_SAMPLES` samples.
    """
    samples = run.train.batches.samples_before(run.train.steps)
    tokens = run.train.global_batch_tokens
    if tokens is not None:
        samples = round(run.train.steps * tokens / source.lengths(range(MEASURED_SAMPLES)).mean())
    return source.epochs(samples)


def data_line(run: RunSpec, source: DataSource) -> str:
    """Return the line about the data: how often each source is read, the steps of one pass, and the document mask."""
    epochs = planned_epochs(run, source)
    shown = [f"{name} {passes:.3g} epochs" for name, passes in list(epochs.items())[:MOST_SOURCES]]
    shown += [f"{len(epochs) - MOST_SOURCES} more sources"] if len(epochs) > MOST_SOURCES else []
    own = (
        "their own document"
        if source.document_mask
        else "earlier documents of their sequence too (data.document_mask: false)"
    )
    whole = ""
    if run.train.global_batch_tokens is None:
        whole = f" in {run.train.steps:,} steps ({steps_of_epochs(run, source, 1.0):,} steps read all once)"
    return f"data: {', '.join(shown)}{whole}; tokens see {own}"


def data_lines(run: RunSpec, source: DataSource) -> tuple[str, ...]:
    """Return all lines about the data: `data_line`, the streamed sources, and fine-tuning on chats."""
    streamed = (
        f"streamed: {name}: {run.data.streams[name].files}: {each.describe_size()}"
        for name, each in source.streams.items()
    )
    return data_line(run, source), *streamed, *fine_tuning_lines(run, source)


def open_run_data(run: RunSpec) -> DataSource:
    """Open the run's training data. This happens before ranks start, so that errors in the data are found early."""
    return open_data(
        run.data,
        seq_len=run.train.seq_len,
        seed=run.seed,
        vocab_size=run.model.vocab_size or None,
        conversations=run.rl is not None,
        preference=run.preference,
    )


def check_validation(run: RunSpec, note: Note) -> None:
    """Check the validation data of a run.

    Raises BadInput or Damaged if it cannot be read, BadInput if it is also trained on, and BadInput if its texts have
    another format than the training data.
    """
    if not has_validation(run.data, run.train.seq_len):
        if has_validation(run.data, 0):
            note(
                f"no validation: the held-out text is shorter than a sequence of {run.train.seq_len:,} tokens; "
                "data.validation can name other text"
            )
        return
    vocabulary = run.model.vocab_size or None
    source = open_data(
        run.data,
        seq_len=run.train.seq_len,
        seed=run.seed,
        vocab_size=vocabulary,
        split="validation",
        preference=run.preference,
    )
    training = open_run_data(run)
    for name, held_out in source.sources.items():
        for trained in training.sources.values():
            if same_text(held_out.directory, trained.directory):
                raise BadInput(
                    f"data.validation: {name} is trained on, as {trained.name} of data.mix; name other text, or leave it out"
                )
    for held_out in source.sources.values():
        for trained in training.sources.values():
            if difference := trained.directory.format_difference(held_out.directory):
                raise BadInput(f"data.validation: {difference}; {SAME_TOKENIZER}")
        if training.stream_tokenizer is not None and (
            difference := training.stream_tokenizer.difference(held_out.directory)
        ):
            raise BadInput(f"data.validation: {difference}; {SAME_TOKENIZER}")


def needs_stdlib(run: RunSpec) -> bool:
    """Whether the run uses the built-in corpus, which is prepared when it is first used."""
    return STDLIB in (*run.data.mix, run.data.validation) and not Path(STDLIB).exists()


def lacks_stdlib(run: RunSpec) -> bool:
    """Whether the run uses the built-in corpus and it has not been prepared yet."""
    return needs_stdlib(run) and not stdlib_folder().exists()


def with_vocabulary(run: RunSpec) -> RunSpec:
    """Return the run with a vocabulary size and steps, for planning.

    The vocabulary size comes from the data or, if the data is not prepared, from the built-in tokenizer. `train.epochs`
    becomes `train.steps` if the data is prepared.
    """
    if run.train.epochs is not None and not lacks_stdlib(run):
        with suppress(BadInput, Damaged):  # `resolve_data` reports errors of the data
            run = with_steps(run, open_run_data(run))
    return run if run.model.vocab_size else _with_vocabulary_of(run, _vocabulary_of_data(run) or VOCABULARY)


def with_model_vocabulary(model: ModelSection, count: int = VOCABULARY) -> ModelSection:
    """Return the model with a vocabulary size, if it has none: `count` rounded up to a multiple of `VOCABULARY_MULTIPLE`."""
    padded = -(-count // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return model if model.vocab_size else replace(model, vocab_size=padded)


def _with_vocabulary_of(run: RunSpec, count: int) -> RunSpec:
    return replace(run, model=with_model_vocabulary(run.model, count))


def _vocabulary_of_data(run: RunSpec) -> int | None:
    """Return the vocabulary size of the data's tokenizer; None if no source gives it.

    `resolve_data` reports errors of the data.
    """
    sizes = []
    if run.data.streamed:
        with suppress(BadInput):  # without data.tokenizer, the tokenizer comes from a prepared source below
            sizes.append(stream_tokenizer(run.data, ()).loaded.record.vocab_size)
    for name in run.data.mix:
        if name in run.data.streams:
            continue
        try:
            folder, foreign = locate(stdlib_folder() if name == STDLIB and needs_stdlib(run) else Path(name))
            sizes += [] if foreign else [Manifest.read(folder).tokenizer.vocab_size]
        except (BadInput, Damaged):
            continue
    return max(sizes, default=None)


def plan_for(run: RunSpec) -> tuple[Plan, tuple[Candidate, ...]]:
    """Return the run's plan, and all candidates with the chosen one first.

    A run with a plan file gets that plan, and no candidates. Otherwise the planner searches, within the fields that the
    run file fixes, for a plan that uses all devices and that this release can train.
    """
    if isinstance(run.plan, str) and run.plan != "auto":
        return given_plan(run), ()
    answer = search_or_suggest_fixes(run, memory_bytes=device_memory(run))
    return answer.best.plan, (answer.best, *answer.others)


def given_plan(run: RunSpec) -> Plan:
    """Return the plan in the run's plan file. Its reasons are replaced, because the file may have been edited.

    Raises BadInput that names the file if the plan's schedule is impossible for its ranks and micro-batches.
    """
    plan = load_plan(Path(str(run.plan)), run.cluster)
    try:
        stage_schedule(plan, run.model.layers)
    except BadInput as refused:
        raise BadInput(f"{run.plan}: {refused}") from None
    return replace(plan, why=(f"as {os.path.relpath(str(run.plan))} says",))


def device_memory(run: RunSpec) -> int | None:
    """Return the bytes of this host's memory for each CPU rank; None on GPUs, whose memory the cluster section gives."""
    return host_memory_bytes() // run.cluster.gpus_per_node if run.cluster.is_cpu else None


def on_this_host(run: RunSpec) -> RunSpec:
    """Return the run with this host's memory filled in, if it trains on GPUs and its cluster does not give the memory."""
    if run.cluster.is_cpu or run.cluster.host_memory_gib is not None:
        return run
    return replace(run, cluster=replace(run.cluster, host_memory_gib=host_memory_bytes() / GiB))


def training_plan(run: RunSpec, note: Note) -> Plan:
    """Return the plan with which the run trains. `note` receives a line for each field of the plan that has no effect.

    Raises the errors of `refuse_untrainable`.
    """
    run = on_this_host(run)
    with telling("searching for a plan", note):
        plan, _ = plan_for(run)
    refuse_untrainable(run, plan)
    for sentence in idle_fields(plan):
        note(sentence)
    return plan


def on_used_devices(run: RunSpec, note: Note) -> RunSpec:
    """Return the run on the devices of this host that `train` will use: all, or fewer if that is faster
    (`planner.devices`).

    `note` receives a sentence about devices that stay idle. All devices are kept for runs on several hosts, with a plan
    file, or with ranks that a launcher has started. A run without a possible plan is returned unchanged; its
    preparation reports the error.
    """
    fixed = isinstance(run.plan, str) and run.plan != "auto"
    divides = run.train.global_batch_tokens is not None or not run.train.global_batch % run.cluster.ranks
    if fixed or run.cluster.nodes > 1 or started_by_launcher() or divides:
        return run
    local_run = on_this_host(with_vocabulary(run))
    try:
        idle = (choice := choose_devices(local_run, memory_bytes=device_memory(run))).idle
    except MeshwrightError:
        return run
    if idle is None:
        return run
    note(idle.sentence)
    return replace(run, cluster=replace(choice.run.cluster, host_memory_gib=run.cluster.host_memory_gib))


def refuse_untrainable(run: RunSpec, plan: Plan) -> None:
    """Raise BadInput if this release cannot train the plan, and OutOfResources if the plan does not fit.

    The errors name the plan file, if there is one, and the key of the plan that is the reason.
    """
    named = f"{run.plan}: " if isinstance(run.plan, str) and run.plan != "auto" else ""
    if refused := training_refusal(plan):
        key, reason = refused
        if not named:
            raise BadInput(reason, key=f"plan.{key}")
        at = read_yaml(Path(str(run.plan))).value_position((key,))
        sentence = reason.removeprefix(f"plan.{key}: ")
        raise BadConfig([Refusal(at.file, at.line, at.column, key, "", sentence)])
    if refused := ramp_misfit(run, plan):
        raise BadInput(named + refused)
    if excess := misfit(run, plan):
        raise OutOfResources(f"{named}does not fit: {excess}")


def misfit(run: RunSpec, plan: Plan) -> str | None:
    """Return a sentence about missing device or host memory, with the keys that reduce the need; None if the plan fits.

    A search leaves a share of the device memory free. A plan written by a person may use that share.
    """
    memory = run.cluster.memory_bytes() or device_memory(run)
    if any(overfull_ranks(run, plan, memory)):
        return f"{shortfall(run, plan, memory)}; lower plan.micro_batch, shard over more ranks, or set plan.recompute or plan.offload"
    if host_excess := host_excess_bytes(run, plan):
        source = "" if run.cluster.host_memory_gib else ", a default"
        return (
            f"offloaded data exceed host memory by {host_excess / 1e9:.1f} GB of {host_budget(run) / 1e9:.1f} GB usable per host "
            f"({HOST_HEADROOM:.0%} of cluster.host_memory_gib{source}); offload fewer layers, or use more nodes"
        )
    return None


class CheckedWork(Protocol):
    """Runs one check: calls `work` and returns its result.

    If `work` raises an error, the error is raised, or it is recorded and None is returned. `key` is the run-file key of
    the error, and `expected` says what the key should have. The check is skipped unless the keys `needs` are valid.
    """

    def __call__(self, key: str, expected: str, work: Callable[[], T], needs: Sequence[str] = ()) -> T | None: ...


@dataclass(frozen=True)
class Readiness:
    """Result of the checks before a start. A `finished` run has nothing left to train."""

    run: RunSpec
    """The run, with the vocabulary size from its data. `resumes`: whether it continues from its folder."""
    resumes: bool = False
    finished: bool = False
    plan: Plan | None = None


def _doubts(run: RunSpec) -> Iterator[str]:
    """Yield a sentence for each value that is valid but probably a mistake."""
    rate = run.train.learning_rate
    ranks = run.cluster.gpus_per_node
    cores = usable_cores()
    if rate > MOST_USUAL_RATE:
        yield f"train.learning_rate is {rate:g}, above {MOST_USUAL_RATE:g}: is it a slip? Most runs use 1e-5 to 0.1"
    preference = run.preference
    if preference is not None and preference.scale > UNUSUAL * (usual := BETAS[preference.loss]):
        yield f"preference.beta is {preference.scale:g}, more than {UNUSUAL} times the usual {usual:g}: is it a slip?"
    if run.cluster.is_cpu and ranks > cores:
        yield f"cluster.gpus_per_node: {ranks} ranks share {cores} cores of this host, and wait for each other"


def check_start(
    run: RunSpec, runs: Path, attempt: CheckedWork, note: Note, *, build_stdlib: bool, fresh: bool = False
) -> Readiness:
    """Make every check between a loaded run and its start. `check` and `train` both use this.

    `attempt` runs each check. `build_stdlib`: prepare the built-in corpus if it is missing; if false, checks that need
    it are skipped. `fresh`: do not compare with an existing run of this name, because the caller will choose another
    name.

    Before `train` calls this, it locks the run's folder.
    """
    folder = runs / run.name
    run = _check_data(run, attempt, note, build_stdlib=build_stdlib)
    known = bool(run.model.vocab_size) and run.train.epochs is None
    run = with_vocabulary(run)
    resumes = None
    if known and not fresh:  # if the vocabulary size is unknown, every earlier run would seem to differ
        same_name = "a new name, or a run with the same configuration"
        resumes = attempt(
            "name", same_name, lambda: continues(run, folder), ("seed", "model", "data", "train", "rl", "preference")
        )
        state = "a run folder with a checkpoint that can be loaded, or one that never had any"
        attempt("checkpoint", state, lambda: check_state(run, folder))
    if resumes and is_finished(run, folder):
        note(f"{folder} is finished: {run.train.steps} of {run.train.steps} steps; nothing is changed in it")
        return Readiness(run, resumes=True, finished=True)
    for sentence in _doubts(run):
        note(sentence)
    attempt("observe", "packages that are installed", lambda: check_sinks(run.observe))
    attempt(
        "checkpoint.mirror",
        "the URL of a store whose package is installed",
        lambda: check_mirror(run.checkpoint.mirror),
    )
    if resumes:
        unchanged = "the data of the run's checkpoints"
        attempt("data.mix", unchanged, lambda: check_unchanged(run, folder, open_run_data(run), note), ("data",))
    else:
        attempt("model.init", "weights of this model and tokenizer", lambda: check_init(run, note), ("model", "data"))
    attempt("model", "a model", lambda: _note_export(run, note))
    plan = attempt("plan", "a plan that fits the cluster", lambda: _make_plan(run, note), ("model", "train", "cluster"))
    seconds = plan.predicted.step_seconds if plan is not None and plan.predicted is not None else None
    space = "space for the run's checkpoints"
    attempt("checkpoint", space, lambda: check_disk(run, folder, seconds), ("model", "name"))
    return Readiness(run, resumes=bool(resumes), plan=plan)


def _note_export(run: RunSpec, note: Note) -> None:
    if obstacle := export_obstacle(run.model):
        note(f"this model can be trained but not exported to a Hugging Face folder: {obstacle}")


def _check_data(run: RunSpec, attempt: CheckedWork, note: Note, *, build_stdlib: bool) -> RunSpec:
    """Return the run with what follows from its data. All sources are located before any is opened or prepared."""
    expected = "prepared data"
    all_exist = True
    needed = ("data", "preference.loss", "rl.reward")  # these decide what is read from a corpus
    for name in run.data.mix:
        key = f"data.mix.{name}" if len(run.data.mix) > 1 else "data.mix"
        all_exist &= attempt(key, expected, lambda name=name: _check_source(run, name), needed) or False
    validation = run.data.validation
    if validation and validation not in run.data.streams:
        all_exist &= attempt("data.validation", expected, lambda: _check_exists(validation), needed) or False
    if not all_exist or (lacks_stdlib(run) and not build_stdlib):
        return run
    fitting = "prepared data with a tokenizer that the model fits"
    resolved = attempt("data.mix", fitting, lambda: resolve_data(run, note), (*needed, "model", "train.seq_len"))
    if resolved is not None:
        attempt("data.validation", fitting, lambda: check_validation(resolved, note))
    return resolved or run


def _check_source(run: RunSpec, name: str) -> bool:
    """Open one source of a mixture alone, so that the error names this source. The built-in corpus may be missing."""
    if name in run.data.streamed:
        # Its tokenizer may come from another source, so `resolve_data` opens all of them together.
        return True
    if not (name == STDLIB and lacks_stdlib(run)):
        _check_exists(name)
        open_run_data(replace(run, data=replace(run.data, mix={name: 1.0}, validation=None)))
    return True


def _check_exists(name: str) -> bool:
    """Raise BadInput if the data does not exist. The built-in corpus may be missing."""
    if name != STDLIB or Path(name).exists():
        locate(Path(name))
    return True


def _make_plan(run: RunSpec, note: Note) -> Plan:
    """Return the plan with a prediction for this host. The prediction in a plan file may be for another machine."""
    plan = predict(run, training_plan(run, note))
    check_host_memory(run, plan)
    return plan


def _raise_on_failure(key: str, expected: str, work: Callable[[], T], needs: Sequence[str] = ()) -> T:
    """Run a check of a start: the first failing check ends the start, with an error that has the key."""
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
    replay: Path | None = None,
) -> PreparedRun | None:
    """Create or reopen the run's folder, and write what its ranks need. Return None if the run is finished.

    `profile` is (first, last) step whose profiler trace is written, and `timeline` the same for the timeline. `replay`
    is a file of recorded expert loads, which replace the routers' choices.

    Raises the first error of `check_start`. BadInput: a run of this name has another configuration, data or weights are
    missing, or a package is not installed. OutOfResources: devices, disk or host memory are too small.
    """
    if run.checkpoint.mirror is not None:
        fetch_newest(run.checkpoint.mirror, runs / run.name, note)
    checked = check_start(run, runs, _raise_on_failure, note, build_stdlib=True)
    if checked.finished:
        return None
    run, plan, resumes, folder = checked.run, checked.plan, checked.resumes, runs / run.name
    assert plan is not None  # or a check raised
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("logs", "checkpoints"):
        (folder / name).mkdir(exist_ok=True)
    lease = take_over(folder)
    remove_partials(folder)
    write_durable(folder / "config.yaml", resolved_yaml(run))
    write_durable(folder / "plan.yaml", plan_yaml(plan))
    source = open_run_data(run)
    text = write_text_files(run, source, folder)
    if not resumes:
        keep_towers_of(run.model.init, folder)
    for sentence in () if text is None else text.sentences():
        note(sentence)
    assignment = Assignment(
        run=run,
        plan=plan,
        folder=str(folder),
        lease=lease,
        profile=profile,
        timeline=timeline,
        replay_routing=None if replay is None else str(replay.resolve()),
    )
    write_durable(folder / "assignment.json", to_sealed_json(assignment))
    return PreparedRun(assignment, folder, resumes, data_lines(run, source))


def check_init(run: RunSpec, note: Note) -> None:
    """Raise BadInput if the weights that the run starts from cannot be used.

    The initial weights, and those of the reference of preference training, must exist, fit the model and have the
    corpus's tokenizer. `rl.reward.model` must be a reward model.
    """
    if run.rl is not None and run.rl.reward.model is not None:
        from meshwright.checkpoint.models.stored_model import check_head, open_model  # needs torch

        folder = Path(run.rl.reward.model)
        with attach_key("rl.reward.model"), open_model(folder, contents=False) as stored:
            check_head(stored.spec, folder, scores=True)
    if run.model.adapter is not None and run.model.adapter.init is not None:
        from meshwright.checkpoint.models.stored_model import check_adapters  # needs torch

        for sentence in check_adapters(run.model):
            note(sentence)
    inits = {"model.init": run.model.init}
    if run.preference is not None and run.preference.reference != START:
        inits["preference.reference"] = run.preference.reference
    for key, init in inits.items():
        if init != "scratch":
            from meshwright.checkpoint.models.initial import check_initial  # needs torch

            with attach_key(key):
                check_initial(run.model, init, key)
                if not lacks_stdlib(run):
                    check_tokenizer(run, open_run_data(run), note, key, init)


def check_host_memory(run: RunSpec, plan: Plan) -> None:
    """Raise OutOfResources if this host's memory cannot hold what the plan offloads: activations, optimizer, gradient sums."""
    activations, optimizer, sums = host_bytes(run.model, slot_run(run, plan).train, plan, run.cluster.nodes)
    need = activations + optimizer + sums
    available = host_memory_bytes()
    if need > available:
        sums_text = f"plan.accumulation: gradient sums take {sums / 1e9:.1f} GB, and " if sums else ""
        raise OutOfResources(
            f"{sums_text}plan.offload: activations take {activations / 1e9:.1f} and the optimizer {optimizer / 1e9:.1f} GB of host memory, "
            f"and this host has {available / 1e9:.1f} GB; offload fewer layers (plan.layers), or use more nodes"
        )
