"""The same work under several plans, one after another on one machine: step time, memory, loss, traffic, beside what was predicted.

    python benchmarks/layouts.py benchmarks/layouts/tcp-8b.yaml --out tcp-8b.json
    python benchmarks/layouts.py benchmarks/layouts/tcp-8b.yaml --only 'hsdp*,layered-16' --gpus 8 --set train.steps=12
    python benchmarks/layouts.py benchmarks/layouts/tcp-8b.yaml --list

Prints one line a layout, then every layout's speed over the reference's, and writes one JSON object after each run. --list says what the
simulator expects of each and starts nothing. --timeline 4:5 keeps what the timeline of two steps says of each beside the prediction. A file
of layouts has these keys:

    run        the run file beside this one that all take
    gpus       how many, when --gpus does not say; in the file's texts `N*gpus`, `gpus/N` and `gpus` stand for the number,
               and `here/` for the folder of this script
    memory_gib by number of GPUs, what `memory_gib` stands for in the texts
    against    the layout that the others are compared with
    steps      of each run; skip: those at the start that do not count; limit: seconds for one run
    script     what starts a run in place of `meshwright train`: a file beside this one and its options
    all        key=value words of every run
    sizes      name → sequences and steps: every layout runs at each size, as LAYOUT-SIZE
    layouts    name → its own key=value words; or a mapping with `overrides` (the words) or `torchtitan` (the arguments of a run of
               torchtitan), `env`, `steps`, `skip`, `limit`, `script`, and `least_gpus` below which it is left out
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
from sides import HERE, KERNELS, MESHWRIGHT, SAID, TORCHTITAN, our_figures, run_ours, run_torchtitan

SKIP, LIMIT = 4, 240.0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One run to make."""

    name: str
    run: Path
    words: list[str]
    """Ours: key=value words. torchtitan's: its arguments."""
    torchtitan: bool
    gpus: int
    script: list[str]
    env: dict[str, str] = field(default_factory=dict)
    skip: int = SKIP
    limit: float = LIMIT


def main() -> None:
    options = arguments()
    file = yaml.safe_load(options.layouts.read_text(encoding="utf-8"))
    layouts = [layout for layout in layouts_of(file, options) if wanted(layout.name, options.only)]
    if not layouts:
        sys.exit(f"{options.layouts}: no layout is called {options.only}")
    if options.list:
        for layout in layouts:
            print(f"{layout.name:24s} {expectation(layout)}", flush=True)
        return
    options.logs.mkdir(parents=True, exist_ok=True)
    rows: dict[str, dict[str, Any]] = {}
    environment: dict[str, Any] = {}
    started = time.monotonic()
    for layout in layouts:
        left = options.budget - (time.monotonic() - started)
        rows[layout.name] = measured(layout, options, left) if left > 0 else {"left_out": "no time"}
        environment = rows[layout.name].pop("environment", None) or environment
        show(layout.name, rows[layout.name])
        facts = {"benchmark": options.layouts.stem, "date": time.strftime("%Y-%m-%d"), "command": " ".join(sys.argv)}
        body = {
            **facts,
            "kernels": KERNELS,
            "against": file.get("against"),
            "environment": environment,
            "layouts": rows,
        }
        options.out.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    compare(file.get("against"), rows, list(file.get("sizes", {})))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", type=Path)
    parser.add_argument("--only", default="*", help="names of the layouts to run, by comma; * and ? stand for others")
    parser.add_argument("--gpus", type=int, help="GPUs of this host to use; the file says how many when left out")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further words of all our runs")
    parser.add_argument("--timeline", metavar="A:B", help="our runs also record what all ranks did in these steps")
    parser.add_argument("--list", action="store_true", help="print what the simulator expects of each, run nothing")
    parser.add_argument(
        "--budget", type=float, default=1e9, help="seconds for everything; what does not fit is left out"
    )
    parser.add_argument("--runs", type=Path, default=Path("/dev/shm/meshwright-runs"))
    parser.add_argument("--logs", type=Path, default=Path("benchmark-logs"))
    parser.add_argument("--out", type=Path, default=Path("layouts.json"))
    return parser.parse_args()


