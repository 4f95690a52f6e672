"""Shows the predicted effective training time for `meshwright simulate` and `meshwright plan`, in a terminal and as JSON.

The effective training time is the fraction of the time of a run that is spent on training steps that are not lost by
failures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.planner.effective_time import EffectiveTime
    from meshwright.simulator.supervised import SupervisedTime

NO_PREDICTION = "not predicted: it needs periodic checkpoints (checkpoint.every) and a known step time"
"""Text in place of a prediction."""


def effective_answer(prediction: EffectiveTime | None, *, played: bool) -> dict[str, Any] | None:
    """Return the prediction as JSON values; None if there is none.

    With `played`, it also has the result of a simulation, and of other ways to react to the loss of a host.
    """
    from meshwright.spec.fields import to_plain

    if prediction is None:
        return None
    plain: dict[str, Any] = to_plain(prediction)
    plain["inputs"] = plain.pop("model")
    if played:
        plain["simulated"], plain["hosts"] = _played(prediction)
        supervised = _supervised(prediction)
        plain["supervised"] = None if supervised is None else to_plain(supervised)
    return plain


def show_effective(prediction: EffectiveTime | None, *, played: bool) -> None:
    """Print the prediction. With `played`, also print the formula, its inputs, and the results of simulations."""
    from rich.console import Console

    from meshwright.planner.effective_time import effective_sentence

    console = Console(highlight=False)
    if prediction is None:
        console.print(f"effective training time: {NO_PREDICTION}")
        return
    console.print(f"effective training time: {effective_sentence(prediction)}")
    if played:
        _show_inputs(console, prediction)


def _show_inputs(console: Any, prediction: EffectiveTime) -> None:
    """Print the formula, its inputs by class of failure, and the results of the simulations."""
    from rich.table import Table

    model = prediction.model
    console.print(f"  {prediction.effective:.4f} = {prediction.formula}")
    console.print(f"  {prediction.first_order:.4f} = {prediction.first_order_formula}")
    console.print(
        f"  T = {model.interval_seconds:,.1f} s between checkpoints, δ = {model.cost_seconds:.2f} s each, M = {model.mttf_seconds:,.0f} s "
        f"between failures of {model.hosts:,} hosts; a lost host is replaced after {model.replace_seconds:,.0f} s"
    )
    table = Table("failure", "share p", "detection", "restart", "loading", "lag L", box=None, padding=(0, 2, 0, 2))
    for failure in model.classes:
        parts = (failure.detect_seconds, failure.restart_seconds, failure.load_seconds, failure.lag_seconds)
        table.add_row(failure.name, f"{failure.share:.0%}", *(f"{seconds:.1f} s" for seconds in parts))
    console.print(table)
    simulated, hosts = _played(prediction)
    console.print(f"  simulated: {simulated:.2%}")
    if (supervised := _supervised(prediction)) is not None:
        console.print(
            f"  simulated with the supervisor's decisions: {supervised.effective:.2%}, restarts exhausted {supervised.requeues} times"
        )
    for option in hosts:
        console.print(f"  {option['name']}: {option['effective']:.2%}, simulated {option['simulated']:.2%}")


def _played(prediction: EffectiveTime) -> tuple[float, list[dict[str, Any]]]:
    """Return the effective time by simulation, and the other ways to react to the loss of a host:

    `{name, effective, simulated}` for each.

    `effective` is by the formula, `simulated` by the simulation; both are fractions from 0 to 1.
    """
    from meshwright.planner.effective_time import host_loss_alternatives
    from meshwright.policies.effective_time import effective_time
    from meshwright.simulator.failures import simulate_failures

    hosts = [
        {"name": name, "effective": effective_time(model), "simulated": simulate_failures(model)}
        for name, model in host_loss_alternatives(prediction.model)
    ]
    return simulate_failures(prediction.model), hosts


def _supervised(prediction: EffectiveTime) -> SupervisedTime | None:
    """Return the result of a simulation that makes the decisions of the supervisor.

    None if the run continues on fewer hosts after a loss.
    """
    from meshwright.simulator.supervised import simulate_supervised

    model = prediction.model
    return simulate_supervised(model, prediction.restarts) if model.wait_seconds is None else None
