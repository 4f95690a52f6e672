"""Simulates placement policies over recorded loads of 32 A100s, beside the speeds that LAER-MoE's authors measured there.

    python benchmarks/expert_placement.py [--out FILE.json] [--draws 5]

The loads are those of data/expert-loads-32-ranks.csv. A layout without copies (FSDP and expert parallelism: each expert on eight ranks)
is compared with FlexMoE as they ran it (`flexmoe_baseline.py`), with FlexMoE that adds single copies (`flexmoe_policy.py`), and with our
`hecate`, under equal memory: all gather as many experts per rank. Everything that is assumed is printed. `--draws` repeats the simulation
with unequal loads within each group of experts, which the recorded loads do not tell apart. `recorded` times the rows of the busiest ranks
that the authors recorded with their FlexMoE and with LAER-MoE: no policy is simulated.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flexmoe_baseline import improved_slots, rank_loads
from flexmoe_policy import SingleCopies

from meshwright.policies.expert_costs import ExpertCosts
from meshwright.policies.expert_owners import even_owners, heterogeneous_owners
from meshwright.policies.expert_placement import overlap_degree, place_experts
from meshwright.policies.expert_routing import node_rows
from meshwright.policies.load_window import WINDOW_STEPS
from meshwright.simulator.expert_loads import PlayedLoads, play_loads

LOADS = Path(__file__).parent / "data" / "expert-loads-32-ranks.csv"
RANKS, RANKS_PER_NODE, GROUPS = 32, 8, 4
PUBLISHED = {"over_fsdp_ep": 1.42, "over_flexmoe": 1.20}
"""Geometric means over six models, two data sets and two balance losses (e2e_analysis_backup.csv of the artifact), of LAER-MoE."""
PUBLISHED_OF_RECORDED = {"over_fsdp_ep": 1.39, "over_flexmoe": 1.17}
"""The same over the two models whose loads were recorded, so over 8 runs."""
PUBLISHED_SECONDS = {
    "mixtral-8x7b-e16k4": {
        "fsdp_ep": (28.14, 11.66, 9.03),
        "flexmoe": (24.82, 9.23, 9.00),
        "laer": (19.36, 4.35, 9.02),
    },
    "mixtral-8x7b-e8k2": {
        "fsdp_ep": (38.01, 14.73, 11.85),
        "flexmoe": (32.97, 11.42, 11.80),
        "laer": (29.55, 8.45, 11.74),
    },
}
"""Seconds of a profiled step: all, the exchange with the wait for other ranks, experts; means of ranks (breakdown_analysis_backup.csv)."""
BUSIEST = Path(__file__).parent / "data" / "expert-loads-busiest-rank.csv"
MATMUL_FLOPS = 4096 * 6 * 4096 * 14336 / 6.08e-3
"""FLOP/s of an expert: 4,096 rows of width 14,336 in 6.08 ms (computation_profiling_bf16_mixtral-8x7b.json)."""
INSIDE_BYTES, ACROSS_BYTES = 216.269e9, 88.9539e9
"""Bytes per second of a rank within its node and of a node to others (network_config.json); the node's link has 100e9."""
SEQ_LEN, SEQUENCES, MICRO_BATCHES = 8192, 2, 2
"""Sequences of a micro-batch and rank, micro-batches of a step (train_dist_fsep_32gpus.sh)."""
HIDDEN, KV_WIDTH, VOCABULARY = 4096, 1024, 32000


