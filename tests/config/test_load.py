"""Layers merge in their order, shorthands mean what they say, and a resolved run loads to itself."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.slow import examples

from meshwright.config.load import (
    differences,
    load_cluster,
    load_plan,
    load_resolved,
    load_run,
    resolved_yaml,
)
from meshwright.config.presets import MODEL_PRESETS
from meshwright.config.value_sources import QUICKSTART
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadConfig, BadInput
from meshwright.spec.fields import from_plain, to_plain
from meshwright.spec.model import RopeScaling
from meshwright.spec.optimizers import AdamWSpec
from meshwright.spec.plan import LayerStrategy, Recompute
from meshwright.spec.plan_keys import PlanKeys, keys_of, plan_of
from meshwright.spec.run import RunSpec

SMALL = {"family": "llama", "layers": 2, "hidden": 32, "heads": 4, "ffn_hidden": 64}
PLAN = """\
shard: 2
global_batch: 4
micro_batch: 1
compute: fp32
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, text: str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def run_of(text: str, *overrides: str, **options: Any) -> RunSpec:
    """The run of a file that gives what every run needs, and `text`."""
    return load_run(write("run.yaml", f"train: {{steps: 10, global_batch: 8}}\n{text}\n"), overrides, **options)


def test_the_quick_start_names_all_of_its_run() -> None:
    run = load_run(QUICKSTART)
    assert (run.name, run.model.preset, run.data.mix) == ("quickstart", "llama-nano", {"stdlib": 1.0})
    assert (run.cluster.gpu, run.cluster.ranks, run.plan) == ("cpu", 2, "auto")
    assert (run.train.seq_len, run.train.learning_rate) == (256, 3e-3)


def test_the_quick_start_can_be_shortened_without_touching_its_warm_up() -> None:
    for path in (QUICKSTART, None):
        assert load_run(path, ["train.steps=20"]).train.warmup_steps == 2
        assert load_run(path, ["train.steps=1"]).train.warmup_steps == 0
        with pytest.raises(BadConfig, match=r"train\.warmup_steps"):
            load_run(path, ["train.steps=20", "train.warmup_steps=20"])
    assert load_run(QUICKSTART, ["model.layers=2"]).model.hidden == 256


def test_a_preset_and_a_chip_bring_their_own_to_a_question_without_a_file() -> None:
    run = load_run(None, ["model=llama3-8b", "cluster.gpu=GB200"])
    assert (run.train.seq_len, run.train.learning_rate, run.cluster.gpus_per_node) == (8192, 3e-4, 4)
    given = load_run(None, ["model=llama3-8b", "train.seq_len=512", "cluster={gpu: H100, gpus_per_node: 2}"])
    assert (given.train.seq_len, given.cluster.gpus_per_node) == (512, 2)
    assert load_run(QUICKSTART, ["model=llama3-8b"]).train.seq_len == 8192


def test_a_question_without_a_file_does_not_take_the_quick_start_s_name() -> None:
    assert load_run(None, ["model=llama3-8b", "train.optimizer.name=lamb"]).name == "llama3-8b"
    assert load_run(None, ["model={family: llama, layers: 2, hidden: 64, heads: 2, vocab_size: 512}"]).name == "unnamed"
    assert load_run(None, ["model=llama3-8b", "name=mine"]).name == "mine"
    assert load_run(QUICKSTART, ["model=llama3-8b"]).name == "quickstart"


def notes_of(path: Path | None, *overrides: str, **options: Any) -> tuple[RunSpec, list[str]]:
    """The run, and what was assumed for it."""
    notes: list[str] = []
    return load_run(path, overrides, note=notes.append, **options), notes


