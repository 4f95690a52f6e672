"""Loads the file that asks for the plan of a deployment, and files that describe a deployment.

Reports every mistake in them.

The first is called the question: its section `serve` has the workload and the limits. The planner answers it with a
deployment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.config.complete import ModelReader, complete
from meshwright.config.key_rules import cross_checks
from meshwright.config.load import one_cpu_rank, profile_mistakes
from meshwright.config.mistakes import schema_mistakes
from meshwright.config.reading import LocatedValues, in_reading_order
from meshwright.config.trace_file import read_trace
from meshwright.config.value_sources import COMMAND_LINE, Detect, gather
from meshwright.config.yaml_positions import KeyPath, Position, YamlDocument, dump_yaml, format_value, read_yaml
from meshwright.spec.deployment import (
    PREFIX_BLOCK,
    Deployment,
    DeploymentSpec,
    EngineSwitches,
    ServeLimits,
    release_error,
    role_error,
)
from meshwright.spec.errors import BadConfig, BadInput, Mistake
from meshwright.spec.fields import from_plain, hints_of, to_plain

SHORTHANDS: dict[str, dict[str, str]] = {
    "none": {},
    "fp8": {"weights": "fp8", "kv_cache": "fp8"},
    "int8": {"weights": "int8"},
}
"""The sections that single words of `quantisation` stand for."""
_SYNTHETIC = ("rate", "input_tokens", "output_tokens", "prefix_sharing")
"""Keys of a workload of equal requests."""
_WORKLOAD: KeyPath = ("serve", "workload")
"""Path of the section of the workload."""


class PlannedSetting(NamedTuple):
    """A setting of a server that comes from the file of its deployment."""

    value: Any
    position: Position
    """Where the file gives the value."""


def asks_for_deployment(path: Path | None, overrides: Sequence[str]) -> bool:
    """Return whether the file, or an override, has the section `serve`, and so asks for a deployment."""
    if any(text.removeprefix("--").partition("=")[0].partition(".")[0] == "serve" for text in overrides):
        return True
    return path is not None and read_yaml(path).has(("serve",))


def load_deployment_spec(path: Path, overrides: Sequence[str] = (), **options: Any) -> DeploymentSpec:
    """Like `read_deployment_spec`, but returns only the values."""
    return read_deployment_spec(path, overrides, **options).value


def read_deployment_spec(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    runs: Path = Path("runs"),
    detect: Detect | None = None,
    model_reader: ModelReader | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> LocatedValues[DeploymentSpec]:
    """Read the question in the file at `path` and apply `overrides` such as `serve.limits.tpot_seconds=0.02`.

    The arguments are as in `load_run`; `note` receives a sentence for each assumption. The path of a trace is relative
    to the file that names it. Raises BadConfig with every mistake in the keys, and with the first mistake in the trace.
    """
    document = gather(path, overrides, detect or one_cpu_rank)
    given = set(document.data)
    notes = complete(document, path.stem, runs, detect or one_cpu_rank, model_reader)
    for section in set(document.data) - given - set(hints_of(DeploymentSpec)):
        del document.data[section]  # `complete` adds sections that only a training has.
    _expand(document, path.parent)
    values, mistakes, unusable = schema_mistakes(DeploymentSpec, document)
    mistakes += document.mistakes + cross_checks(document, unusable | {("train",), ("data",)})
    mistakes += profile_mistakes(document, unusable)
    if not any(path[:1] == ("serve",) for path in unusable):
        mistakes += [*_workload_rules(document), *_trace_mistakes(document)]
    if mistakes:
        raise BadConfig(in_reading_order(mistakes, str(path)))
    for text in notes:
        note(text)
    return LocatedValues(from_plain(DeploymentSpec, values), document)


def load_deployment(path: Path) -> Deployment:
    """Load a deployment from a file that `deployment_yaml` or a person wrote. Raises BadConfig with every mistake."""
    return read_deployment(path).value


def read_deployment(path: Path) -> LocatedValues[Deployment]:
    """Like `load_deployment`, but the result also has the positions of the keys."""
    document = read_yaml(path)
    refuse_question(document, "a deployment, which `meshwright plan FILE --out DEPLOYMENT.yaml` writes for this file")
    _expand_quantisation(document, ("quantisation",))
    values, mistakes, unusable = schema_mistakes(Deployment, document)
    mistakes += document.mistakes
    if not unusable and not document.partial:
        roles = [instance.get("role", "both") for instance in document.data["instances"]]
        if (expected := role_error(roles)) is not None:
            mistakes.append(document.mistake(("instances",), expected, ", ".join(roles) or "an empty list"))
        mistakes += _switch_mistakes(from_plain(Deployment, values), document)
    if mistakes:
        raise BadConfig(in_reading_order(mistakes, str(path)))
    return LocatedValues(from_plain(Deployment, values), document)


def _switch_mistakes(deployment: Deployment, document: YamlDocument) -> Iterator[Mistake]:
    """Yield a mistake for each switch about sending hidden states to experts on other devices, if no instance divides experts."""
    if any(instance.expert > 1 for instance in deployment.instances):
        return
    engine = deployment.engine
    usual = EngineSwitches()
    for key, value, default in (
        ("expert_dispatch", engine.expert_dispatch, usual.expert_dispatch),
        ("expert_micro_batches", engine.expert_micro_batches, usual.expert_micro_batches),
    ):
        if value != default:
            without = "none" if default is None else default
            expected = f"{without}, as no instance has expert above 1: tokens travel between several devices only"
            yield document.mistake(("engine", key), expected, format_value(value))


def refuse_question(document: YamlDocument, expected: str) -> None:
    """Raise BadConfig if the file is a question. `expected` says what the file should be."""
    if document.has(("serve",)):
        raise BadConfig([document.mistake(("serve",), expected, "a question for the plan of a deployment")])


def deployment_yaml(deployment: Deployment) -> str:
    """Return the deployment as a YAML file that a person can read, edit and pass to `meshwright serve --plan FILE`."""
    header = "# A serving deployment. Edit it and pass it back with --plan FILE; `predicted` and `why` bind nothing.\n"
    return header + dump_yaml(to_plain(deployment))


def server_settings(deployment: Deployment, role: str | None) -> dict[str, Any]:
    """Return the keys that a server's file must have so that the server is an instance of the deployment.

    `role` selects the instance if there are several kinds. Raises BadInput, with the key in the deployment's file, if
    the instances selected by the role differ, and if this release cannot serve them.
    """
    return {key: value for key, (value, _) in _settings_with_keys(deployment, role).items()}


def planned_settings(file: LocatedValues[Deployment], role: str | None) -> dict[str, PlannedSetting]:
    """Return the settings of `server_settings`, each with its position in the file.

    Engine switches that differ from their defaults are added. Raises BadConfig where `server_settings` raises BadInput.
    """
    with file.at_keys():
        settings = _settings_with_keys(file.value, role)
    usual = vars(EngineSwitches())
    for key, value in vars(file.value.engine).items():
        if value != usual[key]:
            settings[key] = value, ("engine", key)
    return {key: PlannedSetting(value, file.document.value_position(path)) for key, (value, path) in settings.items()}


def _settings_with_keys(deployment: Deployment, role: str | None) -> dict[str, tuple[Any, KeyPath]]:
    """Return the settings of a server, each with the key of the deployment's file that gives it."""
    entries = [(index, entry) for index, entry in enumerate(deployment.instances) if role in (None, entry.role)]
    if len({(entry.role, entry.tensor, entry.expert, entry.token_budget) for _, entry in entries}) != 1:
        roles = {entry.role for _, entry in entries}
        wanted = f"equal instances of role {roles.pop()}" if len(roles) == 1 else "--role of an instance"
        listed = " and ".join(f"{instance.count} of role {instance.role}" for instance in deployment.instances)
        raise BadInput(f"expected {wanted}; instances: {listed}", key="instances")
    index, own = entries[0]
    if (mistake := deployment.release_mistake) is not None:
        raise BadInput(mistake[1], key=mistake[0])
    if (problem := release_error(own, deployment.quantisation)) is not None:
        raise BadInput(problem, key=f"instances.{index}.expert")
    settings: dict[str, tuple[Any, KeyPath]] = {
        "role": (own.role, ("instances", index, "role")),
        "tensor": (own.tensor, ("instances", index, "tensor")),
        **({"expert": (own.expert, ("instances", index, "expert"))} if own.expert > 1 else {}),
        "step_tokens": (own.token_budget, ("instances", index, "token_budget")),
    }
    formats = deployment.quantisation
    for key, value in (("weights", formats.served_weights), ("kv_cache", formats.kv_cache)):
        if value is not None:
            settings[key] = value, ("quantisation", key)
    return settings


