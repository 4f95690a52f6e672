"""Expert parallelism as the best published systems do it, feature by feature: what each would change in a plan's step.

A feature is an option of the cost model (`workload.layouts.Layouts`, `costs.constants.Constants`); the default is what is on in this
program's engine. Sources: DeepSeek-V3's report (arXiv 2412.19437: sections 2.1.2, 3.2, 3.3) and Megatron-Bridge's recipes of 2026.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.costs.device_rates import BLOCKWISE
from meshwright.costs.plan_costs import Pricing, as_nodes, mean_cost, number, pricing
from meshwright.spec.plan import Plan, Recompute
from meshwright.spec.run import RunSpec

DOMAINS_PER_TOKEN = 4.0
"""Nodes that the routers of DeepSeek-V3 send a token to at most."""
DISPATCH_IN_FP8 = 1.5
"""Bytes per element of an exchange whose dispatch is fp8 and whose combination is bf16."""
BLOCK_MATMULS = 1350 / 1979
"""Share of the fp8 peak that DeepGEMM's matmuls reach on Hopper (github.com/deepseek-ai/DeepGEMM, README of February
2025)."""
DUAL_PIPE_FILL = 14 / 45
"""Idle time of DualPipe relative to 1F1B's, with 16 ranks (arXiv 2412.19437, table 2)."""
GRAPH_HOST_US = 50.0
"""Host time of a layer where the whole step is one graph, microseconds (the guess that fits of such runs start from)."""


Changed = Callable[[Pricing], Pricing]


@dataclass(frozen=True)
class Feature:
    """A feature: how it changes the inputs of the cost model, and whether a plan has it already."""

    name: str
    change: Changed
    present: Callable[[Pricing], bool]
    recompute: Recompute | None = None
    """The recomputation of every layer with it; none leaves that of the plan."""
    matmuls: str | None = None
    """The format of its linear layers' matmuls; clusters of which a chip has none cannot have the feature."""


def _layout(**fields: float) -> Changed:
    return lambda priced: replace(priced, layout=replace(priced.layout, **fields))


def _at(field: str, value: float) -> Callable[[Pricing], bool]:
    return lambda priced: bool(number(getattr(priced.layout, field)) == value)


def _one_graph(priced: Pricing) -> Pricing:
    host_us = np.minimum(priced.constants.host_us, GRAPH_HOST_US)
    k = replace(priced.constants, host_us=host_us, host_tensor_us=0.0, host_micro_us=0.0)
    return replace(priced, layout=replace(priced.layout, host_sizes=0.0), constants=k)


def _fp8_blocks(priced: Pricing) -> Pricing:
    """Matmuls of all linear layers in fp8 at twice the 16-bit peak, weight gradients of experts too, at DeepGEMM's
    rate."""
    machine = replace(priced.machine, peak=2 * priced.machine.half_peak, matmul_format=BLOCKWISE, wide_gradients=0.0)
    k = priced.constants
    return replace(priced, machine=machine, constants=replace(k, gemm_block=BLOCK_MATMULS / k.gemm))


def _no_tensor_ranks(priced: Pricing) -> Pricing:
    """Data ranks in place of tensor ranks, which the report's memory allows: moments in bf16, light recomputation (3.2.3)."""
    layout = priced.layout
    data = layout.data * layout.tensor
    shards = layout.shards * layout.tensor
    changed = replace(layout, tensor=1.0, data=data, shards=shards, sequence=0.0, shard_stride=1.0)
    return replace(priced, layout=changed)


def _dual_pipe(priced: Pricing) -> Pricing:
    """Idle time of DualPipe: (p/2 − 1)(F&B + B − 3W) with B = 2F and W = F (table 2 of the report).

    Not by `Layouts.fill`, which also says that the backward is split: reductions of gradients are as before.
    """
    k = priced.constants
    return replace(priced, constants=replace(k, bubble=k.bubble * DUAL_PIPE_FILL))


