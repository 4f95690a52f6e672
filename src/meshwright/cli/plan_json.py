"""Shows the answer of `meshwright plan` as JSON: the plan, and the values of the sections that people see."""

from __future__ import annotations

from typing import Any

from meshwright.cli.plan_answer import PlanAnswer
from meshwright.cli.plan_sections import sections_of
from meshwright.planner.candidate import Candidate, fixed_keys, untrainable
from meshwright.spec.fields import to_plain
from meshwright.spec.plan_keys import plain_keys
from meshwright.spec.plan_name import plan_name


def as_plain(answer: PlanAnswer, *, explain: bool) -> dict[str, Any]:
    """Return the answer as JSON values, for `--json`. With `explain`, it also has the limits of the step and the gains of changes."""
    plan = plain_keys(answer.plan)
    body = {
        "name": plan_name(answer.plan),
        "plan": plan,
        "predicted": plan["predicted"],
        "search_seconds": answer.search_seconds,
    }
    body |= {section.key: section.plain() for section in sections_of(answer, explain=explain) if section.plain}
    if over := answer.does_not_fit:
        body["does_not_fit"] = over
    if fixed := fixed_keys(answer.run):
        body["fixed"] = fixed
    if answer.idle:
        body["idle"] = to_plain(answer.idle)
    if answer.question.include_untrainable:
        body["untrainable"] = _untrainable(answer.untrainable)
    return body


def _untrainable(candidate: Candidate | None) -> dict[str, Any] | None:
    if candidate is None:
        return None
    return {"plan": plain_keys(candidate.plan), "cannot_train": untrainable(candidate.plan)}
