"""Pipeline plans from the command line: `generate` starts ranks, `eval` by the plan has those of the pool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli import spread
from meshwright.observe.metrics import read_metrics
from meshwright.parallel.world import World
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.fields import from_plain, to_plain
from tests.cli.command import meshwright
from tests.distributed import cases_training as cases
from tests.distributed.pool import Pool
from tests.slow import quick_first
from tests.training.tiny import prepared

PINS = ["cluster.gpus_per_node=2", "plan.pipeline=2", "plan.schedule=zbv", "plan.micro_batch=2", "model.layers=4"]


def answer_as_json(world: World, question: str) -> str:
    """The answer of a rank of `meshwright.training.spread`."""
    from meshwright.training.spread import SpreadJob, compute_answer

    return json.dumps(to_plain(compute_answer(from_plain(SpreadJob, json.loads(question)), world)))


@pytest.fixture(scope="module")
def run(pool: Pool, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run. `tests/training/test_wire_count.py` trains one by the command."""
    prepared_run = prepared(tiny, tmp_path_factory.mktemp("pipeline"), *PINS, "checkpoint.every=3")
    assert [result.error for result in pool.run(cases.run, 2, prepared_run.assignment)] == [None] * 2
    return prepared_run.folder


def test_the_run_is_whole(run: Path) -> None:
    steps = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6] and steps[-1]["loss"] < steps[0]["loss"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000003", "step-00000006"]
    answer = meshwright("checkpoint", "verify", run, "--json")
    assert answer.code == 0 and all(checkpoint["ok"] for checkpoint in answer.json["checkpoints"])


@pytest.mark.parametrize(
    "sampling_options",
    quick_first(1, [["--temperature", 2, "--seed", 3], ["--temperature", 0]]),
    ids=["drawn", "greedy"],
)
def test_generate_by_the_plan_is_that_of_one_device(run: Path, sampling_options: list[object]) -> None:
    arguments = [run, "-p", "the quick", "-p", "seven wizards", "--tokens", 6, "--json", *sampling_options]
    one_device, by_plan = (
        meshwright("generate", *arguments, *plan_options) for plan_options in ([], ["--plan", run / "plan.yaml"])
    )
    assert by_plan.code == 0, by_plan.err
    assert by_plan.json == one_device.json


def test_eval_by_the_plan_is_that_of_one_device(run: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer_of_ranks(module: str, question: object, cluster: ClusterSpec, weights: str) -> object:
        assert module == "meshwright.training.spread"
        return json.loads(pool.run(answer_as_json, cluster.ranks, json.dumps(question))[0])

    monkeypatch.setattr(spread, "answer_of_ranks", answer_of_ranks)
    one_device, by_plan = (
        meshwright("eval", run, "--json", *plan_options) for plan_options in ([], ["--plan", run / "plan.yaml"])
    )
    assert by_plan.code == 0, by_plan.err
    assert by_plan.json["loss"] == pytest.approx(one_device.json["loss"], rel=1e-5)
    assert by_plan.json["tokens"] == one_device.json["tokens"]


def test_generate_joins_under_a_launcher(run: Path, tmp_path: Path) -> None:
    """As the only rank of a plan for one."""
    file = tmp_path / "one.yaml"
    file.write_text("global_batch: 1\nmicro_batch: 1\ncompute: fp32\n")
    arguments = ["generate", run, "-p", "the quick", "--tokens", 5, "--json"]
    launched = meshwright(*arguments, "--plan", file, env={"RANK": "0", "WORLD_SIZE": "1"})
    assert launched.code == 0, launched.err
    assert launched.json == meshwright(*arguments).json


@pytest.mark.parametrize(
    ("axis", "further_keys", "message"),
    [
        ("pipeline: 8", "", "is not for this model of 4 layers"),
        ("", "layers: [{range: 0-2}]", "no strategy covers layer 3"),
        ("context_ulysses: 3", "", "context_ulysses: expected a divisor of model.heads"),
        (
            "",
            "layers: [{offload: both, recompute: selective}]\ncompile: false",
            "recompute selective where blocks are not compiled",
        ),
        ("tensor: 3", "", "a divisor of model.heads"),
    ],
)
def test_a_plan_for_something_else_is_refused(
    run: Path, tmp_path: Path, axis: str, further_keys: str, message: str
) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(f"{axis}\nglobal_batch: 1\nmicro_batch: 1\n{further_keys}\n")
    answer = meshwright("generate", run, "-p", "the", "--plan", file)
    assert answer.code == 2 and message in answer.err and "plan.yaml" in answer.err