@dataclass(frozen=True)
class RecordedModel:
    """A model of the trace; all but one part of its layers were recorded."""

    name: str
    layers: int
    experts: int
    per_token: int
    width: int

    @property
    def experts_per_part(self) -> int:
        """Experts of a recorded part of a layer, as many as a rank gathers per layer."""
        return self.experts // GROUPS

    @property
    def attention_seconds(self) -> float:
        """Forward of a layer's attention."""
        flops = 2 * HIDDEN * (2 * HIDDEN + 2 * KV_WIDTH) + 2 * HIDDEN * SEQ_LEN
        return SEQUENCES * SEQ_LEN * flops / MATMUL_FLOPS

    @property
    def head_seconds(self) -> float:
        """Forward and backward of the head."""
        return SEQUENCES * SEQ_LEN * 6 * HIDDEN * VOCABULARY / MATMUL_FLOPS

    def costs(self) -> ExpertCosts:
        """Full recompute: four forwards' work and six exchanges of rows; weights move behind one layer's attention and experts."""
        row, expert = 6 * HIDDEN * self.width / MATMUL_FLOPS, 6 * HIDDEN * self.width
        return ExpertCosts(
            RANKS_PER_NODE,
            row_compute=row,
            row_inside=2 * HIDDEN / INSIDE_BYTES,
            row_across=2 * HIDDEN / ACROSS_BYTES,
            expert_inside=expert / INSIDE_BYTES,
            expert_across=expert / ACROSS_BYTES,
            hidden=self.attention_seconds + SEQUENCES * SEQ_LEN * self.per_token * row,
            compute_passes=4,
            row_exchanges=6,
        )

    def played(self, imbalance: np.ndarray) -> PlayedLoads:
        """Times for the rows of the busiest rank over the mean, `(steps, layers)`, if all rows stay in their nodes."""
        costs = self.costs()
        busiest = imbalance * SEQUENCES * SEQ_LEN * self.per_token
        exchange = busiest * (1 - 1 / RANKS_PER_NODE) * costs.row_inside * costs.row_exchanges
        return PlayedLoads(
            busiest * costs.row_compute * costs.compute_passes, exchange, np.zeros_like(imbalance), imbalance
        )

    def step_seconds(self, played: PlayedLoads) -> float:
        """Mean seconds of a step: experts of all layers, attention and head."""
        recorded = played.imbalance.shape[1]
        layers = played.step_seconds.mean() * self.layers / recorded + 4 * self.attention_seconds * self.layers
        return MICRO_BATCHES * float(layers + self.head_seconds)