def wanted(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split(",") if pattern)


def layouts_of(file: dict[str, Any], options: argparse.Namespace) -> Iterator[Layout]:
    """Every layout of the file, at every size, with its numbers filled in."""
    gpus = options.gpus or file["gpus"]
    memory = file.get("memory_gib", {}).get(gpus)

    def filled(value: Any) -> str:
        text = re.sub(r"(\d+)\*gpus\b", lambda found: str(int(found[1]) * gpus), str(value))
        text = re.sub(r"\bgpus/(\d+)", lambda found: str(gpus // int(found[1])), text)
        text = re.sub(r"=memory_gib\b", f"={memory}", text)
        return re.sub(r"\bgpus\b", str(gpus), text).replace("here/", f"{HERE}/")

    for size, change in file.get("sizes", {"": {}}).items():
        for name, given in file["layouts"].items():
            own = {**file, **change, **(given if isinstance(given, dict) else {"overrides": given})}
            if own.get("least_gpus", 0) > gpus:
                continue
            full = f"{name}-{size}" if size else name
            titan = "torchtitan" in own
            words = titan_words(own) if titan else [*our_words(own), *options.set, f"name={full}"]
            yield Layout(
                name=full,
                run=HERE / file["run"],
                words=[filled(word) for word in words],
                torchtitan=titan,
                gpus=gpus,
                script=filled(own.get("script", "")).split(),
                env={key: filled(value) for key, value in own.get("env", {}).items()},
                skip=own.get("skip", SKIP),
                limit=own.get("limit", LIMIT),
            )


def our_words(own: dict[str, Any]) -> list[str]:
    steps = [f"train.steps={own['steps']}"] if "steps" in own else []
    sequences = [f"train.global_batch={own['sequences']}"] if "sequences" in own else []
    return [*own.get("all", []), *steps, *sequences, *own["overrides"]]


def titan_words(own: dict[str, Any]) -> list[str]:
    steps = ["--training.steps", own["steps"]] if "steps" in own else []
    sequences = ["--training.global_batch_size", own["sequences"]] if "sequences" in own else []
    return [str(word) for word in [*own["torchtitan"].split(), *steps, *sequences]]


def expectation(layout: Layout) -> str:
    """What the simulator says of a layout, or why it cannot."""
    if layout.torchtitan:
        return "torchtitan: not simulated"
    with tempfile.TemporaryDirectory() as folder:
        command = [*MESHWRIGHT, "simulate", str(layout.run), "--json", "--trace", f"{folder}/trace.json.gz"]
        answer = subprocess.run([*command, *layout.words], text=True, capture_output=True, check=False)
    if answer.returncode:
        return " ".join(answer.stderr.split())
    found = json.loads(answer.stdout)
    plan = found["plan"]
    mesh = " × ".join(f"{axis['axis']} {axis['size']}" for axis in plan["mesh"])
    batch, layers = plan["batch"], plan["layers"][0]
    memory = max(sum(rank["memory_bytes"].values()) for rank in found["ranks"])
    rate = found["tokens_per_second"] / layout.gpus
    kept = f"reshard {layers['reshard']}, gradients {layers['gradients']}, recompute {layers['recompute']}"
    return (
        f"{rate:9,.0f} tok/s/GPU {found['step_seconds']:7.2f} s bubble {found['bubble']:5.1%} {memory / 2**30:6.1f} GiB  {mesh}; "
        f"{batch['micro_batch']} × {batch['accumulate']}; {plan['schedule']['name']}; {kept}"
    )


def measured(layout: Layout, options: argparse.Namespace, left: float) -> dict[str, Any]:
    began = time.perf_counter()
    limit = min(layout.limit, left)
    row = torchtitan(layout, options, limit) if layout.torchtitan else ours(layout, options, limit)
    return row | {"wall_seconds": round(time.perf_counter() - began, 1)}


def ours(layout: Layout, options: argparse.Namespace, limit: float) -> dict[str, Any]:
    start = (
        [sys.executable, str(HERE / layout.script[0]), *layout.script[1:]] if layout.script else [*MESHWRIGHT, "train"]
    )
    recorded = ["--timeline", options.timeline] if options.timeline and not layout.script else []
    log = options.logs / f"{layout.name}.log"
    ran = run_ours(
        [*start, str(layout.run), *recorded], layout.words, layout.name, options.runs, log, layout.env, limit
    )
    if ran.folder is None or len(ran.records) <= layout.skip:
        said = log.read_text(encoding="utf-8", errors="replace")[-SAID:]
        return {"error": f"exit code {ran.code}", "words": layout.words, "steps": len(ran.records), "log": said}
    row = our_figures(ran.folder, ran.records, layout.skip)
    slowed = sorted(ran.folder.glob("slowed-rank-*.json"))
    row |= {"slowed": [json.loads(file.read_text(encoding="utf-8")) for file in slowed]} if slowed else {}
    for file in sorted(ran.folder.glob("timelines/*.summary.json")):
        row["timeline"] = json.loads(file.read_text(encoding="utf-8"))
    return {"words": layout.words, "exit_code": ran.code, **row}


def torchtitan(layout: Layout, options: argparse.Namespace, limit: float) -> dict[str, Any]:
    """One torchtitan run; its figures are what its own log says."""
    steps, said = run_torchtitan(layout.name, layout.gpus, layout.words, options.logs, layout.env, limit)
    kept = [step for step in steps if step.step > layout.skip]
    if not kept:
        return {"error": said[-SAID:], "arguments": layout.words}
    return {
        "torchtitan": TORCHTITAN,
        "arguments": layout.words,
        "tokens_per_second_per_gpu": statistics.median(step.rate for step in kept),
        "memory_reserved_peak_gib": max(step.memory_gib for step in steps),
        "loss_first": steps[0].loss,
        "loss_last": steps[-1].loss,
        "steps": steps[-1].step,
    }


def show(name: str, row: dict[str, Any]) -> None:
    if "tokens_per_second_per_gpu" not in row:
        reason = row.get("left_out") or row["error"] + " " + row.get("log", "")[-700:]
        print(f"{name:24s} {reason}", flush=True)
        return
    seconds = f"{row['step_seconds']:7.3f} s" if "step_seconds" in row else " " * 9
    memory = row.get("memory_allocated_peak_gib") or row["memory_reserved_peak_gib"]
    phases = " ".join(f"{key} {value:.3f}" for key, value in row.get("phases", {}).items() if value > 0.0005)
    traffic = " ".join(f"{key} {value / 1e9:.2f} GB" for key, value in row.get("traffic", {}).items())
    print(
        f"{name:24s} {row['tokens_per_second_per_gpu']:9,.0f} tok/s/GPU {seconds} {memory:6.1f} GiB "
        f"loss {row['loss_first']:.4f} {row['loss_last']:.4f}  {phases} {traffic}",
        flush=True,
    )
    if found := row.get("timeline"):
        bubbles = {side: found[side]["bubble"] for side in ("measured", "predicted") if found.get(side)}
        print(" " * 24, "bubble", ", ".join(f"{value:.1%} {side}" for side, value in bubbles.items()), flush=True)


def compare(against: str | None, rows: dict[str, dict[str, Any]], sizes: list[str]) -> None:
    """Every layout's tokens per second over the reference's, of the same size; nothing without the reference."""
    for size in sizes or [""]:
        reference = f"{against}-{size}" if size else against
        base = rows.get(str(reference), {}).get("tokens_per_second_per_gpu")
        if base is None:
            continue
        print(f"\nover {reference}, {base:,.0f} tok/s/GPU")
        for name, row in rows.items():
            if name.endswith(f"-{size}" if size else "") and "tokens_per_second_per_gpu" in row:
                print(f"{row['tokens_per_second_per_gpu'] / base:8.3f}  {name}")


if __name__ == "__main__":
    main()
