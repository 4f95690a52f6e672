"""What a model can be trained and served with, and what is expected instead if a rule refuses it.

There are no rules here. Each answer comes from the rules by which runs and engines refuse a feature before they start.
`meshwright check` and the page of model families show these answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from meshwright.spec.engine import WeightFormat
from meshwright.spec.fields import to_plain
from meshwright.spec.inference_layout import experts_error, split_error
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import RECOMPUTE_MODES, AxisName
from meshwright.spec.plan_rules import RULES, RuleInput, text_of
from meshwright.spec.serving_limits import (
    fp8_sizes_error,
    invariant_error,
    predictions_error,
    single_decode_obstacle,
    weights_error,
)

RANKS = range(2, 9)
"""Numbers of ranks of an axis that are tried. The axis is supported if one of them suits the model."""
EXPERT = "expert"
"""The key of expert ranks, which are no axis of the mesh."""
EXPERT_RANKS = "expert ranks"
"""The engine's ranks with different experts."""
MTP = "mtp"
"""Drafts by the model's own modules that predict further tokens."""


@dataclass(frozen=True)
class Support:
    """Whether a model can have a feature."""

    feature: str
    """Name of the feature, for example an axis."""
    refusal: str | None
    """What the rule expects of the model or of the run instead; None if the model can have the feature."""


def training_support(spec: ModelSpec) -> tuple[Support, ...]:
    """Return which axes can have several ranks to train a model, which recompute modes it can have, and whether its
    matmuls can be in fp8.
    """
    axes = (Support(axis, _axis_error(spec, axis)) for axis in (*get_args(AxisName), EXPERT))
    modes = (Support(f"recompute {mode}", _error(spec, "recompute", mode)) for mode in RECOMPUTE_MODES[1:])
    return (*axes, *modes, Support("fp8", _error(spec, "linear", "fp8_tensorwise")))


def serving_support(spec: ModelSpec) -> tuple[Support, ...]:
    """Return how the inference engine can divide a model, which formats its weights can have, its drafts, and its fast
    paths.
    """
    formats = {name: weights_error(spec, name) for name in get_args(WeightFormat)}
    formats["fp8"] = formats["fp8"] or fp8_sizes_error(spec)
    return (
        Support("tensor ranks", _first_error(lambda ranks: split_error(spec, ranks))),
        Support(EXPERT_RANKS, _first_error(lambda ranks: experts_error(spec, ranks))),
        *(Support(f"{name} weights", error) for name, error in formats.items()),
        Support("invariant results on a GPU", invariant_error(spec)),
        Support(MTP, predictions_error(spec, 1)),
        Support("fast single decodes on a CPU", single_decode_obstacle(spec)),
    )


def support_lines(spec: ModelSpec) -> Iterator[str]:
    """Yield the lines of training, then those of the engine: what the model can have, and one line for each feature that it
    cannot have, with the reason.

    Features of a part that the model does not have, experts or modules that predict further tokens, are left out.
    """
    absent = {EXPERT, EXPERT_RANKS} if not spec.experts else set[str]()
    absent |= {MTP} if not spec.prediction_depth else set[str]()
    for verb, found in (("trained", training_support(spec)), ("served", serving_support(spec))):
        yield f"{spec.family} can be {verb} with {', '.join(each.feature for each in found if each.refusal is None)}"
        for each in found:
            if each.refusal is not None and each.feature not in absent:
                yield f"  not with {each.feature}: {each.refusal.removeprefix(f'{each.feature}: ')}"


def support_as_plain(spec: ModelSpec) -> dict[str, dict[str, bool | str]]:
    """Return the answers by feature, as `meshwright check --json` prints them: true, or what is expected instead."""
    return {
        part: {each.feature: True if each.refusal is None else each.refusal for each in found}
        for part, found in (("train", training_support(spec)), ("serve", serving_support(spec)))
    }


def _axis_error(spec: ModelSpec, axis: str) -> str | None:
    """Return what is expected if an axis cannot have several ranks; None if it can."""
    return _first_error(lambda ranks: _error(spec, axis, ranks, **_beside(axis, ranks)))


def _beside(axis: str, ranks: int) -> dict[str, Any]:
    """Return the other keys that a run must have to have ranks along an axis."""
    return {"hybrid": {"data.packing": "none"}, EXPERT: {"shard": ranks}}.get(axis, {})


def _first_error(of_ranks: Any) -> str | None:
    """Return the error of the smallest number of ranks; None if some number of ranks has no error."""
    errors = [of_ranks(ranks) for ranks in RANKS]
    return None if None in errors else errors[0]


def _error(spec: ModelSpec, key: str, value: Any, **beside: Any) -> str | None:
    """Return what the first broken rule of a key expects, if the key has this value; None if no rule is broken."""
    model = to_plain(spec)
    given = RuleInput(lambda name: _value_at({"model": model}, name, {key: value, **beside}))
    rules = (rule for rule in RULES if rule.key == key and rule.is_broken(given))
    return next((text_of(rule.expected or rule.untrained, given) for rule in rules), None)


def _value_at(tree: Mapping[str, Any], name: str, keys: Mapping[str, Any]) -> Any:
    """Return the value of a key of the plan, or of a dotted key of the run; None if it is not known."""
    if name in keys:
        return keys[name]
    value: Any = tree if "." in name else None
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
