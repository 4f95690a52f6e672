"""One run of a row of `dense.py`, on either side, as JSON lines: its figures, and its traced step by kind of kernel."""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from dense_rows import TRACED, WARMED, Row, Visit
from dense_table import ENOUGH, PEER, Line
from kernel_times import breakdown, read_trace
from sides import MESHWRIGHT, SAID, TitanStep, our_figures, run_ours, run_torchtitan

from meshwright.spec.chips import CHIPS
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.fields import to_plain
from meshwright.spec.model import flops_per_token, parameter_count

LEAST_SECONDS = 45.0
"""What a run takes at the very least; with less left, none is started."""


def made(visit: Visit, options: argparse.Namespace, left: float) -> Iterator[Line]:
    """The lines of one run, in the first way that fits in memory."""
    row, ways = visit.row, visit.row.peer if visit.side == PEER else visit.row.ours
    traced = visit.number == 1 and not options.no_trace
    deadline = time.monotonic() + left
    for number, words in enumerate(ways):
        began = time.monotonic()
        limit = min(row.limit, deadline - began - 5)
        if limit < LEAST_SECONDS / 2:
            return
        run = peer_run if visit.side == PEER else our_run
        line, trace = run(visit, list(words), options, limit, traced)
        facts = {
            "kind": "run",
            "row": row.name,
            "side": visit.side,
            "pass": visit.number,
            "way": number,
            "words": words,
        }
        yield {**facts, **line, "wall_seconds": round(time.monotonic() - began, 1)}
        if traced and trace is None and "error" not in line:
            yield {"kind": "breakdown", "row": row.name, "side": visit.side, "error": "no trace was written"}
        if trace is not None:
            yield {"kind": "breakdown", "row": row.name, "side": visit.side, **read_breakdown(trace, row, options)}
        if "error" not in line or "out of memory" not in line["error"].lower():
            return


def our_run(
    visit: Visit, words: list[str], options: argparse.Namespace, limit: float, traced: bool
) -> tuple[Line, Path | None]:
    row, log = visit.row, options.logs / f"{visit.row.name}-ours-{visit.number}.log"
    start = [*MESHWRIGHT, "train", str(row.run)]
    if traced:
        start += ["--profile-steps", f"{row.steps - TRACED + 1}:{row.steps}"]
    ran = run_ours(start, words, row.name, options.runs, log, {}, limit)
    counted = ran.records[row.skip : row.last]
    if ran.folder is None or not counted or (ran.code and len(counted) < ENOUGH):
        said = log.read_text(encoding="utf-8", errors="replace")[-SAID:]
        return {"error": f"exit code {ran.code} after {len(ran.records)} steps: {said}"}, None
    figures = our_figures(ran.folder, ran.records, row.skip, row.last)
    loss = {"loss_first": ran.records[0]["loss"], "losses": [round(record["loss"], 4) for record in ran.records]}
    rates = [record["tokens_per_second_per_gpu"] for record in counted]
    line = {
        **figures, **loss, **rate_figures(row, rates, 1), "exit_code": ran.code, "folder": str(ran.folder),
        "data_wait_seconds": statistics.median(record.get("data_wait_seconds", 0.0) for record in counted),
    }  # fmt: skip
    line.pop("environment"), line.pop("step_seconds_all")
    trace = ran.folder / "traces" / "rank-00000.json.gz"
    return line, trace if traced and trace.exists() else None


def peer_run(
    visit: Visit, words: list[str], options: argparse.Namespace, limit: float, traced: bool
) -> tuple[Line, Path | None]:
    row, dump = visit.row, options.runs / f"{visit.row.name}-peer-{visit.number}"
    shutil.rmtree(dump, ignore_errors=True)
    asked = [*words, "--training.steps", str(row.steps), "--training.global_batch_size", str(row.sequences)]
    if traced:
        asked += ["--profiling.enable_profiling", "--profiling.profile_freq", str(row.steps)]
        asked += ["--profiling.profiler_active", str(TRACED), "--profiling.profiler_warmup", str(WARMED)]
    env = {"DUMP": str(dump), "LOG_FREQ": str(row.log_every)}
    steps, said = run_torchtitan(f"{row.name}-peer-{visit.number}", row.gpus, asked, options.logs, env, limit)
    counted = [step for step in steps if row.skip <= step.step - row.log_every and step.step <= row.last]
    if not counted:
        return {"error": out_of_memory(said) or said[-SAID:]}, None
    line = {
        "arguments": asked,
        **rate_figures(row, [step.rate for step in counted], row.log_every),
        "memory_reserved_peak_gib": max(step.memory_gib for step in steps),
        **titan_losses(steps),
    }
    traces = sorted(dump.glob("**/rank0_trace.json"))
    return line, traces[-1] if traced and traces else None


def out_of_memory(said: str) -> str | None:
    line = next((line for line in said.splitlines() if "out of memory" in line.lower()), None)
    return line and line[-SAID:]


def titan_losses(steps: list[TitanStep]) -> Line:
    return {"loss_first": steps[0].loss, "loss_last": steps[-1].loss, "steps": steps[-1].step}


def rate_figures(row: Row, rates: list[float], steps_each: int) -> Line:
    """Median speed of one run in both FLOP conventions; `rates` are tokens per second and GPU, each over so many steps."""
    rate, model, seq_len = statistics.median(rates), row.spec.model, row.spec.train.seq_len
    chip = CHIPS.get(row.spec.cluster.gpu)
    found: Line = {
        "tokens_per_second_per_gpu": round(rate, 1),
        "step_seconds": round(row.tokens / row.gpus / rate, 5),
        "rates": [round(one, 1) for one in rates],
        "counted_steps": len(rates) * steps_each,
        "parameters": parameter_count(model),
    }
    for kind, causal in (("causal", True), ("full", False)):
        flops = flops_per_token(model, seq_len, causal=causal)
        found[f"gflop_per_token_{kind}"] = round(flops / 1e9, 3)
        found[f"mfu_{kind}"] = (
            round(rate * flops / chip.peak_flops["bf16"], 4) if chip and "bf16" in chip.peak_flops else None
        )
    return found


def read_breakdown(trace: Path, row: Row, options: argparse.Namespace) -> Line:
    """The trace by kind of kernel; it is then kept where asked, and else deleted."""
    try:
        found = to_plain(breakdown(read_trace(trace)))
    except (MeshwrightError, ValueError) as error:
        found = {"error": str(error)}
    if options.keep_traces:
        options.keep_traces.mkdir(parents=True, exist_ok=True)
        shutil.move(trace, options.keep_traces / f"{row.name}-{trace.name}")
    else:
        trace.unlink()
    return found


def tell(line: Line) -> None:
    """One line on the terminal for each run."""
    if line["kind"] != "run":
        return
    name = f"{line['row']:14s} {line['side']:10s} pass {line['pass']}"
    if "error" in line:
        print(f"{name} failed: {line['error'][-600:]}", flush=True)
        return
    memory = line["memory_reserved_peak_gib"]
    print(
        f"{name} {line['tokens_per_second_per_gpu']:9,.0f} tok/s/GPU {line['step_seconds']:8.4f} s {memory:6.1f} GiB reserved "
        f"loss {line['loss_first']:.3f} → {line['loss_last']:.3f}  {line['wall_seconds']:.0f} s in all",
        flush=True,
    )
