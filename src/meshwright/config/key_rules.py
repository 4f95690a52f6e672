"""Rules that involve several keys of a run file. A broken rule becomes a Mistake at the key that breaks it.

Rules read only valid values. So their mistakes can be reported together with unknown keys and wrong types.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

from meshwright.config.optimizer_rules import decay_patterns, final_learning_rate
from meshwright.config.preference_rules import preference
from meshwright.config.rl_rules import rl
from meshwright.config.run_values import RunValues, Values
from meshwright.config.sample_rules import samples
from meshwright.config.value_sources import COMMAND_LINE
from meshwright.config.yaml_positions import KeyPath, YamlDocument, format_value
from meshwright.spec.chips import CHIPS, chip_from_device_name
from meshwright.spec.dimension_checks import model_mistakes
from meshwright.spec.divisors import divisors, nearest_divisor
from meshwright.spec.errors import Mistake, nearest
from meshwright.spec.fields import from_plain
from meshwright.spec.foreign_words import THIS_MACHINE
from meshwright.spec.layout import (
    STAGES_PER_RANK,
    stage_table,
)
from meshwright.spec.listen_address import EXPECTED, listen_address
from meshwright.spec.model import MOST_PARAMETERS, ModelSpec, parameter_count
from meshwright.spec.node_label import EXPECTED as LABEL_EXPECTED
from meshwright.spec.node_label import node_label
from meshwright.spec.plan import (
    DATA_AXES,
    ScheduleName,
    SchedulePlan,
    layer_range,
)
from meshwright.spec.plan_keys import AXES
from meshwright.spec.plan_name import layer_numbers
from meshwright.spec.plan_rules import RuleInput, mistakes, text_of

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
"""What the name of a run must match."""
_COMPARED = re.compile(r"([a-z_]+(?:\.[a-z_0-9]+)+) = ")
"""A key that a mistake compares with, as in `a divisor of model.heads = 5`."""
MOST_LETTERS = 200
"""Maximum number of characters of the name of a chip or a run.

A folder name may have 255 bytes, and a suffix such as `-2` is added to the name of a run.
"""
MOST_RANKS = 2**20
"""Maximum number of ranks of a cluster."""
MOST_SEQUENCES = 2**14
"""Maximum number of sequences of one rank in one step. A schedule lists every micro-batch, so their number must be limited."""
_WIDTHS = (
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn_hidden",
    "vocab_size",
    "max_seq_len",
    "experts",
    "expert_hidden",
    "shared_expert_hidden",
)
"""Dimensions that may be the reason for too many parameters. The largest of them is named in the mistake."""


def cross_checks(document: YamlDocument, unusable: set[KeyPath], plan_file: Values | None = None) -> list[Mistake]:
    """Check a run file, and the plan file that it names, against every rule, and return the mistakes.

    `unusable` has the paths of invalid values. No rule reads these.
    """
    run = RunValues(document, unusable, plan_file)
    rules = (
        _names,
        _parameters,
        _model,
        _experts,
        _sequence,
        _warmup,
        _partner,
        _data,
        _deterministic,
        samples,
        _rl,
        preference,
        _prometheus,
        _report_label,
        _chip,
        _emulated,
        _batch_ramp,
        plan_rules,
        *WHOLE_PLAN,
        decay_patterns,
        final_learning_rate,
    )
    return [_at_override(document, mistake) for rule in rules for mistake in rule(run)]


def _at_override(document: YamlDocument, mistake: Mistake) -> Mistake:
    """Return the mistake with the command line as its position if a key that it compares with stands there.

    The value in the file was right before; the override is what the user has to change. A key of a plan, in the run
    file or in a plan file, keeps its own line, because rules of a plan compare several keys.
    """
    if mistake.key.startswith("plan") or mistake.file != document.top.file:
        return mistake
    compared = (tuple(name.split(".")) for name in _COMPARED.findall(mistake.expected))
    position = next((at for at in map(document.value_position, compared) if at.file == COMMAND_LINE), None)
    if position is None:
        return mistake
    return dataclasses.replace(mistake, file=COMMAND_LINE, line=None, column=None)


def plan_rules(run: RunValues) -> Iterator[Mistake]:
    """Yield mistakes against the table of rules between keys of a plan."""
    given = RuleInput(run.rule_value, run("plan.layers") or ())
    for rule, index, values in mistakes(given):
        key = rule.key if "." in rule.key else f"plan.{rule.key}"
        path: KeyPath = tuple(key.split(".")) if index is None else ("plan", "layers", index, rule.key)
        yield run.mistake_at(path, text_of(rule.expected, values), rule.nearest_value(values), rule.got)


def _names(run: RunValues) -> Iterator[Mistake]:
    """Yield mistakes in the name of the run and in `model.init`."""
    name = None if run.document.partial else run("name")
    init = run("model.init")
    if name is not None and not _NAME.fullmatch(name):
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip(".-") or None
        yield run.mistake("name", "a folder name of letters, digits, '.', '_' and '-', not beginning with '.'", plain)
    if name is not None and len(name) > MOST_LETTERS:
        yield run.mistake("name", f"at most {MOST_LETTERS} characters", name[:40], f"{len(name):,} characters")
    if init is not None and init != "scratch" and not re.fullmatch(r"(hf|checkpoint):.+", init):
        yield run.mistake(
            "model.init", "scratch, hf:DIR or checkpoint:DIR", nearest(init, ("scratch", "hf:", "checkpoint:"))
        )


def _parameters(run: RunValues) -> Iterator[Mistake]:
    """Yield a mistake if the model has more parameters than the arithmetic of the cost model allows."""
    if (sizes := _model_values(run)) is None:
        return
    count = parameter_count(from_plain(ModelSpec, sizes))
    if count > MOST_PARAMETERS:
        largest = max(_WIDTHS, key=lambda name: sizes[name])
        expected = f"a model of at most {MOST_PARAMETERS:.0e} parameters"
        yield run.mistake(f"model.{largest}", expected, None, f"{sizes[largest]}, which makes {count:.1e}")


def _model_values(run: RunValues) -> dict[str, Any] | None:
    """Return the given fields of the run's ModelSpec. None if some are invalid or not yet known."""
    if run.document.partial or any(path[:1] == ("model",) for path in run.unusable):
        return None
    given = {f.name: run(f"model.{f.name}") for f in dataclasses.fields(ModelSpec)}
    return {name: value for name, value in given.items() if value is not None}