def test_without_a_file_all_that_is_assumed_is_said() -> None:
    run, notes = notes_of(None, "train.steps=20", detect=lambda: {"gpu": "H200", "nodes": 1, "gpus_per_node": 8})
    assert (run.model.preset, run.cluster.gpu, run.cluster.ranks) == ("llama-nano", "H200", 8)
    assert notes == [
        "no cluster.gpu: cluster=auto assumed, gpu=H200 nodes=1 gpus_per_node=8 on this machine",
        "no run file: name=llama-nano model.preset=llama-nano data.mix=stdlib data.validation_tokens=32768 train.global_batch=16 "
        "train.seq_len=256 train.learning_rate=0.003 train.warmup_steps=2 train.validate_every=50 assumed",
    ]
    (output,) = notes_of(None, "model=llama3-8b", "cluster.gpu=H100")[1]
    assert "model" not in output and "train.seq_len=8192" in output and "cluster.gpus_per_node=8" in output
    assert notes_of(QUICKSTART)[1] == []


@pytest.mark.usefixtures("here")
def test_a_cluster_that_names_no_devices_is_this_machine_s() -> None:
    def detect() -> dict[str, Any]:
        return {"gpu": "H200", "nodes": 1, "gpus_per_node": 8, "host_memory_gib": 900.0}

    assert run_of("model: llama3-8b", detect=detect).cluster.ranks == 8
    part = run_of("model: llama3-8b\ncluster: {gpus_per_node: 4, memory_gib: 90}", detect=detect).cluster
    assert (part.gpu, part.gpus_per_node, part.memory_gib, part.host_memory_gib) == ("H200", 4, 90, 900)
    assert run_of("model: llama3-8b", "cluster.gpu=cpu", detect=detect).cluster == ClusterSpec()
    assert load_cluster(Path("run.yaml"), detect=detect).gpu == "H200"
    write("base.yaml", "model: llama3-8b\ntrain: {steps: 5, global_batch: 8}\ncluster: {gpu: H100, gpus_per_node: 2}")
    assert load_run(write("run.yaml", "extends: base.yaml"), detect=detect).cluster.gpu == "H100"


def test_a_family_without_a_preset_has_its_own_dimensions_and_values() -> None:
    overrides = ["model.family=gpt2", "model.hidden=3072", "model.layers=20", "model.heads=24"]
    run, notes = notes_of(None, *overrides, "cluster.gpu=H100")
    model = run.model
    assert (model.preset, model.ffn_hidden, model.kv_heads, model.head_dim) == (None, 12288, 24, 128)
    assert (model.positions, model.norm, model.mlp, model.bias, model.tied) == (
        "learned",
        "layernorm",
        "gelu",
        True,
        True,
    )
    assert notes[0] == (
        "model: gpt2; positions learned, norm layernorm, mlp gelu, bias true, tied true as gpt2 has them; "
        "ffn_hidden 12288 = 4 × hidden, kv_heads 24 = heads, head_dim 128 = hidden / heads"
    )
    llama, notes = notes_of(
        None, *overrides, "model.family=llama", "model.hidden=4096", "model.heads=32", "model.kv_heads=8"
    )
    assert (llama.model.ffn_hidden, llama.model.mlp, llama.model.tied) == (11008, "swiglu", False)  # Llama 2 7B
    assert notes[-2].startswith("model: llama; ffn_hidden 11008 = 8/3 × hidden") and "kv_heads" not in notes[-2]
    assert load_run(None, [*overrides, "model.bias=false"]).model.bias is False
    assert load_run(None, ["model=llama-nano", "model.family=qwen3"]).model.qk_norm


@pytest.mark.usefixtures("here")
def test_a_small_file_takes_its_name_and_the_defaults() -> None:
    run = load_run(write("first.try.yaml", "model: llama3-8b\ntrain: {steps: 10_000, global_batch: 8}"))
    assert run.name == "first.try"
    assert (run.train.steps, run.train.clip_norm, run.checkpoint.keep) == (10_000, 1.0, 3)
    assert (run.model.layers, run.model.rope_scaling) == (32, RopeScaling(factor=8.0))
    assert run == load_run(
        write("first.try.yaml", "model: {preset: llama3-8b}\ntrain: {steps: 10000, global_batch: 8}")
    )


