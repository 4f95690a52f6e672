"""Runs one side of a comparison of `dense.py` and returns JSON lines: its figures, and its traced step by kernel class."""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from dense_comparisons import PROFILER_WARM_UP_STEPS, TRACED_STEPS, Comparison, Visit
from dense_table import MIN_COUNTED_STEPS, PEER, Line
from kernel_times import breakdown, read_trace
from sides import LOG_TAIL, MESHWRIGHT, TitanStep, our_figures, run_ours, run_torchtitan

from meshwright.spec.chips import CHIPS
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.fields import to_plain
from meshwright.spec.model import flops_per_token, parameter_count

MIN_RUN_SECONDS = 45.0
"""Fewest seconds of a run; with less time left, none is started."""


def run_visit(visit: Visit, options: argparse.Namespace, seconds_left: float) -> Iterator[Line]:
    """The lines of a run, of the first variant that fits into memory."""
    comparison, variants = visit.comparison, visit.comparison.peer if visit.side == PEER else visit.comparison.ours
    traced = visit.number == 1 and not options.no_trace
    deadline = time.monotonic() + seconds_left
    for number, variant in enumerate(variants):
        began = time.monotonic()
        limit = min(comparison.limit, deadline - began - 5)
        if limit < MIN_RUN_SECONDS / 2:
            return
        run = peer_run if visit.side == PEER else our_run
        line, trace = run(visit, list(variant), options, limit, traced)
        header = {
            "kind": "run",
            "row": comparison.name,
            "side": visit.side,
            "pass": visit.number,
            "way": number,
            "words": variant,
        }
        yield {**header, **line, "wall_seconds": round(time.monotonic() - began, 1)}
        if traced and trace is None and "error" not in line:
            yield {"kind": "breakdown", "row": comparison.name, "side": visit.side, "error": "no trace was written"}
        if trace is not None:
            yield {
                "kind": "breakdown",
                "row": comparison.name,
                "side": visit.side,
                **read_breakdown(trace, comparison, options),
            }
        if "error" not in line or "out of memory" not in line["error"].lower():
            return


def our_run(
    visit: Visit, overrides: list[str], options: argparse.Namespace, limit: float, traced: bool
) -> tuple[Line, Path | None]:
    comparison, log = visit.comparison, options.logs / f"{visit.comparison.name}-ours-{visit.number}.log"
    command = [*MESHWRIGHT, "train", str(comparison.run)]
    if traced:
        command += ["--profile-steps", f"{comparison.steps - TRACED_STEPS + 1}:{comparison.steps}"]
    run = run_ours(command, overrides, comparison.name, options.runs, log, {}, limit)
    counted_records = run.records[comparison.skip : comparison.last]
    if run.folder is None or not counted_records or (run.code and len(counted_records) < MIN_COUNTED_STEPS):
        log_tail = log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]
        return {"error": f"exit code {run.code} after {len(run.records)} steps: {log_tail}"}, None
    figures = our_figures(run.folder, run.records, comparison.skip, comparison.last)
    loss = {"loss_first": run.records[0]["loss"], "losses": [round(record["loss"], 4) for record in run.records]}
    rates = [record["tokens_per_second_per_gpu"] for record in counted_records]
    line = {
        **figures,
        **loss,
        **rate_figures(comparison, rates, 1),
        "exit_code": run.code,
        "folder": str(run.folder),
        "data_wait_seconds": statistics.median(record.get("data_wait_seconds", 0.0) for record in counted_records),
    }
    line.pop("environment"), line.pop("step_seconds_all")
    trace = run.folder / "traces" / "rank-00000.json.gz"
    return line, trace if traced and trace.exists() else None


def peer_run(
    visit: Visit, base_arguments: list[str], options: argparse.Namespace, limit: float, traced: bool
) -> tuple[Line, Path | None]:
    comparison, dump_folder = visit.comparison, options.runs / f"{visit.comparison.name}-peer-{visit.number}"
    shutil.rmtree(dump_folder, ignore_errors=True)
    arguments = [
        *base_arguments,
        "--training.steps",
        str(comparison.steps),
        "--training.global_batch_size",
        str(comparison.sequences),
    ]
    if traced:
        arguments += ["--profiling.enable_profiling", "--profiling.profile_freq", str(comparison.steps)]
        arguments += [
            "--profiling.profiler_active",
            str(TRACED_STEPS),
            "--profiling.profiler_warmup",
            str(PROFILER_WARM_UP_STEPS),
        ]
    env = {"DUMP": str(dump_folder), "LOG_FREQ": str(comparison.log_every)}
    steps, log_tail = run_torchtitan(
        f"{comparison.name}-peer-{visit.number}", comparison.gpus, arguments, options.logs, env, limit
    )
    counted_steps = [
        step for step in steps if comparison.skip <= step.step - comparison.log_every and step.step <= comparison.last
    ]
    if not counted_steps:
        return {"error": out_of_memory(log_tail) or log_tail[-LOG_TAIL:]}, None
    line = {
        "arguments": arguments,
        **rate_figures(comparison, [step.rate for step in counted_steps], comparison.log_every),
        "memory_reserved_peak_gib": max(step.memory_gib for step in steps),
        **titan_losses(steps),
    }
    traces = sorted(dump_folder.glob("**/rank0_trace.json"))
    return line, traces[-1] if traced and traces else None


def out_of_memory(log_text: str) -> str | None:
    line = next((line for line in log_text.splitlines() if "out of memory" in line.lower()), None)
    return line and line[-LOG_TAIL:]


def titan_losses(steps: list[TitanStep]) -> Line:
    return {"loss_first": steps[0].loss, "loss_last": steps[-1].loss, "steps": steps[-1].step}


def rate_figures(comparison: Comparison, rates: list[float], steps_each: int) -> Line:
    """Median speed of a run in both FLOP conventions; `rates` are tokens/s per GPU, each over `steps_each` steps."""
    rate, model, seq_len = statistics.median(rates), comparison.spec.model, comparison.spec.train.seq_len
    chip = CHIPS.get(comparison.spec.cluster.gpu)
    figures: Line = {
        "tokens_per_second_per_gpu": round(rate, 1),
        "step_seconds": round(comparison.tokens / comparison.gpus / rate, 5),
        "rates": [round(sample, 1) for sample in rates],
        "counted_steps": len(rates) * steps_each,
        "parameters": parameter_count(model),
    }
    for convention, causal in (("causal", True), ("full", False)):
        flops = flops_per_token(model, seq_len, causal=causal)
        figures[f"gflop_per_token_{convention}"] = round(flops / 1e9, 3)
        figures[f"mfu_{convention}"] = (
            round(rate * flops / chip.peak_flops["bf16"], 4) if chip and "bf16" in chip.peak_flops else None
        )
    return figures


def read_breakdown(trace: Path, comparison: Comparison, options: argparse.Namespace) -> Line:
    """The breakdown of the trace by kernel class; the trace file is then moved to --keep-traces, or deleted."""
    try:
        body = to_plain(breakdown(read_trace(trace)))
    except (MeshwrightError, ValueError) as error:
        body = {"error": str(error)}
    if options.keep_traces:
        options.keep_traces.mkdir(parents=True, exist_ok=True)
        shutil.move(trace, options.keep_traces / f"{comparison.name}-{trace.name}")
    else:
        trace.unlink()
    return body


def print_run(line: Line) -> None:
    """Print a line for a run."""
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
