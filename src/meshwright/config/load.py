"""From a run file and overrides to one RunSpec, or every mistake in them at once.

    defaults < what `extends` names < the file < `train.steps=200` on the command line

Derived values are filled in after merging. A resolved run, written by `resolved_yaml`, loads to an equal RunSpec.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.config.complete import ModelReader, complete
from meshwright.config.key_rules import cross_checks, plan_file_checks
from meshwright.config.mistakes import schema_mistakes
from meshwright.config.plan_file import plan_rules
from meshwright.config.profile_file import load_profile
from meshwright.config.reading import Reading, in_reading_order
from meshwright.config.schema import validate
from meshwright.config.value_sources import EMBEDDED, QUICKSTART, Detect, gather, shown_name
from meshwright.config.yaml_positions import Document, KeyPath, dotted, dump_yaml, read_yaml
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadConfig, BadInput, Mistake, nearest
from meshwright.spec.fields import from_plain, to_plain
from meshwright.spec.layout import with_node_crossings
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec

_SAME_TRAINING_SECTIONS = ("seed", "model", "data", "train")
_NOT_COMPARED = {
    "model.preset", "data.validation", "data.tokenizer_mismatch", "data.changed", "train.validate_every",
    "train.validate_batches", "train.gc_every",
    "train.keep_cores", "train.timeout_seconds", "train.loss_chunk",
}  # fmt: skip


def load_run(
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    runs: Path = Path("runs"),
    detect: Detect | None = None,
    model_reader: ModelReader | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> RunSpec:
    """The run that the file at `path` describes, with `overrides` such as `train.steps=200` laid over it.

    Without a path the overrides describe the run (see `gather`); QUICKSTART is the path of the quick start's. `runs` is where
    `model.init: checkpoint:NAME` looks for a run by name, `detect` answers `cluster: auto` and a cluster that is left out with
    ClusterSpec's keys, `model_reader` gives ModelSpec's keys for `model.init: hf:DIR` when the file gives no dimensions, and `note` gets
    a sentence for each assumption. Raises BadConfig with every mistake found.
    """
    reading = read_run(path, overrides, runs=runs, detect=detect, model_reader=model_reader)
    run = reading.run()
    for text in reading.notes:
        note(text)
    return run


def read_run(
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    runs: Path = Path("runs"),
    detect: Detect | None = None,
    model_reader: ModelReader | None = None,
) -> Reading:
    """What `load_run` reads, with the mistakes in it and the positions of its keys. Raises nothing for a mistake."""
    document = gather(path, overrides, detect or _one_cpu_rank)
    notes = _complete(document, path, runs, detect, model_reader)
    _, mistakes, unusable = schema_mistakes(RunSpec, document)
    mistakes += document.mistakes + cross_checks(document, unusable) + _plan_file_mistakes(document, unusable)
    mistakes += _profile_mistakes(document, unusable)
    return Reading(document, shown_name(path), tuple(mistakes), frozenset(unusable), tuple(notes))


def load_resolved(path: Path) -> RunSpec:
    """The run in a file that `resolved_yaml` wrote, such as the config.yaml of a run's folder or of a checkpoint.

    Unlike `load_run` it asks for nothing outside the file: the plan file or weights that it names may be gone by now.
    Raises BadConfig with every mistake found.
    """
    document = read_yaml(path)
    pins = document.get(("plan",))
    if isinstance(pins, dict):
        pins.pop("reduce_engine", None)  # earlier versions wrote every key, also this one, which was removed
    given, mistakes, _ = schema_mistakes(RunSpec, document)
    mistakes += document.mistakes
    if mistakes:
        raise BadConfig(in_reading_order(mistakes, str(path)))
    return from_plain(RunSpec, given)


def load_cluster(path: Path | None, overrides: Sequence[str] = (), *, detect: Detect | None = None) -> ClusterSpec:
    """The cluster alone of the run that `load_run` would load. A profile that it names is not read: it may be about to be written.

    Raises BadConfig with every mistake in the section.
    """
    document = gather(path, overrides, detect or _one_cpu_rank)
    _complete(document, path, Path("runs"), detect, None)
    _, mistakes, unusable = schema_mistakes(RunSpec, document)
    mistakes += document.mistakes + cross_checks(document, unusable)
    mistakes = [mistake for mistake in mistakes if mistake.key.partition(".")[0] == "cluster"]
    if mistakes:
        raise BadConfig(in_reading_order(mistakes, shown_name(path)))
    given, _ = validate(ClusterSpec, document.data.get("cluster", {}))
    return from_plain(ClusterSpec, given)


def load_plan(path: Path, cluster: ClusterSpec | None = None) -> Plan:
    """The plan in a file that the planner or a person wrote; on a `cluster`, its axes cross what they cross there.

    Raises BadConfig with every mistake found.
    """
    document = read_yaml(path)
    given, mistakes, _ = _checked_plan(document)
    if mistakes:
        raise BadConfig(in_reading_order(mistakes, str(path)))
    plan = from_plain(Plan, given)
    return with_node_crossings(plan, cluster.ranks_per_node) if cluster else plan


def resolved_yaml(run: RunSpec) -> str:
    """The run with every value written out, as YAML that `load_run` reads back to an equal RunSpec."""
    header = "# A resolved run: every value, defaults included. Loading this file gives the same run again.\n"
    return header + dump_yaml(to_plain(run))


def plan_yaml(plan: Plan) -> str:
    """The plan as the file a person reads, edits and passes back with `plan: FILE`."""
    header = (
        "# The plan of this run. Edit a copy and pass it back with `plan: FILE`; `predicted` and `why` bind nothing.\n"
    )
    return header + dump_yaml(to_plain(plan))


def differences(a: RunSpec, b: RunSpec) -> list[tuple[str, Any, Any]]:
    """The dotted keys, with both values, in which two runs would train differently.

    What only moves or watches the training is left out: cluster, plan, checkpoint, observe, validation and time limits.
    The order of `data.mix` counts, as the order of samples may follow from it.
    """
    ours, theirs = _flat(a), _flat(b)
    keys = dict.fromkeys([*ours, *theirs])
    return [
        (key, ours.get(key), theirs.get(key)) for key in keys if _as_list(ours.get(key)) != _as_list(theirs.get(key))
    ]


def mistakes_as_json(mistakes: Iterable[Mistake] = ()) -> dict[str, Any]:
    """What `meshwright check --json` prints for these mistakes."""
    report = BadConfig(mistakes)
    more = {"more": report.unlisted} if report.unlisted else {}
    return {"ok": not report.mistakes, "errors": report.as_plain(), **more}


def _complete(
    document: Document, path: Path | None, runs: Path, detect: Detect | None, model_reader: ModelReader | None
) -> list[str]:
    """Adds to `document` what follows from it; returns a sentence for each assumption."""
    notes = complete(document, (path or QUICKSTART).stem, runs, detect or _one_cpu_rank, model_reader)
    if path is not None:
        return notes
    assumed = " ".join(f"{dotted(path)}={text}" for path, text in _embedded_values(document))
    return [*notes, f"no run file: {assumed} assumed"] if assumed else notes


def _embedded_values(document: Document) -> Iterator[tuple[KeyPath, str]]:
    """Keys that have the quick start's value or its preset's, chip's, and that value in words."""
    for section, value in document.data.items():
        for key, inner in value.items() if isinstance(value, dict) else ((None, value),):
            path: KeyPath = (section,) if key is None else (section, key)
            named = path in document.values and document.values[path].file == EMBEDDED
            if named and (section != "model" or key == "preset"):
                yield path, "+".join(inner) if isinstance(inner, dict) else str(inner)


