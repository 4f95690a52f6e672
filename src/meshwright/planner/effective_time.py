"""Predicts the share of wall-clock time in which a run trains: after failures, detection, restart, loading, lost steps,
missing hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from meshwright.costs.machine_rates import machine_of
from meshwright.costs.offload_costs import host_rate
from meshwright.costs.partner_copies import PORT_SHARE, partner_rate
from meshwright.costs.plan_costs import as_nodes, matmul_dtype, number
from meshwright.planner.checkpoint_cost import (
    HOST_COPY_RATE,
    REPLICA_PARTS,
    STATE_BYTES,
    WRITE_RATE,
    checkpoint_cost,
)
from meshwright.policies.checkpoint_times import auto_interval
from meshwright.policies.effective_time import (
    FIRST_ORDER_FORMULA,
    FORMULA,
    FailureClass,
    FailureModel,
    effective_time,
    first_order,
    losses,
    spares_needed,
)
from meshwright.spec.errors import BadInput, nearest
from meshwright.spec.model import trained_parameter_count
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec

READ_RATE = 2e9
"""Bytes/s at which one rank reads from storage: a guess."""


@dataclass(frozen=True)
class Assumptions:
    """Assumed times and shares of failures, which a run file does not state. `--assume KEY=VALUE` replaces them."""

    detect_seconds: float = 1.0
    """Seconds until a dead process is detected."""
    host_detect_seconds: float = 10.0
    """Seconds until a dead host is detected."""
    hang_detect_seconds: float = 30.0
    """Seconds until a hang is detected. If 3 steps and 5 s take longer, they count instead."""
    restart_seconds: float = 30.0
    """Seconds from detection until the ranks can load their state: a guess for spare processes that have already
    started.
    """
    replace_seconds: float = 600.0
    """Seconds until the cluster supplies another host: ByteRobust's requeue takes 454 to 768 s (arXiv 2509.16293, table
    7).
    """
    hang_share: float = 0.15
    """Share of all failures that are hangs."""
    host_share: float = 0.78
    """Share of the failures other than hangs in which a host is lost: Llama 3's hardware failures (arXiv 2407.21783,
    section 3.3.4).
    """

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Assumptions:
        """Return the assumptions with the values of `KEY=VALUE` arguments.

        Raises BadInput, with the nearest key for an unknown key.
        """
        known = [field.name for field in fields(cls)]
        values: dict[str, float] = {}
        for word in arguments:
            key, _, text = word.partition("=")
            if key not in known:
                near = nearest(key, known)
                raise BadInput(
                    f"--assume {word}: expected KEY=NUMBER with a key of {', '.join(known)}"
                    + (f" (nearest: {near})" if near else "")
                )
            upper_limit = 1.0 if key.endswith("_share") else float("inf")
            try:
                values[key] = float(text)
            except ValueError:
                raise BadInput(f"--assume {word}: expected a number, e.g. {key}={getattr(cls, key):g}") from None
            if not 0 <= values[key] <= upper_limit or values[key] == float("inf"):
                limits = "from 0 to 1" if upper_limit == 1 else "of at least 0"
                raise BadInput(f"--assume {word}: expected a number {limits}, e.g. {key}={getattr(cls, key):g}")
        return replace(cls(), **values)


@dataclass(frozen=True)
class EffectiveTime:
    """The predicted share of time in which a run trains, and what it was computed from."""

    effective: float
    """Share of wall-clock time in which the run trains."""
    first_order: float
    """The same share by a formula that is linear in the rate of failures."""
    losses: dict[str, float]
    """Shares of wall-clock time that are lost, by cause, to first order."""
    spares_needed: int
    """Number of spare hosts that is enough 99% of the time."""
    formula: str
    """The formula of `effective`, as text."""
    first_order_formula: str
    """The formula of `first_order`, as text."""
    model: FailureModel
    """The rates, times and shares that enter the formulas."""
    restarts: int
    """Number of restarts that the run allows (`supervision.restarts`)."""


def predict_effective_time(
    run: RunSpec, plan: Plan, step_seconds: float | None = None, assumed: Assumptions | None = None
) -> EffectiveTime | None:
    """Return the prediction for a run; None if it writes no periodic checkpoints or its step time is not known.

    `step_seconds` is the time of a step, by default the plan's prediction.
    """
    model = failure_model(run, plan, step_seconds, assumed or Assumptions())
    if model is None:
        return None
    return EffectiveTime(
        effective=effective_time(model),
        first_order=first_order(model),
        losses=losses(model),
        spares_needed=spares_needed(model),
        formula=FORMULA,
        first_order_formula=FIRST_ORDER_FORMULA,
        model=model,
        restarts=run.supervision.restarts,
    )


def failure_model(run: RunSpec, plan: Plan, step_seconds: float | None, assumed: Assumptions) -> FailureModel | None:
    """Return the failures of a run by class; None if it writes no periodic checkpoints or its step time is not known.

    What the ranks load after a failure:

    | failure | saves are synchronous | saves are asynchronous |
    | --- | --- | --- |
    | process or hang | checkpoint in storage | snapshot in host memory |
    | host | checkpoint in storage | newest durable checkpoint in storage |
    | host, with a copy on another host | — | the lost host's ranks: that copy; the others: their snapshots |

    The copy is on a partner host that gets every snapshot, or in a replica of the model on another host.
    """
    step = step_seconds or (plan.predicted.step_seconds if plan.predicted is not None else None)
    cost = checkpoint_cost(run, plan, step)
    if cost is None or step is None:
        return None
    cluster = as_nodes(run.cluster)
    rank_bytes = trained_parameter_count(run.model) * STATE_BYTES / plan.ranks
    copy_rate = HOST_COPY_RATE
    if not cluster.is_cpu:
        copy_rate = number(host_rate(machine_of(cluster, matmul_dtype(plan.precision, cluster))))
    from_memory = rank_bytes / copy_rate
    from_storage = rank_bytes / READ_RATE + from_memory
    copy = cost.copy_seconds if cost.copy_seconds is not None else from_memory
    save = copy + rank_bytes / WRITE_RATE
    save_cost = cost.cost_seconds if cost.cost_seconds is not None else save
    interval = cost.interval_seconds or auto_interval(save_cost, save, cluster.nodes, cluster.host_mtbf_hours)
    # A lag is the time from the start of a save until its state can be loaded. It is 0 if training waits for the
    # save.
    process_load, process_lag = (from_memory, copy) if cost.beside_training else (from_storage, 0.0)
    host_load = from_storage
    host_lag = save if cost.beside_training else 0.0
    if cost.partner is not None and not cost.partner_link_share:
        # The other replica has both parts of the lost rank's state, and sends them with the whole bandwidth of its
        # port.
        sent_seconds = PORT_SHARE * REPLICA_PARTS * rank_bytes / partner_rate(run.cluster)
        host_load = REPLICA_PARTS * from_memory + sent_seconds
        host_lag = copy
    elif cost.partner_seconds is not None and run.checkpoint.partner_every == 1:
        # Copies to the partner use only the share PORT_SHARE of the port's bandwidth. Reading a copy back uses all
        # of it, so it takes PORT_SHARE of the time.
        host_load = from_memory + PORT_SHARE * cost.partner_seconds
        host_lag = copy + cost.partner_seconds
    crash_share = 1 - assumed.hang_share
    hang = run.supervision.hang_seconds or assumed.hang_detect_seconds
    restart = assumed.restart_seconds
    return FailureModel(
        hosts=cluster.nodes,
        mttf_seconds=cluster.host_mtbf_hours * 3600 / cluster.nodes,
        interval_seconds=interval,
        cost_seconds=save_cost,
        classes=(
            FailureClass(
                "process",
                crash_share * (1 - assumed.host_share),
                assumed.detect_seconds,
                restart,
                load_seconds=process_load,
                lag_seconds=process_lag,
            ),
            FailureClass(
                "hang",
                assumed.hang_share,
                max(3 * step + 5, hang),
                restart,
                load_seconds=process_load,
                lag_seconds=process_lag,
            ),
            FailureClass(
                "host",
                crash_share * assumed.host_share,
                assumed.host_detect_seconds,
                restart,
                load_seconds=host_load,
                lag_seconds=host_lag,
                loses_host=True,
            ),
        ),
        spares=run.supervision.spares,
        replace_seconds=assumed.replace_seconds,
        wait_seconds=run.supervision.wait_seconds,
        resize_seconds=restart + from_storage,
    )


def host_loss_alternatives(model: FailureModel) -> Iterator[tuple[str, FailureModel]]:
    """Yield (name, failure model) for three other answers to a lost host: wait for a host, continue on fewer hosts, and
    enough spare hosts.
    """
    enough = max(1, spares_needed(model))
    yield "no spares, wait for a host", replace(model, spares=0, wait_seconds=None)
    yield "no spares, continue on fewer hosts", replace(model, spares=0, wait_seconds=0.0)
    yield (
        f"{enough} spare{'s' * (enough > 1)}, wait for a host if all are used",
        replace(model, spares=enough, wait_seconds=None),
    )


def effective_sentence(prediction: EffectiveTime) -> str:
    """Return the prediction as a sentence."""
    model = prediction.model
    parts = ", ".join(f"{share:.2%} {name}" for name, share in prediction.losses.items() if share >= 0.00005)
    return (
        f"{prediction.effective:.2%} of the time with a failure every {duration_text(model.mttf_seconds)}"
        f"{f' (lost: {parts})' if parts else ''}"
    )


def duration_text(seconds: float) -> str:
    """Return a duration as text, in the largest unit of which it has at least two.

    90 minutes are less than two hours, so they are written in minutes:

    >>> duration_text(5400), duration_text(100_000)
    ('90.0 minutes', '27.8 hours')
    """
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.1f} s"
