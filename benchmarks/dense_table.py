"""Prints the tables of `dense.py` from its JSON lines: speed of both sides, their ratio, and the parts of a step's time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from roofline import Roofline, table_lines

from meshwright.spec.fields import from_plain

PEER, OURS = "torchtitan", "meshwright"
MIN_COUNTED_STEPS = 20
"""Counted steps of a side, over all passes, below which its figure is marked."""
Line = dict[str, Any]


def show(table: str, names: Sequence[str], lines: Sequence[Line], against: dict[str, str | None]) -> None:
    """Print the tables of the named rows; `against` gives the row whose `meshwright` side replaces torchtitan, if any."""
    sides = {(name, side): side_of(lines, name, side) for name in names for side in (PEER, OURS)}
    width = max(len(name) for name in names) + 2
    print(f"\n{table}: tokens/s per GPU, medians of the counted steps of all passes (slowest and fastest pass)")
    heads = f"{'torchtitan':>12s}{'':20s}{'meshwright':>12s}{'':20s}"
    print(f"{'':{width}s}{heads}   {'MFU causal/full':>19s}  {'GiB reserved':>14s}  {'last loss':>14s}    ratio")
    for name in names:
        peer_side, our_side = sides[name, PEER], sides[name, OURS]
        base = sides.get((against[name], OURS)) if against.get(name) else peer_side
        ratio = f"{our_side['rate'] / base['rate']:8.3f}" if our_side and base else " " * 8
        mfu, memory, loss = (_both_sides(peer_side, our_side, text) for text in (_mfu, _memory, _loss))
        print(
            f"{name:{width}s}{_speed(peer_side)}{_speed(our_side)}   {mfu:>19s}  {memory:>14s}  {loss:>14s} {ratio}{_notes(lines, name)}"
        )
    for name in names:
        for side in (PEER, OURS):
            print_breakdown(lines, name, side)
            print_roofline(lines, name, side)


def side_of(lines: Sequence[Line], name: str, side: str) -> Line | None:
    """Figures of a row's side: the median over the counted steps of all passes, and each pass; None without a run."""
    runs = [
        line
        for line in lines
        if line["kind"] == "run" and (line["row"], line["side"]) == (name, side) and "error" not in line
    ]
    if not runs:
        return None
    return {
        "rate": statistics.median(rate for run in runs for rate in run["rates"]),
        "passes": [run["tokens_per_second_per_gpu"] for run in runs],
        "steps": sum(run["counted_steps"] for run in runs),
        "step_seconds": statistics.median(run["step_seconds"] for run in runs),
        "mfu_full": runs[-1]["mfu_full"],
        "mfu_causal": runs[-1]["mfu_causal"],
        "memory": max(run["memory_reserved_peak_gib"] for run in runs),
        "loss": runs[-1]["loss_last"],
    }


def _speed(side: Line | None) -> str:
    if side is None:
        return f"{'–':>12s}{'':20s}"
    mark = "" if side["steps"] >= MIN_COUNTED_STEPS else f" {side['steps']} steps"
    pass_range = f" ({min(side['passes']):,.0f}–{max(side['passes']):,.0f}){mark}"
    return f"{side['rate']:12,.0f}{pass_range:20s}"


def _both_sides(peer_side: Line | None, our_side: Line | None, text: Any) -> str:
    return ", ".join(text(side) for side in (peer_side, our_side) if side)


def _mfu(side: Line) -> str:
    if side["mfu_causal"] is None:
        return "–"
    return f"{100 * side['mfu_causal']:.1f}/{100 * side['mfu_full']:.1f}"


def _memory(side: Line) -> str:
    return f"{side['memory']:.1f}"


def _loss(side: Line) -> str:
    return f"{side['loss']:.3f}"


def _notes(lines: Sequence[Line], name: str) -> str:
    runs = [line for line in lines if line["kind"] == "run" and line["row"] == name]
    last = {line["side"]: line for line in runs}
    return "".join(
        f"  [{side} failed: {line['error'].splitlines()[0][:80]}]" for side, line in last.items() if "error" in line
    )


def print_breakdown(lines: Sequence[Line], name: str, side: str) -> None:
    """Print a line with the milliseconds of a traced step by kernel class."""
    line = newest(lines, "breakdown", name, side)
    if line is None:
        return
    if "error" in line:
        print(f"{name} {side}: no breakdown: {line['error']}")
        return
    classes = "  ".join(
        f"{kernel_class} {1e3 * class_time['seconds']:.1f}" for kernel_class, class_time in line["kinds"].items()
    )
    idle = line["idle"]
    host = f"idle {1e3 * idle['seconds']:.1f} (host {1e3 * idle['host_seconds']:.1f})"
    print(f"{name} {side}: traced step {1e3 * line['seconds']:.1f} ms: {classes}  {host}")


def print_roofline(lines: Sequence[Line], name: str, side: str) -> None:
    """Print the comparison of a step with its roofline."""
    line = newest(lines, "roofline", name, side)
    if line is not None:
        step = from_plain(Roofline, {key: value for key, value in line.items() if key not in ("kind", "row", "side")})
        print(f"{name} {side}: the step against its device\n" + "\n".join(f"  {line}" for line in table_lines(step)))


def newest(lines: Sequence[Line], line_kind: str, name: str, side: str) -> Line | None:
    """The last line of this type for a row's side."""
    return next(
        (line for line in reversed(lines) if (line["kind"], line["row"], line.get("side")) == (line_kind, name, side)),
        None,
    )