@pytest.mark.usefixtures("here")
def test_preset_dimensions_are_overlaid_key_by_key() -> None:
    run = run_of("model: {preset: llama3-8b, layers: 2, rope_scaling: {original_max_seq_len: 4096}}")
    assert (run.model.layers, run.model.hidden) == (2, 4096)
    assert run.model.rope_scaling == RopeScaling(factor=8.0, original_max_seq_len=4096)
    assert run_of("model: {preset: llama3-8b, rope_scaling: none}").model.rope_scaling is None


@pytest.mark.usefixtures("here")
def test_heads_and_lengths_follow_when_left_out() -> None:
    run = run_of(f"model: {json.dumps({**SMALL, 'max_seq_len': 512})}")
    assert (run.model.kv_heads, run.model.head_dim, run.train.seq_len) == (4, 8, 512)
    assert run_of(f"model: {json.dumps({**SMALL, 'max_seq_len': 4096})}").train.seq_len == 2048


@pytest.mark.usefixtures("here")
def test_number_notations() -> None:
    run = run_of("model: llama-nano", "train.learning_rate=3e-4", "train.optimizer.epsilon=1e-8", "train.clip_norm=2")
    assert run.train.optimizer == AdamWSpec(epsilon=1e-8)
    assert (run.train.learning_rate, run.train.clip_norm) == (3e-4, 2.0)
    assert isinstance(run.train.clip_norm, float)
    assert run_of("model: llama-nano", "train.clip_norm=none").train.clip_norm is None
    assert run_of("model: llama-nano", "train.clip_norm=").train.clip_norm is None
    assert run_of("model: llama-nano\nobserve:\ncheckpoint:").checkpoint.keep == 3


@pytest.mark.usefixtures("here")
def test_overrides_reach_everything_in_their_order() -> None:
    text = "model: llama-nano\nplan: {layers: [{range: 0-1}, {range: 2-3}]}\ncluster: {gpus_per_node: 2}"
    run = run_of(
        text,
        "train.steps=200",
        "--train.steps=300",
        "plan.layers.1.recompute=full",
        "data.mix=corpora/a",
        "cluster.gpu=H100",
        "data.mix.v1.2/b=0.5",
        "observe={tensorboard: true}",
        "name=other",
    )
    assert (run.train.steps, run.train.global_batch, run.name) == (300, 8, "other")
    assert isinstance(run.plan, PlanKeys)
    assert run.plan.layers == (LayerStrategy(range="0-1"), LayerStrategy(range="2-3", recompute="full"))
    assert run.data.mix == {"corpora/a": 1.0, "v1.2/b": 0.5}
    assert (run.cluster.gpu, run.cluster.gpus_per_node, run.observe.tensorboard) == ("H100", 2, True)


@pytest.mark.usefixtures("here")
def test_the_plan_switches_between_auto_file_and_pins() -> None:
    write("plans/two.yaml", PLAN)
    write(
        "plans/run.yaml",
        "model: llama-nano\ntrain: {steps: 10, global_batch: 4}\ncluster: {gpus_per_node: 2}\nplan: two.yaml",
    )
    run = load_run(Path("plans/run.yaml"))
    assert run.plan == os.path.abspath("plans/two.yaml")
    assert load_run(Path("plans/run.yaml"), ["plan=auto", "plan.shard=2"]).plan == PlanKeys(shard=2)
    assert run_of("model: llama-nano\nplan: auto", "plan.recompute=none").plan == PlanKeys(recompute="none")
    assert run_of("model: llama-nano\nplan: {recompute: null, shard: none}").plan == PlanKeys()


@pytest.mark.usefixtures("here")
def test_extends_follows_a_chain_to_a_preset() -> None:
    write(
        "base/all.yaml",
        "extends: llama3-8b\ntrain: {steps: 5, global_batch: 8}\nmodel: {layers: 4}\ndata: {mix: {a: 1, b: 2}}",
    )
    write("mid.yaml", "extends: base/all.yaml\ntrain: {learning_rate: 1e-3}\ndata: {mix: {c: 1}}")
    run = load_run(write("run.yaml", "extends: mid.yaml\ntrain: {steps: 7}"))
    assert (run.model.preset, run.model.layers, run.model.hidden) == ("llama3-8b", 4, 4096)
    assert (run.train.steps, run.train.global_batch, run.train.seq_len) == (7, 8, 8192)
    assert run.train.learning_rate == 1e-3
    assert run.data.mix == {"c": 1.0}


