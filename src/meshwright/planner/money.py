"""Money, energy and time of training: from the step time, the price and the power of a device, and the share of time that trains.

The share (`planner.effective_time`) takes out failures, restarts and checkpoints, and the evaluations of the run; without periodic
checkpoints it counts evaluations alone, because the time of failures is not known.
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
"""Time of an evaluation's forward relative to a step on as many tokens."""


@dataclass(frozen=True)
class Rate:
    """A price or a power, with its source."""

    value: float | None
    source: str
    unit: str = ""
    """Before a number in words: the currency, or "costs " for a price in the user's own."""

    @property
    def currency(self) -> str:
        """Before a number of a table whose head says that it is a cost."""
        return "" if self.unit == OWN_CURRENCY else self.unit


@dataclass(frozen=True)
class Expense:
    """What a training takes; money is in the currency of the price."""

    gpus: int
    """Devices that train and are counted; idle devices are not."""
    price_per_gpu_hour: Rate
    watts_per_gpu: Rate
    training_share: float
    """Share of the time in which the run trains."""
    money_per_million_tokens: float | None
    kwh_per_million_tokens: float | None
    tokens: float | None
    """Tokens of the whole training; without them the rest is unknown."""
    days: float | None
    gpu_hours: float | None
    money: float | None
    kwh: float | None
    low: float | None = None
    """Lower end of the 80% band of days, GPU-hours, money and energy, as a factor on them. They are in proportion to the step, so this is
the band of the step."""
    high: float | None = None
    """Upper end of that band, as a factor."""


def price_of(cluster: ClusterSpec, asked: float | None = None) -> Rate:
    """The price of one device for one hour: as asked, as the cluster states, or the table's."""
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
    """The power of one device with its share of host and network."""
    if cluster.watts_per_gpu is not None:
        return Rate(cluster.watts_per_gpu, "cluster.watts_per_gpu")
    if cluster.groups or cluster.gpu not in WATTS:
        return Rate(None, f"no power of {cluster.gpu} in the table; cluster.watts_per_gpu states one")
    limit = WATTS[cluster.gpu]
    return Rate(
        SYSTEM_POWER * limit, f"{SYSTEM_POWER} × {limit} W, the limit of the device, with its share of the host"
    )


def expense(run: RunSpec, plan: Plan, tokens: float | None = None, price: float | None = None) -> Expense | None:
    """What training with `plan` takes, for `tokens` in all if given; None without a step time."""
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
    """What `gpus` devices take that train on `tokens_per_second` in the mean, interruptions included.

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
    """Share of the time in which a run trains, after failures, restarts, checkpoints and evaluations."""
    effective = predict_effective_time(run, plan)
    return (1.0 if effective is None else effective.effective) / (1 + _evaluation_seconds_per_step_second(run))


def _evaluation_seconds_per_step_second(run: RunSpec) -> float:
    """Seconds of evaluations for each second of steps."""
    if not run.train.validate_every:
        return 0.0
    tokens = run.data.validation_tokens or MOST_VALIDATION_TOKENS
    return FORWARD_SHARE * tokens / (run.train.tokens_per_step * run.train.validate_every)
