"""Predicted beside measured: what the planner said of a step's time and a rank's memory, against what the run's own steps say.

The first `WARM_UP` steps of a start do not count. Of the others a step's time is the median, which a pause (a validation, a checkpoint, a
profiler) does not move. Parts are means over the middle half of these steps by step time, so that they add up to a step like that one.

What a step's phases can tell apart is less than what is predicted: a forward that waits for its weights is longer, and nothing says by how
much. So communication that no compute hides stands with compute, and messages of a pipeline with its bubble. A recorded timeline
(`train --timeline`) tells them apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from meshwright.events.span import PHASES
from meshwright.observe import figures
from meshwright.spec.fields import from_plain
from meshwright.spec.plan import Breakdown, Predicted

WARM_UP = 5
"""Steps of a start that do not count: they compile, and fill the allocator's cache."""
ENOUGH = 10
"""Steps behind the warm-up after which a run says how it compares."""
FEWEST = 3
"""Steps behind the warm-up without which a run that ends says nothing."""
KEPT = 1000
"""The newest steps that a comparison at the end of a long run looks at."""

WORKING = ("forward", "backward", "reduce", "optim")
"""Phases in which a rank computes, or waits for a collective that its computing needs."""
TIMED_AXES = ("pipeline", "shard", "replicate")
"""Axes whose exposed communication a timeline measures; that of others is inside its compute."""

ROUNDING = 1e-9
"""Seconds below which a predicted part is none."""

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Typical:
    """A typical step of one rank, or of all: seconds by phase are means over the ranks then, and memory is the fullest rank's."""

    steps: tuple[int, int]
    """First and last step that counted."""
    seconds: float
    """Median."""
    tokens_per_second_per_gpu: float | None
    mfu: float | None
    memory_bytes: int
    """Largest so far: what tensors took on a GPU, what was resident on a CPU."""
    resident: bool
    """Whether `memory_bytes` is of the whole process."""
    phases: dict[str, float]
    """Seconds by phase, adding up to a step; empty when no step says."""


@dataclass(frozen=True, kw_only=True)
class Beside:
    """One figure, measured and predicted; `low` and `high` are the ends of the 80% band."""

    measured: float
    predicted: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def error(self) -> float | None:
        """Measured ÷ predicted − 1."""
        return self.measured / self.predicted - 1 if self.predicted else None

    @property
    def outside(self) -> bool:
        """Whether the measured figure lies outside of a predicted band."""
        return self.low is not None and self.high is not None and not self.low <= self.measured <= self.high


@dataclass(frozen=True, kw_only=True)
class Part:
    """Seconds of a step that both sides can name, and what each side says they are made of."""

    name: str
    measured: dict[str, float]
    predicted: dict[str, float] = field(default_factory=dict)

    @property
    def measured_seconds(self) -> float:
        return sum(self.measured.values())

    @property
    def predicted_seconds(self) -> float:
        return sum(self.predicted.values())

    @property
    def error(self) -> float | None:
        """Measured ÷ predicted − 1; None for what was not predicted to take any time."""
        return self.measured_seconds / self.predicted_seconds - 1 if self.predicted_seconds else None


@dataclass(frozen=True, kw_only=True)
class Account:
    """Predicted beside measured, ready to be kept as JSON."""

    steps: tuple[int, int]
    """First and last step that counted."""
    step_seconds: Beside
    memory_bytes: Beside
    resident: bool
    """Whether the measured memory is of the whole process (ranks on a CPU), interpreter and libraries included."""
    tokens_per_second_per_gpu: Beside | None = None
    mfu: Beside | None = None
    parts: tuple[Part, ...] = ()
    """Empty when the step time was not predicted by part."""
    recorded: tuple[int, int] | None = None
    """First and last step of the timeline that the parts are from; none: they are from every step's phases."""


def typical(records: Sequence[Record]) -> Typical | None:
    """The typical step among step lines of metrics.jsonl behind the warm-up; None without any."""
    known = [record for record in records if record.get("step_seconds")]
    if not known:
        return None
    last = known[-1]
    allocated = last.get("memory_allocated_peak_bytes")
    return Typical(
        steps=(known[0]["step"], last["step"]),
        seconds=median(record["step_seconds"] for record in known),
        tokens_per_second_per_gpu=_median(known, "tokens_per_second_per_gpu"),
        mfu=_median(known, "mfu"),
        memory_bytes=int(last["memory_peak_bytes"] if allocated is None else allocated),
        resident=allocated is None,
        phases=_phases(_middle_half(known)),
    )


