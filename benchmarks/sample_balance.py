"""Imbalance of the balancer over many global batches of two length mixes, and its own time.

    python benchmarks/sample_balance.py [--batches 1000] [--out FILE.json]

A batch has 16 micro-batches of tokens per rank. Slowest over mean: time of the slowest rank with its waits over the mean work of a rank.
Times of samples are those of Llama-2-7B on an H100, from the cost model. `--time` measures only the time for 10,000 samples on 1,024
ranks; run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from length_mixes import length_mix

from meshwright.costs.machine_rates import machine_of
from meshwright.policies.sample_balance import RankPool, balance_samples
from meshwright.policies.sample_time import SampleTime
from meshwright.simulator.sample_times import sample_time
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.model import ModelSpec

LLAMA_7B = ModelSpec(
    family="llama", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn_hidden=11008, vocab_size=32000
)
CONTEXT = 2 << 20
"""Longest sample, tokens; less where the pool holds less."""
POOLS = ((8, 32768), (64, 32768), (1024, 8192))
"""Ranks, and tokens of a micro-batch."""
MICRO_BATCHES = 16
MIXES = ("public", "long")
TIMED_SAMPLES, TIMED_RANKS = 10_000, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--time", action="store_true", help="measure only the time of the balancer")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"command": f"benchmarks/sample_balance.py --batches {arguments.batches}"}
    if not arguments.time:
        result["imbalance"] = [
            measured(mix, ranks, capacity, arguments.batches) for mix in MIXES for ranks, capacity in POOLS
        ]
    result["seconds"] = {mix: balancer_seconds(mix) for mix in MIXES}
    for figures in result.get("imbalance", []):
        print(json.dumps(figures))
    for mix, seconds in result["seconds"].items():
        print(f"{mix}: {TIMED_SAMPLES} samples on {TIMED_RANKS} ranks in {1e3 * seconds:.1f} ms")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def time_on_h100(capacity: int) -> SampleTime:
    """Time of a sample of Llama-2-7B on one H100."""
    return sample_time(LLAMA_7B, machine_of(ClusterSpec(gpu="H100", gpus_per_node=8)), "hopper", capacity)


def measured(mix: str, ranks: int, capacity: int, batches: int, seed: int = 0) -> dict[str, Any]:
    """Figures over `batches` global batches of a mix on a pool."""
    pool, random = RankPool(ranks, capacity, time_on_h100(capacity)), np.random.default_rng(seed)
    longest = min(CONTEXT, ranks * capacity)
    imbalances, paddings, efficiencies, samples = [], [], [], 0
    for _ in range(batches):
        lengths = length_mix(mix).draw(MICRO_BATCHES * capacity * ranks, longest, random)
        balance = balance_samples(lengths, pool)
        imbalances.append(balance.imbalance)
        paddings.append(balance.padding)
        efficiencies.append(balance.efficiency)
        samples += len(lengths)
    return {
        "mix": mix,
        "ranks": ranks,
        "capacity": capacity,
        "longest": longest,
        "batches": batches,
        "mean_samples": round(samples / batches),
        "imbalance": {
            "mean": round(float(np.mean(imbalances)), 4),
            "p99": round(float(np.quantile(imbalances, 0.99)), 4),
            "largest": round(max(imbalances), 4),
        },
        "mean_efficiency": round(float(np.mean(efficiencies)), 4),
        "padding": {"mean": round(float(np.mean(paddings)), 4), "largest": round(max(paddings), 4)},
    }


def balancer_seconds(mix: str, repeats: int = 9) -> float:
    """Least processor time of a balance of 10,000 samples on 1,024 ranks."""
    lengths = length_mix(mix).draw(10**9, CONTEXT, np.random.default_rng(0))[:TIMED_SAMPLES]
    capacity = max(2 * -(-int(lengths.sum()) // (2 * MICRO_BATCHES * TIMED_RANKS)), CONTEXT // TIMED_RANKS)
    pool = RankPool(TIMED_RANKS, capacity, time_on_h100(capacity))
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        balance_samples(lengths, pool)
        seconds.append(time.process_time() - start)
    return min(seconds)


if __name__ == "__main__":
    main()
