"""Effective training time: the share of wall-clock time that advances a run with failures, in closed form.

A run takes a checkpoint after every T seconds of training, at a cost of δ seconds. Failures are a Poisson process with mean time M between
them, in wall-clock time. A failure may also interrupt a recovery, which then starts again. There are classes of failures:

    p_c    share of class c among all failures
    R_c    its recovery: detection + restart + loading
    L_c    time from a copy of the state until this class of failures can use the copy

The expected cycle (Daly 2006, here for several classes) gives

    effective = T/M · Σ p_c e^(−R_c/M) · Σ p_c e^(−L_c/M) / (e^((T+δ)/M) − 1) · hosts

where `hosts` is the mean speed if lost hosts are replaced only after a while (`host_factor`). For short recoveries the result is close to
the familiar 1 − δ/T − (detection + restart + T/2)/M, which `first_order` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, expm1

FORMULA = "T/M · Σ p·e^(−R/M) · Σ p·e^(−L/M) / (e^((T+δ)/M) − 1) · hosts"
FIRST_ORDER_FORMULA = "1 − δ/T − Σ p·(detection + restart + loading + L + T/2)/M − (1 − hosts)"


@dataclass(frozen=True)
class FailureClass:
    """A class of failures that are detected and repaired in the same way."""

    name: str
    share: float
    """Share of all failures."""
    detect_seconds: float
    restart_seconds: float
    """Time from detection until the ranks can load their state."""
    load_seconds: float
    lag_seconds: float = 0.0
    """Time from a copy of the state until this class of failures can use the copy."""
    loses_host: bool = False

    @property
    def recovery_seconds(self) -> float:
        """Seconds from the failure until the ranks have their state again."""
        return self.detect_seconds + self.restart_seconds + self.load_seconds


@dataclass(frozen=True)
class FailureModel:
    """A run's checkpoints, its failures, and the replacement of its hosts."""

    hosts: int
    mttf_seconds: float
    """Mean time between failures of the whole job."""
    interval_seconds: float
    """Training time between two checkpoints."""
    cost_seconds: float
    """Training time that one checkpoint costs."""
    classes: tuple[FailureClass, ...]
    spares: int = 0
    replace_seconds: float = 0.0
    """Mean time until the cluster supplies another host for a lost one."""
    wait_seconds: float | None = None
    """How long the run waits for a host before it continues with fewer hosts; None if it waits until all hosts are there."""
    resize_seconds: float = 0.0
    """Duration of the restart, at a checkpoint, when a host returns to a run that continued without it."""

    @property
    def host_share(self) -> float:
        """Share of failures that lose a host."""
        return sum(failure.share for failure in self.classes if failure.loses_host)

    def mean(self, value: Callable[[FailureClass], float]) -> float:
        """Mean of `value` over all failures, weighted by the shares of their classes."""
        return sum(failure.share * value(failure) for failure in self.classes)


def effective_time(model: FailureModel) -> float:
    """Share of wall-clock time that advances the run, from 0 to 1."""
    mttf = model.mttf_seconds
    recovered = model.mean(lambda failure: exp(-failure.recovery_seconds / mttf))
    copy_usable = model.mean(lambda failure: exp(-failure.lag_seconds / mttf))
    cycle = expm1((model.interval_seconds + model.cost_seconds) / mttf)
    return model.interval_seconds / mttf * recovered * copy_usable / cycle * host_factor(model)


def losses(model: FailureModel) -> dict[str, float]:
    """Shares of wall-clock time that are lost, by cause, each to first order. Their sum is 1 − `first_order`."""
    mttf = model.mttf_seconds
    return {
        "checkpoints": model.cost_seconds / model.interval_seconds,
        "detection": model.mean(lambda failure: failure.detect_seconds) / mttf,
        "restart": model.mean(lambda failure: failure.restart_seconds) / mttf,
        "loading": model.mean(lambda failure: failure.load_seconds) / mttf,
        "lost steps": (model.mean(lambda failure: failure.lag_seconds) + model.interval_seconds / 2) / mttf,
        "missing hosts": 1 - host_factor(model),
    }


def first_order(model: FailureModel) -> float:
    """`effective_time` to first order in (recovery + interval) / MTTF."""
    return 1 - sum(losses(model).values())


