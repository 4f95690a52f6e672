"""Plans of published trainings, kept with their reasons: `make keep-plans` (CPU only, half a minute).

For each question of benchmarks/plans/questions.yaml writes the plan that the search finds beside it, and prints a table of it and of the
layout that was published, both priced with the present constants.
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
        asked = question["ask"].split()
        best = search(load_run(None, asked)).best.plan
        command = f"# meshwright plan {question['ask']}\n"
        (FOLDER / f"{name}.yaml").write_text(command + plan_yaml(best), encoding="utf-8")
        print(row(name, best))
        print(row("  published", search(load_run(None, [*asked, *question["published"].split()])).best.plan))


def row(name: str, plan: Plan) -> str:
    said = plan.predicted
    assert said is not None and said.step_seconds and said.low_seconds and said.high_seconds and said.mfu
    mesh = " × ".join(f"{axis.axis} {axis.size}" for axis in plan.mesh if axis.size > 1)
    stages = len(plan.schedule.stages[0]) if plan.schedule.stages else 1
    modes = "/".join(dict.fromkeys(layer.recompute for layer in plan.layers))
    cut = f"micro-batch {plan.batch.micro_batch} × {plan.batch.accumulate}"
    text = f"{mesh}, {plan.schedule.name} with {stages} stage{'s' * (stages > 1)} a rank, {cut}, recompute {modes}"
    band = f"{said.step_seconds:.2f} s ({said.low_seconds:.2g} to {said.high_seconds:.2g})"
    return f"| {name} | {text} | {band} | {said.mfu:.1%} | {said.memory_peak_bytes / 1e9:.0f} GB |"


if __name__ == "__main__":
    main()