def account(predicted: Predicted, found: Typical, timeline: Record | None = None) -> Account:
    """What was predicted beside `found`, by part where the prediction has parts.

    `timeline` is the summary of a recorded timeline (`observe.timeline_files.summary`), which tells more parts apart than phases do.
    """
    share = (predicted.step_seconds or 0.0) / found.seconds
    memory = comparable_memory(predicted, resident=found.resident)
    return Account(
        steps=found.steps,
        step_seconds=Beside(
            measured=found.seconds,
            predicted=predicted.step_seconds,
            low=predicted.low_seconds,
            high=predicted.high_seconds,
        ),
        memory_bytes=Beside(measured=found.memory_bytes, predicted=memory),
        resident=found.resident,
        tokens_per_second_per_gpu=_rate(found.tokens_per_second_per_gpu, predicted.tokens_per_second_per_gpu, share),
        mfu=_rate(found.mfu, predicted.mfu, share),
        parts=_parts(predicted.breakdown, found.phases, timeline),
        recorded=tuple(timeline["steps"]) if timeline and predicted.breakdown else None,
    )


def read_account(record: Record) -> Account:
    """The account that a line of metrics.jsonl holds. Raises ValueError when it holds none."""
    plain = {key: value for key, value in record.items() if key not in ("kind", "step")}
    try:
        told = from_plain(Account, plain)
        sizes = [told.step_seconds, told.memory_bytes, told.tokens_per_second_per_gpu, told.mfu]
        numbers = [*(size.measured for size in sizes if size), *told.steps, *(told.recorded or ())]
        numbers += [size for part in told.parts for size in (*part.measured.values(), *part.predicted.values())]
        expected = [one for size in sizes if size for one in (size.predicted, size.low, size.high) if one is not None]
        if not all(_finite(one) for one in [*numbers, *expected]):
            raise TypeError("a figure is not a number")
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"not an account: {error}") from error
    return told


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30


def comparable_memory(predicted: Predicted, *, resident: bool) -> int:
    """Predicted bytes to hold against a measured peak.

    Torch does not count what CUDA and the communicators take for themselves, so on a GPU the framework's share is left out; a process's
    resident set has it.
    """
    return predicted.memory_peak_bytes - (0 if resident else predicted.memory_bytes.get("framework", 0))


def lines(told: Account, run: str) -> list[str]:
    """What a person reads: step and memory, the parts, and what to do about a step time outside of its band. `run` is the run's folder."""
    step = told.step_seconds
    first = f"steps {told.steps[0]} to {told.steps[1]}: step {_step(told)}; memory {_memory(told)}"
    return [first, *(_part_line(part) for part in told.parts), *(_hints(told, run) if step.outside else [])]


def _step(told: Account) -> str:
    step = told.step_seconds
    measured = figures.duration(step.measured)
    if step.predicted is None or step.error is None:
        return f"{measured} ({why_unpredicted(told)}; `meshwright profile --out FILE` measures this machine)"
    ends = f" ({figures.duration(step.low)} to {figures.duration(step.high)})" if step.low and step.high else ""
    way = "slower" if step.error >= 0 else "faster"
    return f"{measured}, predicted {figures.duration(step.predicted)}{ends}: {100 * abs(step.error):.1f}% {way}"


def why_unpredicted(told: Account) -> str:
    """Why the account has no predicted step time. Memory is resident on CPUs alone."""
    return "CPU times are not predicted without a profile" if told.resident else "no figures of this device are known"


def _memory(told: Account) -> str:
    memory = told.memory_bytes
    kind, about = ("resident, interpreter included", "about ") if told.resident else ("allocated", "")
    expected = f", predicted {about}{figures.size(memory.predicted)}" if memory.predicted else ""
    off = f": {100 * memory.error:+.1f}%" if memory.error is not None else ""
    return f"{figures.size(memory.measured)} {kind}{expected}{off}"


def _part_line(part: Part) -> str:
    return f"  {part.name}: {_made_of(part.measured)}; predicted {_made_of(part.predicted)}"


def _made_of(shares: Mapping[str, float]) -> str:
    """The sum, and what it is made of when that is more than one thing."""
    total, each = sum(shares.values()), ", ".join(f"{name} {figures.duration(s)}" for name, s in shares.items() if s)
    return (figures.duration(total) if total else "0 s") + (f" ({each})" if "," in each else "")