def _model(run: RunValues) -> Iterator[Mistake]:
    """Yield mistakes between the dimensions of the model, by the rules of `spec.dimension_checks`."""
    if (values := _model_values(run)) is None:
        return
    for wrong in model_mistakes(from_plain(ModelSpec, values)):
        expected = wrong.expected_with(lambda key, value: f"model.{key} = {value}")
        yield run.mistake(f"model.{wrong.key}", expected, wrong.near, wrong.found)


def _experts(run: RunValues) -> Iterator[Mistake]:
    """Yield mistakes of expert keys: a dense model must not have them, and a model with experts needs MoE layers."""
    experts = run("model.experts")
    layers = run("model.layers")
    dense = run("model.first_dense_layers")
    for key in ("experts_per_token", "expert_hidden", "shared_expert_hidden", "first_dense_layers"):
        if experts == 0 and run(f"model.{key}"):
            yield run.mistake(f"model.{key}", "0, as model.experts is 0: a dense model", "0")
    if experts and layers and dense and dense >= layers:
        yield run.mistake("model.first_dense_layers", f"fewer than model.layers = {layers}", str(layers - 1))


def _sequence(run: RunValues) -> Iterator[Mistake]:
    """Yield a mistake if sequences are longer than the model's longest sequence."""
    seq_len = run("train.seq_len")
    longest = run("model.max_seq_len")
    # If the model itself is a mistake, its longest sequence is only the default of ModelSpec.
    is_known = run.given("model.max_seq_len") or run("model.layers")
    if is_known and seq_len and longest and seq_len > longest:
        learned = run("model.positions") == "learned"
        remedy = "the length of its learned positions" if learned else "which can be raised"
        yield run.mistake("train.seq_len", f"at most model.max_seq_len = {longest}, {remedy}", str(longest))


