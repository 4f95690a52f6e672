"""Stores the plans of published trainings with their reasons: `make keep-plans` (CPU only, half a minute).

For each question of benchmarks/plans/questions.yaml, writes the plan that the search finds, and prints a table of it and of the published
layout, both priced with the present constants.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from meshwright.config.load import load_run
from meshwright.launch.prepare import plan_yaml
from meshwright.planner.search import search
from meshwright.spec.plan import Plan

FOLDER = Path(__file__).resolve().parent / "plans"


def questions() -> dict[str, dict[str, str]]:
    return yaml.safe_load((FOLDER / "questions.yaml").read_text(encoding="utf-8"))


def main() -> None:
    print("| question | plan | step (80%) | MFU | memory |\n|---|---|---:|---:|---:|")
    for name, question in questions().items():
        overrides = question["ask"].split()
        best = search(load_run(None, overrides)).best.plan
        command = f"# meshwright plan {question['ask']}\n"
        (FOLDER / f"{name}.yaml").write_text(command + plan_yaml(best), encoding="utf-8")
        print(table_row(name, best))
        print(table_row("  published", search(load_run(None, [*overrides, *question["published"].split()])).best.plan))


def table_row(name: str, plan: Plan) -> str:
    predicted = plan.predicted
    assert (
        predicted is not None
        and predicted.step_seconds
        and predicted.low_seconds
        and predicted.high_seconds
        and predicted.mfu
    )
    mesh = " × ".join(f"{axis.axis} {axis.size}" for axis in plan.mesh if axis.size > 1)
    stages = len(plan.schedule.stages[0]) if plan.schedule.stages else 1
    modes = "/".join(dict.fromkeys(layer.recompute for layer in plan.layers))
    batch_text = f"micro-batch {plan.batch.micro_batch} × {plan.batch.accumulate}"
    plan_text = (
        f"{mesh}, {plan.schedule.name} with {stages} stage{'s' * (stages > 1)} a rank, {batch_text}, recompute {modes}"
    )
    band = f"{predicted.step_seconds:.2f} s ({predicted.low_seconds:.2g} to {predicted.high_seconds:.2g})"
    return f"| {name} | {plan_text} | {band} | {predicted.mfu:.1%} | {predicted.memory_peak_bytes / 1e9:.0f} GB |"


if __name__ == "__main__":
    main()
