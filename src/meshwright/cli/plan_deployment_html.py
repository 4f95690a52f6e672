"""Shows the plan of a deployment as one self-contained page without scripts."""

from __future__ import annotations

from meshwright.cli.plan_words import machines_line
from meshwright.cli.planned_deployment import (
    INSTANCE_HEADS,
    ServePlan,
    divisions,
    headline,
    instance_lines,
    limits_line,
    rate_line,
    scaled_limits,
    search_line,
)
from meshwright.observe import number_text
from meshwright.observe.attainment_chart import AttainmentCurve, attainment_chart, division_chart, limits_chart
from meshwright.observe.page import document, header, listing, table, tile_list
from meshwright.spec.deployment import deployment_name
from meshwright.spec.model import parameter_count


def page(plan: ServePlan) -> str:
    """Return the HTML of the page."""
    answer = plan.answer
    spec = plan.spec
    name = spec.model.preset or spec.model.family
    line = f"{number_text.short(parameter_count(spec.model))} parameters · {machines_line(spec.cluster)}"
    margin = answer.margin_over_colocated
    tiles = [
        (
            "Goodput",
            number_text.rate(answer.chosen.goodput_per_gpu),
            f"requests/s a device, 80%: {number_text.rate(answer.low)} to {number_text.rate(answer.high)}",
        ),
        ("Binding limit", answer.chosen.goodput.binding.upper(), f"{spec.serve.limits.attainment:.0%} must meet both"),
        (
            "Over colocated",
            "none meets the limits" if margin is None else f"{margin:+.0%}",
            "the best colocated deployment",
        ),
        ("Considered", f"{answer.considered:,}", f"deployments in {answer.search_seconds:.1f} s"),
    ]
    goal = spec.serve.limits.attainment
    curve = AttainmentCurve("predicted", answer.curve)
    others = [
        (
            number_text.rate(option.goodput_per_gpu),
            deployment_name(option.deployment),
            option.goodput.binding.upper(),
            option.why_not,
        )
        for option in answer.alternatives
    ]
    parts = [
        header(
            "plan", name, f"{line} · {deployment_name(answer.deployment)}", f"{headline(plan)}. {limits_line(plan)}."
        ),
        tile_list(tiles),
        table("Instances", INSTANCE_HEADS, instance_lines(answer)),
        f'<div class="grid">{attainment_chart([curve], goal)}{limits_chart(scaled_limits(answer), goal)}</div>',
        f'<div class="grid">{division_chart(divisions(answer))}</div>',
        listing("Why this deployment", [*answer.why, rate_line(plan), search_line(answer)]),
        table(
            "Alternatives, and why they were not chosen",
            ("requests/s a device", "deployment", "binds", "reason"),
            others,
        ),
        table("Where the numbers come from", (), answer.sources.items()),
    ]
    return document(f"plan · {name}", parts)
