"""Merges the sources of a run's values in a fixed order: the file that `extends` names, the run file, the command line.

Each source is read with the positions of its tokens. Its shorthands are expanded (`model: NAME`, `data.mix: DIR`,
`cluster: auto | NAME | FILE`), and it is merged over the earlier sources. The paths of `extends`, `cluster`, `plan` and
`cluster.profile` are relative to the file that contains them. The paths of data and weights are relative to the current
directory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshwright.config.presets import CLUSTER_PRESETS, MODEL_PRESETS, cluster_names, run_preset
from meshwright.config.yaml_positions import (
    KeyPath,
    Position,
    YamlDocument,
    dotted,
    format_value,
    parse_yaml,
    read_yaml,
)
from meshwright.spec.errors import nearest_file

COMMAND_LINE = "command line"
"""Name of the command line in messages."""
QUICKSTART = Path(__file__).with_name("defaults") / "quickstart.yaml"
"""The built-in run file of the quick start."""
EMBEDDED = "quickstart.yaml (embedded)"
"""Name of that file in messages."""
UNNAMED = "unnamed"
"""Name of a run that has neither a file nor a named model."""
Detect = Callable[[], dict[str, Any]]
"""Returns the ClusterSpec keys of this machine."""
_SECTIONS = ("model", "data", "train", "cluster", "plan", "checkpoint", "observe", "supervision")
"""Sections that may be written without a value, which means an empty section."""
_BESIDE_DIMENSIONS = ("adapter",)
"""Keys of the model that stay if a later source names another preset."""


def shown_name(path: Path | None) -> str:
    """Return the name of a run's file in messages."""
    return EMBEDDED if path in (None, QUICKSTART) else str(path)


def gather(path: Path | None, overrides: Sequence[str], detect: Detect) -> YamlDocument:
    """Merge the sources of the run whose file is at `path`, with the rules of `merge`.

    Without a path, the overrides are applied to the run of the quick start, without its cluster. If an override sets a
    key of the model, the quick start's model is dropped too: `model.family=gpt2` must not train a model with the
    dimensions of another family. Such a run is named after the preset of its model, otherwise `UNNAMED`, so that it
    does not use the folder of the quick start.
    """
    document = _with_base(path or QUICKSTART, shown_name(path), (), detect)
    if path is None:
        _drop(document, "cluster")
        if any(text.removeprefix("--").partition("=")[0].partition(".")[0] == "model" for text in overrides):
            _drop(document, "model")
            document.put(("model",), {}, Position(COMMAND_LINE))
        document.put(("name",), UNNAMED, document.value_position(("name",)))
    # Another optimizer's name replaces the whole section, so it must be applied before other keys of the section.
    for text in sorted(overrides, key=lambda text: text.removeprefix("--").partition("=")[0] != "train.optimizer.name"):
        document = _overridden(document, text, detect)
    if path is None and document.data.get("name") == UNNAMED and document.get(("model", "preset")) in MODEL_PRESETS:
        document.put(("name",), document.get(("model", "preset")), document.value_position(("name",)))
    return document


def _drop(document: YamlDocument, section: str) -> None:
    """Remove a section from `document`, with the positions of its keys."""
    del document.data[section]
    for positions in (document.keys, document.values):
        for path in [path for path in positions if path[:1] == (section,)]:
            del positions[path]


def merge(base: YamlDocument, over: YamlDocument) -> YamlDocument:
    """Merge `over` over `base`.

    Sections are merged key by key. Lists, `data.mix` and values of different types are replaced.

    A source that names another preset, optimizer or trace replaces the whole section `model` (but for adapters),
    `train.optimizer` or `serve.workload`. If `data.mix` is replaced, the streams that only the replaced mix names are
    dropped.
    """
    return YamlDocument(
        merged(base.data, over.data),
        over.top,
        {**base.keys, **over.keys},
        {**base.values, **over.values},
        base.mistakes + over.mistakes,
        base.partial or over.partial,
        base.rejected | over.rejected,
    )


def merged(base: Any, over: Any, path: KeyPath = ()) -> Any:
    """Return the merge of plain data, by the rules of `merge`. `path` is the path of the data in the file."""
    if not isinstance(base, dict) or not isinstance(over, dict) or path == ("data", "mix"):
        return over
    if path == ("model",) and over.get("preset") not in (None, base.get("preset")):
        return {**{key: base[key] for key in _BESIDE_DIMENSIONS if key in base}, **over}
    if path == ("train", "optimizer") and over.get("name") not in (None, base.get("name", "adamw")):
        return over
    if path == ("serve", "workload") and over.get("trace") not in (None, base.get("trace")):
        return over
    if path == ("data",) and isinstance(over.get("mix"), dict):
        base = _without_dropped_streams(base, over["mix"])
    return {**base, **{key: merged(base.get(key), value, (*path, key)) for key, value in over.items()}}


