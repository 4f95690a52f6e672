"""Reads the health of this host and its GPUs as an agent does, and says what that costs and what it finds.

    python benchmarks/health.py --seconds 60 --out health.json

One JSON object: processor time of the reading as a share of one core, what the container hides, findings, and with
`--keep` all readings, for `tests/policies/test_host_health.py`. `--calls` counts NVML's functions and their processor
time by reading (the counting itself adds to `cpu_share`). `--load` computes on the first GPU meanwhile and
compares the time of its matmuls with the reading off and on, in turns.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from meshwright.launch.health_monitor import HealthMonitor
from meshwright.launch.health_reader import ALL, readings
from meshwright.policies.host_health import READING_SECONDS, HealthReading, HealthWatch

TURN_SECONDS = 10.0
"""Length of a turn with, or without, reading."""


def read(seconds: float) -> dict[str, Any]:
    """Readings for `seconds`, in this process, without its start."""
    source = readings(0, ALL)
    first, notes = next(source)
    watch, kept, found = HealthWatch(), [first], set()
    began, cpu_began = time.monotonic(), time.process_time()
    while time.monotonic() - began < seconds:
        kept.append(next(source)[0])
    cpu, wall = time.process_time() - cpu_began, time.monotonic() - began
    for number, each in enumerate(kept):
        found |= {f"{finding.rule}: {finding.description}" for finding in watch.update(number * READING_SECONDS, each)}
    return {
        "notes": notes,
        "seconds": round(wall, 1),
        "readings": len(kept),
        "cpu_share": round(cpu / wall, 6),
        "findings": sorted(found),
        "quantities": {reading.part: sorted(reading.values) for reading in kept[-1]},
        "series": series_of(kept),
    }


def count_calls() -> dict[str, list[float]]:
    """Let each function of NVML count its calls and its processor milliseconds in the table that is returned."""
    import pynvml

    spent: dict[str, list[float]] = {}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.process_time()
            try:
                return function(*arguments)
            finally:
                entry = spent.setdefault(name, [0, 0.0])
                entry[0] += 1
                entry[1] += 1000 * (time.process_time() - began)

        return call

    for name, function in list(vars(pynvml).items()):
        if name.startswith(("nvmlDevice", "nvmlEventSetWait")):
            setattr(pynvml, name, counted(name, function))
    return spent


def series_of(kept: Sequence[Sequence[HealthReading]]) -> dict[str, dict[str, Any]]:
    """Each part's quantities over all readings: one number where it never changed, else a list with None where it was not read.

    XIDs are lists of a reading's, under "xids", of parts that had any.
    """
    series: dict[str, dict[str, Any]] = {}
    for number, found in enumerate(kept):
        for reading in found:
            quantities = series.setdefault(reading.part, {})
            for name, value in {**reading.values, **({"xids": list(reading.xids)} if reading.xids else {})}.items():
                quantities.setdefault(name, [None] * len(kept))[number] = value
    for quantities in series.values():
        for name, values in quantities.items():
            if all(value == values[0] for value in values):
                quantities[name] = values[0]
    return series


def readings_of(series: Mapping[str, Mapping[str, Any]], count: int) -> Iterator[list[HealthReading]]:
    """The readings that `series_of` was made of."""
    for number in range(count):
        found = []
        for part, quantities in series.items():
            values = {name: v[number] if isinstance(v, list) else v for name, v in quantities.items() if name != "xids"}
            xids = quantities.get("xids", [None] * count)[number] or ()
            found.append(HealthReading(part, {name: v for name, v in values.items() if v is not None}, tuple(xids)))
        yield found


def compare(turns: int) -> dict[str, Any]:
    """Milliseconds of a matmul on the GPU without and with reading, in alternating turns."""
    import torch

    left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def matmul() -> None:
        for _ in range(20):
            torch.mm(left, left)
        torch.cuda.synchronize()

    matmul()
    times: dict[str, list[float]] = {"off": [], "on": []}
    for turn in range(2 * turns):
        if turn % 2:
            with closing(HealthMonitor(ALL)) as monitor:
                times["on"] += _turn(matmul, monitor.findings)
        else:
            times["off"] += _turn(matmul, lambda: None)
    middle = {name: statistics.median(each) for name, each in times.items()}
    return {"milliseconds": middle, "on_over_off": middle["on"] / middle["off"], "products": 20, "turns": turns}


def _turn(matmul: Callable[[], None], poll: Callable[[], object]) -> list[float]:
    times, ends = [], time.monotonic() + TURN_SECONDS
    while time.monotonic() < ends:
        poll()
        began = time.perf_counter()
        matmul()
        times.append(1000 * (time.perf_counter() - began))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--load", type=int, default=0, metavar="TURNS", help="turns of matmuls off and on")
    parser.add_argument("--keep", action="store_true", help="keep all readings")
    parser.add_argument("--calls", action="store_true", help="count the calls of NVML")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    spent = count_calls() if given.calls else {}
    answer: dict[str, Any] = {"host": platform.machine(), "python": platform.python_version(), **read(given.seconds)}
    if spent:
        count = answer["readings"]
        answer["calls_and_milliseconds_of_a_reading"] = {
            name: [round(calls / count, 2), round(milliseconds / count, 3)]
            for name, (calls, milliseconds) in spent.items()
        }
    if not given.keep:
        del answer["series"]
    if given.load:
        answer["product"] = compare(given.load)
    if given.out:
        given.out.write_text(json.dumps(answer) + "\n")
    print(json.dumps({name: value for name, value in answer.items() if name != "series"}, indent=1))


if __name__ == "__main__":
    main()
