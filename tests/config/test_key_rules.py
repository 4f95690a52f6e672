"""Rules between keys: each broken one is reported at the key that breaks it, together with everything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.config.load import load_run, read_run
from meshwright.spec.errors import BadConfig, Mistake

BASE = "model: {preset: llama-nano}\ntrain: {steps: 10, global_batch: 8}\ncluster: {gpus_per_node: 4}\n"
MOE = ["model.experts=8", "model.experts_per_token=2", "model.expert_hidden=64"]


def mistakes(tmp_path: Path, *overrides: str, text: str = BASE) -> list[Mistake]:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    try:
        load_run(file, overrides)
    except BadConfig as error:
        return list(error.mistakes)
    return []


ON_DEVICE = "none or activations, as train.optimizer is {}: only the state of adamw is updated in host memory"


def test_a_chip_may_be_written_in_any_letters() -> None:
    overrides = ["cluster={gpu: h200, nodes: 2, groups: [{nodes: 1, gpu: mi300x}]}", "model=llama-nano"]
    cluster = load_run(None, overrides).cluster
    assert (cluster.gpu, cluster.groups[0].gpu) == ("H200", "MI300X")
    assert load_run(None, ["cluster.gpu=CPU"]).cluster.is_cpu


KINDS = ["model.blocks={local: {sliding_window: 64}, global: {sliding_window: 0}}", "model.pattern=[local, global]"]
"""A model of two kinds of blocks."""


@pytest.mark.parametrize(
    ("overrides", "key", "expected", "nearest"),
    [
        (["model.kv_heads=3"], "model.kv_heads", "a divisor of model.heads = 4", "2"),
        (["model.head_dim=33"], "model.head_dim", "an even number", "34"),
        (
            ["train.deterministic=true", "supervision.wait_seconds=60"],
            "supervision.wait_seconds",
            "none, as train.deterministic needs one layout",
            "none",
        ),
        (
            ["supervision.report_label=gpu-health"],
            "supervision.report_label",
            "KEY=VALUE of a label of Kubernetes",
            None,
        ),
        (
            ["train.batch_ramp=[{until: 3, batch: 4}, {until: 3, batch: 8}]"],
            "train.batch_ramp.1.until",
            "a step after 3, where the stage before ends",
            "4",
        ),
        (
            ["train.batch_ramp=[{until: 3, batch: 12}]"],
            "train.batch_ramp.0.batch",
            "at most train.global_batch = 8, which the plan is made for",
            "8",
        ),
        (["train.seq_len=2000"], "train.seq_len", "at most model.max_seq_len = 1024, which can be raised", "1024"),
        (["train.seq_len=2000", "model.positions=learned"], "train.seq_len", "learned positions", "1024"),
        (["train.optimizer.name=muon", "plan.offload=both"], "plan.offload", ON_DEVICE.format("muon"), "none"),
        (
            ["train.optimizer.name=lamb", "plan.layers=[{offload: optimizer}]"],
            "plan.layers.0.offload",
            ON_DEVICE.format("lamb"),
            "none",
        ),
        (
            ["train.decay_groups=[{names: embed.*, decay: 0}, {names: haed.*, decay: 0}]"],
            "train.decay_groups.1.names",
            "a pattern that matches",
            None,
        ),
        (
            [*MOE, "model.family=mixtral", "plan.expert_exchange=peer"],
            "plan.expert_exchange",
            "all_to_all, unless plan.expert",
            "all_to_all",
        ),
        (
            [*MOE, "model.family=mixtral", "plan.expert=2", "plan.expert_exchange=peer_fp8", "cluster.gpu=cpu"],
            "plan.expert_exchange",
            "all_to_all, as the kernels run on GPUs",
            "all_to_all",
        ),
        (
            [*MOE, "model.family=mixtral", "plan.expert=2", "plan.expert_receive_bound=1.5"],
            "plan.expert_receive_bound",
            "no key without plan.expert_exchange: peer",
            None,
        ),
        (
            [*MOE, "model.family=mixtral", "plan.expert_placement=balanced"],
            "plan.expert_placement",
            "even, as every rank has all experts",
            "even",
        ),
        (
            [
                *MOE,
                "model.family=mixtral",
                "plan.expert=2",
                "plan.expert_placement=balanced",
                "plan.expert_policy=fixed",
            ],
            "plan.expert_placement",
            "even, as policy fixed does not depend on loads",
            "even",
        ),
        (
            [*MOE, "model.family=mixtral", "plan.expert=2", "plan.expert_placement_every=10"],
            "plan.expert_placement_every",
            "no key without plan.expert_placement: balanced",
            None,
        ),
        (["train.ema_decay=0.9", "plan.offload=both"], "plan.offload", "train.ema_decay averages weights", "none"),
        (["train.warmup_steps=10"], "train.warmup_steps", "fewer than train.steps = 10", "1"),
        (["train.steps=2", "train.warmup_steps=5"], "train.warmup_steps", "fewer than train.steps = 2", "1"),
        (["checkpoint.partner=host", "checkpoint.mode=sync"], "checkpoint.mode", "auto or async", "async"),
        (["train.global_batch=9", "plan.shard=4"], "train.global_batch", "a multiple of 4 (plan.shard 4)", "12"),
        (
            ["plan={shard: 4, micro_batch: 4}"],
            "train.global_batch",
            "a multiple of 16 (plan.shard 4 × plan.micro_batch 4)",
            "16",
        ),
        (["plan.shard=3"], "plan.shard", "a divisor of the cluster's 4 ranks", "2"),
        (["plan.replicate=8"], "plan.replicate", "a divisor of the cluster's 4 ranks", "4"),
        (["plan={replicate: 2, shard: 4}"], "plan.shard", "plan.shard a divisor of the cluster's 4 ranks", "2"),
        (
            ["plan={replicate: 1, shard: 2, pipeline: 1, tensor: 1, context_ring: 1, context_ulysses: 1}"],
            "plan.shard",
            "plan.replicate × plan.shard = the cluster's 4 ranks",
            "4",
        ),
        (["cluster.gpu=h20x"], "cluster.gpu", "H20", "H20"),
        (["cluster.gpu=NVIDIA A100-SXM4-80GB"], "cluster.gpu", "memory_gib", "A100"),
        (["cluster.gpu=CPUs"], "cluster.gpu", "cpu", "cpu"),
        (["cluster.gpu=H100", "plan.compute=fp64"], "plan.compute", "fp64 runs on cpu only", "fp32"),
        (["cluster.gpu=T4", "plan.compute=bf16"], "plan.compute", "fp16 or fp32 on T4", "fp32"),
        (["cluster.gpu=A100", "plan.compute=fp16"], "plan.compute", "bf16 or fp32 on A100", "fp32"),
        (["plan.compute=fp16"], "plan.compute", "on cpu", "fp32"),
        (["cluster.gpu=Ascend910", "plan.compute=fp32"], "plan.compute", "bf16 or fp16 on Ascend910", "bf16"),
        (
            ["cluster.gpu=Ascend910", "plan.compute=fp64"],
            "plan.compute",
            "bf16 or fp16 on Ascend910; fp64 runs on cpu only",
            "bf16",
        ),
        (["cluster.gpu=T4", "plan.compute=fp64"], "plan.compute", "fp16 or fp32 on T4", "fp32"),
        (["cluster.gpu=A100", "plan.linear=fp8_rowwise"], "plan.linear", "A100 has no fp8 matmuls", "compute"),
        (
            ["plan={linear: fp8_rowwise, gather: fp8}"],
            "plan.gather",
            "no layer's `linear` is fp8_tensorwise",
            "compute",
        ),
        (["plan.gather=fp8"], "plan.gather", "no layer's `linear` is fp8_tensorwise", "compute"),
        (["plan={linear: fp8_rowwise, compute: fp64}"], "plan.linear", "fp8 goes with bf16 or fp32", "compute"),
        (
            ["plan.linear=fp8_rowwise", "train.seq_len=1000"],
            "plan.linear",
            "train.seq_len = 1000 is no multiple",
            "compute",
        ),
        (
            ["plan={linear: fp8_rowwise, context_ring: 4}", "train.seq_len=1000"],
            "plan.linear",
            "train.seq_len ÷ 4 context ranks = 250 is no multiple",
            "compute",
        ),
        (["plan.context_ring=4", "train.seq_len=1020"], "plan.context_ring", "must be a multiple of 8", "2"),
        (
            ["plan={context_ulysses: 4, shard: 1}", "model.heads=6", "model.kv_heads=3"],
            "plan.context_ulysses",
            "model.heads = 6",
            "1",
        ),
        (["plan.linear=fp8_rowwise", "model.ffn_hidden=1000"], "plan.linear", "ffn_hidden = 1000 is no", "compute"),
        (["plan={layers: [{range: all, linear: fp8_rowwise}], gather: fp8}"], "plan.gather", "tensorwise", "compute"),
        (["plan={reshard: true, layers: [{range: all}]}"], "plan.reshard", "inside plan.layers only", None),
        (["plan={recompute: none, layers: [{range: all}]}"], "plan.recompute", "inside plan.layers only", None),
        (["plan={layers: [{range: 0-1}]}"], "plan.layers", "ranges that cover layers 0-3", None),
        (["plan={layers: []}"], "plan.layers", "ranges that cover layers 0-3", None),
        (["plan={layers: [{range: 0-2}, {range: 2-3}]}"], "plan.layers.1.range", "no earlier range covers", None),
        (["plan={layers: [{range: 0-7}]}"], "plan.layers.0.range", "inside layers 0-3", None),
        (["plan={layers: [{range: first}]}"], "plan.layers.0.range", "all, N or FIRST-LAST", None),
        (["plan={offload: both, layers: [{range: all}]}"], "plan.offload", "inside plan.layers only", None),
        (["plan.expert=2"], "plan.expert", "no key, as the model is dense", None),
        (["model.expert_hidden=64"], "model.expert_hidden", "0, as model.experts is 0", "0"),
        ([*MOE, "model.experts_per_token=9"], "model.experts_per_token", "1 to model.experts = 8", "8"),
        # Rules of blocks, which run files had no check for.
        (["model.rope_width=7"], "model.rope_width", "an even number", "8"),
        (["model.query_growth=0.5"], "model.query_growth", "0 without yarn", "0"),
        (
            ["model.rope_scaling={high_freq_factor: 0.5}"],
            "model.rope_scaling.high_freq_factor",
            "more than rope_scaling.low_freq",
            None,
        ),
        (
            ["model.rope_scaling={kind: linear, factor: 2, low_freq_factor: 2}"],
            "model.rope_scaling",
            "none of them",
            None,
        ),
        (
            [f"model.longrope={{short_factor: [1], long_factor: {[1] * 32}}}"],
            "model.longrope.short_factor",
            "positive numbers",
            None,
        ),
        ([*MOE, "model.expert_hidden=0"], "model.expert_hidden", "the width inside one expert", "640"),
        ([*MOE, "model.first_dense_layers=4"], "model.first_dense_layers", "fewer than model.layers = 4", "3"),
        ([*MOE, "plan.expert=3"], "plan.expert", "a divisor of model.experts = 8", "2"),
        ([*MOE, "plan={expert: 4, shard: 2}"], "plan.expert", "a divisor of plan.shard × context ranks = 2", "2"),
        (["model.experts=8", "model.expert_hidden=64"], "model.experts_per_token", "1 to model.experts = 8", "1"),
        (
            [*KINDS, "model.pattern=[3*locl, global, local]"],
            "model.pattern",
            "kinds of model.blocks (local, global)",
            "local",
        ),
        ([*KINDS, "model.first=[5*local, global]"], "model.first", "at most model.layers = 4", None),
        ([*KINDS, "model.pattern=[local]"], "model.blocks.global", "its name in model.pattern", None),
        ([*KINDS, "model.blocks.local.routed=true"], "model.blocks.local.routed", "as model.experts is 0", None),
        (
            ["model.norm_plus_one=true", "model.norm=layernorm"],
            "model.norm_plus_one",
            "false with norm: layernorm",
            None,
        ),
        (
            ["model.output_norms=true", "model.parallel_block=true"],
            "model.output_norms",
            "false with parallel_block",
            None,
        ),
        (["data.mix={}"], "data.mix", "at least one", "stdlib"),
        (["name=a/b"], "name", "a folder name", "a-b"),
        (["name='...'"], "name", "a folder name", None),
        (["model.init=hg:dir"], "model.init", "hf:DIR", None),
        (
            ["model={family: llama, layers: 1, hidden: 30, heads: 4, ffn_hidden: 8}"],
            "model.hidden",
            "a multiple of model.heads = 4",
            "32",
        ),
    ],
)
def test_a_broken_rule(tmp_path: Path, overrides: list[str], key: str, expected: str, nearest: str | None) -> None:
    text = BASE.replace("preset: llama-nano", "") if "model={" in overrides[0] else BASE
    (mistake,) = mistakes(tmp_path, *overrides, text=text)
    assert (mistake.key, mistake.nearest) == (key, nearest)
    assert expected in mistake.expected


@pytest.mark.parametrize(
    "overrides",
    [
        ["plan={replicate: 2, shard: 2, micro_batch: 2}"],
        ["plan.shard=2"],
        ["plan={layers: [{range: 0-1, recompute: full}, {range: '2'}, {range: 3-3}], reshard: none}"],
        ["cluster.gpu=TPUv9", "cluster.memory_gib=64"],
        ["plan.compute=fp64", "plan.reduce=fp64"],
        ["train.seq_len=2048", "model.max_seq_len=2048"],
        ["model.head_dim=33", "model.positions=learned"],
        ["train.warmup_steps=9"],
        ["model.init=hf:some/where"],
        ["name=A-1_b.c"],
    ],
)
def test_valid_key_combinations_pass(tmp_path: Path, overrides: list[str]) -> None:
    assert mistakes(tmp_path, *overrides) == []


LOOPS, VEE = "[['0', '2'], ['1', '3']]", "[['0', '3'], ['1', '2']]"


@pytest.mark.parametrize(
    "pins",
    [
        "stages: [[0-1], [2-3]]",
        "stages: [[0-1], [2-3]], replicate: 1, shard: 2",
        "stages: [['0'], ['1'], ['2'], ['3']]",
        f"stages: {VEE}",
        f"stages: {LOOPS}",
        f"stages: {VEE}, pipeline: 2",
        f"stages: {VEE}, schedule: zbv",
    ],
)
def test_stages_in_any_schedule_s_order_may_be_pinned_without_it(tmp_path: Path, pins: str) -> None:
    assert mistakes(tmp_path, f"plan={{{pins}}}") == []


@pytest.mark.parametrize(
    ("pins", "expected", "got"),
    [
        (
            "stages: [[0-1], ['3']]",
            "layers 0-3 in some schedule's order",
            "begins with layer 3 where layer 2 is expected",
        ),
        (
            "stages: [['0', '3'], ['2', '1']]",
            "in some schedule's order",
            "stage 1 (rank 1) begins with layer 2 where layer 1 is expected",
        ),
        (
            "stages: [['0', '2'], ['1', '2']]",
            "in some schedule's order",
            "stage 3 (rank 1) begins with layer 2 where layer 3 is expected and, in a V, stage 3 (rank 0)",
        ),
        (f"stages: {VEE}, schedule: interleaved", "in interleaved's order", "where layer 2 is expected"),
        (f"stages: {LOOPS}, schedule: zbv", "in zbv's order", "begins with layer 3 where layer 2 is expected"),
        ("stages: [[0-1], [2-3]], pipeline: 4", "in some schedule's order", "2 rows of stages for 4 pipeline ranks"),
        ("stages: [['0'], ['1'], [2-3]]", "axes whose product divides the cluster's 4 ranks", "3"),
        ("stages: []", "a row of layer ranges for each pipeline rank", "an empty list"),
    ],
)
def test_stages_in_no_schedule_s_order(tmp_path: Path, pins: str, expected: str, got: str) -> None:
    (mistake,) = mistakes(tmp_path, f"plan={{{pins}}}")
    assert mistake.key == "plan.stages"
    assert expected in mistake.expected and got in mistake.got


def test_pinned_stages_say_how_deep_the_pipeline_is(tmp_path: Path) -> None:
    (mistake,) = mistakes(tmp_path, "plan={stages: [[0-1], [2-3]], replicate: 2, shard: 2}")
    assert (mistake.key, mistake.nearest) == ("plan.shard", "1")
    assert "the cluster's 4 ranks ÷ plan.stages 2 rows" in mistake.expected


def test_the_position_is_that_of_the_offending_token(tmp_path: Path) -> None:
    text = (
        "model: llama-nano\ntrain:\n  steps: 10\n  warmup_steps: 20\n  global_batch: 3\ncluster: {gpus_per_node: 4}\n"
        "plan: {shard: 4}\n"
    )
    reported = mistakes(tmp_path, text=text)
    assert [(m.key, m.line, m.column) for m in reported] == [
        ("train.warmup_steps", 4, 17),
        ("train.global_batch", 5, 17),
    ]


def test_a_length_that_comes_from_a_preset_is_placed_where_the_preset_is_named(tmp_path: Path) -> None:
    text = "extends: llama3-8b\nmodel: {max_seq_len: 4096}\ntrain: {steps: 1, global_batch: 1}\n"
    (mistake,) = mistakes(tmp_path, text=text)
    assert (mistake.key, mistake.line, mistake.column) == ("train.seq_len", 1, 10)


def test_rules_are_checked_beside_unknown_keys_and_not_on_unusable_values(tmp_path: Path) -> None:
    train = "train: {steps: ten, warmup_steps: 20, global_batch: 3, lr: 1}"
    text = f"model: llama-nano\n{train}\ncluster: {{gpus_per_node: 4}}\nplan: {{shard: 4}}\n"
    assert [m.key for m in mistakes(tmp_path, text=text)] == ["train.steps", "train.global_batch", "train.lr"]
    text = text.replace("cluster: {gpus_per_node: 4}", "cluster: {gpus_per_node: many}")
    assert [m.key for m in mistakes(tmp_path, text=text)] == ["train.steps", "train.lr", "cluster.gpus_per_node"]


def test_a_moe_and_its_fold_pass(tmp_path: Path) -> None:
    assert mistakes(tmp_path, *MOE, "plan={expert: 4, shard: 4}") == []
    assert mistakes(tmp_path, *MOE, "plan.offload=optimizer") == []


@pytest.mark.parametrize(
    ("changes", "axis", "pin", "expected", "nearest"),
    [
        (["model.heads=6", "model.kv_heads=6"], "tensor", 4, "a divisor of model.heads = 6", "2"),
        (["model.blocks.local.ffn_hidden=342"], "tensor", 4, "a divisor of model.blocks.local.ffn_hidden = 342", "2"),
        (["model.layers=3"], "pipeline", 4, "at most model.layers = 3 stages", "2"),
    ],
)
def test_pins_and_plan_files_that_cannot_divide_layers_are_refused_alike(
    tmp_path: Path, changes: list[str], axis: str, pin: int, expected: str, nearest: str
) -> None:
    """With the key and the nearest valid number; kinds may differ in the width of the feed-forward network, not in heads."""
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"{axis}: {pin}\nglobal_batch: 8\nmicro_batch: 2\n")
    for key, override in ((f"plan.{axis}", f"plan.{axis}={pin}"), (axis, f"plan={plan}")):
        (mistake,) = mistakes(tmp_path, *KINDS, *changes, override)
        assert (mistake.key, mistake.got, mistake.nearest) == (key, str(pin), nearest)
        assert mistake.expected.startswith(expected)


def test_a_pipeline_plan_of_unlike_layers_lists_its_stages(tmp_path: Path) -> None:
    """A pinned pipeline needs no list: the search balances its stages."""
    plan = tmp_path / "plan.yaml"
    text = "pipeline: 4\nglobal_batch: 8\nmicro_batch: 2\n"
    plan.write_text(text)
    (mistake,) = mistakes(tmp_path, *KINDS, "model.layers=5", f"plan={plan}")
    assert (mistake.key, Path(mistake.file).name) == ("stages", "plan.yaml")
    assert mistake.nearest == "[[0-1], [2-2], [3-3], [4-4]]"
    plan.write_text(f"{text}stages: {mistake.nearest}\n")
    assert mistakes(tmp_path, *KINDS, "model.layers=5", f"plan={plan}") == []
    assert mistakes(tmp_path, *KINDS, "model.layers=5", "plan.pipeline=4") == []
    plan.write_text(text)
    assert mistakes(tmp_path, "model.layers=5", f"plan={plan}") == []


@pytest.mark.parametrize("text", ["pipeline: 9\nglobal_batch: 8\nmicro_batch: 8\n", "mesh: []\nbatch: {}\n"])
def test_a_run_whose_plan_file_has_mistakes_has_no_plan(tmp_path: Path, text: str) -> None:
    """So checks after the keys, which would time its schedule, leave it out."""
    (tmp_path / "plan.yaml").write_text(text)
    reading = read_run(None, [f"plan={tmp_path / 'plan.yaml'}", "model=llama-nano"])
    assert reading.mistakes and not reading.is_sound("plan") and reading.is_sound("model")
