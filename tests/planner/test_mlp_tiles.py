"""Feed-forward networks in tiles: their memory, when the planner uses them, and what they cannot be combined with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.config.load import load_run
from meshwright.planner.candidate import idle_fields, untrainable
from meshwright.planner.search import search
from meshwright.simulator.step_simulation import memory_of
from meshwright.spec.plan import BatchPlan, LayerStrategy, MeshAxis, Plan, SchedulePlan
from meshwright.spec.run import RunSpec
from meshwright.workload.plan_bytes import fullest

LONG = 1 << 19


def run_of(seq_len: int, *words: str) -> RunSpec:
    return load_run(
        None,
        [
            "model=llama3-8b",
            "cluster.gpu=H200",
            "cluster.gpus_per_node=1",
            "cluster.host_memory_gib=1000",
            "train.global_batch=1",
            f"model.max_seq_len={seq_len}",
            f"train.seq_len={seq_len}",
            *words,
        ],
    )


def plan_with(tile: int, **changes: object) -> Plan:
    plan = Plan(
        mesh=(MeshAxis(axis="shard", size=1),),
        batch=BatchPlan(global_batch=1, micro_batch=1, accumulate=1),
        layers=(LayerStrategy(recompute="full"),),
        mlp_tile=tile,
    )
    return replace(plan, **changes)  # pyrefly: ignore [bad-argument-type]


def activations(tile: int, seq_len: int = LONG) -> int:
    run = run_of(seq_len)
    return fullest(memory_of(run.model, run.train, plan_with(tile), cpu=False))["activations"]


def test_wide_activations_exist_for_one_tile() -> None:
    """Gates, up, their product, gradients of gates and up, each 14,336 wide; and fp32 sums of the weights' gradients."""
    tile, width, weights = 8192, 14_336, 3 * 4096 * 14_336
    saved = 2 * 5 * width * (LONG - tile)
    assert activations(0) - activations(tile) == pytest.approx(saved - weights * (4 + 2), rel=1e-6)
    assert activations(LONG) == activations(0), "a single tile is the whole"


def test_the_planner_uses_tiles_where_nothing_fits_without() -> None:
    run = run_of(LONG)
    best = search(run).best.plan
    assert best.mlp_tile == 8192 and best.layers[0].recompute == "all_but_attention"
    assert any(reason.startswith("feed-forward networks in tiles of 8,192 tokens: without them") for reason in best.why)
    assert not any(reason.startswith("pinned") for reason in best.why)
    assert search(run_of(LONG // 4)).best.plan.mlp_tile == 0


def test_a_pin_decides() -> None:
    pinned = search(run_of(32_768, "plan.mlp_tile=4096")).best.plan
    assert pinned.mlp_tile == 4096 and pinned.layers[0].recompute in ("all_but_attention", "full")
    assert "pinned by the run file: mlp_tile" in pinned.why


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"mesh": (MeshAxis(axis="tensor", size=2),)}, "tensor ranks"),
        ({"mesh": (MeshAxis(axis="pipeline", size=2),), "schedule": SchedulePlan(name="zb_h1")}, "zb_h1"),
        ({"layers": (LayerStrategy(recompute="full", linear="fp8_tensorwise"),)}, "matmuls in fp8"),
    ],
)
def test_pairs_that_do_not_train_are_named(changes: dict[str, object], feature: str) -> None:
    assert feature in (untrainable(plan_with(64, **changes)) or "")
    assert untrainable(plan_with(0, **changes)) is None


def test_tiles_without_recompute_have_no_effect() -> None:
    plan = plan_with(64, layers=(LayerStrategy(),))
    assert any(text.startswith("plan.mlp_tile = 64 has no effect") for text in idle_fields(plan))
