"""Compares the predicted step time and memory of a rank with the step lines of the run.

The first `WARM_UP` steps of a start are ignored. The step time is the median of all other steps, so pauses (a validation, a checkpoint, a
profiler) do not change it. The parts of a step are means over the middle half of these steps, sorted by step time, so that they add up to a
typical step.

Phases of a step cannot separate everything that is predicted separately. For example, a forward that waits for its weights only takes
longer, and the wait is not recorded. Exposed communication is therefore compared together with compute, and pipeline messages together with
the bubble. A recorded timeline (`train --timeline`) separates them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from meshwright.events.span import PHASES
from meshwright.observe import number_text
from meshwright.spec.fields import from_plain
from meshwright.spec.plan import Breakdown, Predicted

WARM_UP = 5
"""Number of first steps of a start that are ignored. They compile, and fill the allocator's cache."""
COMPARED_STEPS = 10
"""Number of steps after warm-up at which a run prints the comparison."""
FEWEST_STEPS = 3
"""Least number of steps after warm-up for a comparison at the end of a run."""
KEPT_STEPS = 1000
"""Number of newest steps that are compared at the end of a long run."""

COMPUTE_PHASES = ("forward", "backward", "reduce", "optim")
"""Phases in which a rank computes, or waits for a collective that its compute needs."""
TIMED_AXES = ("pipeline", "shard", "replicate")
"""Axes whose exposed communication a timeline measures. For other axes, it is counted as compute."""

ROUNDING_SECONDS = 1e-9
"""Predicted parts below this many seconds are taken for rounding errors."""

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class TypicalStep:
    """A typical step of one rank or of all ranks. For all ranks, phases are means, and memory is that of the rank with the most."""

    steps: tuple[int, int]
    """First and last step included."""
    seconds: float
    """Median step time."""
    tokens_per_second_per_gpu: float | None
    mfu: float | None
    memory_bytes: int
    """Peak memory: on a GPU of tensors, on a CPU the resident memory of the process."""
    resident: bool
    """Whether `memory_bytes` is the resident set of the process."""
    phases: dict[str, float]
    """Seconds by phase, which add up to a step. Empty if steps have no phases."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A measured and a predicted figure. `low` and `high` are the bounds of the 80% band of the prediction."""

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
        """Whether the measured figure is outside of the 80% band."""
        return self.low is not None and self.high is not None and not self.low <= self.measured <= self.high


@dataclass(frozen=True, kw_only=True)
class CheckPart:
    """A part of a step that is both measured and predicted, with the components of each."""

    name: str
    measured: dict[str, float]
    predicted: dict[str, float] = field(default_factory=dict)
    known: bool = True
    """Whether the part is predicted. If not, `predicted` is empty, which does not mean zero seconds."""

    @property
    def measured_seconds(self) -> float:
        return sum(self.measured.values())

    @property
    def predicted_seconds(self) -> float:
        return sum(self.predicted.values())

    @property
    def error(self) -> float | None:
        """Measured ÷ predicted − 1; None if the prediction is 0."""
        return self.measured_seconds / self.predicted_seconds - 1 if self.predicted_seconds else None


@dataclass(frozen=True, kw_only=True)
class PredictionCheck:
    """The measured and predicted figures of a run. It is stored as JSON."""

    steps: tuple[int, int]
    """First and last step included."""
    step_seconds: Comparison
    memory_bytes: Comparison
    resident: bool
    """Whether measured memory is the resident memory of the process, which includes interpreter and libraries (CPU ranks)."""
    tokens_per_second_per_gpu: Comparison | None = None
    mfu: Comparison | None = None
    parts: tuple[CheckPart, ...] = ()
    """Empty if the prediction has no parts."""
    recorded: tuple[int, int] | None = None
    """First and last step of the timeline from which the parts are; None if they are from the phases of all steps."""
    unpredicted: str = ""
    """With `rl`, why the time of steps that sample their training data is not predicted."""
    samples: bool = False
    """Whether steps sample their training data. Then all figures are means, and the prediction does not include the time of rewards."""


def typical_step(records: Sequence[Record]) -> TypicalStep | None:
    """The typical step, from lines of metrics.jsonl for steps after warm-up; None if there are none."""
    timed = [record for record in records if record.get("step_seconds")]
    if not timed:
        return None
    last = timed[-1]
    allocated = last.get("memory_allocated_peak_bytes")
    return TypicalStep(
        steps=(timed[0]["step"], last["step"]),
        seconds=median(record["step_seconds"] for record in timed),
        tokens_per_second_per_gpu=_median(timed, "tokens_per_second_per_gpu"),
        mfu=_median(timed, "mfu"),
        memory_bytes=int(last["memory_peak_bytes"] if allocated is None else allocated),
        resident=allocated is None,
        phases=_phases(_middle_half(timed)),
    )


