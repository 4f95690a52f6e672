"""Replays ByteScale's published step of unequal samples (arXiv 2502.21231) with its algorithms and this program's cost model.

    python benchmarks/sample_replay.py [--seeds 64] [--out FILE.json]

The published case is a 7B Llama with samples up to 2M tokens on 1,024 GPUs. Everything that is assumed is printed; nothing is fitted.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from length_mixes import evenly_drawn, length_mix
from sample_balance import LLAMA_7B

from meshwright.costs.collective_costs import gather, link_rate, port_rate, rank_group
from meshwright.costs.constants import Constants, constants
from meshwright.costs.device_rates import Machine
from meshwright.costs.machine_rates import machine_of
from meshwright.policies.sample_balance import RankPool, balance_samples
from meshwright.policies.sample_time import SampleTime, least_ranks, memory_shares, offload_ratios
from meshwright.simulator.sample_steps import (
    RingTime,
    SampleParts,
    arrival_parts,
    longest_first_parts,
    part_seconds,
    play_parts,
    static_seconds,
)
from meshwright.simulator.sample_times import sample_time
from meshwright.spec.chips import CHIPS
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.model import parameter_count

RANKS, CONTEXT_RANKS, CAPACITY, CONTEXT = 1024, 256, 8192, 2 << 20
BATCH_TOKENS = 32 << 20
LAYERS, WIDTH = LLAMA_7B.layers, LLAMA_7B.hidden
ACTIVATION_BYTES = 34 * WIDTH * LAYERS
"""Activations of a token in all layers with fused attention and without recompute (Korthikanti et al. 2022)."""
STACK = "default"
"""Published training stacks, which the cost model's constants were fitted to before and without this case."""
GPUS = ("H800", "A100")
"""The paper names no GPU. The first is assumed; the second shows what that matters."""
PUBLISHED_SECONDS = {"static": 520, "arrival_offload": 272, "balanced": 157}
PUBLISHED_SPEED = {"static": 1.0, "arrival": 1.59, "arrival_offload": 2.01, "balanced": 3.69, "loader": 3.89}
"""The ablation. Its last step is a data loader that costs nothing."""
LOADER_SECONDS = PUBLISHED_SECONDS["static"] * (1 / PUBLISHED_SPEED["balanced"] - 1 / PUBLISHED_SPEED["loader"])
"""Seconds of data loading in all steps but the last: taken from the paper, as no part of the system is simulated there."""
TOLERANCE = 0.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=64, help="global batches: orders of arrival")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    result = {
        "command": f"benchmarks/sample_replay.py --seeds {arguments.seeds}",
        "assumptions": assumptions(),
        "published_seconds": PUBLISHED_SECONDS,
        "published_speed": PUBLISHED_SPEED,
        "simulated": {gpu: replay(gpu, arguments.seeds) for gpu in GPUS},
    }
    print("\n".join(result["assumptions"]))
    for gpu, figures in result["simulated"].items():
        for name, seconds in figures["seconds"].items():
            beside = [
                _beside(seconds, PUBLISHED_SECONDS.get(name)),
                _beside(figures["speed"][name], PUBLISHED_SPEED.get(name)),
            ]
            error = figures["standard_error"][name]
            print(f"{gpu} {name}: {seconds} ± {error} s{beside[0]}; {figures['speed'][name]:.2f} × static{beside[1]}")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _beside(simulated: float, published: float | None) -> str:
    """The published figure and the difference from it, marked where that is over `TOLERANCE`."""
    if published is None:
        return ""
    difference = simulated / published - 1
    return f" (published {published}: {difference:+.1%}{'!' * (abs(difference) > TOLERANCE)})"


def assumptions() -> list[str]:
    """Return the assumptions of the simulation, in sentences."""
    return [
        f"7B Llama, 32 layers of 4,096; steps of {BATCH_TOKENS >> 20}M tokens of the mix `long`, samples up to {CONTEXT >> 20}M",
        "each batch has each length in the share that the paper states (two samples of 2M tokens): it tells of one step, and a batch of "
        "samples drawn one by one often has none",
        f"{RANKS} {GPUS[0]} on nodes of 8; matmuls, attention, links and ports at the rates of published stacks in the cost model",
        f"{CAPACITY} tokens of a micro-batch on a rank, no recompute, no tensor or pipeline ranks; {CONTEXT_RANKS} static context ranks",
        "a ring crosses nodes from one rank to one rank, so one port carries it; keys and values pass once forward and once backward, "
        "their gradients once backward, all in bf16",
        "attention hides the ring, forward and backward each its own, at the cost model's slow-down of compute beside communication",
        "static: whole samples are packed into sequences of 2M tokens; all keys and values go round the whole group",
        "arrival: each sample takes the ranks with the fewest slots in the order of arrival, short ones best-fit",
        "balanced: the paper's algorithm 2, the longest samples first, each on as many ranks as above, those that are free first; `own` is "
        "this program's balancer, which gives samples more ranks where a step then ends sooner",
        "offload: a sample has as few ranks as hide its ring behind attention, with at most the mean work of a rank on each, where copies "
        "to the host are hidden too",
        "beside the micro-batches: one gather of bf16 weights and one reduction of fp32 gradients over all ranks, not hidden, and the cost "
        "model's constants of a step: jitter by the number of nodes, milliseconds of a step and of its synchronisation",
        f"data loading takes {LOADER_SECONDS:.1f} s of every step but the last's, by the paper's own last difference",
    ]


