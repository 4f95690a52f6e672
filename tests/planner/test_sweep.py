"""The sweep finds the same optimum as pricing everything, on small random questions."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from tests.slow import examples

from meshwright.config.load import load_run
from meshwright.config.presets import MODEL_PRESETS
from meshwright.costs.plan_costs import Pricing
from meshwright.planner.candidate import HEADROOM
from meshwright.planner.finalists import plan_at
from meshwright.planner.space import SCHEDULES, Points, points
from meshwright.planner.strategies import PLAIN, recomputes
from meshwright.planner.sweep import closed_form_cost, layouts, peak_rank_bytes, sweep
from meshwright.simulator.step_simulation import require_cost_inputs
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.fields import from_plain
from meshwright.spec.job import TrainSpec
from meshwright.spec.network import NetworkSpec
from meshwright.spec.plan import RECOMPUTE_MODES, Gradients, LayerStrategy, Offload, Recompute
from meshwright.spec.plan_keys import PlanKeys
from meshwright.spec.run import ModelSection, RunSpec
from meshwright.workload.layouts import Layouts


@st.composite
def questions(draw: st.DrawFn) -> RunSpec:
    """Models with a few wide layers on one to eight GPUs, with enough or too little memory."""
    heads, kv_heads = draw(st.sampled_from([4, 8])), draw(st.sampled_from([2, 4]))
    model = model_of(draw(st.integers(2, 6)), heads, kv_heads, tied=draw(st.booleans()))
    per_node = draw(st.sampled_from([1, 2, 4]))
    network = draw(st.sampled_from([None, NetworkSpec(fabric="tcp", port_gb_per_s=1.0)]))
    cluster = ClusterSpec(
        gpu=draw(st.sampled_from(["A100", "H200"])),
        nodes=draw(st.sampled_from([1, 2])),
        gpus_per_node=per_node,
        memory_gib=draw(st.sampled_from([4.5, 6, 10, 40])),
        network=network,
    )
    pins = PlanKeys(
        recompute=draw(st.sampled_from([None, None, None, "full"])),
        reshard=draw(st.sampled_from([None, None, True])),
        pipeline=draw(st.sampled_from([None, None, 2])),
    )
    train = TrainSpec(
        steps=1, global_batch=draw(st.sampled_from([4, 8, 16])), seq_len=draw(st.sampled_from([1024, 4096]))
    )
    return RunSpec(name="x", model=model, train=train, cluster=cluster, plan=pins)


def model_of(layers: int, heads: int, kv_heads: int, *, tied: bool) -> ModelSection:
    return ModelSection(
        family="llama",
        layers=layers,
        hidden=heads * 128,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        ffn_hidden=heads * 384,
        vocab_size=32000,
        max_seq_len=8192,
        norm="rmsnorm",
        mlp="swiglu",
        positions="rope",
        tied=tied,
    )


WHOLE_IS_LESS = RunSpec(
    name="x",
    model=model_of(3, 8, 2, tied=True),
    train=TrainSpec(steps=1, global_batch=16, seq_len=4096),
    plan=PlanKeys(pipeline=2),
    cluster=ClusterSpec(
        gpu="H200", nodes=2, gpus_per_node=4, memory_gib=4.5, network=NetworkSpec(fabric="tcp", port_gb_per_s=1.0)
    ),
)
"""The fastest plan fits only with whole gradients: sharded ones need reduction buffers that are larger than the saving."""


@settings(max_examples=examples(1, 3), deadline=None, suppress_health_check=list(HealthCheck))
@given(questions())
@example(WHOLE_IS_LESS)
def test_pruning_and_shares_keep_the_optimum(run: RunSpec) -> None:
    check(run)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(questions())
def test_pruning_and_shares_keep_the_optimum_of_many(run: RunSpec) -> None:
    check(run)


def check(run: RunSpec) -> None:
    space = points(run)
    assume(len(space) > 0)
    priced = require_cost_inputs(run.model, run.train, plan_at(run, space, 0, PLAIN, None), run.cluster)
    memory = run.cluster.memory_bytes()
    assert memory is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.planner.sweep.BATCH_POINTS", 8)  # so that what was found leaves points out
        result = sweep(run, priced, space, HEADROOM * memory, best=1)
    fastest = _fastest(run, priced, space, HEADROOM * memory)
    if not np.isfinite(fastest):
        assert len(result.seconds) == 0
        return
    # The sweep counts the bytes of a share of the state by parameters, the reference by the memory of two shares.
    assert result.seconds[0] == pytest.approx(fastest, rel=1e-4)


def _fastest(run: RunSpec, priced: Pricing, space: Points, memory_limit: float) -> float:
    """Prices every point with every strategy and every number of low-memory layers."""
    pins, layers, best = run.plan, run.model.layers, np.inf
    assert isinstance(pins, PlanKeys)
    modes = recomputes(run)
    reshards = (False, True) if pins.reshard is None else (pins.reshard,)
    offloads: tuple[Offload, ...] = ("none", "activations", "optimizer", "both")
    sums: tuple[Gradients, ...] = ("shard", "whole")
    for gradients, offload in product(sums, offloads):
        ends = {}
        for reshard, mode in product(reshards, modes):
            layer = LayerStrategy(reshard=reshard, recompute=mode, gradients=gradients, offload=offload)
            layout = layouts(run, space, layer)
            ends[reshard, mode] = closed_form_cost(priced, layout).seconds, peak_rank_bytes(run, layout)
            if layer.optimizer_offloaded:
                seconds = closed_form_cost(priced, _with_least_state(run, space, layer, memory_limit)).seconds
                legal = _gradients_legal(space, gradients) & (ends[reshard, mode][1] <= memory_limit)
                best = min(best, seconds[legal].min(initial=np.inf))
        for (first_end, first), (second_end, second) in product(ends.items(), ends.items()):
            # Layers differ in one thing at a time; a line is the same from either end.
            if (first_end[0] != second_end[0]) + (first_end[1] != second_end[1]) > 1 or first_end[0] > second_end[0]:
                continue
            legal = _gradients_legal(
                space, gradients
            )  # a single shard rank casts weights to bf16, which it may free too
            shares = np.arange(layers + 1)[:, None] / layers
            seconds, memory = ((1 - shares) * a + shares * b for a, b in zip(first, second, strict=True))
            best = min(best, seconds[legal & (memory <= memory_limit)].min(initial=np.inf))
        if offload not in ("activations", "both"):
            continue
        # Some layers moved and others not: the fewer, the longer the forward is that each copy may hide behind.
        here: Offload = "none" if offload == "activations" else "optimizer"
        for reshard, mode in product(reshards, modes):
            kept, offloading = (
                LayerStrategy(reshard=reshard, recompute=mode, gradients=gradients, offload=value)
                for value in (here, offload)
            )
            high_memory, low_memory = layouts(run, space, kept), layouts(run, space, offloading)
            legal = _gradients_legal(space, gradients)
            for count in range(1, layers + 1):
                share = count / layers
                moved = closed_form_cost(priced, replace(low_memory, offload_activations=share)).seconds
                seconds = (1 - share) * closed_form_cost(priced, high_memory).seconds + share * moved
                # Two or three layers stay besides those that are kept.
                vanishing = peak_rank_bytes(run, replace(low_memory, offload_activations=1e-9))
                memory = (1 - share) * vanishing + share * peak_rank_bytes(run, low_memory)
                best = min(best, seconds[legal & (memory <= memory_limit)].min(initial=np.inf))
    return best


def _gradients_legal(space: Points, gradients: Gradients) -> np.ndarray:
    """For each point, whether gradients of this kind differ there from the other kind."""
    if gradients == "shard":
        return np.ones(len(space), bool)
    sharded = space.column("shard") * space.column("context") > 1
    return sharded & (space.accumulate > 1) & (space.schedule != SCHEDULES.index("breadth_first"))


def _with_least_state(run: RunSpec, space: Points, layer: LayerStrategy, memory_limit: float) -> Layouts:
    """The points' layouts with the least share of the optimizer's state in host memory with which they fit.

    Memory is linear in the share, so two pinned shares tell it.
    """

    def pinned(share: float) -> RunSpec:
        assert isinstance(run.plan, PlanKeys)
        return replace(run, plan=replace(run.plan, offload_fraction=share))

    whole, half = (peak_rank_bytes(pinned(share), layouts(run, space, layer)) for share in (1.0, 0.5))
    layout = layouts(run, space, layer)
    kept = np.clip((memory_limit - whole) / (2 * (half - whole)), 0.0, 1.0)
    return replace(layout, state_bytes=layout.state_bytes * (1 - kept))


def test_all_but_attention_is_tried_where_attention_is_long() -> None:
    def tried(seq_len: int, pinned: Recompute | None = None) -> tuple[str, ...]:
        train = TrainSpec(steps=1, global_batch=1, seq_len=seq_len)
        model = from_plain(ModelSection, MODEL_PRESETS["llama3-8b"])
        return recomputes(RunSpec(name="x", model=model, train=train, plan=PlanKeys(recompute=pinned)))

    assert tried(8192) == ("none", "selective", "full") and tried(32768) == RECOMPUTE_MODES
    assert tried(8192, "all_but_attention") == ("all_but_attention",)


def test_offloaded_state_is_priced_as_the_least_share_that_fits() -> None:
    """The sweep finds the time of the best pinned share; with all state offloaded a step takes three times as long."""
    words = (
        "model=qwen2.5-72b cluster.gpu=H800 cluster.nodes=2 cluster.gpus_per_node=8 train.seq_len=2048 train.global_batch=8 "
        "cluster.network.port_gb_per_s=15 plan.tensor=4 plan.pipeline=4 plan.micro_batch=1 plan.schedule=breadth_first "
        "plan.offload=optimizer plan.recompute=selective plan.reshard=true"
    )

    def seconds(*more: str) -> float:
        run = load_run(None, [*words.split(), *more])
        space = points(run)
        priced = require_cost_inputs(run.model, run.train, plan_at(run, space, 0, PLAIN, None), run.cluster)
        found = sweep(run, priced, space, HEADROOM * (run.cluster.memory_bytes() or 0), best=1).seconds
        return float(found[0]) if len(found) else np.inf

    by_share = [seconds(f"plan.offload_fraction={share / 100}") for share in range(2, 101, 2)]
    assert seconds() == pytest.approx(min(by_share), rel=0.05)
    assert by_share[-1] > 3 * min(by_share)
