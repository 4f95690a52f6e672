"""Keys of adapters: targets become our names, and what does not go beside adapters is refused with its position."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.config.load import load_resolved, load_run, plan_yaml, resolved_yaml
from meshwright.spec.errors import BadConfig
from meshwright.spec.plan import BatchPlan, LayerStrategy, MeshAxis, Plan, Precision

RUN = """\
model: {{preset: {preset}, adapter: {{rank: 4, {adapter}}}}}
train: {{steps: 3, global_batch: 8, seq_len: 64}}
cluster: {{gpu: cpu, gpus_per_node: 4}}
plan: {plan}
"""


def written(folder: Path, *, preset: str = "llama-nano", adapter: str = "kind: lora", plan: str = "auto") -> Path:
    file = folder / "run.yaml"
    file.write_text(RUN.format(preset=preset, adapter=adapter, plan=plan), encoding="utf-8")
    return file


def test_targets_are_resolved_and_the_resolved_run_reads_back(tmp_path: Path) -> None:
    run = load_run(written(tmp_path, adapter="targets: [v_proj, mlp.down_proj]"))
    assert run.model.adapter is not None and run.model.adapter.targets == ("attention.qkv.v", "mlp.down")
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(resolved_yaml(run), encoding="utf-8")
    assert load_resolved(resolved) == run == load_run(resolved)
    everything = load_run(written(tmp_path)).model.adapter
    assert everything is not None and len(everything.targets) == 7


def test_adapters_beside_the_dimensions_of_weights(tmp_path: Path) -> None:
    """A folder's model has no adapters, and a run with adapters is one whose weights are merged: neither excludes the section."""
    values = {"family": "llama", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn_hidden": 96}
    values |= {"vocab_size": 131, "max_seq_len": 64}
    file = tmp_path / "tuned.yaml"
    text = "model: {init: 'hf:base', adapter: {rank: 8, targets: [q_proj]}}\ntrain: {steps: 3, global_batch: 8, seq_len: 64}\n"
    file.write_text(text, encoding="utf-8")
    run = load_run(file, model_reader=lambda folder: values)
    assert run.model.adapter is not None and run.model.init.startswith("hf:/")
    (tmp_path / "config.yaml").write_text(resolved_yaml(run), encoding="utf-8")
    again = load_run(file, [f"model.init=checkpoint:{tmp_path}", "model.adapter.rank=2"])
    assert again.model.adapter is not None and again.model.adapter.rank == 2 and again.model.hidden == 64
    plain = load_run(file, [f"model.init=checkpoint:{tmp_path}", "model.adapter=none"])
    assert plain.model.adapter is None


@pytest.mark.parametrize(
    ("adapter", "plan", "line", "message"),
    [
        ("targets: [q_proj, vproj]", "auto", 1, "vproj matches no linear layer.*nearest: v_proj"),
        ("targets: []", "auto", 1, "no targets"),
        ("rank: 0", "auto", 1, "rank"),
        ("kind: dora", "{tensor: 2}", 4, "plan.tensor: expected 1, as the row lengths of model.adapter.kind = dora"),
        ("kind: dora", "{linear: fp8_rowwise}", 4, "plan.linear: expected compute, as the row lengths"),
        ("alpha: 8", "{mlp_tile: 32}", 4, "plan.mlp_tile: expected 0, as tiles do not compute the adapters"),
    ],
)
def test_refusals(tmp_path: Path, adapter: str, plan: str, line: int, message: str) -> None:
    with pytest.raises(BadConfig, match=message) as refused:
        load_run(written(tmp_path, adapter=adapter, plan=plan))
    assert refused.value.mistakes[0].line == line


def test_keys_of_a_plan_file(tmp_path: Path) -> None:
    axes = (MeshAxis(axis="shard", size=2), MeshAxis(axis="tensor", size=2))
    plan = Plan(
        mesh=axes,
        batch=BatchPlan(global_batch=8, micro_batch=1, accumulate=4),
        layers=(LayerStrategy(recompute="full"),),
        precision=Precision(compute="fp32"),
    )
    for adapter, changed, message in (
        ("kind: dora", plan, "tensor: expected 1, as the row lengths"),
        ("kind: lora", replace(plan, mlp_tile=32), "mlp_tile: expected 0, as tiles"),
    ):
        file = tmp_path / "plan.yaml"
        file.write_text(plan_yaml(changed), encoding="utf-8")
        with pytest.raises(BadConfig, match=message):
            load_run(written(tmp_path, adapter=adapter, plan=str(file)))


def test_experts_are_neither_copied_nor_moved(tmp_path: Path) -> None:
    pins = ("{expert: 4, expert_policy: hecate, expert_slots: 1}", "{expert: 4, expert_placement: balanced}")
    for plan in pins:
        with pytest.raises(BadConfig, match=r"plan.expert_(policy|placement): expected (none|even), as"):
            load_run(written(tmp_path, preset="mixtral-8x7b", plan=plan))


def test_another_model_on_the_command_line_keeps_the_adapters(tmp_path: Path) -> None:
    file = written(tmp_path, adapter="targets: [v_proj]")
    replaced = load_run(file, ["model=llama3-1b"]).model
    assert replaced.preset == "llama3-1b" and replaced.adapter == load_run(file).model.adapter
    before = ["model.adapter.rank=4", "model=llama3-1b", "train.global_batch=8", "cluster.gpu=cpu"]
    adapter = load_run(None, before).model.adapter
    assert adapter is not None and adapter.rank == 4
