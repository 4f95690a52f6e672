"""Runs the same training under several plans on one machine; compares step time, memory, loss, traffic and predictions.

    python benchmarks/layouts.py benchmarks/layouts/tcp-8b.yaml --out tcp-8b.json
    python benchmarks/layouts.py benchmarks/layouts/tcp-8b.yaml --only 'hsdp*,layered-16' --gpus 8 --set train.steps=12
    python benchmarks/layouts.py benchmarks/layouts/tcp-8b.yaml --list

Prints a line per layout, then the speed of each layout over the reference's, and writes the JSON object after each run. --list prints the
simulator's prediction of each layout and starts nothing. --timeline 4:5 stores a summary of the timeline of two steps beside the
prediction. A file of layouts has these keys:

    run        run file of all layouts, relative to this script
    gpus       number of GPUs without --gpus; in the file's values `N*gpus`, `gpus/N` and `gpus` are replaced by numbers, and `here/` by
               the folder of this script
    memory_gib replacement for `memory_gib` in the values, by number of GPUs
    against    the layout that the others are compared with
    steps      per run; skip: first steps that are not counted; limit: seconds per run
    script     a script beside this one, with options, that replaces `meshwright train`
    all        key=value words of all runs
    sizes      name → sequences and steps: every layout runs at each size, as LAYOUT-SIZE
    layouts    name → its key=value words; or a mapping with `overrides` (the words) or `torchtitan` (arguments of torchtitan), `env`,
               `steps`, `skip`, `limit`, `script`, and `least_gpus`, the fewest GPUs on which it runs
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from sides import HERE, KERNELS, LOG_TAIL, MESHWRIGHT, TORCHTITAN, our_figures, run_ours, run_torchtitan

SKIP, LIMIT = 4, 240.0
"""Default number of first steps that are not counted, and default seconds per run."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A run of a layout."""

    name: str
    run: Path
    words: list[str]
    """key=value words of our run, or torchtitan's arguments."""
    torchtitan: bool
    gpus: int
    script: list[str]
    env: dict[str, str] = field(default_factory=dict)
    skip: int = SKIP
    limit: float = LIMIT


def main() -> None:
    options = arguments()
    file = yaml.safe_load(options.layouts.read_text(encoding="utf-8"))
    layouts = [layout for layout in layouts_of(file, options) if matches(layout.name, options.only)]
    if not layouts:
        sys.exit(f"{options.layouts}: no layout is called {options.only}")
    if options.list:
        for layout in layouts:
            print(f"{layout.name:24s} {prediction_text(layout)}", flush=True)
        return
    options.logs.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    environment: dict[str, Any] = {}
    start = time.monotonic()
    for layout in layouts:
        seconds_left = options.budget - (time.monotonic() - start)
        results[layout.name] = (
            run_layout(layout, options, seconds_left) if seconds_left > 0 else {"left_out": "no time"}
        )
        environment = results[layout.name].pop("environment", None) or environment
        show(layout.name, results[layout.name])
        header = {"benchmark": options.layouts.stem, "date": time.strftime("%Y-%m-%d"), "command": " ".join(sys.argv)}
        body = {
            **header,
            "kernels": KERNELS,
            "against": file.get("against"),
            "environment": environment,
            "layouts": results,
        }
        options.out.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    compare(file.get("against"), results, list(file.get("sizes", {})))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", type=Path)
    parser.add_argument("--only", default="*", help="names of the layouts to run, by comma; * and ? stand for others")
    parser.add_argument("--gpus", type=int, help="GPUs of this host to use; the file says how many when left out")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further words of all our runs")
    parser.add_argument("--timeline", metavar="A:B", help="our runs also record what all ranks did in these steps")
    parser.add_argument("--list", action="store_true", help="print what the simulator expects of each, run nothing")
    parser.add_argument(
        "--budget", type=float, default=1e9, help="seconds for all runs; runs that do not fit are left out"
    )
    parser.add_argument("--runs", type=Path, default=Path("/dev/shm/meshwright-runs"))
    parser.add_argument("--logs", type=Path, default=Path("benchmark-logs"))
    parser.add_argument("--out", type=Path, default=Path("layouts.json"))
    return parser.parse_args()


def matches(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split(",") if pattern)