def replay(gpu: str, seeds: int) -> dict[str, Any]:
    """Mean seconds of each layout's step over `seeds` global batches, and its speed relative to static context ranks."""
    generation, machine = CHIPS[gpu].generation, machine_of(ClusterSpec(gpu=gpu, gpus_per_node=8, nodes=RANKS // 8))
    k = constants(generation, STACK)
    time = sample_time(LLAMA_7B, machine, generation, CAPACITY, stack=STACK)
    rates = float(link_rate(machine, k)), float(port_rate(machine, k))
    ring = RingTime(2.0 * 2 * WIDTH * LAYERS, *rates, ranks_per_node=8, tax=float(k.overlap_tax))
    steps = [layout_seconds(time, ring, CHIPS[gpu].host, seed) for seed in range(seeds)]
    nodes = np.log2(RANKS / 8)
    jitter, beside = (
        1 + float(k.jitter) * nodes,
        beside_micro_batches(machine, k) + 1e-3 * float(k.step_ms + k.sync_ms * nodes),
    )
    played = {name: jitter * np.array([step[name] for step in steps]) + beside for name in steps[0]}
    played["loader"] = played["balanced"] - LOADER_SECONDS
    means = {name: float(seconds.mean()) + LOADER_SECONDS for name, seconds in played.items()}
    return {
        "seconds": {name: round(mean, 1) for name, mean in means.items()},
        "standard_error": {name: round(float(seconds.std() / np.sqrt(seeds)), 1) for name, seconds in played.items()},
        "speed": {name: round(means["static"] / mean, 3) for name, mean in means.items()},
    }


def beside_micro_batches(machine: Machine, k: Constants) -> float:
    """Seconds of a step's gather of weights and reduction of gradients over all ranks."""
    group, count = rank_group(machine, k, RANKS, 1.0), parameter_count(LLAMA_7B)
    return float(sum(gather(group, k, size * count, LAYERS + 1) for size in (2.0, 4.0)))


def layout_seconds(time: SampleTime, ring: RingTime, host: float, seed: int) -> dict[str, float]:
    """Seconds of the step of one global batch under each layout."""
    lengths = evenly_drawn(length_mix("long"), BATCH_TOKENS, CONTEXT, np.random.default_rng(seed))
    least = least_ranks(lengths, np.ones(len(lengths)), CAPACITY)
    ratios = ring_offload(lengths, least, time, ring, host)
    fewer = least_ranks(lengths, memory_shares(ratios, LAYERS), CAPACITY)
    pool = RankPool(RANKS, CAPACITY, replace(time, ring=float(ring.seconds(np.ones(1), RANKS)[0])))
    layouts = {
        "arrival": arrival_parts(lengths, least, RANKS, CAPACITY),
        "arrival_offload": arrival_parts(lengths, fewer, RANKS, CAPACITY),
    }
    for name, needed in (("balanced_without_offload", least), ("balanced", fewer)):
        seconds = part_seconds(lengths, needed, time, ring) + time.fixed * (needed > 1)
        layouts[name] = longest_first_parts(lengths, needed, RANKS, CAPACITY, seconds)
    for name, shares in (("own_without_offload", None), ("own", memory_shares(ratios, LAYERS))):
        balance = balance_samples(lengths, pool, shares)
        layouts[name] = SampleParts(balance.sample, balance.parts, balance.rank, balance.slot)
    static, packed = static_seconds(lengths, RANKS // CONTEXT_RANKS, CONTEXT_RANKS, CAPACITY, time, ring)
    played = {name: float(play_parts(parts, lengths, RANKS, time, ring).max()) for name, parts in layouts.items()}
    return {"static": static * int(lengths.sum()) / packed, **played}


def ring_offload(lengths: np.ndarray, least: np.ndarray, time: SampleTime, ring: RingTime, host: float) -> np.ndarray:
    """Offload with which a sample has as few ranks as hide its ring behind attention, if the copies are hidden too."""
    tokens = lengths.astype(np.float64)
    attention = time.quadratic * tokens**2
    messages = np.maximum(ring.seconds(lengths, np.maximum(least, 2)), 1e-12)
    mean = float(time.shared(lengths).sum()) / RANKS
    fewest = np.maximum(attention / messages, time.shared(lengths) / mean)
    shares = np.clip(fewest * CAPACITY / tokens, 2 / LAYERS, 1.0)
    wanted = (1 - shares) * LAYERS / (LAYERS - 2)
    hidden = offload_ratios(lengths, time, ACTIVATION_BYTES, host)
    return np.where(least > 1, np.minimum(hidden, wanted), 0.0)


if __name__ == "__main__":
    main()