def _hints(told: Account, run: str) -> list[str]:
    tell = "" if told.recorded else "; `train --timeline A:B` tells communication from compute"
    return [
        f"  outside of the predicted band{tell}",
        f"  `meshwright profile --out FILE` measures this machine, `meshwright profile --from-run {run} --out FILE` "
        "corrects it by this run",
    ]


def _rate(measured: float | None, predicted: float | None, share: float) -> Beside | None:
    """A rate beside its prediction; one that the prediction leaves out follows from the step times."""
    if measured is None:
        return None
    return Beside(measured=measured, predicted=predicted or (measured / share if share else None))


def _parts(expected: Breakdown | None, phases: Mapping[str, float], timeline: Record | None) -> tuple[Part, ...]:
    if expected is None:
        return ()
    if timeline is not None:
        return _parts_of_timeline(expected, timeline["measured"])
    return _parts_of_phases(expected, phases) if phases else ()


def _parts_of_phases(expected: Breakdown, phases: Mapping[str, float]) -> tuple[Part, ...]:
    beside = {f"exposed {axis}": seconds for axis, seconds in expected.exposed.items()}
    stages = _known({"bubble": expected.bubble, "exposed pipeline": beside.pop("exposed pipeline", 0.0)})
    # Where there are stages, whoever comes first to the gradient norm waits there for the others: the end of the bubble.
    working = tuple(name for name in WORKING if not (stages and name == "reduce"))
    rest = {"between phases": sum(s for name, s in phases.items() if name not in (*WORKING, "data"))}
    return (
        Part(
            name="computing",
            measured={name: phases.get(name, 0.0) for name in working},
            predicted=_known({"compute": expected.compute, **beside, "host": expected.host}),
        ),
        Part(
            name="waiting for stages" if stages else "between phases",
            measured={**rest, **{name: phases.get(name, 0.0) for name in WORKING if name not in working}},
            predicted=stages,
        ),
        Part(name="waiting for data", measured={"data": phases.get("data", 0.0)}),
    )


def _parts_of_timeline(expected: Breakdown, measured: Record) -> tuple[Part, ...]:
    inside = {f"exposed {axis}": s for axis, s in expected.exposed.items() if axis not in TIMED_AXES}
    computing = Part(
        name="computing",
        measured={"forward, backward": measured["compute"], "norm, optimizer": measured["closing"]},
        predicted=_known({"compute": expected.compute, **inside, "host": expected.host}),
    )
    exposed = (
        Part(
            name=f"exposed {axis}",
            measured={f"exposed {axis}": measured.get(f"exposed_{axis}", 0.0)},
            predicted=_known({f"exposed {axis}": expected.exposed.get(axis, 0.0)}),
        )
        for axis in TIMED_AXES
    )
    return (
        computing,
        *(part for part in exposed if part.measured_seconds or part.predicted_seconds),
        Part(
            name="idle",
            measured={"idle": measured["idle"]},
            predicted=_known({"bubble": expected.bubble}),
        ),
    )


def _known(shares: Mapping[str, float]) -> dict[str, float]:
    """Without what is nothing but the rounding of a sum."""
    return {name: seconds for name, seconds in shares.items() if seconds > ROUNDING}


def _median(records: Sequence[Record], key: str) -> float | None:
    values = [record[key] for record in records if record.get(key) is not None]
    return median(values) if values else None


def _middle_half(records: Sequence[Record]) -> Sequence[Record]:
    """Without the fastest and the slowest quarter; with fewer than four steps, all."""
    ordered, quarter = sorted(records, key=lambda record: record["step_seconds"]), len(records) // 4
    return ordered[quarter : len(ordered) - quarter]


def _phases(records: Sequence[Record]) -> dict[str, float]:
    """Mean seconds by phase. What lies between the end of one step and the begin of the next counts for `host`."""
    timed = [record for record in records if record.get("phases")]
    if not timed:
        return {}
    names = [name for name in PHASES if name != "host" and any(record["phases"].get(name) for record in timed)]
    means = {name: fmean(record["phases"].get(name, 0.0) for record in timed) for name in names}
    whole = fmean(record["step_seconds"] for record in timed)
    return {**means, "host": max(0.0, whole - sum(means.values()))}