def _without_dropped_streams(data: dict[str, Any], mix: dict[str, Any]) -> dict[str, Any]:
    """Return the section `data` without the streams that its own mix names but the new `mix` does not."""
    streams = data.get("streams")
    earlier = data.get("mix")
    if not isinstance(streams, dict) or not isinstance(earlier, dict):
        return data
    dropped = earlier.keys() - mix.keys()
    return {**data, "streams": {name: stream for name, stream in streams.items() if name not in dropped}}


def _with_base(path: Path, shown: str, extended_by: tuple[Path, ...], detect: Detect) -> YamlDocument:
    """Read the file at `path` and merge it over the file or preset that it extends.

    `extended_by` has the files that led here through `extends`, to detect a cycle.
    """
    document = read_yaml(path, shown)
    if document.has(("global_batch",)) and document.has(("micro_batch",)):
        beside = f"a run file; a plan is given beside one, as plan={shown}"
        document.complain(document.key_position(("micro_batch",)), "micro_batch", beside, "a plan")
        document.data = {}
        document.partial = True
    position = document.value_position(("extends",))
    name = document.data.pop("extends", None)
    _expand(document, path.parent, detect)
    if name is None:
        return document
    if isinstance(name, str) and name in MODEL_PRESETS:
        base = YamlDocument({}, position)
        for section, keys in run_preset(name).items():
            base.put((section,), keys, position)
        return merge(base, document)
    file = path.parent / os.path.expanduser(str(name))
    chain = (*extended_by, path.resolve())
    if not isinstance(name, str) or not os.path.isfile(file):
        close = nearest_file(str(name), [*MODEL_PRESETS, *_yaml_files(path.parent)])
        document.complain(position, "extends", "a preset or an existing run file", format_value(name), close)
    elif file.resolve() in chain:
        cycle = " → ".join(part.name for part in (*chain, file.resolve()))
        document.complain(position, "extends", "a chain of files that ends", f"a cycle: {cycle}")
    else:
        return merge(_with_base(file, os.path.normpath(file), chain, detect), document)
    document.partial = True
    return document


def _overridden(document: YamlDocument, text: str, detect: Detect) -> YamlDocument:
    """Apply one argument `KEY=VALUE` of the command line to `document`."""
    position = Position(COMMAND_LINE)
    key, equals, written = text.removeprefix("--").partition("=")
    value = parse_yaml(written, COMMAND_LINE)
    for mistake in value.mistakes:
        document.complain(position, key, mistake.expected, mistake.got)
    try:
        if not equals or not key:
            raise _CannotOverride("KEY=VALUE, as in train.steps=200", format_value(text))
        if key == "extends":
            raise _CannotOverride("`extends` in a run file only; here, model=NAME", format_value(written))
        steps = ["data", "mix", key[len("data.mix.") :]] if key.startswith("data.mix.") else key.split(".")
        data = _nested(document.data, steps, value.data if written.strip() else None, ())
    except _CannotOverride as refusal:
        document.complain(position, key, refusal.expected, refusal.got)
        return document
    if value.mistakes:
        return document
    over = YamlDocument(data, document.top)
    path = _changed(document, steps)
    over.mark(path, over.get(path), position)
    _expand(over, Path(), detect)
    return merge(document, over)


def _changed(document: YamlDocument, steps: list[str]) -> KeyPath:
    """Return the path that an override sets.

    Steps into a list become numbers. The path ends where there is no section or list to step into.
    """
    path: KeyPath = ()
    for step in steps:
        around = document.get(path)
        if not isinstance(around, (dict, list)):
            break
        path = (*path, int(step) if isinstance(around, list) else step)
    return path


class _CannotOverride(Exception):
    """An override cannot be applied. Has what was expected and what was found."""

    def __init__(self, expected: str, got: str) -> None:
        super().__init__(expected, got)
        self.expected = expected
        self.got = got


def _nested(current: Any, steps: list[str], value: Any, path: KeyPath) -> Any:
    """Return the data that, merged over `current`, sets `value` at the path `steps`. `path` is the path of `current`."""
    if not steps:
        return value
    step = steps[0]
    below = steps[1:]
    if isinstance(current, list):
        if not step.isdigit() or int(step) >= len(current):
            raise _CannotOverride(f"an item of {dotted(path)}, 0 to {len(current) - 1}", format_value(step))
        items = list(current)
        items[int(step)] = merged(items[int(step)], _nested(items[int(step)], below, value, (*path, step)))
        return items
    if path == ("plan",) and isinstance(current, str) and current != "auto":
        raise _CannotOverride("plan=auto before it, or a change in the plan file", f"a pin beside plan={current}")
    mapping = current if isinstance(current, dict) else {}
    inner = _nested(mapping.get(step), below, value, (*path, step))
    return {**mapping, step: inner} if path == ("data", "mix") else {step: inner}