def _warmup(run: RunValues) -> Iterator[Mistake]:
    """Yield a mistake if the warm-up is not shorter than the run."""
    steps = run("train.steps")
    warmup = run("train.warmup_steps")
    if steps and warmup and warmup >= steps and not run("train.epochs"):
        near = str(min(steps - 1, -(-steps // 10)))
        yield run.mistake("train.warmup_steps", f"fewer than train.steps = {steps}", near)


def _partner(run: RunValues) -> Iterator[Mistake]:
    """Yield a mistake if snapshots are copied to a partner although saves are synchronous, as only asynchronous saves make snapshots."""
    if run("checkpoint.partner") == "host" and run("checkpoint.mode") == "sync":
        yield run.mistake("checkpoint.mode", "auto or async, as checkpoint.partner is host", "async")


def _data(run: RunValues) -> Iterator[Mistake]:
    """Yield mistakes in the sources of data.

    There must be a source, something must use each stream, and the number of lanes must be a multiple of the batch.
    """
    if run("data.mix") == {}:
        yield run.mistake("data.mix", "at least one data directory", "stdlib")
    sources = {*(run("data.mix") or ()), run("data.validation")}
    for name in run("data.streams") or ():
        if name not in sources:
            near = nearest(name, [source for source in sources if source])
            expected = "a source that data.mix names, with its weight, or data.validation"
            yield run.mistake_at(("data", "streams", name), expected, near, name)
    lanes = run("data.lanes")
    batch = run("train.global_batch")
    if lanes and batch and lanes % batch:
        near = str(-(-lanes // batch) * batch)
        yield run.mistake(
            "data.lanes", f"a multiple of train.global_batch = {batch}, so that a rank keeps its lanes", near
        )


def _deterministic(run: RunValues) -> Iterator[Mistake]:
    """Yield a mistake if a deterministic run may continue on fewer hosts, because another layout rounds differently."""
    if run("train.deterministic") and run("supervision.wait_seconds") is not None:
        expected = "none, as train.deterministic needs one layout and fewer hosts have another; set spares instead"
        yield run.mistake("supervision.wait_seconds", expected, "none")


def _rl(run: RunValues) -> Iterator[Mistake]:
    yield from rl(run, _model_values(run))


def _report_label(run: RunValues) -> Iterator[Mistake]:
    label = run("supervision.report_label")
    if label is not None:
        try:
            node_label(label)
        except ValueError:
            yield run.mistake("supervision.report_label", LABEL_EXPECTED)


def _prometheus(run: RunValues) -> Iterator[Mistake]:
    address = run("observe.prometheus")
    if address is not None:
        try:
            listen_address(address)
        except ValueError:
            yield run.mistake("observe.prometheus", EXPECTED, f":{address}" if address.isdigit() else None)


def _chip(run: RunValues) -> Iterator[Mistake]:
    """Yield mistakes in the name of the chip: it must be in the table of chips, or its memory must be given."""
    gpu = run("cluster.gpu")
    if gpu is not None and not (gpu.isprintable() and 0 < len(gpu) <= MOST_LETTERS):
        yield run.mistake("cluster.gpu", f"1 to {MOST_LETTERS} characters on one line", chip_from_device_name(gpu))
        return
    if gpu is None or gpu == "cpu" or gpu in CHIPS or run("cluster.memory_gib") is not None:
        return
    if gpu.lower() in THIS_MACHINE:
        yield run.mistake(
            "cluster.gpu", "a chip such as H100; `cluster: auto` is the devices of this machine", "cluster=auto"
        )
        return
    spellings = {name.upper(): name for name in ("cpu", *CHIPS)}
    close = chip_from_device_name(gpu) or spellings.get(nearest(gpu.upper(), spellings) or "")
    yield run.mistake(
        "cluster.gpu", f"cpu, {', '.join(CHIPS)}, or another chip with cluster.memory_gib beside it", close
    )


def _plan_file(run: RunValues) -> Iterator[Mistake]:
    """Yield mistakes of keys that only a plan file has: the batch for which the plan was made, and the micro-batch."""
    batch = run("train.global_batch")
    made_for = run("plan.global_batch")
    if batch and made_for and not run("train.global_batch_tokens") and made_for != batch:
        yield run.mistake("plan.global_batch", f"train.global_batch = {batch}", str(batch))
    for key in ("global_batch", "micro_batch"):
        if run.plan_file is not None and not run.given(f"plan.{key}"):
            expected = (
                "the sequences of a step" if key == "global_batch" else "the sequences that a rank runs at a time"
            )
            yield run.mistake(f"plan.{key}", f"{expected}, in a plan file", None, "nothing")


def _order(run: RunValues) -> Iterator[Mistake]:
    """Yield mistakes of `plan.order`: it must have each axis with more than one rank exactly once."""
    order = run("plan.order")
    if order is None:
        return
    for index, axis in enumerate(order):
        if axis in order[:index]:
            yield run.mistake_at(("plan", "order", index), "each axis once", None, f"{axis} again")
    if absent := [axis for axis in AXES if (run(f"plan.{axis}") or 1) > 1 and axis not in order]:
        text = ", ".join(f"{axis} {run(f'plan.{axis}')}" for axis in absent)
        yield run.mistake("plan.order", "every axis with more than one rank", None, f"no {text}")


def _rank_count(run: RunValues) -> int | None:
    nodes = run("cluster.nodes")
    per_node = run("cluster.gpus_per_node")
    return nodes * per_node if nodes and per_node else None


def _emulated(run: RunValues) -> Iterator[Mistake]:
    """Yield mistakes in the number of nodes that one host emulates."""
    nodes = run("cluster.nodes")
    per_node = run("cluster.gpus_per_node")
    emulated = run("cluster.emulate_nodes")
    if not emulated or emulated == 1:
        return
    if nodes and nodes > 1:
        yield run.mistake("cluster.emulate_nodes", f"1, as the cluster has {nodes} hosts: one host emulates nodes", "1")
    elif per_node and per_node % emulated:
        near = str(nearest_divisor(per_node, emulated))
        yield run.mistake("cluster.emulate_nodes", f"a divisor of cluster.gpus_per_node = {per_node}", near)


_MODEL_AXES = ("pipeline", "tensor", "context_ring", "context_ulysses")
"""Axes whose ranks read the same samples. The other axes are data axes."""


def _pipeline_ranks(run: RunValues) -> int:
    """Return the given number of pipeline ranks, or the number of rows of `plan.stages`, or 1."""
    return run("plan.pipeline") or len(run("plan.stages") or ()) or 1


def _model_ranks(run: RunValues) -> dict[str, int]:
    """Return the given sizes of the axes that divide the model, by key. Sizes of 1 are left out."""
    pinned = {f"plan.{axis}": run(f"plan.{axis}") or 1 for axis in _MODEL_AXES}
    if run("plan.pipeline") is None:
        pinned["plan.stages"] = _pipeline_ranks(run)
    return {key: size for key, size in pinned.items() if size > 1}


def _ranks(run: RunValues) -> Iterator[Mistake]:
    """Yield mistakes in the sizes of axes: together they must give the number of ranks of the cluster.

    If some sizes are left to the planner, the product of the given ones must divide the number of ranks.
    """
    ranks = _rank_count(run)
    replicate = run("plan.replicate")
    shard = run("plan.shard")
    if ranks is None:
        return
    if ranks > MOST_RANKS:
        nodes = run("cluster.nodes")
        per_node = run("cluster.gpus_per_node")
        key = "cluster.nodes" if nodes > per_node else "cluster.gpus_per_node"
        got = f"{nodes} × {per_node} = {ranks}"
        yield run.mistake(key, f"cluster.nodes × cluster.gpus_per_node of at most {MOST_RANKS}", None, got)
        return
    if run("plan.hybrid"):
        return  # A rule of the table checks the ranks of a hybrid plan.
    wrong = [axis for axis in (*_MODEL_AXES, *DATA_AXES) if ranks % (run(f"plan.{axis}") or 1)]
    for axis in wrong:
        size = run(f"plan.{axis}")
        yield run.mistake(
            f"plan.{axis}", f"a divisor of the cluster's {ranks} ranks", str(nearest_divisor(ranks, size))
        )
    if wrong:
        return
    pinned = _model_ranks(run)
    pinned_ranks = math.prod(pinned.values())
    divisors_text = "".join(f" ÷ {key} {size}" + " rows" * (key == "plan.stages") for key, size in pinned.items())
    if ranks % pinned_ranks:
        worst = max(pinned, key=lambda key: pinned[key])
        product = " × ".join(map(str, pinned.values()))
        got = f"{product} = {pinned_ranks} ranks, the cluster has {ranks}" if len(pinned) > 1 else str(pinned_ranks)
        yield run.mistake(worst, f"axes whose product divides the cluster's {ranks} ranks", None, got)
        return
    data = ranks // pinned_ranks
    free = any(run(f"plan.{axis}") is None for axis in _MODEL_AXES)
    sizes = {f"plan.{axis}": run(f"plan.{axis}") for axis in DATA_AXES if run(f"plan.{axis}")}
    product = math.prod(sizes.values())
    exact = len(sizes) == 2 and not free
    if data % product or (exact and data != product):
        key = "plan.shard" if shard else "plan.replicate"
        quotient, remainder = divmod(data, replicate) if shard and replicate else (data, 0)
        nearest_size = quotient if exact else nearest_divisor(quotient, sizes[key])
        near = None if remainder else str(nearest_size)
        factors = [*sizes.values(), *pinned.values()]
        got = f"{' × '.join(map(str, factors))} = {math.prod(factors)} ranks, the cluster has {ranks}"
        both = "plan.replicate × plan.shard " if len(sizes) == 2 else ""
        yield run.mistake(
            key, f"{both}{'=' if exact else 'a divisor of'} the cluster's {ranks} ranks{divisors_text}", near, got
        )


def _global_batch(run: RunValues) -> Iterator[Mistake]:
    """Yield mistakes of the global batch: the given data ranks times the given micro-batch must divide it.

    The planner chooses values that are not given such that they do.
    """
    keys = ("plan.replicate", "plan.shard", "plan.micro_batch")
    batch = run("train.global_batch")
    ranks = _rank_count(run)
    pinned = {key: run(key) for key in keys if run(key)}
    if (ranks is None and batch) or any((ranks or 0) % (run(f"plan.{axis}") or 1) for axis in DATA_AXES):
        return  # If the run gives no batch, the batch of the plan file is checked elsewhere.
    pinned = {key: size for key, size in pinned.items() if size > 1}
    if run("train.global_batch_tokens"):  # The planner then divides samples of different lengths, not sequences.
        return
    unit = math.prod(pinned.values())
    batch_key = "train.global_batch" if batch else "plan.global_batch"
    batch = batch or run("plan.global_batch")
    if batch and ranks and batch > MOST_SEQUENCES * ranks:
        expected = f"at most {MOST_SEQUENCES} sequences for each of the cluster's {ranks} ranks"
        yield run.mistake("train.global_batch", expected, str(MOST_SEQUENCES * ranks))
    elif batch and batch % unit:
        product = " × ".join(f"{key} {size}" for key, size in pinned.items())
        yield run.mistake(batch_key, f"a multiple of {unit} ({product})", str(-(-batch // unit) * unit))


def _batch_ramp(run: RunValues) -> Iterator[Mistake]:
    """Yield mistakes of a batch ramp: its stages must follow each other, and none may exceed the batch of the plan."""
    batch = run("train.global_batch")
    last = 0
    for index, stage in enumerate(run("train.batch_ramp") or ()):
        until = stage["until"]
        size = stage["batch"]
        path: KeyPath = ("train", "batch_ramp", index)
        if run("train.global_batch_tokens"):
            expected = "no ramp, as train.global_batch_tokens gives the batch in tokens"
            yield run.mistake("train.batch_ramp", expected, "[]", "a ramp")
            return
        if until <= last:
            yield run.document.mistake(
                (*path, "until"), f"a step after {last}, where the stage before ends", str(until), str(last + 1)
            )
        if batch and size > batch:
            expected = f"at most train.global_batch = {batch}, which the plan is made for"
            yield run.document.mistake((*path, "batch"), expected, str(size), str(batch))
        last = max(last, until)


def _stages(run: RunValues) -> Iterator[Mistake]:
    """Yield mistakes of the pipeline: the layers must fill the stages, in the stage order of the schedule.

    If no schedule is given, it suffices that one of the possible orders fits.
    """
    layers = run("model.layers")
    stages = run("plan.stages")
    if stages is not None and not stages:
        yield run.mistake("plan.stages", "a row of layer ranges for each pipeline rank, or no key", "none")
    elif layers:
        path: KeyPath = ("plan", "stages") if stages else ("plan", "pipeline")
        of_order = list(_stage_order(run, path, run("plan.schedule"), stages, _pipeline_ranks(run), layers))
        yield from of_order or (_unlisted_stages(run) if run.plan_file is not None else ())


def _unlisted_stages(run: RunValues) -> Iterator[Mistake]:
    """Yield a mistake if a plan file has no `plan.stages` although the layers of the model differ.

    Stages with equally many layers then take different times. The search balances the times, so a plan file lists the
    stages.
    """
    values = _model_values(run)
    pipeline = _pipeline_ranks(run)
    if run("plan.stages") or pipeline == 1 or values is None:
        return
    if len((model := from_plain(ModelSpec, values)).block_kinds) == 1:
        return
    even = stage_table(SchedulePlan(name=run("plan.schedule") or "1f1b"), pipeline, model.layers)
    rows = (", ".join(f"{stage.start}-{stage.stop - 1}" for stage in rank) for rank in even)
    expected = "the layers of each stage by pipeline rank, as the model's layers are not alike"
    yield run.mistake("plan.stages", expected, f"[{', '.join(f'[{row}]' for row in rows)}]", "none")


def _stage_order(
    run: RunValues, path: KeyPath, schedule: ScheduleName | None, stages: Any, pipeline: int, layers: int
) -> Iterator[Mistake]:
    """Yield a mistake if the layers cannot be divided into the given stages.

    `schedule` is the given schedule; None tries one schedule for each order of stages. `stages` is a row of layer
    ranges for each pipeline rank, or None for an even division. `path` is where the mistake is reported.
    """
    table = tuple(map(tuple, stages or ()))
    wrong: list[str] = []
    # Without a given schedule, try one schedule for each order of stages: the same order on every rank, or a V.
    names = (schedule,) if schedule else _schedule_of_each_order(table)
    for name in names:
        try:
            stage_table(SchedulePlan(name=name, stages=table), pipeline, layers)
        except ValueError as error:
            wrong.append(str(error))
        else:
            return
    if not table:
        stages_of_rank = STAGES_PER_RANK.get(schedule or "1f1b", 1)
        each = f"; {schedule} has {stages_of_rank} on each rank" if stages_of_rank > 1 else ""
        near = next((str(size) for size in reversed(divisors(pipeline)) if size * stages_of_rank <= layers), None)
        yield run.mistake_at(path, f"at most model.layers = {layers} stages{each}", near, str(pipeline))
        return
    expected = f"stages that hold layers 0-{layers - 1} in {schedule or 'some schedule'}'s order"
    yield run.mistake_at(path, expected, None, " and, in a V, ".join(dict.fromkeys(wrong)))


def _schedule_of_each_order(table: tuple[tuple[str, ...], ...]) -> tuple[ScheduleName, ...]:
    return ("1f1b", "zbv") if table and len(table[0]) == STAGES_PER_RANK["zbv"] else ("1f1b",)


def _layers(run: RunValues) -> Iterator[Mistake]:
    """Yield mistakes of layer ranges: they must be inside the model, must not overlap, and must cover every layer."""
    layers = run("model.layers")
    strategies = run("plan.layers")
    if not layers or strategies is None:
        return
    covered: set[int] = set()
    readable = True
    for index, strategy in enumerate(strategies):
        where: KeyPath = ("plan", "layers", index, "range")
        text = strategy.get("range", "all")
        try:
            chosen = layer_range(text, layers)
        except ValueError:
            readable = False
            expected = f"all, N or FIRST-LAST inside layers 0-{layers - 1}"
            yield run.mistake_at(where, expected, None, format_value(text))
            continue
        if covered.intersection(chosen):
            twice = layer_numbers(covered.intersection(chosen))
            yield run.mistake_at(where, "layers that no earlier range covers", None, f"layers {twice} again")
        covered.update(chosen)
    uncovered = set(range(layers)) - covered
    if uncovered and readable:
        expected = f"ranges that cover layers 0-{layers - 1}"
        got = f"none for {layer_numbers(uncovered)}"
        yield run.mistake("plan.layers", expected, None, got)


WHOLE_PLAN = (_plan_file, _order, _ranks, _global_batch, _layers, _stages)
"""Rules about a plan as a whole. The search lists only layouts that fulfil them, so it need not check them."""