@pytest.mark.usefixtures("here")
def test_another_preset_starts_the_model_anew() -> None:
    write("base.yaml", "model: {preset: llama3-8b, layers: 4, init: 'hf:x'}\ntrain: {steps: 5, global_batch: 8}")
    for text in ("model: qwen3-0.6b", "model: {preset: qwen3-0.6b}"):
        run = load_run(write("run.yaml", f"extends: base.yaml\n{text}"))
        assert (run.model.family, run.model.layers, run.model.init) == ("qwen3", 28, "scratch")
    assert load_run(Path("base.yaml"), ["model=qwen3-0.6b"]).model.layers == 28
    assert load_run(Path("base.yaml"), ["model=llama3-8b"]).model.layers == 4


@pytest.mark.usefixtures("here")
def test_a_circle_of_extends_is_named_where_it_closes() -> None:
    write("b.yaml", "extends: a.yaml")
    with pytest.raises(BadConfig) as caught:
        load_run(write("a.yaml", "model: llama-nano\nextends: b.yaml"))
    (mistake,) = caught.value.mistakes
    assert (mistake.file, mistake.line, mistake.column) == ("b.yaml", 1, 10)
    assert mistake.got == "a cycle: a.yaml → b.yaml → a.yaml"


@pytest.mark.usefixtures("here")
def test_mistakes_of_every_file_of_a_chain_name_their_file() -> None:
    write("base.yaml", "seeed: 1\ntrain: {steps: 0, global_batch: 8}")
    with pytest.raises(BadConfig) as caught:
        load_run(write("run.yaml", "extends: base.yaml\nmodel: llama-nano\ntrain:\n  beta1: 2"), ["sed=4"])
    assert [(m.file, m.line, m.key) for m in caught.value.mistakes] == [
        ("run.yaml", 4, "train.beta1"),
        ("base.yaml", 1, "seeed"),
        ("base.yaml", 2, "train.steps"),
        ("command line", None, "sed"),
    ]


@pytest.mark.usefixtures("here")
def test_cluster_auto_file_and_section() -> None:
    detected = {"gpu": "H200", "nodes": 1, "gpus_per_node": 8}
    run = run_of("model: llama-nano\ncluster: auto", detect=lambda: detected)
    assert (run.cluster.gpu, run.cluster.ranks) == ("H200", 8)
    assert run_of("model: llama-nano\ncluster: auto").cluster.ranks == 1
    assert (
        run_of("model: llama-nano\ncluster: auto", "cluster.gpus_per_node=4", detect=lambda: detected).cluster.ranks
        == 4
    )
    write("sites/big.yaml", "gpu: H100\nnodes: 2\ngpus_per_node: 4")
    write("sites/run.yaml", "model: llama-nano\ntrain: {steps: 1, global_batch: 8}\ncluster: big.yaml")
    assert load_run(Path("sites/run.yaml")).cluster.ranks == 8
    write("sites/big.yaml", "gpu: H100\nnodez: 2")
    with pytest.raises(BadConfig, match=r"sites/big\.yaml:2:1: cluster\.nodez: .*nearest: nodes"):
        load_run(Path("sites/run.yaml"))


