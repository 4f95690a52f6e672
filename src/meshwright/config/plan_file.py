"""Reads a plan file. Its top-level keys are those of the section `plan` in a run file."""

from __future__ import annotations

from typing import Any

from meshwright.config.key_rules import cross_checks
from meshwright.config.mistakes import schema_mistakes
from meshwright.config.run_values import Values
from meshwright.config.yaml_positions import YamlDocument
from meshwright.spec.errors import Mistake
from meshwright.spec.plan_keys import PlanKeys


def checked_keys(plan: YamlDocument) -> tuple[dict[str, Any], list[Mistake], Values]:
    """Return the keys of a plan file as plain data, the mistakes in them, and the values for rules that involve the run as well."""
    keys, mistakes, unusable = schema_mistakes(PlanKeys, plan)
    return keys, [*mistakes, *plan.mistakes], Values(plan, unusable)


def plan_file_mistakes(plan: YamlDocument) -> tuple[dict[str, Any], list[Mistake]]:
    """Return the keys of a plan file as plain data, and all mistakes that can be found without a run."""
    keys, mistakes, values = checked_keys(plan)
    return keys, mistakes + cross_checks(YamlDocument({}, plan.top, partial=True), set(), values)