def compare_with_prediction(
    predicted: Predicted, measured: TypicalStep, timeline: Record | None = None
) -> PredictionCheck:
    """Compare `measured` with `predicted`, part by part if the prediction has parts.

    `timeline` is the summary of a recorded timeline (`observe.timeline_files.summary`), which separates more parts than the phases do.
    """
    time_ratio = (predicted.step_seconds or 0.0) / measured.seconds
    memory = comparable_memory(predicted, resident=measured.resident)
    return PredictionCheck(
        steps=measured.steps,
        step_seconds=Comparison(
            measured=measured.seconds,
            predicted=predicted.step_seconds,
            low=predicted.low_seconds,
            high=predicted.high_seconds,
        ),
        memory_bytes=Comparison(measured=measured.memory_bytes, predicted=memory),
        resident=measured.resident,
        tokens_per_second_per_gpu=_rate(
            measured.tokens_per_second_per_gpu, predicted.tokens_per_second_per_gpu, time_ratio
        ),
        mfu=_rate(measured.mfu, predicted.mfu, time_ratio),
        parts=_parts(predicted.breakdown, measured.phases, timeline),
        recorded=tuple(timeline["steps"]) if timeline and predicted.breakdown else None,
    )


def read_check(record: Record) -> PredictionCheck:
    """The prediction check in a line of metrics.jsonl. Raises ValueError if the line has no valid prediction check."""
    fields = {key: value for key, value in record.items() if key not in ("kind", "step")}
    try:
        prediction_check = from_plain(PredictionCheck, fields)
        sizes = [
            prediction_check.step_seconds,
            prediction_check.memory_bytes,
            prediction_check.tokens_per_second_per_gpu,
            prediction_check.mfu,
        ]
        numbers = [
            *(size.measured for size in sizes if size),
            *prediction_check.steps,
            *(prediction_check.recorded or ()),
        ]
        numbers += [
            size for part in prediction_check.parts for size in (*part.measured.values(), *part.predicted.values())
        ]
        expected = [
            value for size in sizes if size for value in (size.predicted, size.low, size.high) if value is not None
        ]
        if not all(_finite(value) for value in [*numbers, *expected]):
            raise TypeError("a figure is not a number")
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"not a prediction check: {error}") from error
    return prediction_check


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30


def comparable_memory(predicted: Predicted, *, resident: bool) -> int:
    """The predicted bytes that can be compared with a measured peak.

    On a GPU, torch does not count the memory of CUDA and of communicators, so the predicted share of the framework is left out. The
    resident memory of a process includes it.
    """
    return predicted.memory_peak_bytes - (0 if resident else predicted.memory_bytes.get("framework", 0))


def check_lines(prediction_check: PredictionCheck, run: str) -> list[str]:
    """Lines for people: step time, memory, parts, and advice if the step time is outside of its band.
    `run` is the run's folder."""
    step = prediction_check.step_seconds
    first = f"steps {prediction_check.steps[0]} to {prediction_check.steps[1]}: "
    first += f"step {_step(prediction_check)}; memory {_memory(prediction_check)}"
    return [
        first,
        *(_part_line(part) for part in prediction_check.parts),
        *(_hints(prediction_check, run) if step.outside else []),
    ]


def _step(prediction_check: PredictionCheck) -> str:
    step = prediction_check.step_seconds
    measured = number_text.duration(step.measured)
    if step.predicted is None or step.error is None:
        advice = "" if prediction_check.samples else "; `meshwright profile --out FILE` measures this machine"
        return f"{measured} ({why_unpredicted(prediction_check)}{advice})"
    band = f" ({number_text.duration(step.low)} to {number_text.duration(step.high)})" if step.low and step.high else ""
    comparison = "slower" if step.error >= 0 else "faster"
    return (
        f"{measured}, predicted {number_text.duration(step.predicted)}{band}: {100 * abs(step.error):.1f}% {comparison}"
    )


def why_unpredicted(prediction_check: PredictionCheck) -> str:
    """Why the prediction check has no predicted step time. (If memory is resident memory, the ranks are on CPUs.)"""
    if prediction_check.samples:
        return f"the time of answers is not predicted: {prediction_check.unpredicted}"
    return (
        "CPU times are not predicted without a profile"
        if prediction_check.resident
        else "no figures of this device are known"
    )


def _memory(prediction_check: PredictionCheck) -> str:
    memory = prediction_check.memory_bytes
    scope, about = ("resident, interpreter included", "about ") if prediction_check.resident else ("allocated", "")
    expected = f", predicted {about}{number_text.size(memory.predicted)}" if memory.predicted else ""
    error = f": {100 * memory.error:+.1f}%" if memory.error is not None else ""
    return f"{number_text.size(memory.measured)} {scope}{expected}{error}"


def _part_line(part: CheckPart) -> str:
    return f"  {part.name}: {_sum_text(part.measured)}; {f'predicted {_sum_text(part.predicted)}' if part.known else 'not predicted'}"


