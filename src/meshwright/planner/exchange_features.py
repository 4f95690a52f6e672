"""Features of expert parallelism in the best published systems, and how each of them would change the step time of a plan.

A feature changes inputs of the cost model (`workload.layouts.Layouts`, `costs.constants.Constants`). Their defaults describe what this
program's engine does. Sources: DeepSeek-V3's report (arXiv 2412.19437: sections 2.1.2, 3.2, 3.3) and Megatron-Bridge's recipes of 2026.
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
"""Maximum number of nodes to which DeepSeek-V3's routers send a token."""
DISPATCH_IN_FP8 = 1.5
"""Bytes per element of an exchange with dispatch in fp8 (1 byte) and combine in bf16 (2 bytes), on average."""
BLOCK_MATMULS = 1350 / 1979
"""Share of the fp8 peak that DeepGEMM's matmuls reach on Hopper (github.com/deepseek-ai/DeepGEMM, README of February
2025)."""
DUAL_PIPE_FILL = 14 / 45
"""Idle time of DualPipe relative to 1F1B's, with 16 ranks (arXiv 2412.19437, table 2)."""
GRAPH_HOST_US = 50.0
"""Host microseconds of a layer if the whole step is one CUDA graph; a guess, with which fits of such runs also start."""


Changed = Callable[[Pricing], Pricing]


@dataclass(frozen=True)
class Feature:
    """A feature that a training system may have."""

    name: str
    change: Changed
    """Returns the cost model's inputs with the feature."""
    present: Callable[[Pricing], bool]
    """Whether a plan with these inputs has the feature already."""
    recompute: Recompute | None = None
    """The recompute mode of all layers with the feature; None: that of the plan."""
    matmuls: str | None = None
    """The number format of linear layers with the feature; None: that of the plan. The cluster's chips must support the format."""


def _layout(**fields: float) -> Changed:
    return lambda priced: replace(priced, layout=replace(priced.layout, **fields))


def _at(field: str, value: float) -> Callable[[Pricing], bool]:
    return lambda priced: bool(number(getattr(priced.layout, field)) == value)


def _one_graph(priced: Pricing) -> Pricing:
    host_us = np.minimum(priced.constants.host_us, GRAPH_HOST_US)
    k = replace(priced.constants, host_us=host_us, host_tensor_us=0.0, host_micro_us=0.0)
    return replace(priced, layout=replace(priced.layout, host_sizes=0.0), constants=k)


def _fp8_blocks(priced: Pricing) -> Pricing:
    """Compute all matmuls of linear layers in fp8 at DeepGEMM's rate, with twice the 16-bit peak; also the weight gradients of experts."""
    machine = replace(priced.machine, peak=2 * priced.machine.half_peak, matmul_format=BLOCKWISE, wide_gradients=0.0)
    k = priced.constants
    return replace(priced, machine=machine, constants=replace(k, gemm_block=BLOCK_MATMULS / k.gemm))


def _no_tensor_ranks(priced: Pricing) -> Pricing:
    """Use data ranks in place of tensor ranks. In the report memory suffices for that, with moments in bf16 and little recomputation
    (3.2.3)."""
    layout = priced.layout
    data = layout.data * layout.tensor
    shards = layout.shards * layout.tensor
    changed = replace(layout, tensor=1.0, data=data, shards=shards, sequence=0.0, shard_stride=1.0)
    return replace(priced, layout=changed)


def _dual_pipe(priced: Pricing) -> Pricing:
    """Use the idle time of DualPipe: (p/2 − 1)(F&B + B − 3W), here with B = 2F and W = F (table 2 of the report).

    It is set by a constant. `Layouts.fill` would also mean that the backward is split, which would change the overlap of gradient
    reductions.
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
    """Seconds of a plan's step with a feature."""

    feature: str
    present: bool
    """Whether the plan has the feature already."""
    alone: float
    """Seconds with this feature only."""
    together: float
    """Seconds with this feature and all features before it in `FEATURES`."""
    alone_matmuls: str | None = None
    """Number format of linear layers with this feature only; None: that of the plan."""
    together_matmuls: str | None = None
    """Number format of linear layers with this feature and all before it; None: that of the plan."""


def feature_steps(run: RunSpec, plan: Plan) -> tuple[FeatureSeconds, ...]:
    """Return the seconds of the plan's step with each feature that the chips support.

    The closed form gives ratios, by which the plan's predicted step is multiplied. The result is empty if the plan has no `experts`
    section (no MoE model, or one expert rank), has no predicted step time, or if the cost model has no rates for the devices.
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
    """Return the cost model's inputs with a feature, for the blocks of every number format."""
    others = {linear: _with(inputs, feature) for linear, inputs in priced.other_formats.items()}
    return replace(feature.change(priced), other_formats=others)