FEATURES = (
    Feature("once-per-node sending", _layout(one_copy=1.0), _at("one_copy", 1.0)),
    Feature(
        f"routing to {DOMAINS_PER_TOKEN:.0f} nodes at most",
        _layout(one_copy=1.0, domains_per_token=DOMAINS_PER_TOKEN),
        lambda priced: bool(number(priced.layout.domains_per_token) > 0),
    ),
    Feature("fp8 dispatch", _layout(exchanged_bytes=DISPATCH_IN_FP8), _at("exchanged_bytes", DISPATCH_IN_FP8)),
    Feature(
        "overlap with another micro-batch",
        _layout(exchange_overlaps=1.0),
        lambda priced: bool(number(priced.layout.exchange_overlaps) > 0 or number(priced.layout.paired) > 0),
    ),
    Feature("forced balance", _layout(imbalance=1.0, busiest_rows=1.0), _at("imbalance", 1.0)),
    Feature(
        "the whole step as one graph",
        _one_graph,
        lambda priced: bool(number(priced.constants.host_us) <= GRAPH_HOST_US),
    ),
    Feature("no tensor ranks, by moments in bf16", _no_tensor_ranks, _at("tensor", 1.0)),
    Feature("recomputing norms and up-projections only", lambda priced: priced, lambda priced: False, recompute="none"),
    Feature(
        "matmuls in fp8 blocks",
        _fp8_blocks,
        lambda priced: bool(number(priced.machine.matmul_format) == BLOCKWISE),
        matmuls="fp8",
    ),
    Feature(
        "DualPipe's schedule",
        _dual_pipe,
        lambda priced: bool(number(priced.layout.fill) < 1 or number(priced.layout.pipeline) == 1),
    ),
)


@dataclass(frozen=True)
class FeatureSeconds:
    """Seconds of a step with a feature: alone, and with all before it.

    `alone_matmuls` and `together_matmuls` are the formats of the linear layers' matmuls then, None for those of the
    plan.
    """

    feature: str
    present: bool
    alone: float
    together: float
    alone_matmuls: str | None = None
    together_matmuls: str | None = None


def feature_steps(run: RunSpec, plan: Plan) -> tuple[FeatureSeconds, ...]:
    """The plan's step with each feature that the chips can have; empty for a model without experts, on one expert rank, and without a
    step time.

    The closed form gives the ratios; the plan's predicted step is their base.
    """
    priced = pricing(run.model, run.train, plan, as_nodes(run.cluster))
    if priced is None or plan.predicted is None or not plan.predicted.step_seconds or plan.experts is None:
        return ()
    share = plan.predicted.memory_peak_bytes / number(priced.machine.memory)

    def seconds(features: Sequence[Feature]) -> float:
        inputs = priced
        changed = plan
        for feature in features:
            inputs = _with(inputs, feature)
            if feature.recompute is not None:
                layers = tuple(replace(layer, recompute=feature.recompute) for layer in changed.layers)
                changed = replace(changed, layers=layers)
        return number(mean_cost(run.model, run.train, changed, inputs, share).seconds)

    scale = plan.predicted.step_seconds / seconds(())
    steps = []
    together = list[Feature]()
    for feature in FEATURES:
        if feature.matmuls and run.cluster.peak_flops(feature.matmuls) is None:
            continue
        present = feature.present(priced)
        added = [] if present else [feature]
        together += added
        steps.append(
            FeatureSeconds(
                feature.name,
                present,
                scale * seconds(added),
                scale * seconds(together),
                _matmuls(added),
                _matmuls(together),
            )
        )
    return tuple(steps)


def _matmuls(features: Sequence[Feature]) -> str | None:
    return next((feature.matmuls for feature in features if feature.matmuls), None)


def _with(priced: Pricing, feature: Feature) -> Pricing:
    """The inputs with a feature, for blocks of every format."""
    others = {linear: _with(inputs, feature) for linear, inputs in priced.other_formats.items()}
    return replace(feature.change(priced), other_formats=others)