MODELS = (
    RecordedModel("mixtral-8x7b-e16k4", 24, 16, 4, 7168),
    RecordedModel("mixtral-8x7b-e8k2", 32, 8, 2, 14336),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--draws", type=int, default=5, help="simulations with unequal loads within a group")
    arguments = parser.parse_args()
    result = {
        "command": f"benchmarks/expert_placement.py --draws {arguments.draws}",
        "assumptions": assumptions(),
        "published": PUBLISHED,
        "published_of_recorded_models": PUBLISHED_OF_RECORDED,
        "recorded": recorded(),
        "equal_within_groups": compare(None),
        "drawn_within_groups": [compare(seed) for seed in range(arguments.draws)],
    }
    print("\n".join(result["assumptions"]))
    for label, comparison in [("equal", result["equal_within_groups"])] + [
        (f"drawn, seed {seed}", comparison) for seed, comparison in enumerate(result["drawn_within_groups"])
    ]:
        print(f"loads within a group {label}: {speed_text(comparison['speed'])}")
    print(f"recorded rows of LAER-MoE: {speed_text(result['recorded']['speed'])}")
    for model, explained in result["recorded"]["explained"].items():
        print(f"{model}: {explained}")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def speed_text(speed: dict[str, float]) -> str:
    published = {
        f"{key}": f" (published {value}; of these models {PUBLISHED_OF_RECORDED[key]})"
        for key, value in PUBLISHED.items()
    }
    return ", ".join(f"{key} {value:.3f}{published.get(key, '')}" for key, value in speed.items())


def assumptions() -> list[str]:
    """Return the assumptions of the simulation, in sentences."""
    return [
        f"{RANKS} A100s on nodes of {RANKS_PER_NODE}; matmuls at {MATMUL_FLOPS / 1e12:.0f} TFLOP/s, {INSIDE_BYTES / 1e9:.0f} GB/s within "
        f"a node, {ACROSS_BYTES / 1e9:.0f} GB/s between nodes of 800 Gb/s links, as the artifact's profiles say",
        f"{MICRO_BATCHES} micro-batches of {SEQUENCES} sequences of {SEQ_LEN} tokens per rank, bf16, full recompute",
        "ranks of a node send equal rows, as the trace has sums of nodes; layers that were not recorded are like the others",
        "weights are gathered one layer ahead behind attention and experts, where they hide; gradients alike",
        "attention and head take their FLOPs at the rate of matmuls; norms, the optimizer and host time are left out",
        f"hecate decides from {WINDOW_STEPS} iterations, flexmoe from one; moving flexmoe's copies is free, as in LAER-MoE's comparison",
        "the baseline flexmoe exchanges experts on all nodes at once; flexmoe_policy is ours, which adds single copies",
        "each rank has room for as many gathered experts as FSDP and expert parallelism gather: 4 of 16, or 2 of 8",
    ]


def compare(seed: int | None) -> dict[str, Any]:
    """Step seconds and imbalances by model and layout, and the geometric means of hecate's speed over the others."""
    models = {model.name: simulate(model, seed) for model in MODELS}
    speed = {
        f"over_{name}": math.prod(
            rows[name]["step_seconds"] / rows["hecate"]["step_seconds"] for rows in models.values()
        )
        ** (1 / len(models))
        for name in ("fsdp_ep", "flexmoe", "flexmoe_policy")
    }
    return {"speed": {key: round(value, 4) for key, value in speed.items()}, "models": models}


def simulate(model: RecordedModel, seed: int | None) -> dict[str, dict[str, float]]:
    """Mean step seconds, and median and largest imbalance of ranks, of the three layouts."""
    steps, costs = recorded_counts(model, seed), model.costs()
    layers = steps[0].shape[0]
    even = even_owners(layers, model.experts, RANKS)
    fixed = np.zeros((layers, RANKS, model.experts), dtype=bool)
    fixed[:] = np.arange(RANKS)[:, None] % GROUPS == np.arange(model.experts) % GROUPS
    hidden = int(min(overlap_degree(costs, RANKS), model.experts))
    copied = hidden if hidden <= model.experts_per_part else 0  # with fewer slots no expert is on all ranks
    owners = heterogeneous_owners(steps[0].sum(1), copied, RANKS, RANKS_PER_NODE)
    played = {
        "fsdp_ep": play_loads(steps, even, costs, initial=fixed),
        "flexmoe": flexmoe_baseline(steps, fixed, model),
        "flexmoe_policy": play_loads(steps, even, costs, place=SingleCopies(fixed), slots=model.experts_per_part),
        "hecate": play_loads(
            steps, owners, costs, place=place_experts, slots=model.experts_per_part, window=WINDOW_STEPS
        ),
    }
    return {
        name: {
            "step_seconds": round(model.step_seconds(figures), 4),
            "median_imbalance": round(float(np.median(figures.imbalance)), 4),
            "largest_imbalance": round(float(figures.imbalance.max()), 4),
        }
        for name, figures in played.items()
    }


def flexmoe_baseline(steps: list[np.ndarray], fixed: np.ndarray, model: RecordedModel) -> PlayedLoads:
    """FlexMoE as its comparison with LAER-MoE has it: decided from the micro-batch before, all rows stay in their nodes."""
    slots = fixed.astype(np.int64)
    ratios = []
    for earlier, counts in itertools.pairwise(node_rows(step, RANKS_PER_NODE) for step in steps):
        layers = range(len(counts))
        slots = np.array([improved_slots(slots[layer], earlier[layer], model.experts_per_part) for layer in layers])
        loads = np.array([rank_loads(slots[layer], counts[layer]) for layer in layers])
        ratios.append(loads.max(1) / loads.mean(1))
    return model.played(np.array(ratios))


def recorded() -> dict[str, Any]:
    """Speeds for the recorded rows of each side's busiest rank, and how much of the measured difference they explain."""
    seconds: dict[str, dict[str, float]] = {}
    explained = {}
    for model in MODELS:
        ratios = _read_busiest(model.name)
        counts = recorded_counts(model, None)
        even = np.zeros((counts[0].shape[0], RANKS, model.experts), dtype=bool)
        even[:] = np.arange(RANKS)[:, None] % GROUPS == np.arange(model.experts) % GROUPS
        fixed = play_loads(counts, even_owners(len(even), model.experts, RANKS), model.costs(), initial=even)
        ratios["fsdp_ep"] = fixed.imbalance
        seconds[model.name] = {name: model.step_seconds(model.played(ratio)) for name, ratio in ratios.items()}
        total, exchange, experts = PUBLISHED_SECONDS[model.name]["fsdp_ep"]
        less_total, less_exchange, _ = PUBLISHED_SECONDS[model.name]["laer"]
        wait = experts * float(ratios["fsdp_ep"].mean() - ratios["laer"].mean())
        explained[model.name] = (
            f"LAER-MoE's step is {total - less_total:.1f} s shorter than FSDP and expert parallelism, its exchange with waits "
            f"{exchange - less_exchange:.1f} s; waits for the busiest rank, by recorded rows, {wait:.1f} s shorter"
        )
    speed = {
        f"over_{name}": round(
            math.prod(by_name[name] / by_name["laer"] for by_name in seconds.values()) ** (1 / len(seconds)), 4
        )
        for name in ("fsdp_ep", "flexmoe")
    }
    return {"speed": speed, "step_seconds": seconds, "explained": explained}


def _read_busiest(name: str) -> dict[str, np.ndarray]:
    """Rows of the busiest rank over the mean, `(iterations, layers)`, of each recorded method."""
    with BUSIEST.open(encoding="utf-8") as file:
        lines = [
            line for line in csv.DictReader(line for line in file if not line.startswith("#")) if line["model"] == name
        ]
    return {
        method: np.array([line["by_iteration"].split() for line in lines if line["method"] == key], dtype=np.int64).T
        / 1000
        for method, key in (("flexmoe", "flex"), ("laer", "laer"))
    }


def recorded_counts(model: RecordedModel, seed: int | None) -> list[np.ndarray]:
    """Counts `(layers, ranks, experts)` of each iteration.

    The trace has the rows of groups of experts. Without `seed` a group's experts have equal loads. With it, their shares are drawn once for
    each layer, from a log-normal distribution whose width follows from the spread of the groups' loads.
    """
    groups = _read_groups(model.name)
    _, layers, nodes, _ = groups.shape
    shares = np.full((layers, model.experts_per_part, GROUPS), 1 / model.experts_per_part)
    if seed is not None:
        loads = groups.sum(2)
        spread = float((loads.std(2) / loads.mean(2)).mean())
        deviation = math.sqrt(math.log(1 + spread**2 * model.experts_per_part))
        drawn = np.random.default_rng(seed).lognormal(0, deviation, shares.shape)
        shares = drawn / drawn.sum(1, keepdims=True)
    experts = (groups[:, :, :, None] * shares[:, None]).reshape(len(groups), layers, nodes, model.experts)
    per_rank = np.rint(experts / RANKS_PER_NODE).astype(np.int64)
    return list(np.repeat(per_rank, RANKS_PER_NODE, axis=2))


def _read_groups(name: str) -> np.ndarray:
    """Recorded rows `(iterations, layers, nodes, groups)` of a model."""
    with LOADS.open(encoding="utf-8") as file:
        lines = [
            line for line in csv.DictReader(line for line in file if not line.startswith("#")) if line["model"] == name
        ]
    iterations, layers = (sorted({int(line[key]) for line in lines}) for key in ("iteration", "layer"))
    groups = np.zeros((len(iterations), len(layers), RANKS // RANKS_PER_NODE, GROUPS), dtype=np.int64)
    for line in lines:
        values = [int(line[f"n{node}_s{group}"]) for node in range(groups.shape[2]) for group in range(GROUPS)]
        groups[iterations.index(int(line["iteration"])), layers.index(int(line["layer"]))] = np.reshape(
            values, groups.shape[2:]
        )
    return groups


if __name__ == "__main__":
    main()
