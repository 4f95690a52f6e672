"""Rules of samples of any length: the batch in tokens stands alone, and what needs sequences of equal length is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tests.config.test_key_rules import mistakes as mistakes_of_run

from meshwright.config.load import differences, load_resolved, load_run, plan_yaml, resolved_yaml
from meshwright.spec.plan import BatchPlan, MeshAxis, Plan, SamplePlan

RUN = """\
model: {preset: llama-nano}
data: {packing: none}
train: {steps: 10, global_batch_tokens: 5000, seq_len: 1000}
cluster: {gpus_per_node: 4}
"""
PLAN = Plan(
    mesh=(MeshAxis(axis="shard", size=4),),
    batch=BatchPlan(global_batch=8, micro_batch=1, accumulate=2),
    samples=SamplePlan(capacity=1000, alpha=0.0, beta=1e-6),
)


mistakes = partial(mistakes_of_run, text=RUN)


@pytest.mark.parametrize(
    ("overrides", "key", "expected", "nearest"),
    [
        (["train.global_batch=8"], "train.global_batch_tokens", "no train.global_batch beside it", None),
        (
            ["train.global_batch_tokens=999"],
            "train.global_batch_tokens",
            "at least the longest sample, train.seq_len = 1000",
            "1000",
        ),
        (["data.packing=stream"], "data.packing", "none, as train.global_batch_tokens gives", "none"),
        (["data.document_mask=false"], "data.document_mask", "true, as data.packing is none", "true"),
        (["plan.micro_batch=2"], "plan.micro_batch", "1, as data.packing is none", "1"),
        (["plan.tensor=2"], "plan.tensor", "1, as data.packing is none", "1"),
        (["plan.context_ring=2"], "plan.context_ring", "1, as data.packing is none", "1"),
        (["model.prediction_depth=1"], "data.packing", "stream, as model.prediction_depth is not 0", "stream"),
    ],
)
def test_a_broken_rule(tmp_path: Path, overrides: list[str], key: str, expected: str, nearest: str | None) -> None:
    (mistake,) = mistakes(tmp_path, *overrides)
    assert mistake.key == key and expected in mistake.expected and mistake.nearest == nearest


def test_documents_need_a_batch_in_tokens(tmp_path: Path) -> None:
    text = RUN.replace("global_batch_tokens: 5000", "global_batch: 8")
    (mistake,) = mistakes(tmp_path, text=text)
    assert mistake.key == "train.global_batch_tokens" and "in place of train.global_batch" in mistake.expected


def test_an_inherited_batch_can_be_dropped(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(RUN.replace("data: {packing: none}\n", "").replace("_tokens: 5000", ": 8"))
    text = "extends: base.yaml\ndata: {packing: none}\ntrain: {global_batch: none, global_batch_tokens: 5000}\n"
    assert not mistakes(tmp_path, text=text)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_resolved_run_loads_to_an_equal_run_and_resumes_on_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    run = load_run(tmp_path / "run.yaml")
    assert run.data.document_mask and run.train.tokens_per_step == 5000
    (tmp_path / "config.yaml").write_text(resolved_yaml(run))
    assert load_run(tmp_path / "config.yaml") == load_resolved(tmp_path / "config.yaml") == run
    other = load_run(tmp_path / "run.yaml", [f"cluster.gpus_per_node={ranks}"])
    assert other.train.global_batch % ranks == 0 and not differences(run, other)
    (changed,) = differences(run, load_run(tmp_path / "run.yaml", ["train.global_batch_tokens=6000"]))
    assert changed == ("train.global_batch_tokens", 5000, 6000)


@pytest.mark.parametrize(
    ("plan", "key"),
    [
        (replace(PLAN, samples=None), "samples"),
        (replace(PLAN, samples=replace(PLAN.samples, capacity=998)), "capacity"),
        (replace(PLAN, samples=replace(PLAN.samples, capacity=1001)), "capacity"),
        (replace(PLAN, batch=BatchPlan(global_batch=8, micro_batch=2, accumulate=1)), "micro_batch"),
        (replace(PLAN, mesh=(MeshAxis(axis="shard", size=2), MeshAxis(axis="tensor", size=2))), "tensor"),
    ],
)
def test_a_plan_file_places_samples_on_data_ranks(tmp_path: Path, plan: Plan, key: str) -> None:
    (tmp_path / "plan.yaml").write_text(plan_yaml(PLAN))
    assert not mistakes(tmp_path, f"plan={tmp_path / 'plan.yaml'}")
    (tmp_path / "plan.yaml").write_text(plan_yaml(plan))
    reported = mistakes(tmp_path, f"plan={tmp_path / 'plan.yaml'}")
    assert key in [mistake.key for mistake in reported]
