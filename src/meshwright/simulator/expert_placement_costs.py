"""The costs by which a placement policy decides which experts to copy: seconds per row (a token sent to an expert) and per copy."""

from __future__ import annotations

from meshwright.costs.collective_costs import link_rate, port_rate
from meshwright.costs.compute import matmul_rate
from meshwright.costs.plan_costs import number, pricing
from meshwright.policies.expert_costs import ExpertCosts
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec, feed_forward_of
from meshwright.spec.plan import RECOMPUTES_MATMULS, Plan


def placement_costs(
    model: ModelSpec, train: TrainSpec, plan: Plan, cluster: ClusterSpec, ranks_per_node: int
) -> ExpertCosts:
    """Return the costs of rows and of expert copies in an MoE layer under `plan`.

    `ranks_per_node` is how many ranks of an expert group are on one node. A gather of copies can overlap with the attention of a
    micro-batch; that time is `ExpertCosts.hidden`. Raises BadInput for a device whose rates are not known.
    """
    priced = pricing(model, train, plan, cluster)
    if priced is None or plan.experts is None:
        raise BadInput(
            "plan.experts.policy: the rates of this device are not known, so no policy can decide; expected policy none or fixed, or "
            "cluster.profile (`meshwright profile --out FILE` measures the device)"
        )
    machine = priced.machine
    k = priced.constants
    compute = 2 if plan.precision.compute == "bf16" else 4
    rate = number(matmul_rate(machine, k).flops)
    inside = number(link_rate(machine, k))
    across = number(port_rate(machine, k)) * ranks_per_node
    weights = (2 + feed_forward_of(model, model.expert_hidden).gated) * model.hidden * model.expert_hidden
    tokens = plan.batch.micro_batch * train.seq_len // plan.axis_size("tensor")
    for axis in ("context_ring", "context_ulysses"):
        tokens //= plan.axis_size(axis)
    layers = range(model.layers)
    recomputes = any(plan.strategy(layer, model.layers).recompute in RECOMPUTES_MATMULS for layer in layers)
    width = model.heads * model.head_dim
    attention = 2 * model.hidden * (2 * width + 2 * model.kv_heads * model.head_dim) + 2 * train.seq_len * width
    return ExpertCosts(
        ranks_per_node,
        row_compute=2 * weights / rate,
        row_inside=compute * model.hidden / inside,
        row_across=compute * model.hidden / across,
        expert_inside=compute * weights / inside,
        expert_across=compute * weights / across,
        hidden=tokens * attention / rate,
        compute_passes=4 if recomputes else 3,
        row_exchanges=6 if recomputes else 4,
        weight_exchanges=2 if plan.experts.keep else 3,
    )