@pytest.mark.usefixtures("here")
def test_dimensions_come_from_the_weights_when_not_given() -> None:
    requested: list[Path] = []

    def reader(folder: Path) -> dict[str, Any]:
        requested.append(folder)
        return {**SMALL, "kv_heads": 2, "head_dim": 8, "rope_scaling": RopeScaling(factor=2.0)}

    run = run_of("model: {init: 'hf:weights/tiny'}", model_reader=reader)
    assert (run.model.hidden, run.model.kv_heads, run.model.rope_scaling) == (32, 2, RopeScaling(factor=2.0))
    assert requested == [Path("weights/tiny")]
    assert load_run(None, ["model.init=hf:weights/tiny"], model_reader=reader).model.hidden == 32

    def refusing(folder: Path) -> dict[str, Any]:
        raise BadInput(f"{folder}/config.json: no such file")

    with pytest.raises(BadConfig) as caught:
        run_of("model: {init: 'hf:weights/tiny'}", model_reader=refusing)
    (mistake,) = caught.value.mistakes
    assert (mistake.key, mistake.line, mistake.got) == ("model.init", 2, "weights/tiny/config.json: no such file")


STORED = {**SMALL, "kv_heads": 4, "head_dim": 8, "rope_theta": 50_000.0, "norm_eps": 1e-6, "max_seq_len": 64}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("given", "key", "words"),
    [
        ("rope_theta: 10000", "model.rope_theta", ["50000.0", "hf:w has", "got 10000"]),
        ("norm_eps: 0.00001", "model.norm_eps", ["1e-06", "got 1e-05"]),
        ("heads: 8", "model.heads", ["4, which hf:w has"]),
        ("family: qwen3", "model.family", ["llama, which hf:w has"]),
        ("sliding_window: 16", "model.sliding_window", ["none, which hf:w has"]),
        (
            "preset: llama-nano",
            "model.preset",
            ["no preset beside it", "llama-nano, with layers 4 where the weights have 2"],
        ),
    ],
)
def test_a_key_beside_initial_weights_must_be_theirs(given: str, key: str, words: list[str]) -> None:
    reader = lambda folder: STORED  # noqa: E731
    with pytest.raises(BadConfig) as caught:
        run_of(f"model: {{init: 'hf:w', {given}}}", model_reader=reader)
    (mistake,) = caught.value.mistakes
    assert (mistake.key, mistake.line) == (key, 2)
    for word in words:
        assert word in str(mistake)
    write("runs/old/config.yaml", resolved_yaml(run_of(f"model: {json.dumps(STORED)}")))
    with pytest.raises(BadConfig, match=re.escape(key)):
        run_of(f"model: {{init: 'checkpoint:runs/old', {given}}}")


@pytest.mark.usefixtures("here")
def test_equal_keys_and_a_longer_context_may_stand_beside_initial_weights() -> None:
    notes: list[str] = []
    text = (
        "model: {init: 'hf:w', family: llama, heads: 4, rope_theta: 5e4, max_seq_len: 128, rope_scaling: {factor: 2}}"
    )
    run = run_of(text, model_reader=lambda folder: STORED, note=notes.append)
    assert (run.model.rope_theta, run.model.norm_eps, run.model.max_seq_len) == (50_000, 1e-6, 128)
    assert "model: max_seq_len 128 where hf:w has 64; rope_scaling {'factor': 2} where hf:w has none" in notes
    small = {**MODEL_PRESETS["llama-nano"], "max_seq_len": 32}
    run = run_of("model: {init: 'hf:w', preset: llama-nano}", model_reader=lambda folder: small)
    assert (run.model.max_seq_len, run.model.hidden) == (32, 256)


@pytest.mark.usefixtures("here")
def test_dimensions_come_from_an_earlier_run() -> None:
    write("runs/old/config.yaml", resolved_yaml(run_of(f"model: {json.dumps(SMALL)}")))
    Path("runs/old/checkpoints/step-00000010").mkdir(parents=True)
    for where in ("old", "runs/old", "runs/old/checkpoints/step-00000010"):
        run = run_of(f"model: {{init: 'checkpoint:{where}'}}")
        assert (run.model.hidden, run.model.layers) == (32, 2)
        assert run.model.init == f"checkpoint:{'runs/old' if where == 'old' else where}"
    for folder in ("missing", "runs/old/traces", "runs/old/traces/day"):
        with pytest.raises(BadConfig, match=r"run\.yaml:2:15: model\.init"):
            run_of(f"model: {{init: 'checkpoint:{folder}'}}")


