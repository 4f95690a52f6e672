"""Loads a run file with its overrides as one RunSpec, or reports every mistake in them.

The sources of a value, from the weakest to the strongest: the default, the file or preset that `extends` names, the
file itself, and an override such as `train.steps=200` on the command line. Derived values are computed after these are
merged. A resolved run, as `resolved_yaml` writes it, loads to an equal RunSpec.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.config.complete import ModelReader, complete, complete_batch
from meshwright.config.key_rules import cross_checks
from meshwright.config.mistakes import KEYS_OF_OTHER_FILES, schema_mistakes
from meshwright.config.plan_file import checked_keys, plan_file_mistakes
from meshwright.config.profile_file import load_profile
from meshwright.config.reading import RunReading, in_reading_order
from meshwright.config.recorded_lengths import read_lengths
from meshwright.config.recorded_loads import read_loads
from meshwright.config.run_values import Values
from meshwright.config.schema import validate
from meshwright.config.value_sources import EMBEDDED, QUICKSTART, Detect, gather, shown_name
from meshwright.config.yaml_positions import KeyPath, YamlDocument, dump_yaml, read_yaml
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadConfig, BadInput, Mistake, nearest
from meshwright.spec.fields import from_plain, to_plain
from meshwright.spec.job import EQUAL_LOADS
from meshwright.spec.layout import with_node_crossings
from meshwright.spec.plan import Plan
from meshwright.spec.plan_keys import PlanKeys, plain_keys, plan_of
from meshwright.spec.run import ModelSection, RunSpec

_COMPARED_SECTIONS = ("seed", "model", "data", "train", "rl", "preference")
"""Sections in which two runs may differ such that they train differently."""
_NOT_COMPARED = {
    "model.preset",
    "data.validation",
    "data.validation_tokens",
    "data.streams",
    "data.tokenizer",
    "data.cache",
    "data.cache_gib",
    "data.loaders",
    "data.tokenizer_mismatch",
    "data.changed",
    "train.validate_every",
    "train.gc_every",
    "train.on_nonfinite",
    "train.on_spike",
    "train.spike_factor",
    "train.keep_cores",
    "train.timeout_seconds",
    "train.loss_chunk",
    "train.expert_load",
    "data.lengths",
    "rl.presumed_question",
    "rl.presumed_answer",
    "rl.cache_tokens",
    "rl.reward.processes",
    "rl.reward.seconds",
    "rl.reward.memory_gib",
}
"""Keys in these sections that do not change the result of a training."""
_PATHS = ("rl.reward.file", "rl.reward.model")
"""Keys with the path of a file.

