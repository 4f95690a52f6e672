"""Applies the rules of a plan in the search: says which values the search must not combine with the keys that the user
pinned.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

from meshwright.planner.candidate import compiles, pins_of
from meshwright.spec.fields import to_plain
from meshwright.spec.plan_keys import STRATEGY_KEYS
from meshwright.spec.plan_rules import UNTRAINED, RuleInput
from meshwright.spec.run import RunSpec


def conflicts(run: RunSpec, *, trainable: bool, **values: Any) -> Any:
    """Return whether `values` break a rule, together or with the run's pins.

    `values` maps keys to values that the search chooses.

    If the values are arrays, the result is an array of the same length. If `trainable` is true, a plan that this
    release can predict but not train breaks a rule too. Pins that conflict with each other are obeyed; their plan is
    then marked as not trainable.
    """
    pins = vars(pins_of(run))
    free = {key for key in values if pins[key] is None and not (pins["layers"] is not None and key in STRATEGY_KEYS)}
    known = {**pins, "compile": compiles(run), "model.experts": run.model.experts, **{key: values[key] for key in free}}
    given = RuleInput(known.get, [to_plain(layer) for layer in pins["layers"] or ()])
    rules = (
        rule for rule in UNTRAINED if (trainable or rule.expected) and not free.isdisjoint((rule.key, *rule.beside))
    )
    return reduce(or_, (rule.is_broken(given) for rule in rules), False)