@pytest.mark.usefixtures("here")
def test_home_is_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    run = run_of("model: {preset: llama-nano, init: 'hf:~/w'}\ndata: {mix: {~/a: 2, b: 1}, validation: ~/v}")
    assert run.data.mix == {"/home/somebody/a": 2.0, "b": 1.0}
    assert (run.data.validation, run.model.init) == ("/home/somebody/v", "hf:/home/somebody/w")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("preset", MODEL_PRESETS)
def test_a_resolved_run_loads_to_itself(preset: str) -> None:
    run = load_run(write("run.yaml", f"extends: {preset}\ntrain: {{steps: 10, global_batch: 8}}"))
    text = resolved_yaml(run)
    again = load_run(write("elsewhere/config.yaml", text))
    assert again == run
    assert resolved_yaml(again) == text
    assert from_plain(RunSpec, json.loads(json.dumps(to_plain(run)))) == run


@pytest.mark.usefixtures("here")
def test_a_run_s_section_and_a_plan_file_have_the_same_keys() -> None:
    """A plan file pasted into the section `plan` pins what the file fixes."""
    text = PLAN.replace("global_batch: 4", "global_batch: 8") + "order: [shard]\nschedule: 1f1b\nwhy: [fast]\n"
    write("plan.yaml", text)
    section = "".join(f"  {line}\n" for line in text.splitlines())
    run = run_of(f"model: llama-nano\ncluster: {{gpus_per_node: 2}}\nplan:\n{section}")
    plan = load_plan(Path("plan.yaml"))
    assert plan_of(cast("PlanKeys", run.plan)) == plan
    assert plan_of(keys_of(plan)) == plan


@pytest.mark.usefixtures("here")
def test_a_resolved_run_is_readable_when_the_files_it_names_are_gone() -> None:
    plan = write(
        "plan.yaml",
        PLAN.replace("shard: 2", "shard: 1").replace(": 4", ": 8"),
    )
    run = run_of("model: {preset: llama-nano, init: 'hf:weights'}\nplan: plan.yaml")
    stored = write("elsewhere/config.yaml", resolved_yaml(run))
    assert load_run(stored) == load_resolved(stored) == run
    plan.unlink()
    assert load_resolved(stored) == run
    with pytest.raises(BadConfig, match="plan"):
        load_run(stored)
    stored.write_text(resolved_yaml(run).replace("steps: 10\n", "stepz: 10\n"))
    with pytest.raises(BadConfig, match=r"train\.stepz"):
        load_resolved(stored)
    with pytest.raises(BadConfig, match="^no file nowhere/config.yaml$"):
        load_resolved(Path("nowhere/config.yaml"))


TEXT = st.text("abcé日😀 019.:-#/[]{}'\"\\,&*!|>%@_~=?", min_size=1, max_size=9).filter(lambda text: text[0] != "~")
VALUES = {
    "train.steps": st.integers(60, 10**9),
    "train.learning_rate": st.floats(1e-12, 1e3),
    "data.validation": st.none() | TEXT,
    "train.clip_norm": st.none() | st.floats(1e-9, 1e9),
    "train.schedule": st.sampled_from(["cosine", "linear", "wsd"]),
    "plan.recompute": st.sampled_from([None, *get_args(Recompute)]),
    "plan.compile": st.booleans(),
    "model.sliding_window": st.none() | st.integers(1, 9),
    "seed": st.integers(0, 2**31),
    "observe.wandb": st.none() | TEXT,
    "data.mix": st.dictionaries(TEXT, st.floats(1e-6, 1e6), min_size=1, max_size=3),
    "name": st.sampled_from(["1e5", "010", "null", "no", "1_0", "true", "a.b"])
    | st.from_regex("[A-Za-z0-9_-]{1,8}", fullmatch=True),
}


@settings(max_examples=examples(20, 60), deadline=None)
@given(st.fixed_dictionaries({}, optional=VALUES))
def test_any_run_survives_resolving(tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]) -> None:
    run = load_run(QUICKSTART, [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in changes.items()])
    file = tmp_path_factory.mktemp("resolved") / "config.yaml"
    file.write_text(resolved_yaml(run), encoding="utf-8")
    assert load_run(file) == run
    assert run.name == changes.get("name", "quickstart")


