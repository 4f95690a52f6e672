"""From a run file and overrides to one RunSpec, or every mistake in them at once.

    defaults < what `extends` names < the file < `train.steps=200` on the command line

Derived values are filled in after merging. A resolved run, written by `resolved_yaml`, loads to an equal RunSpec.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from meshwright.spec.checks import cross_checks, plan_file_checks
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.complete import ModelReader, complete
from meshwright.spec.errors import BadConfig, BadInput, Mistake, nearest
from meshwright.spec.fields import from_plain, to_plain
from meshwright.spec.layout import placed
from meshwright.spec.mistakes import schema_mistakes
from meshwright.spec.plan import Plan
from meshwright.spec.plan_file import plan_rules
from meshwright.spec.profile import load_profile
from meshwright.spec.run import RunSpec
from meshwright.spec.schema import validate
from meshwright.spec.sources import COMMAND_LINE, EMBEDDED, Detect, gather
from meshwright.spec.yaml_positions import Document, KeyPath, dump_yaml, read_yaml

QUICKSTART = Path(__file__).with_name("defaults") / "quickstart.yaml"
_SAME_TRAINING_SECTIONS = ("seed", "model", "data", "train")
_NOT_COMPARED = {
    "model.preset", "data.validation", "train.validate_every", "train.validate_batches", "train.gc_every",
    "train.keep_cores", "train.timeout_seconds", "train.loss_chunk",
}  # fmt: skip


def load_run(
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    runs: Path = Path("runs"),
    detect: Detect | None = None,
    model_reader: ModelReader | None = None,
) -> RunSpec:
    """The run that the file at `path` describes, with `overrides` such as `train.steps=200` laid over it.

    Without a path it is the quick start. `runs` is where `model.init: checkpoint:NAME` looks for a run by name,
    `detect` answers `cluster: auto` with ClusterSpec's keys, and `model_reader` gives ModelSpec's keys for
    `model.init: hf:DIR` when the file gives no dimensions. Raises BadConfig with every mistake found.
    """
    file, shown = (QUICKSTART, EMBEDDED) if path is None else (path, str(path))
    document = gather(file, shown, overrides, detect or _one_cpu_rank)
    complete(document, file.stem, runs, model_reader)
    given, mistakes, unusable = schema_mistakes(RunSpec, document)
    mistakes += document.mistakes + cross_checks(document, unusable) + _plan_file_mistakes(document, unusable)
    mistakes += _profile_mistakes(document, unusable)
    if mistakes:
        raise BadConfig(_in_reading_order(mistakes, shown))
    return from_plain(RunSpec, given)


def load_resolved(path: Path) -> RunSpec:
    """The run in a file that `resolved_yaml` wrote, such as the config.yaml of a run's folder or of a checkpoint.

    Unlike `load_run` it asks for nothing outside the file: the plan file or weights that it names may be gone by now.
    Raises BadConfig with every mistake found.
    """
    document = read_yaml(path)
    given, mistakes, _ = schema_mistakes(RunSpec, document)
    mistakes += document.mistakes
    if mistakes:
        raise BadConfig(_in_reading_order(mistakes, str(path)))
    return from_plain(RunSpec, given)


def load_cluster(path: Path | None, overrides: Sequence[str] = (), *, detect: Detect | None = None) -> ClusterSpec:
    """The cluster alone of the run that `load_run` would load. A profile that it names is not read: it may be about to be written.

    Raises BadConfig with every mistake in the section.
    """
    file, shown = (QUICKSTART, EMBEDDED) if path is None else (path, str(path))
    document = gather(file, shown, overrides, detect or _one_cpu_rank)
    complete(document, file.stem, Path("runs"), None)
    _, mistakes, unusable = schema_mistakes(RunSpec, document)
    mistakes += document.mistakes + cross_checks(document, unusable)
    mistakes = [mistake for mistake in mistakes if mistake.key.partition(".")[0] == "cluster"]
    if mistakes:
        raise BadConfig(_in_reading_order(mistakes, shown))
    given, _ = validate(ClusterSpec, document.data.get("cluster", {}))
    return from_plain(ClusterSpec, given)


def load_plan(path: Path, cluster: ClusterSpec | None = None) -> Plan:
    """The plan in a file that the planner or a person wrote; on a `cluster`, its axes cross what they cross there.

    Raises BadConfig with every mistake found.
    """
    document = read_yaml(path)
    given, mistakes, _ = _checked_plan(document)
    if mistakes:
        raise BadConfig(_in_reading_order(mistakes, str(path)))
    plan = from_plain(Plan, given)
    return placed(plan, cluster.ranks_per_node) if cluster else plan


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
    errors = BadConfig(mistakes).as_plain()
    return {"ok": not errors, "errors": errors}


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


def _in_reading_order(mistakes: list[Mistake], first: str) -> list[Mistake]:
    """Each mistake once: those of the file first, then of other files, then of the command line, each from the top."""

    def order(mistake: Mistake) -> tuple[int, str, int, int]:
        rank = {first: 0, COMMAND_LINE: 2}.get(mistake.file, 1)
        return rank, mistake.file, mistake.line or 0, mistake.column or 0

    return sorted(dict.fromkeys(mistakes), key=order)


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
