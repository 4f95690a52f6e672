"""Money, energy and time of a training.

They follow from the step time, the price and the power of a device, and the share of time in which the run trains. That
share (`planner.effective_time`) excludes failures, restarts, checkpoints and evaluations. Without periodic checkpoints
it excludes only evaluations, because the time that failures cost is not known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.planner.effective_time import predict_effective_time
from meshwright.spec.chip_prices import PRICES, SYSTEM_POWER, WATTS
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import MOST_VALIDATION_TOKENS
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec

OWN_CURRENCY = "costs "
"""Unit of a price that the user gave: its currency is not known."""
FORWARD_SHARE = 1 / 3
"""Seconds of an evaluation relative to a step on the same number of tokens: it has only the forward."""


@dataclass(frozen=True)
class Rate:
    """A price or a power, with its source."""

    value: float | None
    """Money per hour, or watts; None if it is not known."""
    source: str
    """Where the value comes from, or why it is not known."""
    unit: str = ""
    """What is written in front of the number: the currency, or "costs " for a price in the user's own currency."""

    @property
    def currency(self) -> str:
        """Before a number of a table whose head says that it is a cost."""
        return "" if self.unit == OWN_CURRENCY else self.unit


@dataclass(frozen=True)
class Expense:
    """What a training takes.

    Money is in the currency of the price; values that depend on something unknown are None.
    """

    gpus: int
    """Number of devices that train; idle devices do not count."""
    price_per_gpu_hour: Rate
    """Price of one device for one hour."""
    watts_per_gpu: Rate
    """Power of one device with its share of host and network."""
    training_share: float
    """Share of the time in which the run trains."""
    money_per_million_tokens: float | None
    """Money for a million tokens."""
    kwh_per_million_tokens: float | None
    """Energy for a million tokens in kWh."""
    tokens: float | None
    """Number of tokens of the whole training. If it is None, the fields below are None too, except `low` and `high`."""
    days: float | None
    """Days of the whole training."""
    gpu_hours: float | None
    """Number of devices times hours of the whole training."""
    money: float | None
    """Money of the whole training."""
    kwh: float | None
    """Energy of the whole training in kWh."""
    low: float | None = None
    """Lower end of the 80% band of days, GPU-hours, money and energy, as a factor on them.

    They are proportional to the step time, so they have its band.
    """
    high: float | None = None
    """Upper end of that band, as a factor."""


def price_of(cluster: ClusterSpec, asked: float | None = None) -> Rate:
    """Return the price of one device for one hour: `asked` (the option `--price`), else the cluster's, else the
    table's.
    """
    if asked is not None:
        return Rate(asked, "--price", OWN_CURRENCY)
    if cluster.price_per_gpu_hour is not None:
        return Rate(cluster.price_per_gpu_hour, "cluster.price_per_gpu_hour", OWN_CURRENCY)
    if cluster.groups:
        return Rate(None, "nodes of several kinds: cluster.price_per_gpu_hour states their mean")
    if (price := PRICES.get(cluster.gpu)) is None:
        return Rate(None, f"no price of {cluster.gpu} in the table; cluster.price_per_gpu_hour states one")
    return Rate(price.dollars, f"{price.source}, {price.date}", "US$")


def watts_of(cluster: ClusterSpec) -> Rate:
    """Return the power of one device with its share of host and network."""
    if cluster.watts_per_gpu is not None:
        return Rate(cluster.watts_per_gpu, "cluster.watts_per_gpu")
    if cluster.groups or cluster.gpu not in WATTS:
        return Rate(None, f"no power of {cluster.gpu} in the table; cluster.watts_per_gpu states one")
    limit = WATTS[cluster.gpu]
    return Rate(
        SYSTEM_POWER * limit, f"{SYSTEM_POWER} × {limit} W, the limit of the device, with its share of the host"
    )


def expense(run: RunSpec, plan: Plan, tokens: float | None = None, price: float | None = None) -> Expense | None:
    """Return what a training with `plan` takes; None if the step time is not known.

    `tokens` is the number of tokens of the whole training, `price` the price of a device for an hour (by default
    `price_of`).
    """
    predicted = plan.predicted
    if predicted is None or not predicted.step_seconds:
        return None
    share = training_share(run, plan)
    tokens_per_second = run.train.tokens_per_step / predicted.step_seconds * share
    spent = expense_of(run.cluster, plan.ranks, tokens_per_second, tokens, price, share)
    if predicted.low_seconds is None or predicted.high_seconds is None:
        return spent
    step = predicted.step_seconds
    return replace(spent, low=predicted.low_seconds / step, high=predicted.high_seconds / step)


def expense_of(
    cluster: ClusterSpec,
    gpus: int,
    tokens_per_second: float,
    tokens: float | None = None,
    price: float | None = None,
    share: float = 1.0,
) -> Expense:
    """Return what a training on `gpus` devices takes, at `tokens_per_second` on average, interruptions included.

    100 devices at 2 dollars an hour train on 10⁶ tokens a second. 10¹⁰ tokens take 10,000 seconds, or 278 GPU-hours:

    >>> spent = expense_of(ClusterSpec(gpu="H100"), 100, 1e6, tokens=1e10, price=2.0)
    >>> round(spent.gpu_hours), round(spent.money)
    (278, 556)
    """
    rate = price_of(cluster, price)
    watts = watts_of(cluster)
    hours_per_token = gpus / tokens_per_second / 3600
    hours = None if tokens is None else tokens * hours_per_token

    def spent(gpu_hours: float | None, each: float | None) -> float | None:
        return None if gpu_hours is None or each is None else gpu_hours * each

    kilowatts = None if watts.value is None else watts.value / 1000
    return Expense(
        gpus=gpus,
        price_per_gpu_hour=rate,
        watts_per_gpu=watts,
        training_share=share,
        money_per_million_tokens=spent(1e6 * hours_per_token, rate.value),
        kwh_per_million_tokens=spent(1e6 * hours_per_token, kilowatts),
        tokens=tokens,
        days=None if hours is None else hours / gpus / 24,
        gpu_hours=hours,
        money=spent(hours, rate.value),
        kwh=spent(hours, kilowatts),
    )


def training_share(run: RunSpec, plan: Plan) -> float:
    """Return the share of the time in which a run trains: without failures, restarts, checkpoints and evaluations."""
    effective = predict_effective_time(run, plan)
    return (1.0 if effective is None else effective.effective) / (1 + _evaluation_seconds_per_step_second(run))


def _evaluation_seconds_per_step_second(run: RunSpec) -> float:
    """Return the seconds of evaluations for each second of steps."""
    if not run.train.validate_every:
        return 0.0
    tokens = run.data.validation_tokens or MOST_VALIDATION_TOKENS
    return FORWARD_SHARE * tokens / (run.train.tokens_per_step * run.train.validate_every)
