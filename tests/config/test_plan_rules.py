"""Every rule of a plan, broken once by a run's section `plan` and once by a plan file: both give the same message, at their own line."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.config.test_key_rules import MOE, mistakes

from meshwright.config.load import load_plan, load_run
from meshwright.config.yaml_positions import dump_yaml
from meshwright.spec import plan_rules
from meshwright.spec.errors import Mistake
from meshwright.spec.plan_keys import AXES, PlanKeys, plan_of
from meshwright.spec.plan_rules import RULES, PlanRule, untrained

RUN = "model: {preset: llama-nano}\ntrain: {steps: 10, global_batch: 8}\n"
SAMPLES = RUN.replace("global_batch: 8", "global_batch_tokens: 4096, seq_len: 1024") + "data: {packing: none}\n"
TIMES = "alpha: 0.001, beta: 0.001"
H100, A100 = "cluster.gpu=H100", "cluster.gpu=A100"
LONGER = "hybrid: 4, capacity: 512, offload_capacity: 1024"
TILES = "mlp_tile: 64, recompute: full"


def dense(keys: str, *overrides: str, form: str = "both") -> tuple[str, str, list[str], str]:
    return RUN, keys, [*overrides], form


def experts(keys: str, *overrides: str, form: str = "both") -> tuple[str, str, list[str], str]:
    return RUN, keys, [*MOE, *overrides], form


def samples(keys: str, *overrides: str, form: str = "both") -> tuple[str, str, list[str], str]:
    return SAMPLES, keys, [*overrides], form


CASES = (
    # schedules
    dense("schedule: paired"),
    experts("schedule: paired, expert: 1, tensor: 1"),
    experts("schedule: paired, shard: 2, expert: 2, expert_policy: fixed, expert_slots: 4"),
    samples("schedule: paired, shard: 2, expert: 2", *MOE),
    experts("schedule: paired, pipeline: 2, expert: 1"),
    experts("schedule: paired, shard: 2, expert: 2, expert_exchange: peer", H100),
    experts("schedule: paired, shard: 2, expert: 2, recompute: full"),
    experts("schedule: paired, shard: 2, expert: 2, layers: [{offload: activations}]"),
    experts("schedule: paired, replicate: 1, shard: 8, expert: 8, micro_batch: 1"),
    dense("schedule: zb_h1, pipeline: 2, offload: activations"),
    # divisions
    dense("tensor: 3"),
    dense("context_ring: 4", "train.seq_len=1020"),
    dense("context_ulysses: 3"),
    # experts
    experts("shard: 2", form="file"),
    dense("expert: 2, shard: 2"),
    experts("expert: 3, shard: 3"),
    experts("expert: 4, shard: 2"),
    samples("expert: 8, hybrid: 4", *MOE),
    experts("expert: 1, expert_policy: fixed"),
    experts("expert: 2, shard: 2, expert_policy: fixed, expert_slots: 7"),
    experts("expert: 1, expert_slots: 2"),
    experts("expert: 1, expert_keep: true"),
    experts("expert: 1, expert_load_window: 2"),
    experts("expert: 1, expert_receive_bound: 1.5"),
    experts("expert: 1, expert_exchange: peer", H100),
    experts("expert: 2, shard: 2, expert_exchange: peer"),
    experts("expert: 1, expert_placement: balanced"),
    experts("expert: 2, shard: 2, expert_placement: balanced, expert_policy: fixed, expert_slots: 2"),
    experts("expert: 2, shard: 2, expert_placement: balanced", "model.expert_groups=2", "model.groups_per_token=1"),
    experts("expert: 1, expert_placement_every: 10"),
    experts("expert: 2, shard: 2, expert_placement: balanced, offload: optimizer"),
    # samples of any length
    samples(f"hybrid: 4, samples: {{{TIMES}}}", form="section"),
    dense(f"shard: 2, samples: {{{TIMES}}}"),
    samples("hybrid: 4, capacity: 512", form="file"),
    samples(f"hybrid: 4, samples: {{{TIMES}}}", form="file"),
    samples("micro_batch: 2"),
    samples("pipeline: 2"),
    samples("context_ring: 2"),
    samples("context_ulysses: 2"),
    samples("tensor: 2"),
    dense("hybrid: 4"),
    samples("hybrid: 2, shard: 2"),
    samples("hybrid: 2", "cluster.gpus_per_node=4"),
    samples("hybrid_attention: ring"),
    samples("hybrid: 4, hybrid_attention: ulysses", "model.kv_heads=1"),
    samples("capacity: 512"),
    samples("hybrid: 4, capacity: 200"),
    samples("hybrid: 4, schedule: gpipe"),
    samples("hybrid: 4, reshard: true"),
    samples("hybrid: 4, layers: [{range: 0-1, reshard: false, gradients: whole}, {range: 2-3, reshard: false}]"),
    samples("offload_capacity: 512"),
    samples("hybrid: 2, pipeline: 2, capacity: 512, offload_capacity: 1024"),
    samples("hybrid: 4, capacity: 128, offload_capacity: 1026"),
    samples(f"{LONGER}, samples: {{{TIMES}}}", form="file"),
    samples(f"{LONGER}, samples: {{{TIMES}, offload_layers: 9}}"),
    samples(f"{LONGER}, samples: {{{TIMES}}}", form="file"),
    samples(f"{LONGER}, samples: {{{TIMES}, offload_shortest: 3000}}"),
    samples(f"{LONGER}, offload: activations"),
    # number formats
    dense("compute: fp64", H100),
    dense("reduce: fp64", H100),
    dense("reduce_replicas: fp64", H100),
    dense("compute: fp16", A100),
    dense("compute: fp16", "cluster.gpu=V100"),
    dense("gather: fp8"),
    dense("linear: fp8_rowwise", A100),
    dense("linear: fp8_rowwise, compute: fp64"),
    dense("linear: fp8_rowwise", "train.seq_len=1000"),
    dense("linear: fp8_rowwise, tensor: 2", H100),
    # layers
    dense("reshard: true, layers: [{range: all}]"),
    dense("gradients: whole, layers: [{range: all}]"),
    dense("recompute: full, layers: [{range: all}]"),
    dense("offload: none, layers: [{range: all}]"),
    dense("offload: both", "train.ema_decay=0.9"),
    dense("layers: [{range: 0-1}, {range: 2-3, offload: optimizer}]", "train.optimizer.name=muon"),
    dense("offload: activations, recompute: selective, compile: false"),
    dense(f"{TILES}, tensor: 2"),
    dense(f"{TILES}, schedule: zb_h1, pipeline: 2"),
    dense(f"{TILES}, linear: fp8_rowwise", H100),
    # adapters
    dense("linear: fp8_rowwise", "model.adapter={rank: 4, kind: dora}"),
    dense("mlp_tile: 64", "model.adapter={rank: 4}"),
    experts("expert: 2, shard: 2, expert_policy: fixed, expert_slots: 2", "model.adapter={rank: 4}"),
    experts("expert: 2, shard: 2, expert_placement: balanced", "model.adapter={rank: 4}"),
)
"""(run file, keys of the plan, overrides, forms of a file that can break it) for each rule, in the order of the table."""


@pytest.mark.parametrize(("rule", "case"), zip(RULES, CASES, strict=True), ids=[case[1] for case in CASES])
def test_both_forms_of_a_file_give_one_message(
    rule: PlanRule, case: tuple[str, str, list[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, keys, overrides, form = case
    given: dict[str, Any] = yaml.safe_load(f"{{{keys}}}")
    ranks = prod(given.get(axis, 1) for axis in AXES)
    overrides = [f"cluster.gpus_per_node={ranks}", *overrides]
    file = tmp_path / "plan.yaml"
    file.write_text(dump_yaml({"micro_batch": 1, **given, "global_batch": 8}))
    forms = {"section": text + dump_yaml({"plan": {"micro_batch": 1, **given}}), "file": f"{text}plan: {file}\n"}
    if not rule.expected:
        monkeypatch.setattr(plan_rules, "UNTRAINED", (rule,))
        plans = load_plan(file), plan_of(replace(section_keys(tmp_path, forms["section"], overrides), global_batch=8))
        first, second = map(untrained, plans)
        assert len(first) == 1 and first == second
        return
    monkeypatch.setattr(plan_rules, "RULES", (rule,))
    found = {
        name: [as_said(mistake) for mistake in mistakes(tmp_path, *overrides, text=text) if is_of(rule, mistake)]
        for name, text in forms.items()
        if form in (name, "both")
    }
    (first, *others) = found.values()
    assert len(first) == 1 and all(other == first for other in others), found


def section_keys(tmp_path: Path, text: str, overrides: list[str]) -> PlanKeys:
    (tmp_path / "run.yaml").write_text(text)
    keys = load_run(tmp_path / "run.yaml", overrides).plan
    assert isinstance(keys, PlanKeys)
    return keys


def is_of(rule: PlanRule, mistake: Mistake) -> bool:
    """Whether a message is about the rule's key. It has the line of the key's value, where the key is no one of a range of layers."""
    key = rule.key.rpartition(".")[2]
    if not mistake.key.endswith(key):
        return False
    lines = Path(mistake.file).read_text().splitlines()
    at = [number for number, line in enumerate(lines, 1) if line.lstrip().startswith(f"{key}:")]
    assert mistake.line in (
        (at[0], at[0] + 1) if len(at) == 1 and "layers" not in mistake.key else range(1, len(lines) + 1)
    )
    return True


def as_said(mistake: Mistake) -> tuple[str, ...]:
    """What a message says, without the place of its key."""
    return mistake.key.removeprefix("plan."), mistake.expected, mistake.got, mistake.nearest or ""
