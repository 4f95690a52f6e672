"""Mistakes in keys, data, weights and plan, reported at their positions by `check` and `train`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from unittest import mock

import pytest

from meshwright.cli.check import find_mistakes
from meshwright.config.load import read_run
from meshwright.config.schema import accepts, all_keys, annotation_at, section_of
from meshwright.spec.fields import LARGEST_COUNT
from meshwright.spec.run import RunSpec
from tests.cli.command import meshwright

BROKEN = """\
model: {preset: llama-nano, init: checkpoint:nowhere}
train: {steps: 3, global_batch: 2, seq_len: 64}
data:
  mix: {nowhere/a: 1, no.where/b: 2}
  validation: nowhere/c
cluster: {gpus_per_node: 2}
plan: {shard: 2, tensor: 2}
observe: {wandb: project}
lerning_rate: 3
"""
POSITIONS = [
    ("model.init", 1, 35, "nowhere is not a folder"),
    ("data.mix.nowhere/a", 4, 9, "no prepared data here"),
    ("data.mix.no.where/b", 4, 23, "no prepared data here"),
    ("data.validation", 5, 15, "no prepared data here"),
    ("plan.shard", 7, 15, "2 × 2 = 4 ranks, the cluster has 2"),
    ("observe.wandb", 8, 18, "the package wandb is not installed"),
    ("lerning_rate", 9, 1, "'lerning_rate'"),
]
MOE = ["model.experts=4", "model.experts_per_token=2", "model.expert_hidden=64"]
NUMBERS = [path for path in all_keys(RunSpec) if not section_of(annotation_at(RunSpec, path))]
COUNTS = [".".join(map(str, path)) for path in NUMBERS if accepts(annotation_at(RunSpec, path), int)]
RATES = [".".join(map(str, path)) for path in NUMBERS if accepts(annotation_at(RunSpec, path), float)]


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    (tmp_path / "broken.yaml").write_text(BROKEN)
    return Path("broken.yaml")


@pytest.fixture
def nano(tmp_path: Path) -> Path:
    file = tmp_path / "nano.yaml"
    file.write_text("model: llama-nano\ntrain: {steps: 3, global_batch: 2, seq_len: 64}\n")
    return file


def test_mistakes_of_keys_data_weights_and_plan_are_one_report(broken: Path) -> None:
    answer = meshwright("check", broken, "--json")
    result = [(error["key"], error["line"], error["column"]) for error in answer.json["errors"]]
    assert answer.code == 2 and result == [position[:3] for position in POSITIONS]
    for error, (*_, output) in zip(answer.json["errors"], POSITIONS, strict=True):
        assert output in error["got"] and error["file"] == "broken.yaml"


def test_train_refuses_with_the_report_of_check(broken: Path) -> None:
    checked, trained = meshwright("check", broken), meshwright("train", broken)
    lines = checked.err.splitlines()
    assert lines[-1] == "7 mistakes" and trained.code == checked.code == 2
    assert trained.err.splitlines() == ["meshwright: 7 mistakes in the configuration:", *lines[:-1]]


def test_train_places_what_only_its_start_finds(nano: Path, tmp_path: Path) -> None:
    nano.write_text(nano.read_text() + "data: {mix: nowhere}\n")
    answer = meshwright("train", nano, "--runs", tmp_path / "runs")
    assert answer.code == 2 and f"{nano}:3:13: data.mix: nowhere: no prepared data here" in answer.err
    assert not (tmp_path / "runs").exists()


def test_a_plan_that_does_not_fit_is_placed_and_ends_with_its_code(nano: Path) -> None:
    nano.write_text(nano.read_text() + "plan: {shard: 1}\n")
    mistakes, code = find_mistakes([str(nano), "model.vocab_size=500000000"], nano.parent)
    assert code == 3 and ("plan", 3, 7) in [(m.key, m.line, m.column) for m in mistakes]


@pytest.mark.parametrize("command", ["check", "train"])
def test_runs_below_a_file_are_refused(nano: Path, command: str) -> None:
    for runs in (nano, nano / "x"):
        answer = meshwright(command, nano, "--runs", runs)
        assert answer.code == 2 and f"--runs {runs}: expected a folder, and {nano} is a file" in answer.err


def test_data_is_not_written_below_a_file(nano: Path) -> None:
    answer = meshwright("data", "prepare", nano, "--tokenizer", "train:300", "--out", nano / "x")
    assert answer.code == 2 and f"{nano}/x: " in answer.err and "a folder" in answer.err
    assert "Traceback" not in answer.err


def test_variables_of_a_launcher_that_are_wrong_end_train(nano: Path) -> None:
    for env, output in (
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "0", "WORLD_SIZE": "x"}, "WORLD_SIZE is 'x'"),
    ):
        answer = meshwright("train", nano, env=env)
        assert answer.code == 2 and output in answer.err and "Traceback" not in answer.err


@pytest.mark.parametrize("key", [*COUNTS, *RATES])
def test_no_number_is_an_internal_error(nano: Path, key: str) -> None:
    values = (0, -1, 10**6, 10**12, 10**30) if key in COUNTS else (0, -1, ".inf", ".nan", "1e308", "-1e308")
    overrides = MOE if "expert" in key else []
    for value in values:
        for mistake in read_run(nano, [*overrides, f"{key}={value}"]).mistakes:
            assert mistake.expected


@pytest.mark.parametrize("key", ["hidden", "heads", "head_dim", "ffn_hidden", "vocab_size", "max_seq_len"])
def test_the_largest_dimension_gets_an_answer(nano: Path, key: str) -> None:
    """The cost model takes what the schema lets through, without an overflow."""
    _, code = find_mistakes([str(nano), f"model.{key}={LARGEST_COUNT}"], nano.parent)
    assert code in (0, 2, 3)


def test_a_fresh_run_is_not_held_against_an_earlier_one_of_its_name(finished: Path, tiny: Path) -> None:
    arguments = [str(tiny), "cluster.gpus_per_node=1", "train.seq_len=8", "model.init=checkpoint:nowhere"]
    for fresh, keys in ((False, ["name", "model.init"]), (True, ["model.init"])):
        mistakes, code = find_mistakes(arguments, finished.parent, fresh=fresh)
        assert code == 2 and sorted(mistake.key for mistake in mistakes) == sorted(keys)


FOREIGN = [
    ("precision=bf16", "precision: no such key; .*plan.compute"),
    ("num_epochs=3", "nearest: train.epochs"),
    ("train.num_train_epochs=3", "nearest: epochs"),
    ("gradient_accumulation_steps=4", "no such key; .*plan.micro_batch"),
    ("output_dir=out", "no such key; .*--runs"),
    ("wandb_project=p", "nearest: observe.wandb.project"),
    ("training.local_batch_size=8", "training: no such key; .*nearest: train"),
    ("parallelism.tensor_parallel_degree=2", "parallelism: no such key; .*nearest: plan"),
    ("data.path=text", "meshwright data prepare INPUT"),
    ("train.fp8=true", "plan.linear=fp8_rowwise"),
    ("train.lr=1", r"nearest: learning_rate"),
    ("cluster.gpu=cuda", "nearest: cluster=auto"),
    ("gpu=cuda", "nearest: cluster=auto"),
    ("cluster.gpu=4090", "nearest: RTX4090"),
    ("model=meta-llama/Llama-3.2-1B", "model.init=hf:DIR; nothing is downloaded.*nearest: llama3-1b"),
    ("model.init=hf:org/name", "nothing is downloaded"),
    ("data.mix=HuggingFaceFW/fineweb", "--repo-type dataset"),
    ("data.mix=text", "data prepare text --out DIR"),
]


@pytest.mark.parametrize(("word", "hint"), FOREIGN)
def test_words_of_other_programs_get_a_hint(
    word: str, hint: str, nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("text")
    answer = meshwright("check", nano, word)
    assert answer.code == 2 and re.search(hint, answer.err), answer.err


def test_overrides_may_have_dashes(nano: Path, tmp_path: Path) -> None:
    plain, dashed = (
        meshwright("plan", nano, f"{dashes}train.global_batch=3", f"{dashes}cluster.gpu=H100", "--json")
        for dashes in ("", "--")
    )
    assert plain.json["plan"] == dashed.json["plan"] and plain.json["plan"]["global_batch"] == 3
    answer = meshwright("check", nano, "--train.stepz=5")
    assert answer.code == 2 and "command line: train.stepz: " in answer.err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["train", "--num_train_epochs", "3"], "write train.epochs=VALUE"),
        (["train", "--lr=1e-3"], "write train.learning_rate=VALUE"),
        (["plan", "--train.steps", "3"], "write train.steps=VALUE"),
        (["check", "--seed", "3"], "write seed=VALUE"),
        (["serve", "x", "--max-model-len", "3"], "write --context"),
        (["serve", "x", "--trust-remote-code"], "no code of a model's folder is run"),
        (["generate", "x", "-p", "a", "--max-tokens", "3"], "write --tokens"),
        (["serve", "x", "--prot", "3"], "Did you mean .*--port"),
        (["generate", "model.gguf", "-p", "a"], "a file; expected a folder; a GGUF file is converted first"),
        (["eval", "org/name"], "nothing is downloaded from a hub"),
    ],
)
def test_options_of_other_programs_get_a_hint(
    arguments: list[str], hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").touch()
    answer = meshwright(*arguments, env={"COLUMNS": "200"})
    assert answer.code == 2 and re.search(hint, answer.err), answer.err


def test_check_asks_about_values_that_are_valid_and_probably_slips(nano: Path, tmp_path: Path) -> None:
    answer = meshwright("check", nano, "train.learning_rate=3e5", "cluster.gpus_per_node=1", "--runs", tmp_path)
    assert answer.code == 0 and answer.out == "ok\n"
    assert "train.learning_rate is 300000, above 1: is it a slip?" in answer.err and "cores" not in answer.err
    with mock.patch("meshwright.launch.prepare.usable_cores", lambda: 1):
        answer = meshwright("check", nano, "cluster.gpus_per_node=2", "--runs", tmp_path)
    assert answer.code == 0 and "2 ranks share 1 cores" in answer.err and "slip" not in answer.err


def test_a_corpus_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "manifest.json").write_text("{}")
    answer = meshwright("eval", tmp_path)
    assert answer.code == 2 and f"{tmp_path} is no model: " in answer.err and f"--data {tmp_path}" in answer.err


@pytest.mark.parametrize(
    "error", [MemoryError(), ImportError("libtorch_cpu.so: failed to map segment from shared object")]
)
def test_a_command_without_memory_says_so_in_one_message(
    nano: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("meshwright.launch.refusals.Refusals", fail)
    answer = meshwright("check", nano)
    assert answer.code == 3 and answer.err.startswith("meshwright: out of memory: ")
    assert answer.err.count("\n") == 1 and "give the command more memory" in answer.err