@pytest.mark.usefixtures("here")
def test_differences_are_those_of_training_only() -> None:
    run = run_of("model: llama-nano\ndata: {mix: {a: 1, b: 2}}")
    watched = [
        "cluster.gpus_per_node=4",
        "plan.shard=1",
        "checkpoint.every=5",
        "observe.wandb=p",
        "train.timeout_seconds=9",
        "train.gc_every=0",
        "train.loss_chunk=64",
        "train.validate_every=3",
        "data.validation_tokens=128",
        "data.validation=v",
        "name=n",
    ]
    assert differences(run, run_of("model: llama-nano\ndata: {mix: {a: 1, b: 2}}", *watched)) == []
    other = run_of("model: llama-nano\ndata: {mix: {b: 2, a: 1}}", "seed=1", "train.steps=11", "model.layers=3")
    assert differences(run, other) == [
        ("seed", 0, 1),
        ("model.layers", 4, 3),
        ("data.mix", {"a": 1.0, "b": 2.0}, {"b": 2.0, "a": 1.0}),
        ("train.steps", 10, 11),
    ]


@pytest.mark.usefixtures("here")
def test_another_objective_is_another_run() -> None:
    """A run that goes on with another loss or other samples would train on two objectives."""
    text = "model: {preset: llama-nano, init: 'checkpoint:a'}\ndata: {mix: {a: 1}}"
    dpo, rl = f"{text}\npreference: {{loss: dpo}}", f"{text}\nrl: {{reward: {{file: here/judge.py}}, new_tokens: 8}}"
    assert differences(run_of(dpo), run_of(dpo, "preference.loss=ipo", "preference.beta=0.5")) == [
        ("preference.loss", "dpo", "ipo"),
        ("preference.beta", None, 0.5),
    ]
    assert differences(run_of(text), run_of(dpo)) == [("preference", None, "a section")]
    assert differences(run_of(rl), run_of(text)) == [("rl", "a section", None)]
    watched = [
        "rl.presumed_answer=4",
        "rl.cache_tokens=99",
        "rl.reward={file: there/judge.py, seconds: 3, processes: 1}",
    ]
    assert differences(run_of(rl), run_of(rl, *watched)) == []
    changed = ["rl.samples=4", "rl.kl.weight=0.1", "rl.reward.function=other"]
    assert [key for key, *_ in differences(run_of(rl), run_of(rl, *changed))] == [
        "rl.samples",
        "rl.reward.function",
        "rl.kl.weight",
    ]


@pytest.mark.usefixtures("here")
def test_a_plan_file_is_checked_as_strictly_as_a_run_file() -> None:
    plan = load_plan(write("plan.yaml", PLAN))
    assert (plan.ranks, plan.batch.accumulate, plan.precision.compute, plan.precision.reduce) == (2, 2, "fp32", "fp32")
    bad = "shard: 0\norder: [shard, experts]\nmicro_batch: 1\nmicrobatch: 2\nlayer: []"
    with pytest.raises(BadConfig) as caught:
        load_plan(write("plan.yaml", bad))
    assert [(m.line, m.key, m.nearest) for m in caught.value.mistakes] == [
        (1, "global_batch", None),
        (1, "shard", None),
        (2, "order.1", None),
        (4, "microbatch", "micro_batch"),
        (5, "layer", "layers"),
    ]
    for edit, expected in (
        (("global_batch: 4", "global_batch: 5"), "a multiple of 2 (plan.shard 2), got 5 (nearest: 6)"),
        (
            ("micro_batch: 1", "micro_batch: 3"),
            "a multiple of 6 (plan.shard 2 × plan.micro_batch 3), got 4 (nearest: 6)",
        ),
    ):
        with pytest.raises(BadConfig, match=re.escape(f"global_batch: expected {expected}")):
            load_plan(write("plan.yaml", PLAN.replace(*edit)))
    with pytest.raises(BadConfig, match=r"order\.1: expected each axis once, got shard again"):
        load_plan(write("plan.yaml", PLAN + "order: [shard, shard]\n"))
    with pytest.raises(BadConfig, match=r"order: expected every axis with more than one rank, got no shard 2"):
        load_plan(write("plan.yaml", PLAN + "order: [tensor]\n"))


