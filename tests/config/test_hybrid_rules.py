"""Rules of the hybrid axis: each broken one is reported at its key, and a valid run passes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.config.test_key_rules import MOE, mistakes

from meshwright.config.load import load_plan, load_run, plan_yaml
from meshwright.spec.errors import BadConfig
from meshwright.spec.plan import BatchPlan, LayerStrategy, MeshAxis, Plan, SamplePlan

RUN = """\
model: {preset: llama-nano}
data: {packing: none}
train: {steps: 10, global_batch_tokens: 4096, seq_len: 1024}
cluster: {gpus_per_node: 4}
"""
HYBRID = "plan.hybrid=4"
PIPELINES = ["plan.hybrid=2", "plan.pipeline=2"]
EXPERTS = [*MOE, "model.family=mixtral"]
DIFFERENT = "as ranks of plan.hybrid run different numbers of micro-batches (or plan.schedule = breadth_first)"


@pytest.mark.parametrize(
    ("overrides", "key", "expected", "nearest"),
    [
        (["plan.hybrid=2"], "plan.hybrid", "all of the cluster's 4 ranks", "4"),
        (["plan.hybrid=4", "plan.tensor=2"], "plan.hybrid", "all of the cluster's 4 ranks ÷ plan.tensor 2", "2"),
        ([HYBRID, "plan.pipeline=2"], "plan.hybrid", "all of the cluster's 4 ranks ÷ plan.pipeline 2", "2"),
        ([HYBRID, *EXPERTS, "plan.expert=8"], "plan.expert", "a divisor of plan.hybrid = 4", "4"),
        ([HYBRID, "model.prediction_depth=1"], "data.packing", "stream, as model.prediction_depth is not 0", "stream"),
        (
            [HYBRID, "plan.capacity=200"],
            "plan.capacity",
            "at least the longest sample, train.seq_len = 1024 ÷ 4 hybrid ranks",
            "256",
        ),
        ([HYBRID, "plan.capacity=257"], "plan.capacity", "an even number of tokens", "258"),
        (["plan.capacity=512"], "plan.capacity", "no such key without plan.hybrid, whose slots it sizes", "none"),
        (["plan.hybrid_attention=ring"], "plan.hybrid_attention", "no such key without plan.hybrid", "none"),
        (
            [HYBRID, "plan.hybrid_attention=ulysses", "model.kv_heads=1"],
            "plan.hybrid_attention",
            "ring: no number of ranks from 2 to 4 divides a rank's 1 key/value heads",
            "ring",
        ),
        (
            ["plan.offload_capacity=512"],
            "plan.offload_capacity",
            "no such key without plan.hybrid and plan.capacity",
            "none",
        ),
        (
            [HYBRID, "plan.capacity=128", "plan.offload_capacity=1026"],
            "plan.offload_capacity",
            "an even number of tokens above the 128 of other slots and at most 256, where all 4 blocks are offloaded",
            None,
        ),
        (
            [HYBRID, "plan.capacity=128", "plan.offload_capacity=256", "plan.offload=both"],
            "plan.offload",
            "none or optimizer, as slots with offload have activations of long samples only in host memory",
            "none",
        ),
        (
            [HYBRID, "plan.capacity=100", "plan.offload_capacity=200"],
            "plan.capacity",
            "at least the longest sample, train.seq_len = 1024 ÷ 4 hybrid ranks",
            "256",
        ),
        ([HYBRID, "plan.reshard=true"], "plan.reshard", f"false, {DIFFERENT}", "false"),
        ([HYBRID, "plan.gradients=shard"], "plan.gradients", f"whole, {DIFFERENT}", "whole"),
        ([HYBRID, "plan.schedule=gpipe"], "plan.schedule", "1f1b or breadth_first, as plan.hybrid is 4", "1f1b"),
        (
            [HYBRID, "plan.layers=[{range: all, gradients: whole}]"],
            "plan.layers.0.reshard",
            f"false, {DIFFERENT}",
            "false",
        ),
        (
            [HYBRID, "model.sliding_window=64"],
            "plan.hybrid",
            "model.sliding_window = none in all layers beside it: a divided sample attends to all its tokens",
            None,
        ),
        (
            [
                HYBRID,
                "model.sliding_window=64",
                "model.blocks={local: {sliding_window: none}, global: {sliding_window: 0}}",
                "model.pattern=[local, global]",
            ],
            "plan.hybrid",
            "model.sliding_window = none in all layers beside it: a divided sample attends to all its tokens",
            None,
        ),
        (
            [HYBRID, "model.blocks={local: {sliding_window: 64}, global: {}}", "model.pattern=[local, global]"],
            "plan.hybrid",
            "model.sliding_window = none in all layers beside it: a divided sample attends to all its tokens",
            None,
        ),
    ],
)
def test_a_broken_rule(tmp_path: Path, overrides: list[str], key: str, expected: str, nearest: str | None) -> None:
    assert [(m.key, m.expected, m.nearest) for m in mistakes(tmp_path, *overrides, text=RUN)] == [
        (key, expected, nearest)
    ]


@pytest.mark.parametrize("axis", ["shard", "replicate", "context_ring", "context_ulysses"])
def test_an_axis_that_hybrid_ranks_replace_is_one_clear_mistake(tmp_path: Path, axis: str) -> None:
    (mistake,) = mistakes(tmp_path, "plan.hybrid=2", f"plan.{axis}=2", text=RUN)
    expected = f"no {axis} ranks beside it: hybrid ranks take the place of shard and context ranks"
    assert (mistake.key, mistake.expected) == ("plan.hybrid", expected)


def test_windows_are_refused(tmp_path: Path) -> None:
    windows = RUN.replace("packing: none", "packing: stream").replace("_tokens: 4096", ": 4")
    assert [m.key for m in mistakes(tmp_path, HYBRID, text=windows)] == ["plan.hybrid"]


@pytest.mark.parametrize(
    "overrides",
    [
        [HYBRID],
        ["plan.hybrid=2", "plan.tensor=2", "plan.capacity=512"],
        [HYBRID, "plan.capacity=128", "plan.offload_capacity=256"],
        [*PIPELINES, "plan.schedule=zb_h1"],
        [HYBRID, *EXPERTS, "plan.expert=2"],
        [HYBRID, "plan.hybrid_attention=ulysses"],
        [HYBRID, "plan.schedule=breadth_first", "plan.reshard=true", "plan.gradients=shard"],
        [HYBRID, "plan.layers=[{range: all, reshard: false, gradients: whole, recompute: full}]"],
    ],
)
def test_valid_pins_pass(tmp_path: Path, overrides: list[str]) -> None:
    assert not mistakes(tmp_path, *overrides, text=RUN)


PLAN = Plan(
    mesh=(MeshAxis(axis="hybrid", size=4),),
    batch=BatchPlan(global_batch=4, micro_batch=1, accumulate=1),
    samples=SamplePlan(capacity=512, alpha=1e-9, beta=1e-6),
    layers=(LayerStrategy(reshard=False, gradients="whole"),),
)


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("capacity: 512", "capacity: 128", "capacity"),
        ("reshard: false", "reshard: true", "reshard"),
        ("schedule: 1f1b", "schedule: gpipe", "schedule"),
        ("\nhybrid: 4", "\nhybrid: 2", "hybrid"),
    ],
)
def test_a_plan_file_obeys_the_same_rules(tmp_path: Path, old: str, new: str, key: str) -> None:
    text = plan_yaml(PLAN)
    file, run = tmp_path / "plan.yaml", tmp_path / "run.yaml"
    run.write_text(RUN)
    file.write_text(text)
    assert load_plan(file).mesh == PLAN.mesh and load_run(run, [f"plan={file}"])
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(BadConfig) as raised:
        load_run(run, [f"plan={file}"])
    assert [mistake.key for mistake in raised.value.mistakes] == [key]
