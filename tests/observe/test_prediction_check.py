"""Predicted beside measured: which steps count, which phase stands against which part, and what a person is told."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from meshwright.observe.metrics import to_line
from meshwright.observe.prediction_check import (
    TypicalStep,
    check_lines,
    compare_with_prediction,
    read_check,
    typical_step,
)
from meshwright.spec.fields import to_plain
from meshwright.spec.plan import Breakdown, Predicted

PHASES = {"data": 0.01, "forward": 0.3, "backward": 0.5, "reduce": 0.04, "optim": 0.05, "host": 0.02}
GIB = 1 << 30
PREDICTED = Predicted(
    memory_peak_bytes=67 * GIB,
    memory_bytes={"weights": 64 * GIB, "framework": 3 * GIB},
    step_seconds=0.8,
    low_seconds=0.76,
    high_seconds=0.84,
    breakdown=Breakdown(compute=0.7, exposed={"pipeline": 0.02, "shard": 0.05}, bubble=0.02, host=0.01),
)
TIMELINE: dict[str, Any] = {
    "steps": [8, 9],
    "measured": {
        "step_seconds": 0.93,
        "bubble": 0.1,
        "compute": 0.72,
        "closing": 0.03,
        "idle": 0.06,
        "exposed_pipeline": 0.02,
        "exposed_shard": 0.1,
        "exposed_replicate": 0.0,
    },
}


def step(number: int, seconds: float = 0.92, **more: Any) -> dict[str, Any]:
    return {
        "step": number,
        "step_seconds": seconds,
        "tokens_per_second_per_gpu": 920 / seconds,
        "mfu": 0.368 / seconds,
        "memory_peak_bytes": 70 * GIB,
        "memory_allocated_peak_bytes": 63 * GIB,
        "phases": PHASES,
        **more,
    }


def of(*records: dict[str, Any]) -> TypicalStep:
    found = typical_step(records)
    assert found is not None
    return found


def test_a_pause_moves_neither_the_step_nor_its_parts() -> None:
    slow = {**PHASES, "data": 9.0}
    found = of(*(step(n) for n in range(6, 13)), step(13, 9.91, phases=slow), step(14, 9.91, phases=slow))
    assert found.seconds == 0.92 and found.steps == (6, 14)
    assert found.phases["data"] == pytest.approx(0.01)
    assert (found.tokens_per_second_per_gpu, found.mfu) == (1000, pytest.approx(0.4))


def test_phases_add_up_to_the_step_and_the_gap_between_steps_is_the_host_s() -> None:
    found = of(step(6, 1.0))
    assert sum(found.phases.values()) == pytest.approx(1.0)
    assert found.phases["host"] == pytest.approx(0.1)
    assert of(step(6, phases={})).phases == {}


def test_memory_is_what_tensors_took_and_on_a_processor_what_was_resident() -> None:
    assert (of(step(6)).memory_bytes, of(step(6)).resident) == (63 * GIB, False)
    resident = step(6)
    del resident["memory_allocated_peak_bytes"]
    printed = compare_with_prediction(PREDICTED, of(resident))
    assert printed.resident and printed.memory_bytes.measured == 70 * GIB
    assert printed.memory_bytes.predicted == 67 * GIB
    assert compare_with_prediction(PREDICTED, of(step(6))).memory_bytes.predicted == 64 * GIB


def test_no_step_no_account() -> None:
    assert typical_step([]) is None and typical_step([{"step": 6, "step_seconds": None}]) is None


def test_phases_stand_against_what_they_cannot_tell_apart() -> None:
    alone = replace(PREDICTED, breakdown=Breakdown(compute=0.7, exposed={"shard": 0.09}, bubble=1e-16, host=0.01))
    working, waiting, data = compare_with_prediction(alone, of(step(6), step(7))).parts
    assert working.measured == {
        name: pytest.approx(PHASES[name]) for name in ("forward", "backward", "reduce", "optim")
    }
    assert working.predicted == {"compute": 0.7, "exposed shard": 0.09, "host": 0.01}
    assert waiting.name == "between phases" and waiting.measured == {"between phases": pytest.approx(0.02)}
    assert waiting.predicted == {}
    assert data.measured == {"data": pytest.approx(0.01)} and data.predicted_seconds == 0


def test_stages_wait_between_phases_and_for_the_gradient_norm() -> None:
    working, waiting, _ = compare_with_prediction(PREDICTED, of(step(6), step(7))).parts
    assert working.measured == {name: pytest.approx(PHASES[name]) for name in ("forward", "backward", "optim")}
    assert working.predicted == {"compute": 0.7, "exposed shard": 0.05, "host": 0.01}
    assert waiting.name == "waiting for stages"
    assert waiting.measured == {"between phases": pytest.approx(0.02), "reduce": pytest.approx(0.04)}
    assert waiting.predicted == {"bubble": 0.02, "exposed pipeline": 0.02}


@pytest.mark.parametrize("timeline", [None, TIMELINE])
def test_nothing_is_lost_and_nothing_counted_twice(timeline: dict[str, Any] | None) -> None:
    printed = compare_with_prediction(PREDICTED, of(step(6), step(7)), timeline)
    assert sum(part.predicted_seconds for part in printed.parts) == pytest.approx(0.8)
    assert sum(part.measured_seconds for part in printed.parts) == pytest.approx(0.93 if timeline else 0.92)


def test_a_timeline_tells_communication_from_compute() -> None:
    inside = replace(PREDICTED, breakdown=Breakdown(compute=0.6, exposed={"shard": 0.05, "tensor": 0.1}, bubble=0.05))
    printed = compare_with_prediction(inside, of(step(6)), TIMELINE)
    parts = {part.name: part for part in printed.parts}
    assert printed.recorded == (8, 9)
    assert list(parts) == [
        "computing",
        "exposed pipeline",
        "exposed shard",
        "idle",
    ]
    assert parts["computing"].predicted == {"compute": 0.6, "exposed tensor": 0.1}
    assert parts["exposed shard"].error == pytest.approx(1.0)
    assert (parts["exposed pipeline"].predicted_seconds, parts["exposed pipeline"].error) == (0, None)


def test_a_rate_that_was_not_predicted_follows_from_the_step() -> None:
    printed = compare_with_prediction(PREDICTED, of(step(6)))
    assert printed.tokens_per_second_per_gpu is not None and printed.mfu is not None
    assert printed.tokens_per_second_per_gpu.predicted == pytest.approx(1000 * 0.92 / 0.8)
    stated = compare_with_prediction(replace(PREDICTED, mfu=0.5), of(step(6)))
    assert stated.mfu is not None and stated.mfu.predicted == 0.5
    assert compare_with_prediction(PREDICTED, of(step(6, mfu=None))).mfu is None


def test_a_step_is_told_by_part() -> None:
    wide = replace(PREDICTED, low_seconds=0.6, high_seconds=1.0)
    assert check_lines(compare_with_prediction(wide, of(step(6), step(7))), "runs/demo") == [
        "steps 6 to 7: step 920 ms, predicted 800 ms (600 ms to 1.00 s): 15.0% slower; "
        "memory 67.6 GB allocated, predicted 68.7 GB: -1.6%",
        "  computing: 850 ms (forward 300 ms, backward 500 ms, optim 50.0 ms); "
        "predicted 760 ms (compute 700 ms, exposed shard 50.0 ms, host 10.0 ms)",
        "  waiting for stages: 60.0 ms (between phases 20.0 ms, reduce 40.0 ms); "
        "predicted 40.0 ms (bubble 20.0 ms, exposed pipeline 20.0 ms)",
        "  waiting for data: 10.0 ms; predicted 0 s",
    ]


def test_outside_the_band_comes_what_to_do() -> None:
    printed = check_lines(compare_with_prediction(PREDICTED, of(step(6), step(7))), "runs/demo")
    assert "--timeline" in printed[4] and "`meshwright profile --from-run runs/demo --out FILE`" in printed[5]
    recorded = check_lines(compare_with_prediction(PREDICTED, of(step(6)), TIMELINE), "runs/demo")
    assert "--timeline" not in "\n".join(recorded)
    assert "faster" in check_lines(compare_with_prediction(PREDICTED, of(step(6, 0.5))), "x")[0]


def test_without_figures_of_the_device_memory_alone_is_compared() -> None:
    printed = compare_with_prediction(Predicted(memory_peak_bytes=67 * GIB), of(step(6)), TIMELINE)
    assert printed.parts == () and printed.recorded is None and printed.step_seconds.error is None
    (line,) = check_lines(printed, "runs/demo")
    assert "step 920 ms (no figures of this device are known; `meshwright profile" in line
    assert "predicted 71.9 GB: -6.0%" in line


@pytest.mark.parametrize("timeline", [None, TIMELINE])
def test_it_survives_a_line_of_metrics(timeline: dict[str, Any] | None) -> None:
    printed = compare_with_prediction(PREDICTED, of(step(6), step(7)), timeline)
    line = to_line({"kind": "prediction_check", "step": 7, **to_plain(printed)})
    assert read_check(json.loads(line)) == printed


@pytest.mark.parametrize(
    "damage",
    [
        {"steps": "ab"},
        {"steps": [1]},
        {"memory_bytes": {"measured": None}},
        {"step_seconds": 3},
        {"other": 1},
        {"parts": [{"name": "x", "measured": {"a": "b"}}]},
        {"mfu": {"measured": 1e99}},
        {"parts": 5},
    ],
    ids=str,
)
def test_a_line_that_holds_no_account_is_refused(damage: dict[str, Any]) -> None:
    plain = {**to_plain(compare_with_prediction(PREDICTED, of(step(6)))), **damage}
    with pytest.raises(ValueError, match="not a prediction check"):
        read_check(plain)