def _expand(document: YamlDocument, folder: Path, detect: Detect) -> None:
    """Replace the shorthands of one source by their sections, and `~` by the home directory. Relative paths start in `folder`."""
    data = document.data
    for section in _SECTIONS:
        if section in data and data[section] is None:
            data[section] = {}
    if isinstance(data.get("model"), str):
        document.put(("model",), {"preset": data["model"]}, document.value_position(("model",)))
    _expand_cluster(document, folder, detect)
    _expand_profile(document, folder)
    _expand_plan(document, folder)
    if isinstance(document.get(("data", "mix")), str):
        document.put(("data", "mix"), {data["data"]["mix"]: 1.0}, document.value_position(("data", "mix")))
    _expand_streams(document)
    project = document.get(("observe", "wandb"))
    if isinstance(project, str) and project != "none":
        document.put(("observe", "wandb"), {"project": project}, document.value_position(("observe", "wandb")))
    _expand_home(document)


def _expand_cluster(document: YamlDocument, folder: Path, detect: Detect) -> None:
    """Replace `cluster: auto`, a built-in cluster or a cluster file by its section."""
    cluster = document.get(("cluster",))
    position = document.value_position(("cluster",))
    if not isinstance(cluster, str):
        return
    if cluster == "auto":
        document.put(("cluster",), detect(), position)
        return
    file = folder / os.path.expanduser(cluster)
    if cluster in cluster_names() and not os.path.isfile(file):
        file = CLUSTER_PRESETS / f"{cluster}.yaml"
    if not os.path.isfile(file):
        close = nearest_file(cluster, ["auto", *cluster_names(), *_yaml_files(folder)])
        document.reject(("cluster",), "auto, a built-in cluster, an existing cluster file, or a section", nearest=close)
        return
    document.graft("cluster", read_yaml(file, os.path.normpath(file)))
    _expand_profile(document, file.parent)


def _expand_profile(document: YamlDocument, folder: Path) -> None:
    """Make the path of a profile absolute. It is relative to the file that names it: the run file or the cluster file."""
    profile_name = document.get(("cluster", "profile"))
    if isinstance(profile_name, str) and profile_name != "none":
        document.data["cluster"]["profile"] = os.path.abspath(folder / os.path.expanduser(profile_name))


def _expand_plan(document: YamlDocument, folder: Path) -> None:
    """Make the path of a plan file absolute. Rejects a file that does not exist."""
    plan_value = document.get(("plan",))
    if not isinstance(plan_value, str) or plan_value == "auto":
        return
    file = folder / os.path.expanduser(plan_value)
    if os.path.isfile(file):
        document.data["plan"] = os.path.abspath(file)
    else:
        close = nearest_file(plan_value, ["auto", *_yaml_files(folder)])
        document.reject(("plan",), "auto, an existing plan file, or a section of pins", nearest=close)


VALIDATION = "validation"
"""Name in `data.streams` of the files that `data.validation` gives."""


def _expand_streams(document: YamlDocument) -> None:
    """Move sources that are sections from `data.mix` and `data.validation` to `data.streams`. Their weights stay in the mix."""
    mix = document.get(("data", "mix"))
    validation = document.get(("data", "validation"))
    if isinstance(validation, dict):
        _move_stream(document, ("data", "validation"), VALIDATION, validation)
        document.data["data"]["validation"] = VALIDATION
    if not isinstance(mix, dict):
        return
    for name in [name for name, value in mix.items() if isinstance(value, dict)]:
        stream = dict(mix[name])
        document.data["data"]["mix"] = {**document.data["data"]["mix"], name: stream.pop("weight", 1.0)}
        mixed = ("data", "mix", name)
        _move_stream(document, mixed, name, stream)
        for positions in (document.keys, document.values):
            positions[mixed] = positions.get((*mixed, "weight"), positions[mixed])


def _move_stream(document: YamlDocument, path: KeyPath, name: str, stream: dict[str, Any]) -> None:
    """Move the section of a source from `path` to `data.streams`, with the positions of its keys."""
    if isinstance(stream.get("files"), str):
        stream = {**stream, "files": os.path.expanduser(stream["files"])}
    streams = document.data["data"].get("streams")
    document.data["data"]["streams"] = {**(streams if isinstance(streams, dict) else {}), name: stream}
    for positions in (document.keys, document.values):
        below = [each for each in positions if each[: len(path)] == path]
        positions |= {("data", "streams", name, *each[len(path) :]): positions[each] for each in below}


def _expand_home(document: YamlDocument) -> None:
    """Replace `~` in the paths of data, of the tokenizer and of weights."""
    mix = document.get(("data", "mix"))
    if isinstance(mix, dict) and any(name.startswith("~") for name in mix):
        positions = {name: document.value_position(("data", "mix", name)) for name in mix}
        document.put(("data", "mix"), {}, document.value_position(("data", "mix")))
        for name, weight in mix.items():
            document.put(("data", "mix", os.path.expanduser(name)), weight, positions[name])
    for key in ("validation", "tokenizer", "cache"):
        if isinstance(path := document.get(("data", key)), str):
            document.data["data"][key] = os.path.expanduser(path)
    init = document.get(("model", "init"))
    if isinstance(init, str):
        source, colon, folder = init.partition(":")
        document.data["model"]["init"] = f"{source}{colon}{os.path.expanduser(folder)}"


def _yaml_files(folder: Path) -> list[str]:
    return [file.name for file in folder.glob("*.y*ml")]