def _expand(document: YamlDocument, folder: Path) -> None:
    """Replace the shorthand in `serve.quantisation` by its section, and make the path of the trace absolute."""
    _expand_quantisation(document, ("serve", "quantisation"))
    path = (*_WORKLOAD, "trace")
    name = document.get(path)
    if isinstance(name, str) and name != "none":
        from_file = document.value_position(path).file != COMMAND_LINE
        absolute = os.path.abspath((folder if from_file else Path()) / os.path.expanduser(name))
        document.put(path, absolute, document.value_position(path))


def _expand_quantisation(document: YamlDocument, path: KeyPath) -> None:
    word = document.get(path)
    if isinstance(word, str) and word in SHORTHANDS:
        document.put(path, dict(SHORTHANDS[word]), document.value_position(path))


def _workload_rules(document: YamlDocument) -> Iterator[Mistake]:
    """Yield mistakes of the workload: it must be a trace, or the rate and the sizes of equal requests."""
    workload = {key: value for key, value in document.get(_WORKLOAD).items() if value not in (None, "none")}
    if "trace" in workload:
        for key in (key for key in _SYNTHETIC if key in workload):
            expected = "no such key beside serve.workload.trace, which has the sizes and times of its requests"
            yield document.mistake((*_WORKLOAD, key), expected, format_value(workload[key]))
    elif missing := [key for key in _SYNTHETIC[:3] if key not in workload]:
        expected = f"a trace, or all of {', '.join(_SYNTHETIC[:3])}"
        yield document.mistake(_WORKLOAD, expected, "none of them" if len(missing) == 3 else f"no {', '.join(missing)}")
    else:
        yield from _sharing_rule(document, workload["input_tokens"], workload.get("prefix_sharing", 0))
        yield from _context_rule(document, workload)