def layouts_of(file: dict[str, Any], options: argparse.Namespace) -> Iterator[Layout]:
    """All layouts of the file at all sizes, with their placeholders replaced."""
    gpus = options.gpus or file["gpus"]
    memory = file.get("memory_gib", {}).get(gpus)

    def replace_placeholders(value: Any) -> str:
        text = re.sub(r"(\d+)\*gpus\b", lambda match: str(int(match[1]) * gpus), str(value))
        text = re.sub(r"\bgpus/(\d+)", lambda match: str(gpus // int(match[1])), text)
        text = re.sub(r"=memory_gib\b", f"={memory}", text)
        return re.sub(r"\bgpus\b", str(gpus), text).replace("here/", f"{HERE}/")

    for size, change in file.get("sizes", {"": {}}).items():
        for name, overrides in file["layouts"].items():
            merged = {**file, **change, **(overrides if isinstance(overrides, dict) else {"overrides": overrides})}
            if merged.get("least_gpus", 0) > gpus:
                continue
            full_name = f"{name}-{size}" if size else name
            is_torchtitan = "torchtitan" in merged
            words = (
                titan_arguments(merged)
                if is_torchtitan
                else [*our_overrides(merged), *options.set, f"name={full_name}"]
            )
            yield Layout(
                name=full_name,
                run=HERE / file["run"],
                words=[replace_placeholders(word) for word in words],
                torchtitan=is_torchtitan,
                gpus=gpus,
                script=replace_placeholders(merged.get("script", "")).split(),
                env={key: replace_placeholders(value) for key, value in merged.get("env", {}).items()},
                skip=merged.get("skip", SKIP),
                limit=merged.get("limit", LIMIT),
            )


def our_overrides(merged: dict[str, Any]) -> list[str]:
    steps = [f"train.steps={merged['steps']}"] if "steps" in merged else []
    sequences = [f"train.global_batch={merged['sequences']}"] if "sequences" in merged else []
    return [*merged.get("all", []), *steps, *sequences, *merged["overrides"]]


def titan_arguments(merged: dict[str, Any]) -> list[str]:
    steps = ["--training.steps", merged["steps"]] if "steps" in merged else []
    sequences = ["--training.global_batch_size", merged["sequences"]] if "sequences" in merged else []
    return [str(word) for word in [*merged["torchtitan"].split(), *steps, *sequences]]


def prediction_text(layout: Layout) -> str:
    """The simulator's prediction of a layout as text, or its error."""
    if layout.torchtitan:
        return "torchtitan: not simulated"
    with tempfile.TemporaryDirectory() as folder:
        command = [*MESHWRIGHT, "simulate", str(layout.run), "--json", "--trace", f"{folder}/trace.json.gz"]
        answer = subprocess.run([*command, *layout.words], text=True, capture_output=True, check=False)
    if answer.returncode:
        return " ".join(answer.stderr.split())
    simulated = json.loads(answer.stdout)
    plan = simulated["plan"]
    mesh = " × ".join(f"{axis} {plan[axis]}" for axis in plan["order"])
    layers = plan.get("layers", [plan])[0]
    data_ranks = plan["replicate"] * plan["shard"] * plan.get("hybrid", 1)
    accumulate = plan["global_batch"] // (plan["micro_batch"] * data_ranks)
    memory = max(sum(rank["memory_bytes"].values()) for rank in simulated["ranks"])
    rate = simulated["tokens_per_second"] / layout.gpus
    settings = f"reshard {layers['reshard']}, gradients {layers['gradients']}, recompute {layers['recompute']}"
    return (
        f"{rate:9,.0f} tok/s/GPU {simulated['step_seconds']:7.2f} s bubble {simulated['bubble']:5.1%} {memory / 2**30:6.1f} GiB  {mesh}; "
        f"{plan['micro_batch']} × {accumulate}; {plan['schedule']}; {settings}"
    )


def run_layout(layout: Layout, options: argparse.Namespace, seconds_left: float) -> dict[str, Any]:
    began = time.perf_counter()
    limit = min(layout.limit, seconds_left)
    figures = (
        run_torchtitan_layout(layout, options, limit) if layout.torchtitan else run_our_layout(layout, options, limit)
    )
    return figures | {"wall_seconds": round(time.perf_counter() - began, 1)}


def run_our_layout(layout: Layout, options: argparse.Namespace, limit: float) -> dict[str, Any]:
    command = (
        [sys.executable, str(HERE / layout.script[0]), *layout.script[1:]] if layout.script else [*MESHWRIGHT, "train"]
    )
    timeline_options = ["--timeline", options.timeline] if options.timeline and not layout.script else []
    log = options.logs / f"{layout.name}.log"
    run = run_ours(
        [*command, str(layout.run), *timeline_options], layout.words, layout.name, options.runs, log, layout.env, limit
    )
    if run.folder is None or len(run.records) <= layout.skip:
        log_tail = log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]
        return {"error": f"exit code {run.code}", "words": layout.words, "steps": len(run.records), "log": log_tail}
    figures = our_figures(run.folder, run.records, layout.skip)
    slowed = sorted(run.folder.glob("slowed-rank-*.json"))
    figures |= {"slowed": [json.loads(file.read_text(encoding="utf-8")) for file in slowed]} if slowed else {}
    for file in sorted(run.folder.glob("timelines/*.summary.json")):
        figures["timeline"] = json.loads(file.read_text(encoding="utf-8"))
    return {"words": layout.words, "exit_code": run.code, **figures}


def run_torchtitan_layout(layout: Layout, options: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Run torchtitan; its figures come from its log."""
    steps, output = run_torchtitan(layout.name, layout.gpus, layout.words, options.logs, layout.env, limit)
    counted_steps = [step for step in steps if step.step > layout.skip]
    if not counted_steps:
        return {"error": output[-LOG_TAIL:], "arguments": layout.words}
    return {
        "torchtitan": TORCHTITAN,
        "arguments": layout.words,
        "tokens_per_second_per_gpu": statistics.median(step.rate for step in counted_steps),
        "memory_reserved_peak_gib": max(step.memory_gib for step in steps),
        "loss_first": steps[0].loss,
        "loss_last": steps[-1].loss,
        "steps": steps[-1].step,
    }


def show(name: str, result: dict[str, Any]) -> None:
    if "tokens_per_second_per_gpu" not in result:
        reason = result.get("left_out") or result["error"] + " " + result.get("log", "")[-700:]
        print(f"{name:24s} {reason}", flush=True)
        return
    seconds = f"{result['step_seconds']:7.3f} s" if "step_seconds" in result else " " * 9
    memory = result.get("memory_allocated_peak_gib") or result["memory_reserved_peak_gib"]
    phases = " ".join(f"{key} {value:.3f}" for key, value in result.get("phases", {}).items() if value > 0.0005)
    traffic = " ".join(f"{key} {value / 1e9:.2f} GB" for key, value in result.get("traffic", {}).items())
    print(
        f"{name:24s} {result['tokens_per_second_per_gpu']:9,.0f} tok/s/GPU {seconds} {memory:6.1f} GiB "
        f"loss {result['loss_first']:.4f} {result['loss_last']:.4f}  {phases} {traffic}",
        flush=True,
    )
    if predicted := result.get("predicted"):
        # Torch does not allocate the framework's share.
        needed = sum(size for part, size in predicted["memory_bytes"].items() if part != "framework") / 2**30
        time_error, memory_error = predicted["step_seconds"] / result["step_seconds"] - 1, needed / memory - 1
        print(
            " " * 24,
            f"predicted {predicted['step_seconds']:.3f} s ({time_error:+.1%}), {needed:.1f} GiB ({memory_error:+.1%})",
            flush=True,
        )
    if timeline := result.get("timeline"):
        bubbles = {side: timeline[side]["bubble"] for side in ("measured", "predicted") if timeline.get(side)}
        print(" " * 24, "bubble", ", ".join(f"{value:.1%} {side}" for side, value in bubbles.items()), flush=True)


def compare(against: str | None, results: dict[str, dict[str, Any]], sizes: list[str]) -> None:
    """Print each layout's tokens per second over those of the reference at the same size; nothing without a reference."""
    for size in sizes or [""]:
        reference = f"{against}-{size}" if size else against
        base = results.get(str(reference), {}).get("tokens_per_second_per_gpu")
        if base is None:
            continue
        print(f"\nover {reference}, {base:,.0f} tok/s/GPU")
        for name, result in results.items():
            if name.endswith(f"-{size}" if size else "") and "tokens_per_second_per_gpu" in result:
                print(f"{result['tokens_per_second_per_gpu'] / base:8.3f}  {name}")


if __name__ == "__main__":
    main()
