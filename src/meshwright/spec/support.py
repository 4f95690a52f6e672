"""What a model can be trained and served with, and what is expected instead where a rule refuses it.

There are no rules here: each answer is that of the rules by which runs and engines refuse it before they start. `meshwright check` and the
page of families show these answers.
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
"""Numbers of ranks of an axis, of which one must suit the model."""
EXPERT = "expert"
"""The key of expert ranks, which are no axis of the mesh."""


@dataclass(frozen=True)
class Support:
    """A feature, and what its rule expects of the model or of the run instead; None where the model can have it."""

    feature: str
    refusal: str | None


def training_support(spec: ModelSpec) -> tuple[Support, ...]:
    """The axes along which several ranks can train a model, the recomputation of its blocks, and its matmuls in fp8."""
    axes = (Support(axis, _axis_error(spec, axis)) for axis in (*get_args(AxisName), EXPERT))
    modes = (Support(f"recompute {mode}", _error(spec, "recompute", mode)) for mode in RECOMPUTE_MODES[1:])
    return (*axes, *modes, Support("fp8", _error(spec, "linear", "fp8_tensorwise")))


def serving_support(spec: ModelSpec) -> tuple[Support, ...]:
    """How the inference engine can divide a model, the formats of its weights, its drafts, and the fast paths that it has."""
    formats = {name: weights_error(spec, name) for name in get_args(WeightFormat)}
    formats["fp8"] = formats["fp8"] or fp8_sizes_error(spec)
    return (
        Support("tensor ranks", _first_error(lambda ranks: split_error(spec, ranks))),
        Support("expert ranks", _first_error(lambda ranks: experts_error(spec, ranks))),
        *(Support(f"{name} weights", error) for name, error in formats.items()),
        Support("invariant results on a GPU", invariant_error(spec)),
        Support("mtp", predictions_error(spec, 1)),
        Support("fast single decodes on a CPU", single_decode_obstacle(spec)),
    )


def support_lines(spec: ModelSpec) -> Iterator[str]:
    """For training, then for the engine: a line of what the model can have, and one for each feature that it cannot have, with why."""
    for verb, found in (("trained", training_support(spec)), ("served", serving_support(spec))):
        yield f"{spec.family} can be {verb} with {', '.join(each.feature for each in found if each.refusal is None)}"
        for each in found:
            if each.refusal is not None:
                yield f"  not with {each.feature}: {each.refusal.removeprefix(f'{each.feature}: ')}"


def support_as_plain(spec: ModelSpec) -> dict[str, dict[str, bool | str]]:
    """The answers by feature, as `meshwright check --json` prints them: true, or what is expected instead."""
    return {
        part: {each.feature: True if each.refusal is None else each.refusal for each in found}
        for part, found in (("train", training_support(spec)), ("serve", serving_support(spec)))
    }


def _axis_error(spec: ModelSpec, axis: str) -> str | None:
    """What is expected of several ranks along an axis, or of a model that cannot have any."""
    return _first_error(lambda ranks: _error(spec, axis, ranks, **_beside(axis, ranks)))


def _beside(axis: str, ranks: int) -> dict[str, Any]:
    """Keys that a run with ranks along an axis has in any case."""
    return {"hybrid": {"data.packing": "none"}, EXPERT: {"shard": ranks}}.get(axis, {})


def _first_error(of_ranks: Any) -> str | None:
    """The error of the fewest ranks; None if some number of ranks has none."""
    errors = [of_ranks(ranks) for ranks in RANKS]
    return None if None in errors else errors[0]


def _error(spec: ModelSpec, key: str, value: Any, **beside: Any) -> str | None:
    """What the first broken rule of a key of the plan expects with this value; None if none is broken."""
    model = to_plain(spec)
    given = RuleInput(lambda name: _value_at({"model": model}, name, {key: value, **beside}))
    rules = (rule for rule in RULES if rule.key == key and rule.is_broken(given))
    return next((text_of(rule.expected or rule.untrained, given) for rule in rules), None)


def _value_at(tree: Mapping[str, Any], name: str, keys: Mapping[str, Any]) -> Any:
    """The value of a key of the plan, or of a dotted key of the run; None where it is not known."""
    if name in keys:
        return keys[name]
    value: Any = tree if "." in name else None
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
