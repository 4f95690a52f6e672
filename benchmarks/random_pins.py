"""Measures the search's regret on random runs: how much faster a random pin makes the plan, although no pin should.

    python benchmarks/random_pins.py                                  # 500 runs with five pins each, half an hour or so
    python benchmarks/random_pins.py --first 500 --questions 20
    python benchmarks/random_pins.py --log pins.jsonl                 # continues an earlier run
    python benchmarks/random_pins.py --mode more                      # more bandwidth, memory, nodes or batch instead of pins
    python benchmarks/random_pins.py --draw usual --minutes 15        # only the usual models and devices; as many runs as fit

With `--mode more` each run is repeated with more bandwidth, memory, nodes or batch, which should not make a token slower. Prints every
gain above the limit, the largest gain and that which 99% of the runs do not exceed. Torch is not needed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import ceil, inf
from pathlib import Path
from random import Random

from meshwright.config.load import load_run
from meshwright.config.presets import MODEL_PRESETS
from meshwright.planner.candidate import offload_penalty, untrainable
from meshwright.planner.search import search
from meshwright.spec.chips import CHIPS
from meshwright.spec.errors import MeshwrightError

CHOICES = {
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
    "cluster.nodes": (1, 1, 2, 3, 4, 8, 16, 64),
    "cluster.gpus_per_node": (2, 4, 6, 8, 8, 8),
    "train.seq_len": (512, 2048, 4096, 8192, 32768, 131072),
    "train.global_batch": (1, 8, 24, 64, 128, 256, 512, 1024),
}
ALL = {
    "model": tuple(sorted(MODEL_PRESETS)),
    "cluster.gpu": tuple(sorted(name for name, chip in CHIPS.items() if "bf16" in chip.peak_flops)),
}
"""Every preset, and every device that the cost model knows."""
DRAWS = {"all": {**CHOICES, **ALL}, "usual": CHOICES}
PORTS = (None, None, 5, 8, 10, 12.5, 15, 18, 20, 25)
"""GB/s of a device's port, for several nodes; the chip's default where None."""
VOCABULARY = 50_304
"""Vocabulary of presets that take that of their tokenizer."""
FABRICS = (None, None, None, "tcp")
PINS = {
    "pipeline": (1, 2, 4, 8),
    "tensor": (1, 2, 4, 8),
    "context_ring": (1, 2, 4),
    "context_ulysses": (1, 2, 4),
    "shard": (1, 2, 4, 8),
    "replicate": (1, 2, 4),
    "schedule": ("1f1b", "interleaved", "zb_h1", "zbv", "breadth_first"),
    "micro_batch": (1, 2, 4, 8),
    "recompute": ("none", "selective", "full"),
    "offload": ("none", "activations", "optimizer"),
    "gradients": ("shard", "whole"),
    "reshard": ("false", "true"),
}
LATER_PINS = {"accumulation": ("device", "host")}
"""Pins that are drawn after those of `PINS`, one for each run, so that runs of earlier seeds keep theirs.

Sums in bf16 are no choice of the search: they round.
"""
SINGLE_PINS, PIN_PAIRS = 2, 2
"""Number of single pins and of pairs of pins of `PINS` per run."""
LIMITS = {"pins": 0.02, "more": 0.01}
"""Largest gains that pass, by mode."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--mode", choices=LIMITS, default="pins")
    parser.add_argument("--draw", choices=DRAWS, default="all")
    parser.add_argument("--minutes", type=float, default=inf, help="start no further run after this time")
    parser.add_argument("--log", type=Path, help="file of JSON lines; seeds that it has are not repeated")
    options = parser.parse_args()
    limit, gains_by_seed, start = LIMITS[options.mode], read_gains(options.log), time.monotonic()
    for seed in range(options.first, options.first + options.questions):
        if seed in gains_by_seed:
            continue
        if time.monotonic() - start > 60 * options.minutes:
            break
        gains_by_seed[seed] = gains_of(seed, options.mode, choices=DRAWS[options.draw])
        for gain, random_run in gains_by_seed[seed]:
            if gain > limit:
                print(f"{gain:.1%}  seed {seed}  {random_run}", flush=True)
        if options.log:
            with options.log.open("a") as file:
                file.write(json.dumps({"seed": seed, "gains": gains_by_seed[seed]}) + "\n")
    gains = [gain for seed_gains in gains_by_seed.values() for gain, _ in seed_gains]
    exceeding = sum(gain > limit for gain in gains)
    regrets = sorted(max((gain for gain, _ in seed_gains), default=0.0) for seed_gains in gains_by_seed.values())
    most = max(0.0, regrets[ceil(0.99 * len(regrets)) - 1]) if regrets else 0.0
    print(
        f"{len(gains)} plans for {len(gains_by_seed)} runs, {exceeding} above {limit:.0%}, at most {max(gains, default=0):.1%}, "
        f"99% of the runs at most {most:.1%}"
    )
    sys.exit(exceeding > 0)