def host_factor(model: FailureModel) -> float:
    """Mean speed, from 0 to 1, of a run whose hosts are lost and replaced; 1 if no failure loses a host.

    The number of hosts in replacement is the number of customers in an M/G/∞ queue: it has a Poisson distribution with mean host_share ·
    replace / MTTF. The first `spares` lost hosts cost nothing. For each further one the run waits, at most `wait_seconds` from the loss.
    Then it continues on the remaining hosts, at a speed in proportion to their number, until a restart at a checkpoint adds the returned
    host.
    """
    mean_missing = model.host_share * model.replace_seconds / model.mttf_seconds
    if mean_missing == 0:
        return 1.0
    if model.wait_seconds is None:
        return poisson_cdf(model.spares, mean_missing)
    no_spare = 1 - poisson_cdf(model.spares - 1, mean_missing)
    # E[max(0, missing − spares)] of a Poisson variable
    excess = mean_missing * (1 - poisson_cdf(model.spares - 2, mean_missing)) - model.spares * no_spare
    return_rate = (model.spares + 1) / model.replace_seconds
    detection = (
        sum(failure.share * failure.detect_seconds for failure in model.classes if failure.loses_host)
        / model.host_share
    )
    outwaited = exp(-return_rate * model.wait_seconds)
    waiting = max(0.0, exp(-return_rate * detection) - outwaited) / return_rate
    per_loss = waiting + outwaited * model.resize_seconds
    # Only losses during training begin a wait, and waits reduce the share of training time; hence the division.
    return (1 - excess / model.hosts) / (1 + model.host_share / model.mttf_seconds * no_spare * per_loss)


def poisson_cdf(largest: int, mean: float) -> float:
    """Probability that a Poisson variable with this mean is at most `largest`; 0 if `largest` is negative."""
    term = exp(-mean)
    total = 0.0
    for count in range(largest + 1):
        total += term
        term *= mean / (count + 1)
    return min(1.0, total)


def spares_needed(model: FailureModel, quantile: float = 0.99) -> int:
    """The fewest spare hosts with which, with probability `quantile`, all hosts in replacement at one time are covered."""
    mean_missing = model.host_share * model.replace_seconds / model.mttf_seconds
    spares = 0
    while poisson_cdf(spares, mean_missing) < quantile:
        spares += 1
    return spares


@dataclass(frozen=True)
class MeasuredFailure:
    """A failure of a real run, with its measured times."""

    name: str
    """Class of the failure, such as crash or hang."""
    detected_seconds: float
    """Time from the failure until it was detected."""
    restarted_seconds: float
    """Time from detection until the first new step began."""
    lost_seconds: float
    """Training that was repeated: lost steps × step time."""


@dataclass(frozen=True)
class ScaledTime:
    """Effective training time, scaled from the measured failures of a short run to another failure rate."""

    effective: float
    formula: str
    """The formula with its numbers."""
    seconds_per_failure: float
    """Mean over failures, weighted by the shares of their classes."""


def scale_measured(
    failures: Sequence[MeasuredFailure], shares: dict[str, float], mttf_seconds: float, checkpoint_share: float
) -> ScaledTime:
    """Effective training time if failures like the measured ones occurred once in `mttf_seconds`.

    `shares` has the share of each class among all failures. `checkpoint_share` is the share of undisturbed training time that checkpoints
    took. A failure is assumed to take the mean time of its class, whatever the rate. The result is 1 − checkpoints − Σ share · (detected +
    restarted + lost) / MTTF, but at least 0.

    Raises ValueError if the shares do not sum to 1, or if no failure of a class with a share was measured.
    """
    if abs(sum(shares.values()) - 1) > 1e-9:
        raise ValueError(f"shares of failure classes must sum to 1, got {shares}")
    terms = []
    total = 0.0
    for name, share in shares.items():
        measured = [failure for failure in failures if failure.name == name]
        if not measured:
            raise ValueError(f"no failure of class {name} was measured; measured: {sorted({f.name for f in failures})}")
        detected, restarted, lost = (
            sum(getattr(failure, f"{cause}_seconds") for failure in measured) / len(measured)
            for cause in ("detected", "restarted", "lost")
        )
        total += share * (detected + restarted + lost)
        terms.append(f"{share:g} × ({detected:.2f} + {restarted:.2f} + {lost:.2f}) s [{name}]")
    effective = max(0.0, 1 - checkpoint_share - total / mttf_seconds)
    formula = f"1 − {checkpoint_share:.4f} − ({' + '.join(terms)}) / {mttf_seconds:,.0f} s = {effective:.4f}"
    return ScaledTime(effective, formula, total)
