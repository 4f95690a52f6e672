"""Shows the plan of a deployment in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from meshwright.cli.plan_words import machines_line
from meshwright.cli.planned_deployment import (
    INSTANCE_HEADS,
    ServePlan,
    headline,
    instance_lines,
    limits_line,
    rate_line,
    scaled_limits,
    search_line,
)
from meshwright.observe.number_text import rate as rate_text
from meshwright.observe.number_text import short
from meshwright.spec.deployment import deployment_name
from meshwright.spec.model import parameter_count

MOST_ALTERNATIVES = 5
"""Maximum number of alternatives that are printed; --json has all of them."""
BAR = 30
"""Characters of a bar for 100%."""


def show(plan: ServePlan) -> None:
    """Print the whole answer."""
    console = Console(highlight=False)
    answer = plan.answer
    model = plan.spec.model
    parameters = short(parameter_count(model))
    console.print(
        f"[bold]{model.preset or model.family}[/bold], {parameters} parameters, on {machines_line(plan.spec.cluster)}"
    )
    console.print(f"[bold]{deployment_name(answer.deployment)}[/bold]")
    console.print(f"[bold]{headline(plan)}[/bold]")
    for line in (limits_line(plan), rate_line(plan), search_line(answer)):
        console.print(line)
    _grid(console, "instances", [INSTANCE_HEADS, *instance_lines(answer)])
    curve = [(rate_text(rate), f"{share:.1%}", "█" * round(BAR * share)) for rate, share in answer.curve]
    _grid(console, "attainment by requests/s a device", curve)
    scaled = [
        (f"× {factor:g}", f"{share:.1%}", "█" * round(BAR * share)) for factor, share in scaled_limits(answer)[::2]
    ]
    _grid(console, "attainment at the goodput, if both limits are scaled", scaled)
    _grid(console, "why this deployment", [("·", reason) for reason in answer.why])
    others = [
        (rate_text(option.goodput_per_gpu), f"{deployment_name(option.deployment)}\n[dim]{option.why_not}[/dim]")
        for option in answer.alternatives[:MOST_ALTERNATIVES]
    ]
    _grid(console, "alternatives by requests/s a device, and why they were not chosen", others)
    _grid(console, "where the numbers come from", list(answer.sources.items()))


def _grid(console: Console, title: str, lines: Sequence[tuple[str, ...]]) -> None:
    """Print a table with a title. Nothing is printed if there are no lines."""
    if not lines:
        return
    console.print(f"\n[bold]{title}[/bold]")
    table = Table.grid(padding=(0, 2, 0, 0))
    for line in lines:
        table.add_row(*line)
    console.print(Padding(table, (0, 0, 0, 2)))