def read_gains(log: Path | None) -> dict[int, list[tuple[float, str]]]:
    """Gains by seed from the log of an earlier run."""
    lines = log.read_text().splitlines() if log and log.exists() else []
    return {line["seed"]: [(gain, text) for gain, text in line["gains"]] for line in map(json.loads, lines)}


def gains_of(
    seed: int, mode: str, limit: int | None = None, choices: Mapping[str, Sequence[object]] = CHOICES
) -> list[tuple[float, str]]:
    """Relative gains of the first `limit` variants of the seed's random run, each with its overrides as text.

    In mode `pins` a gain is how much faster the pinned plan is, in mode `more` how much slower a token becomes. Variants without a plan
    are left out.
    """
    generator = Random(seed)
    overrides = random_run(generator, choices)
    unpinned = seconds(overrides)
    if unpinned is None:
        return []
    gains = []
    for added, sequences in islice(pins(generator) if mode == "pins" else larger_runs(overrides), limit):
        changed = seconds([*overrides, *added])
        if changed is not None:
            gain = unpinned / changed if mode == "pins" else changed / sequences / unpinned
            gains.append((gain - 1, " ".join([*overrides, *added])))
    return gains


def random_run(generator: Random, choices: Mapping[str, Sequence[object]] = CHOICES) -> list[str]:
    """The overrides of a random run: a model on a cluster."""
    overrides = [f"{key}={generator.choice(values)}" for key, values in choices.items()]
    preset = overrides[0].removeprefix("model=")
    overrides += [] if MODEL_PRESETS[preset].get("vocab_size") else [f"model.vocab_size={VOCABULARY}"]
    port, fabric = generator.choice(PORTS), generator.choice(FABRICS)
    if "cluster.nodes=1" not in overrides:
        overrides += [f"cluster.network.port_gb_per_s={port}"] * (port is not None)
        overrides += [f"cluster.network.fabric={fabric}"] * (fabric is not None)
    return overrides


def pins(generator: Random) -> Iterator[tuple[list[str], float]]:
    for count in (1,) * SINGLE_PINS + (2,) * PIN_PAIRS:
        yield [f"plan.{key}={generator.choice(PINS[key])}" for key in generator.sample(list(PINS), count)], 1.0
    for key, values in LATER_PINS.items():
        yield [f"plan.{key}={generator.choice(values)}"], 1.0


def larger_runs(overrides: list[str]) -> Iterator[tuple[list[str], float]]:
    """(overrides that add bandwidth, memory, nodes or batch, factor on the sequences of a step)."""
    run = load_run(None, overrides)
    cluster, network, batch = run.cluster, run.cluster.network, run.train.global_batch
    memory = cluster.memory_bytes()
    if memory:
        yield [f"cluster.memory_gib={1.25 * memory / 2**30:g}"], 1.0
    if network and network.port_gb_per_s:
        yield [f"cluster.network.port_gb_per_s={1.5 * network.port_gb_per_s:g}"], 1.0
    if batch % (2 * cluster.ranks) == 0:
        yield [f"cluster.nodes={2 * cluster.nodes}"], 1.0
    yield [f"train.global_batch={2 * batch}"], 2.0


def seconds(overrides: list[str]) -> float | None:
    """Seconds of the chosen trainable plan's step times its offload penalty; None where there is no plan."""
    try:
        run = load_run(None, overrides)
        plan = search(run, trainable=True).best.plan
    except MeshwrightError:
        return None
    if untrainable(plan) or plan.predicted is None or plan.predicted.step_seconds is None:
        return None
    return plan.predicted.step_seconds * offload_penalty(run, plan)


if __name__ == "__main__":
    main()
