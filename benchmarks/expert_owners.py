"""Simulates owners of experts that follow recorded loads, beside even ones: seconds of an MoE layer with its attention.

    python benchmarks/expert_owners.py [--out FILE.json]

Loads are those of data/expert-loads: 128 experts, balance losses 0, 1e-4 and 1e-2, from step 100 on. The layer is that of Qwen3-30B-A3B
with micro-batches of 16,384 tokens per rank, priced by the cost model for 8 H200 of one node and for 32 H100 with one 400 Gb/s port each.
Owners change every 100 steps from the last five. `hecate` owners (algorithm 2 of arXiv 2502.02581) change always and may have unequal
numbers in a layer; one layer was recorded, so the numbers are equal. `heterogeneous` ones change where the busiest rank gains 2%.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from meshwright.config.load import load_run
from meshwright.policies.expert_costs import ExpertCosts
from meshwright.policies.expert_owners import better_owners, even_owners, heterogeneous_owners
from meshwright.policies.expert_placement import copied_everywhere, place_experts
from meshwright.policies.expert_routing import owned
from meshwright.policies.load_window import WINDOW_STEPS
from meshwright.simulator.expert_loads import play_loads
from meshwright.simulator.expert_placement_costs import placement_costs
from meshwright.spec.plan import BatchPlan, ExpertPlan, MeshAxis, Plan
from meshwright.workload.expected_loads import recorded_loads

LOADS = Path(__file__).parent / "data" / "expert-loads"
FIRST, EVERY, DELAY, TOKENS, SEQ_LEN = 100, 100, 2, 16_384, 4096
CLUSTERS = {
    "8 H200": ["cluster.gpu=H200", "cluster.gpus_per_node=8"],
    "32 H100": ["cluster.gpu=H100", "cluster.nodes=4", "cluster.gpus_per_node=8", "cluster.network.port_gb_per_s=50"],
}
POLICIES = (("none", 0), ("hecate", 4), ("hecate", 16))
Owners = Callable[[np.ndarray, np.ndarray, int, int, int], np.ndarray]
OWNERS: dict[str, Owners] = {
    "even": lambda loads, before, copied, ranks, per_node: before,
    "heterogeneous": better_owners,
    "hecate": lambda loads, before, copied, ranks, per_node: heterogeneous_owners(loads, copied, ranks, per_node),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    lines = [line for name in CLUSTERS for balance in ("0", "1e-4", "1e-2") for line in compare(name, balance)]
    for line in lines:
        print(json.dumps(line))
    if arguments.out:
        result = {"command": "benchmarks/expert_owners.py", "description": __doc__, "layers": lines}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def compare(name: str, balance: str) -> list[dict[str, object]]:
    """Figures of each policy with each kind of owners: busiest rank over mean, seconds of the layer, gain over even owners."""
    file = LOADS / f"128-experts-{balance}.csv.gz"
    words = ["model=qwen3-30b-a3b", f"train.seq_len={SEQ_LEN}", "train.global_batch=128", *CLUSTERS[name]]
    run = load_run(None, words)
    ranks, per_node = run.cluster.ranks, run.cluster.ranks_per_node
    micro = TOKENS // SEQ_LEN
    plan = Plan(
        mesh=(MeshAxis(axis="shard", size=ranks),),
        batch=BatchPlan(global_batch=ranks * micro, micro_batch=micro, accumulate=1),
        experts=ExpertPlan(expert=ranks),
    )
    costs = replace(placement_costs(run.model, run.train, plan, run.cluster, per_node), weight_exchanges=3)
    loads = recorded_loads(replace(run.model, layers=1), str(file))[FIRST - DELAY :]
    counts = np.rint(loads / loads.sum(2, keepdims=True) * TOKENS * run.model.experts_per_token).astype(np.int64)
    steps = [np.repeat(step[:, None], ranks, axis=1) for step in counts]
    found = []
    for policy, slots in POLICIES:
        even = None
        for kind in OWNERS:
            seconds, imbalance = layer_figures(steps, costs, policy, slots, kind)
            even = seconds if even is None else even
            found.append(
                {
                    "cluster": name,
                    "balance_loss": balance,
                    "policy": policy,
                    "slots": slots,
                    "owners": kind,
                    "imbalance": round(imbalance, 3),
                    "layer_milliseconds": round(seconds * 1e3, 3),
                    "gain_percent": round((even / seconds - 1) * 100, 1),
                }
            )
    return found


def layer_figures(
    counts: list[np.ndarray], layer_costs: ExpertCosts, copy_policy: str, copy_slots: int, owner_rule: str
) -> tuple[float, float]:
    """Mean seconds of the layer with attention, forward and backward, and mean of the busiest rank's rows over the mean.

    `counts` has the tokens of each expert by step, `(layers, ranks, experts)` each; `copy_slots` are experts that a rank may copy.
    """
    layers, ranks, experts = counts[0].shape
    copied = copied_everywhere(copy_policy, copy_slots, layer_costs, ranks)
    owners = even_owners(layers, experts, ranks)
    seconds, imbalances = [], []
    for start in range(DELAY, len(counts), EVERY):
        window = sum(step.sum(1) for step in counts[max(0, start - WINDOW_STEPS) : start])
        owners = OWNERS[owner_rule](np.asarray(window), owners, copied, ranks, layer_costs.ranks_per_node)
        figures = play_loads(
            counts[start - DELAY : start + EVERY],
            owners,
            layer_costs,
            place=None if copy_policy == "none" else place_experts,
            slots=copy_slots,
            window=WINDOW_STEPS,
            initial=owned(owners, ranks),
            delay=DELAY,
        )
        seconds += (figures.step_seconds / layers + 3 * layer_costs.hidden).tolist()
        imbalances += figures.imbalance.mean(1).tolist()
    return float(np.mean(seconds)), float(np.mean(imbalances))


if __name__ == "__main__":
    main()