Only the name of the file is compared, because a run may continue on another machine, where the file is in another
folder.
"""


def load_run(
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    runs: Path = Path("runs"),
    detect: Detect | None = None,
    model_reader: ModelReader | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> RunSpec:
    """Load the run in the file at `path`, with `overrides` such as `train.steps=200` applied.

    - `path`: None means that the overrides describe the run (see `gather`). QUICKSTART is the file of the quick start.
    - `runs`: folder in which `model.init: checkpoint:NAME` looks for the run NAME.
    - `detect`: returns the ClusterSpec keys of this machine. It is called for `cluster: auto`, and if no cluster is
      given.
    - `model_reader`: returns the ModelSpec keys of a Hugging Face folder, for `model.init: hf:DIR` without given
      dimensions.
    - `note`: receives one sentence for each assumption.

    Raises BadConfig with every mistake.
    """
    reading = read_run(path, overrides, runs=runs, detect=detect, model_reader=model_reader)
    run = reading.run()
    for text in reading.notes():
        note(text)
    return run


def read_run(
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    runs: Path = Path("runs"),
    detect: Detect | None = None,
    model_reader: ModelReader | None = None,
) -> RunReading:
    """Read what `load_run` reads, with the positions of the values and all mistakes. Does not raise for a mistake.

    If the file belongs to another command, that is the only mistake.
    """
    document = gather(path, overrides, detect or one_cpu_rank)
    notes = complete(document, (path or QUICKSTART).stem, runs, detect or one_cpu_rank, model_reader)
    _, mistakes, unusable = schema_mistakes(RunSpec, document)
    plan_values, plan_mistakes = _plan_file(document, unusable)
    mistakes += document.mistakes + cross_checks(document, unusable, plan_values) + plan_mistakes
    if plan_mistakes or (plan_values and any(mistake.file == plan_values.document.top.file for mistake in mistakes)):
        unusable.add(("plan",))
    mistakes += profile_mistakes(document, unusable) + _expert_load_mistakes(document, unusable)
    mistakes += _lengths_mistakes(document, unusable)
    if other := [mistake for mistake in mistakes if mistake.key in KEYS_OF_OTHER_FILES]:
        # The file is not a run file, so later checks must not report keys that it lacks.
        mistakes = other
        document.partial = True
    assumed = () if path is not None else tuple(_embedded_values(document))
    return RunReading(document, shown_name(path), tuple(mistakes), frozenset(unusable), tuple(notes), assumed)


def load_resolved(path: Path) -> RunSpec:
    """Load a run from a file that `resolved_yaml` wrote, such as config.yaml in the folder of a run or of a checkpoint.

    Unlike `load_run`, this reads nothing but the file, so plan files and weights that it names may be deleted. Raises
    BadConfig with every mistake.
    """
    document = read_yaml(path)
    complete_batch(document)
    run, mistakes, _ = schema_mistakes(RunSpec, document)
    mistakes += document.mistakes
    if mistakes:
        raise BadConfig(in_reading_order(mistakes, str(path)))
    return from_plain(RunSpec, run)


def load_resolved_model(path: Path) -> ModelSection:
    """Return the model in a file that `load_resolved` reads. The other sections are not checked, unless this section has mistakes."""
    document = read_yaml(path)
    values, mistakes = validate(ModelSection, document.get(("model",)) or {})
    return load_resolved(path).model if mistakes or document.mistakes else from_plain(ModelSection, values)


def load_cluster(path: Path | None, overrides: Sequence[str] = (), *, detect: Detect | None = None) -> ClusterSpec:
    """Return the cluster of the run that `load_run` would load.

    The file `cluster.profile` is not read, because it may not exist yet.

    Raises BadConfig with every mistake in the section.
    """
    document = gather(path, overrides, detect or one_cpu_rank)
    complete(document, (path or QUICKSTART).stem, Path("runs"), detect or one_cpu_rank, None)
    _, mistakes, unusable = schema_mistakes(RunSpec, document)
    mistakes += document.mistakes + cross_checks(document, unusable)
    mistakes = [mistake for mistake in mistakes if mistake.key.partition(".")[0] == "cluster"]
    if mistakes:
        raise BadConfig(in_reading_order(mistakes, shown_name(path)))
    cluster, _ = validate(ClusterSpec, document.data.get("cluster", {}))
    return from_plain(ClusterSpec, cluster)


def load_plan(path: Path, cluster: ClusterSpec | None = None) -> Plan:
    """Load the plan in a file.

    With `cluster`, `crosses` of each axis is computed for the cluster's number of ranks on a node.

    Raises BadConfig with every mistake.
    """
    document = read_yaml(path)
    keys, mistakes = plan_file_mistakes(document)
    if mistakes:
        raise BadConfig(in_reading_order(mistakes, str(path)))
    plan = plan_of(from_plain(PlanKeys, keys))
    return with_node_crossings(plan, cluster.ranks_per_node) if cluster else plan


def resolved_yaml(run: RunSpec) -> str:
    """Return the run with every value, as YAML that `load_run` reads back to an equal RunSpec."""
    header = "# A resolved run: every value, defaults included. Loading this file gives the same run again.\n"
    return header + dump_yaml(_without_derived(run))


def plan_yaml(plan: Plan) -> str:
    """Return the plan as a YAML file that a person can read, edit and pass back with `plan: FILE`."""
    header = (
        "# The plan of this run. Edit a copy and pass it back with `plan: FILE`; `predicted` and `why` bind nothing.\n"
    )
    return header + dump_yaml(plain_keys(plan))


def differences(a: RunSpec, b: RunSpec) -> list[tuple[str, Any, Any]]:
    """Return (dotted key, value in a, value in b) for every key whose difference makes the two runs train differently.

    Other keys are ignored: cluster, plan, checkpoint, observe, validation and time limits. The order of entries in
    `data.mix` is compared, because the order of samples may depend on it. If only one of the runs has a section, the
    section counts as one key.
    """
    ours = _flat(a)
    theirs = _flat(b)
    keys = dict.fromkeys([*ours, *theirs])
    found = {
        key: (ours.get(key), theirs.get(key)) for key in keys if _as_list(ours.get(key)) != _as_list(theirs.get(key))
    }
    return [
        (key, *values)
        for key, values in found.items()
        if key.partition(".")[0] == key or key.partition(".")[0] not in found
    ]


def mistakes_as_json(mistakes: Iterable[Mistake] = ()) -> dict[str, Any]:
    """Return what `meshwright check --json` prints for these mistakes."""
    report = BadConfig(mistakes)
    more = {"more": report.unlisted} if report.unlisted else {}
    return {"ok": not report.mistakes, "errors": report.as_plain(), **more}


def _embedded_values(document: YamlDocument) -> Iterator[tuple[KeyPath, str]]:
    """Yield (path, value as text) of each key whose value comes from the quick start, its preset or a chip."""
    for section, value in document.data.items():
        keys = value.items() if isinstance(value, dict) else [(None, value)]
        for key, inner in keys:
            path: KeyPath = (section,) if key is None else (section, key)
            is_embedded = path in document.values and document.values[path].file == EMBEDDED
            if is_embedded and (section != "model" or key == "preset"):
                yield path, "+".join(inner) if isinstance(inner, dict) else str(inner)


def one_cpu_rank() -> dict[str, Any]:
    """Return the cluster of a file without one: one rank on a CPU. Used if nothing detects this machine's devices."""
    return {"gpu": "cpu", "nodes": 1, "gpus_per_node": 1}


