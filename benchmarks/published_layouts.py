"""Compares the planner's choice with published layouts: `make published-layouts` (two minutes of one core).

For each run: the published seconds, the prediction for this program in that layout (pinned tensor, context, pipeline and expert ranks,
schedule, micro-batch), and the plan that the search chooses among trainable ones. Writes docs/reference/published-layouts.md. Published
seconds are of other software, so they differ from the pinned prediction by more than the error of the cost model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from published_parts import steps_to_published

from meshwright.config.load import load_run
from meshwright.planner.search import search
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.plan import Plan
from meshwright.spec.plan_name import plan_name

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "published-layouts.md"


@dataclass(frozen=True)
class PublishedRun:
    """A published run: the question that it answered, its layout as pins, and its seconds of a step."""

    name: str
    question: str
    pins: str
    seconds: float
    source: str


RUNS = (
    PublishedRun(
        "Llama-3.1-405B, 512 H100, fp8",
        "model=llama3-405b cluster.gpu=H100 cluster.nodes=64 train.seq_len=8192 train.global_batch=256 "
        "plan.linear=fp8_tensorwise",
        "tensor=8 context_ring=2 pipeline=8 schedule=interleaved micro_batch=1",
        12.37,
        "NVIDIA dgxc-benchmarking 25.04",
    ),
    PublishedRun(
        "Llama-3.1-405B, 8,192 H100",
        "model=llama3-405b cluster.gpu=H100 cluster.nodes=1024 train.seq_len=8192 train.global_batch=2048",
        "tensor=8 pipeline=16 schedule=interleaved micro_batch=1",
        12.5,
        "Llama 3 report, table 4, MFU 43%",
    ),
    PublishedRun(
        "Llama-3.1-405B, 16,384 H100",
        "model=llama3-405b cluster.gpu=H100 cluster.nodes=2048 train.seq_len=8192 train.global_batch=2048",
        "tensor=8 pipeline=16 schedule=interleaved micro_batch=1",
        6.74,
        "Llama 3 report, table 4, MFU 41%",
    ),
    PublishedRun(
        "Llama-3.1-405B, 16,384 H100, 131,072 tokens",
        "model=llama3-405b cluster.gpu=H100 cluster.nodes=2048 train.seq_len=131072 train.global_batch=128",
        "tensor=8 context_ring=16 pipeline=16 schedule=interleaved micro_batch=1",
        15.3,
        "Llama 3 report, table 4, MFU 38%",
    ),
    PublishedRun(
        "Llama-3.1-70B, 64 H100",
        "model=llama3-70b cluster.gpu=H100 cluster.nodes=8 train.seq_len=8192 train.global_batch=128",
        "tensor=4 context_ring=2 pipeline=4 schedule=interleaved micro_batch=1",
        14.66,
        "NVIDIA dgxc-benchmarking 25.04",
    ),
    PublishedRun(
        "GPT-3 175B, 1,024 A100",
        "model=gpt3-175b cluster.gpu=A100 cluster.nodes=128 train.seq_len=2048 train.global_batch=768",
        "tensor=8 pipeline=8 schedule=interleaved micro_batch=1",
        11.9,
        "MegaScale, table 2, Megatron-LM",
    ),
    PublishedRun(
        "GPT-3 175B, 12,288 A100",
        "model=gpt3-175b cluster.gpu=A100 cluster.nodes=1536 train.seq_len=2048 train.global_batch=6144",
        "tensor=8 pipeline=8 schedule=interleaved micro_batch=1",
        8.57,
        "MegaScale, table 2, Megatron-LM, the same model",
    ),
    PublishedRun(
        "GPT-3 175B with parallel blocks and a window of 1,024, 12,288 A100",
        "model=gpt3-175b model.parallel_block=true model.sliding_window=1024 cluster.gpu=A100 cluster.nodes=1536 train.seq_len=2048 "
        "train.global_batch=6144",
        "tensor=8 pipeline=8 schedule=interleaved micro_batch=1",
        6.34,
        "MegaScale, table 2 (its window is not printed)",
    ),
    PublishedRun(
        "Qwen3-235B-A22B, 256 H100",
        "model=qwen3-235b-a22b cluster.gpu=H100 cluster.nodes=32 train.seq_len=4096 train.global_batch=2048",
        "tensor=4 pipeline=8 expert=2 schedule=interleaved micro_batch=1",
        29.0,
        "Megatron-MoE-ModelZoo, DeepEP",
    ),
    PublishedRun(
        "DeepSeek-V3, 2,048 H800",
        "model=deepseek-v3 cluster.gpu=H800 cluster.nodes=256 train.seq_len=4096 train.global_batch=15360",
        "tensor=1 context_ring=1 context_ulysses=1 pipeline=16 expert=64 micro_batch=1",
        19.91,
        "DeepSeek-V3 report, 180,000 GPU hours for 10^12 tokens, fp8",
    ),
)


def main() -> None:
    lines = []
    for run in RUNS:
        pinned_plan, chosen_plan = best_plan(run, run.pins), best_plan(run, "")
        print(
            f"{run.name}: {run.seconds} s, pinned {plan_text(pinned_plan)}, chosen {plan_text(chosen_plan)}",
            file=sys.stderr,
        )
        cells = (
            run.name,
            f"{run.seconds:g} ({run.source})",
            plan_text(pinned_plan),
            plan_text(chosen_plan),
            name(chosen_plan),
            difference(pinned_plan, chosen_plan),
        )
        lines.append("| " + " | ".join(cells) + " |")
    parts = ["| " + " | ".join(cells) + " |" for cells in parts_of_difference(RUNS[-1])]
    PAGE.write_text(HEADER + "\n".join(lines) + "\n" + PARTS_HEADER + "\n".join(parts) + "\n", encoding="utf-8")


def parts_of_difference(published: PublishedRun) -> Iterator[tuple[str, ...]]:
    """Cells of the table that leads from the pinned prediction of a run to its published seconds."""
    pinned_plan = best_plan(published, published.pins)
    assert not isinstance(pinned_plan, str), pinned_plan
    for description, breakdown in steps_to_published(load_run(None, published.question.split()), pinned_plan):
        exchange, others = breakdown.exposed.get("expert", 0.0), sum(breakdown.exposed.values()) + breakdown.host
        parts = breakdown.compute, exchange, breakdown.bubble, others - exchange
        yield description, *(f"{seconds:.1f}" for seconds in (sum(parts), *parts))
    yield "published", f"{published.seconds:.1f}", *["–"] * 4


def best_plan(run: PublishedRun, pins: str) -> Plan | str:
    """The best plan round `pins`, or why there is none."""
    overrides = [*run.question.split(), *(f"plan.{pin}" for pin in pins.split())]
    try:
        return search(load_run(None, overrides), trainable=not pins).best.plan
    except MeshwrightError as error:
        return str(error).splitlines()[0]


def plan_text(plan: Plan | str) -> str:
    if isinstance(plan, str):
        return plan
    predicted = plan.predicted
    assert predicted is not None and predicted.step_seconds is not None and predicted.mfu is not None, (
        "the chip table has rates for each of these"
    )
    return f"{predicted.step_seconds:.3g} s, MFU {predicted.mfu:.0%}"


def name(plan: Plan | str) -> str:
    return "–" if isinstance(plan, str) else plan_name(plan)


def difference(pinned: Plan | str, chosen: Plan | str) -> str:
    """The parts of the step in which the two differ most."""
    if isinstance(pinned, str) or isinstance(chosen, str):
        return "–"
    pinned_parts, chosen_parts = step_parts(pinned), step_parts(chosen)
    change_by_part = {
        part: chosen_parts.get(part, 0.0) - pinned_parts.get(part, 0.0) for part in {*pinned_parts, *chosen_parts}
    }
    largest = sorted(change_by_part.items(), key=lambda entry: -abs(entry[1]))[:3]
    seconds = sum(pinned_parts.values())
    texts = [f"{part} {change:+.2g} s" for part, change in largest if abs(change) > 0.01 * seconds]
    return ", ".join(texts) or "within 1%"


def step_parts(plan: Plan) -> Mapping[str, float]:
    assert plan.predicted is not None and plan.predicted.breakdown is not None
    breakdown = plan.predicted.breakdown
    exposed = {f"exposed {axis}": seconds for axis, seconds in breakdown.exposed.items()}
    return {"compute": breakdown.compute, "bubble": breakdown.bubble, "host": breakdown.host, **exposed}


HEADER = """# Published layouts and what the planner chooses

`make published-layouts` writes this page. How does the planner's choice differ from a layout that others published?

- *Published*: seconds of a step with other software on its own network.
- *Pinned*: predicted seconds of this program with the published tensor, context, pipeline and expert ranks and
  micro-batch. The planner chooses the other fields.
- *Chosen*: the best plan that this release can train.
- The last column has the parts of the step in which pinned and chosen differ.

Published seconds do not test the pinned prediction. The [cost model](../design/cost-model.md) is tested on published
runs with constants of their own software.

| run | published | pinned | chosen | chosen plan | chosen against pinned |
|---|---|---|---|---|---|
"""

PARTS_HEADER = """
## DeepSeek-V3's step by parts

How does the pinned step become the published one? Each line adds a feature of the published run
([arXiv 2412.19437](https://arxiv.org/abs/2412.19437)) to the cost model and simulates the step again, with
`benchmarks/published_parts.py`. No search offers these features, and no constant is fitted to the result. Another order
of the lines would give them other shares. Memory is not checked. Not priced are the layer for second tokens, recomputed
projections of attention, and pauses, which a production average includes.

| with | seconds | compute | exposed exchange | bubble | others |
|---|---|---|---|---|---|
"""

if __name__ == "__main__":
    main()