def _one_cpu_rank() -> dict[str, Any]:
    return {"gpu": "cpu", "nodes": 1, "gpus_per_node": 1}


def _plan_file_mistakes(document: Document, unusable: set[KeyPath]) -> list[Mistake]:
    """What is wrong with the plan file that a run names."""
    file = document.data.get("plan")
    if not isinstance(file, str) or file == "auto" or ("plan",) in unusable:
        return []
    plan = read_yaml(Path(file), os.path.relpath(file))
    _, mistakes, wrong = _checked_plan(plan)
    return mistakes + plan_file_checks(plan, wrong, document, unusable)


def _profile_mistakes(document: Document, unusable: set[KeyPath]) -> list[Mistake]:
    """What is wrong with the machine profile that a run's cluster names."""
    path: KeyPath = ("cluster", "profile")
    file = document.get(path)
    if not isinstance(file, str) or file == "none" or path in unusable or ("cluster",) in unusable:
        return []
    place, shown = document.value_place(path), os.path.relpath(file)
    expected = "a file that `meshwright profile --out FILE` wrote"
    if not os.path.isfile(file):
        close = nearest(os.path.basename(file), [near.name for near in Path(file).parent.glob("*.json")])
        return [
            Mistake(place.file, place.line, place.column, "cluster.profile", expected, f"{shown}: no such file", close)
        ]
    try:
        measured = load_profile(file)
    except BadInput as error:
        got = str(error).replace(file, shown)
        return [Mistake(place.file, place.line, place.column, "cluster.profile", expected, got)]
    gpu = document.get(("cluster", "gpu")) or ClusterSpec().gpu
    if measured.gpu == gpu:
        return []
    return [
        Mistake(
            place.file, place.line, place.column, "cluster.profile", f"a profile of {gpu}", f"one of {measured.gpu}"
        )
    ]


def _checked_plan(document: Document) -> tuple[dict[str, Any], list[Mistake], set[KeyPath]]:
    given, mistakes, unusable = schema_mistakes(Plan, document)
    mistakes += document.mistakes
    if not mistakes:
        mistakes += plan_rules(document)
    return given, mistakes, unusable


def _flat(run: RunSpec) -> dict[str, Any]:
    plain = to_plain(run)
    flat: dict[str, Any] = {}
    for section in _SAME_TRAINING_SECTIONS:
        inner = plain[section]
        flat.update(
            {f"{section}.{key}": value for key, value in inner.items()} if isinstance(inner, dict) else {section: inner}
        )
    return {key: value for key, value in flat.items() if key not in _NOT_COMPARED}


def _as_list(value: Any) -> Any:
    """Mappings as lists, so that their order counts."""
    return list(value.items()) if isinstance(value, dict) else value
