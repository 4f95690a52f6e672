"""Random questions to the planner, each again with one random pin: how often a pin makes the answer faster, which no pin should.

    python benchmarks/random_pins.py                    # 150 questions, a quarter of an hour or so
    python benchmarks/random_pins.py --first 150 --questions 20

Prints every pin that makes the answer more than 1% faster, by how much, and the totals. Torch is not needed.
"""

from __future__ import annotations

import argparse
from random import Random

from meshwright.planner.candidate import counts, untrainable
from meshwright.planner.finalists import ALIKE
from meshwright.planner.search import search
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.load import load_run

ASKED = {
    "model": (
        "llama3-1b",
        "llama3-3b",
        "llama3-8b",
        "llama3-70b",
        "llama3-405b",
        "qwen3-8b",
        "mixtral-8x7b",
        "qwen3-30b-a3b",
    ),
    "cluster.gpu": ("A100", "H100", "H200", "B200"),
    "cluster.nodes": (1, 1, 1, 2, 3, 4, 8, 16, 64),
    "cluster.gpus_per_node": (2, 4, 6, 8, 8, 8),
    "train.seq_len": (512, 2048, 4096, 8192, 32768, 131072),
    "train.global_batch": (1, 8, 24, 64, 128, 512, 1024),
}
PINS = {
    "pipeline": (1, 2, 4, 8), "tensor": (1, 2, 4, 8), "context_ring": (1, 2, 4), "context_ulysses": (1, 2, 4), "shard": (1, 2, 4, 8),
    "replicate": (1, 2, 4), "schedule": ("1f1b", "interleaved", "zb_h1", "zbv", "breadth_first"), "micro_batch": (1, 2, 4, 8),
    "recompute": ("none", "selective", "full"), "offload": ("none", "activations", "optimizer"), "gradients": ("shard", "whole"),
    "reshard": ("false", "true"),
}  # fmt: skip
PINNED = 3
"""Pins that are tried of each question."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--questions", type=int, default=150)
    options = parser.parse_args()
    tried, gains = 0, []
    for seed in range(options.first, options.first + options.questions):
        draw = Random(seed)
        words = [f"{key}={draw.choice(values)}" for key, values in ASKED.items()]
        free = seconds(words)
        for key in draw.sample(list(PINS), PINNED):
            pin = f"plan.{key}={draw.choice(PINS[key])}"
            pinned = seconds([*words, pin]) if free else None
            if free and pinned:
                tried += 1
                if (gain := free / pinned - 1) > ALIKE:
                    gains.append(gain)
                    print(f"{gain:.1%}  {' '.join(words)}  {pin}", flush=True)
    most = f", by {min(gains):.1%} to {max(gains):.1%}" if gains else ""
    print(
        f"{tried} pins of {options.questions} questions, {len(gains)} made the answer more than {ALIKE:.0%} faster{most}"
    )


def seconds(words: list[str]) -> float | None:
    """What the chosen step counts as, among plans that can be trained; None where there is none."""
    try:
        run = load_run(None, words)
        plan = search(run, trainable=True).best.plan
    except MeshwrightError:
        return None
    if (
        untrainable(plan, mixture=run.model.experts > 0)
        or plan.predicted is None
        or plan.predicted.step_seconds is None
    ):
        return None
    return plan.predicted.step_seconds * counts(run, plan)


if __name__ == "__main__":
    main()