def _sum_text(seconds_by_component: Mapping[str, float]) -> str:
    """The sum, and its components if there are several."""
    total = sum(seconds_by_component.values())
    components = ", ".join(
        f"{name} {number_text.duration(seconds)}" for name, seconds in seconds_by_component.items() if seconds
    )
    return (number_text.duration(total) if total else "0 s") + (f" ({components})" if "," in components else "")


def _hints(prediction_check: PredictionCheck, run: str) -> list[str]:
    advice = "" if prediction_check.recorded else "; `train --timeline A:B` separates communication from compute"
    return [
        f"  outside of the predicted band{advice}",
        f"  `meshwright profile --out FILE` measures this machine, `meshwright profile --from-run {run} --out FILE` "
        "corrects it by this run",
    ]


def _rate(measured: float | None, predicted: float | None, time_ratio: float) -> Comparison | None:
    """A rate and its prediction. If it was not predicted, the prediction is derived from the step times."""
    if measured is None:
        return None
    return Comparison(measured=measured, predicted=predicted or (measured / time_ratio if time_ratio else None))


def _parts(expected: Breakdown | None, phases: Mapping[str, float], timeline: Record | None) -> tuple[CheckPart, ...]:
    if expected is None:
        return ()
    if timeline is not None:
        return _parts_of_timeline(expected, timeline["measured"])
    return _parts_of_phases(expected, phases) if phases else ()


def _parts_of_phases(expected: Breakdown, phases: Mapping[str, float]) -> tuple[CheckPart, ...]:
    exposed = {f"exposed {axis}": seconds for axis, seconds in expected.exposed.items()}
    stages = _nonzero({"bubble": expected.bubble, "exposed pipeline": exposed.pop("exposed pipeline", 0.0)})
    # With pipeline stages, the ranks that reach the gradient norm first wait there for the others. This wait is the end of the bubble.
    working = tuple(name for name in COMPUTE_PHASES if not (stages and name == "reduce"))
    between = {
        "between phases": sum(seconds for name, seconds in phases.items() if name not in (*COMPUTE_PHASES, "data"))
    }
    return (
        CheckPart(
            name="computing",
            measured={name: phases.get(name, 0.0) for name in working},
            predicted=_nonzero({"compute": expected.compute, **exposed, "host": expected.host}),
        ),
        CheckPart(
            name="waiting for stages" if stages else "between phases",
            measured={**between, **{name: phases.get(name, 0.0) for name in COMPUTE_PHASES if name not in working}},
            predicted=stages,
        ),
        CheckPart(name="waiting for data", measured={"data": phases.get("data", 0.0)}),
    )


def _parts_of_timeline(expected: Breakdown, measured: Record) -> tuple[CheckPart, ...]:
    in_compute = {f"exposed {axis}": seconds for axis, seconds in expected.exposed.items() if axis not in TIMED_AXES}
    computing = CheckPart(
        name="computing",
        measured={"forward, backward": measured["compute"], "norm, optimizer": measured["closing"]},
        predicted=_nonzero({"compute": expected.compute, **in_compute, "host": expected.host}),
    )
    exposed = (
        CheckPart(
            name=f"exposed {axis}",
            measured={f"exposed {axis}": measured.get(f"exposed_{axis}", 0.0)},
            predicted=_nonzero({f"exposed {axis}": expected.exposed.get(axis, 0.0)}),
        )
        for axis in TIMED_AXES
    )
    return (
        computing,
        *(part for part in exposed if part.measured_seconds or part.predicted_seconds),
        CheckPart(
            name="idle",
            measured={"idle": measured["idle"]},
            predicted=_nonzero({"bubble": expected.bubble}),
        ),
    )


def _nonzero(seconds_by_component: Mapping[str, float]) -> dict[str, float]:
    """The shares above rounding errors."""
    return {name: seconds for name, seconds in seconds_by_component.items() if seconds > ROUNDING_SECONDS}


def _median(records: Sequence[Record], key: str) -> float | None:
    values = [record[key] for record in records if record.get(key) is not None]
    return median(values) if values else None


def _middle_half(records: Sequence[Record]) -> Sequence[Record]:
    """The records without the fastest and the slowest quarter. Fewer than four records are all returned."""
    ordered = sorted(records, key=lambda record: record["step_seconds"])
    quarter = len(records) // 4
    return ordered[quarter : len(ordered) - quarter]


def _phases(records: Sequence[Record]) -> dict[str, float]:
    """Mean seconds by phase. The time between two steps counts for `host`."""
    timed = [record for record in records if record.get("phases")]
    if not timed:
        return {}
    names = [name for name in PHASES if name != "host" and any(record["phases"].get(name) for record in timed)]
    means = {name: fmean(record["phases"].get(name, 0.0) for record in timed) for name in names}
    step_seconds = fmean(record["step_seconds"] for record in timed)
    return {**means, "host": max(0.0, step_seconds - sum(means.values()))}