def _plan_file(document: YamlDocument, unusable: set[KeyPath]) -> tuple[Values | None, list[Mistake]]:
    """Return the values of the plan file that a run names, and the mistakes in that file alone.

    The values are None if no file is named.
    """
    file = document.data.get("plan")
    if not isinstance(file, str) or file == "auto" or ("plan",) in unusable:
        return None, []
    _, mistakes, values = checked_keys(read_yaml(Path(file), os.path.relpath(file)))
    return values, mistakes


def profile_mistakes(document: YamlDocument, unusable: set[KeyPath]) -> list[Mistake]:
    """Return the mistakes of `cluster.profile`: the file is missing or invalid, or describes another chip than `cluster.gpu`."""
    path: KeyPath = ("cluster", "profile")
    file = document.get(path)
    if not isinstance(file, str) or file == "none" or path in unusable or ("cluster",) in unusable:
        return []
    position = document.value_position(path)
    shown = os.path.relpath(file)
    expected = "a file that `meshwright profile --out FILE` wrote"
    if not os.path.isfile(file):
        close = nearest(os.path.basename(file), [near.name for near in Path(file).parent.glob("*.json")])
        return [
            Mistake(
                position.file,
                position.line,
                position.column,
                "cluster.profile",
                expected,
                f"{shown}: no such file",
                close,
            )
        ]
    try:
        measured = load_profile(file)
    except BadInput as error:
        got = str(error).replace(file, shown)
        return [Mistake(position.file, position.line, position.column, "cluster.profile", expected, got)]
    gpu = document.get(("cluster", "gpu")) or ClusterSpec().gpu
    if measured.gpu == gpu:
        return []
    return [
        Mistake(
            position.file,
            position.line,
            position.column,
            "cluster.profile",
            f"a profile of {gpu}",
            f"one of {measured.gpu}",
        )
    ]


def _expert_load_mistakes(document: YamlDocument, unusable: set[KeyPath]) -> list[Mistake]:
    """Return the mistakes of `train.expert_load`: the file or run has no loads that fit the model."""
    path: KeyPath = ("train", "expert_load")
    source = document.get(path)
    model, wrong = validate(ModelSection, document.data.get("model") or {})
    if not isinstance(source, str) or source in ("none", EQUAL_LOADS) or path in unusable or wrong:
        return []
    position = document.value_position(path)
    option = "train.expert_load"
    try:
        read_loads(Path(source), from_plain(ModelSection, model), option)
    except BadInput as error:
        got = str(error).removeprefix(option).lstrip(": ").replace(source, os.path.relpath(source))
        expected = f"{EQUAL_LOADS}, or a file or run with loads of this model's experts"
        return [Mistake(position.file, position.line, position.column, option, expected, got)]
    return []


def _lengths_mistakes(document: YamlDocument, unusable: set[KeyPath]) -> list[Mistake]:
    """Return the mistakes of `data.lengths`: the file is no histogram of lengths."""
    path: KeyPath = ("data", "lengths")
    source = document.get(path)
    if not isinstance(source, str) or source == "none" or path in unusable:
        return []
    position = document.value_position(path)
    option = "data.lengths"
    try:
        read_lengths(Path(source), option)
    except BadInput as error:
        got = str(error).removeprefix(option).lstrip(": ").replace(source, os.path.relpath(source))
        expected = "a file that `meshwright data lengths --json` wrote"
        return [Mistake(position.file, position.line, position.column, option, expected, got)]
    return []


def _flat(run: RunSpec) -> dict[str, Any]:
    plain = _without_derived(run)
    flat: dict[str, Any] = {}
    for section in _COMPARED_SECTIONS:
        flat.update(_keys_of(section, plain[section]))
    flat |= {key: flat[key] and Path(flat[key]).name for key in _PATHS if key in flat}
    return {key: value for key, value in flat.items() if key not in _NOT_COMPARED}


def _keys_of(section: str, inner: Any) -> dict[str, Any]:
    """Return the values in a section by dotted key. For a section that may be absent, one more entry says that it is there."""
    if not isinstance(inner, dict):
        return {section: inner}
    keys = {f"{section}.{key}": value for key, value in inner.items()}
    if section not in ("rl", "preference"):
        return keys
    if section == "rl":
        for key in ("reward", "kl"):
            keys |= _keys_of(f"rl.{key}", keys.pop(f"rl.{key}"))
    return {section: "a section", **keys}


def _without_derived(run: RunSpec) -> dict[str, Any]:
    """Return the run as plain data. `train.global_batch` is left out if it follows from `train.global_batch_tokens`."""
    plain = to_plain(run)
    if run.train.global_batch_tokens is not None:
        del plain["train"]["global_batch"]
    return plain


def _as_list(value: Any) -> Any:
    """Convert a mapping to a list of pairs, so that a comparison includes the order."""
    return list(value.items()) if isinstance(value, dict) else value