@pytest.mark.usefixtures("here")
def test_a_plan_file_crosses_what_its_cluster_makes_it_cross() -> None:
    file = write("plan.yaml", PLAN)
    for emulated, crosses in ((1, "device"), (2, "node")):
        (axis,) = load_plan(file, ClusterSpec(gpus_per_node=2, emulate_nodes=emulated)).mesh
        assert axis.crosses == crosses


@pytest.mark.usefixtures("here")
def test_mistakes_of_the_plan_file_are_reported_with_those_of_the_run() -> None:
    write("plan.yaml", PLAN + "layers: [{range: 0-9}]\n")
    with pytest.raises(BadConfig) as caught:
        run_of("model: llama-nano\nplan: plan.yaml\ncluster: {gpus_per_node: 8}\nsede: 3")
    assert [(m.file, m.line, m.key) for m in caught.value.mistakes] == [
        ("run.yaml", 5, "sede"),
        ("plan.yaml", 1, "shard"),
        ("plan.yaml", 2, "global_batch"),
        ("plan.yaml", 5, "layers.0.range"),
    ]


def test_every_section_of_a_run_is_a_frozen_dataclass() -> None:
    run = load_run(None)
    for field in dataclasses.fields(run):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(run, field.name, None)


def test_loading_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None\n"
        "from meshwright.config.load import load_run, resolved_yaml\n"
        "from meshwright.config.schema import json_schema\n"
        "print(len(resolved_yaml(load_run(None))), len(json_schema()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert answer.returncode == 0, answer.stderr


STREAMED = """\
model: {{family: llama, layers: 2, hidden: 32, heads: 4}}
data:
  mix:
    web: {{files: "~/web/*.parquet", {text}: content, weight: 0.7}}
    code: {{files: code}}
    corpora/mail: 2
  validation: {{files: held-out/*.parquet, text: content}}
train: {{steps: 4, global_batch: 4, seq_len: 8}}
"""


def test_sections_in_the_mix_are_streams(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    run = load_run(write("run.yaml", STREAMED.format(text="text")))
    assert run.data.mix == {"web": 0.7, "code": 1.0, "corpora/mail": 2}
    assert {name: (each.files, each.text) for name, each in run.data.streamed.items()} == {
        "web": ("/home/someone/web/*.parquet", "content"),
        "code": ("code", "text"),
    }
    assert run.data.validation == "validation" and run.data.streams["validation"].files == "held-out/*.parquet"
    assert load_resolved(write("resolved.yaml", resolved_yaml(run))) == run
    assert differences(run, load_run(Path("run.yaml"), ["data.streams.web.files=elsewhere"])) == []
    replaced = load_run(Path("run.yaml"), ["data.mix=corpora/mail"])
    assert replaced.data.mix == {"corpora/mail": 1.0} and list(replaced.data.streams) == ["validation"]


def test_mistakes_in_streams_are_found_at_their_keys(here: Path) -> None:
    write("run.yaml", STREAMED.format(text="txt"))
    with pytest.raises(BadConfig, match=r"run.yaml:4:37: data.streams.web.txt: .*text"):
        load_run(Path("run.yaml"))
    write("run.yaml", STREAMED.format(text="text"))
    with pytest.raises(BadConfig, match=r"data.lanes: expected a multiple of train.global_batch = 4.*nearest: 12"):
        load_run(Path("run.yaml"), ["data.lanes=10"])
    with pytest.raises(
        BadConfig, match=r"data.streams.wet: expected a source that data.mix names.*wet \(nearest: web\)"
    ):
        load_run(Path("run.yaml"), ["data.streams.wet={files: other/*.parquet}"])