def _sharing_rule(document: YamlDocument, tokens: int, share: float) -> Iterator[Mistake]:
    """Yield a mistake if the shared part of prompts is shorter than one block, because prompts share whole blocks."""
    if share and int(share * tokens) < PREFIX_BLOCK:
        more = f", or at least {PREFIX_BLOCK / tokens:.3g}" if tokens > PREFIX_BLOCK else ""
        expected = f"0{more}: prompts of {tokens} tokens share whole blocks of {PREFIX_BLOCK}"
        yield document.mistake((*_WORKLOAD, "prefix_sharing"), expected, str(share))


def _context_rule(document: YamlDocument, workload: Mapping[str, Any]) -> Iterator[Mistake]:
    """Yield a mistake if a request does not fit into the context of the model."""
    if (context := _context(document)) is not None:
        most = {"input_tokens": context - 1, "output_tokens": max(1, context - workload["input_tokens"])}
        key = next((key for key in most if workload[key] > most[key]), None)
        if key is not None:
            beside = f" and input_tokens {workload['input_tokens']}" if key == "output_tokens" else ""
            expected = f"at most {most[key]}, as model.max_seq_len is {context}{beside}"
            yield document.mistake((*_WORKLOAD, key), expected, str(workload[key]))


def _context(document: YamlDocument) -> int | None:
    """Return the context of the model in tokens, if the file gives it.

    A prompt must be shorter, because the server adds at least one token.
    """
    context = document.get(("model", "max_seq_len"))
    return context if isinstance(context, int) else None


def _long_prompts(document: YamlDocument, path: KeyPath, lengths: Sequence[int]) -> Iterator[Mistake]:
    """Yield a mistake if too many prompts of a trace are too long for the model.

    That is the case if fewer than the fraction `serve.limits.attainment` of the prompts fit. `lengths` are in tokens.
    """
    context = _context(document)
    attainment = document.get(("serve", "limits", "attainment"))
    share = attainment if isinstance(attainment, int | float) else ServeLimits.attainment
    short = len(lengths) if context is None else sum(length < context for length in lengths)
    if context is not None and short < share * len(lengths):
        expected = f"prompts of at most {context - 1} tokens, as model.max_seq_len is {context}"
        yield document.mistake(
            path, expected, f"{len(lengths) - short} of {len(lengths)} longer, the longest {max(lengths)}"
        )


def _trace_mistakes(document: YamlDocument) -> list[Mistake]:
    """Return the first mistake in the trace. If the trace cannot be read, the mistake is at the key that names it."""
    path = (*_WORKLOAD, "trace")
    name = document.get(path)
    if not isinstance(name, str) or name == "none":
        return []
    try:
        requests = read_trace(Path(name), os.path.relpath(name))
    except BadConfig as error:
        (wrong,) = error.mistakes
        if wrong.line is not None:
            return [wrong]
        return [document.mistake(path, wrong.expected, f"{wrong.file}: {wrong.got}", wrong.nearest)]
    return list(_long_prompts(document, path, [request.input_tokens for request in requests]))
