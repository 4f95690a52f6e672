"""Real runs whose checkpoints are lost or damaged: training, the Python API, evaluation, generation and the server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import meshwright as api
from meshwright.checkpoint.format.manifest import COMMITTED, FORMAT
from meshwright.config.load import load_run
from meshwright.durable.writes import publish_folder
from tests.cli.command import meshwright, train_here
from tests.launch.test_lost_state import cut, flip, path_of, to_newer_format

ONE_RANK = "cluster.gpus_per_node=1"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished run with checkpoints of steps 3 and 6."""
    shutil.copytree(finished, tmp_path / "tiny")
    return tmp_path / "tiny"


def again(tiny: Path, run: Path, *more: str):
    return train_here(tiny, ONE_RANK, "checkpoint.every=3", "train.steps=7", "--runs", run.parent, *more)


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_without_its_commits_ends_with_4_and_a_fresh_one_begins_beside_it(tiny: Path, run: Path) -> None:
    before = steps_of(run)
    for step in (3, 6):
        (path_of(run, step) / COMMITTED).unlink()
    answer = again(tiny, run)
    assert answer.code == 4 and "step-00000006: COMMITTED: missing" in answer.err and "--fresh" in answer.err
    assert steps_of(run) == before, "nothing is lost"
    assert again(tiny, run, "--fresh").code == 0 and max(steps_of(run.with_name("tiny-2"))) == 7


@pytest.mark.parametrize("command", ["train", "check"])
def test_a_run_whose_checkpoints_are_deleted_is_refused(tiny: Path, run: Path, command: str) -> None:
    shutil.rmtree(run / "checkpoints")
    if command == "check":
        answer = meshwright("check", tiny, ONE_RANK, "checkpoint.every=3", "train.steps=7", "--runs", run.parent)
    else:
        answer = again(tiny, run)
    assert answer.code == 4 and "had a checkpoint" in answer.out + answer.err


def test_flipped_bytes_in_all_checkpoints_end_the_ranks_with_4(tiny: Path, run: Path) -> None:
    for step in (3, 6):
        flip(path_of(run, step))
    answer = again(tiny, run)
    assert answer.code == 4 and "every checkpoint of" in answer.err and "does not start from scratch" in answer.err


def test_a_newer_format_is_named_and_not_passed_over(tiny: Path, run: Path) -> None:
    to_newer_format(path_of(run, 6))
    answer = again(tiny, run)
    assert answer.code == 2 and f"newer format: format {FORMAT + 1}" in answer.err
    listed, verified = (meshwright("checkpoint", verb, run) for verb in ("list", "verify"))
    assert listed.code == 0 and "newer format" in listed.out and "DAMAGED" not in listed.out
    assert verified.code == 2 and "newer format" in verified.err
    assert "DAMAGED" not in verified.out
    assert meshwright("eval", run).code == meshwright("generate", run, "-p", "a").code == 2


def test_python_refuses_as_the_command_does(tiny: Path, run: Path) -> None:
    changes = [ONE_RANK, "checkpoint.every=3", "train.steps=7"]
    description = load_run(tiny, changes)
    for step in (3, 6):
        (path_of(run, step) / COMMITTED).unlink()
    with pytest.raises(api.Damaged, match="does not start from scratch"):
        api.train(description, runs=run.parent)


@pytest.mark.parametrize("change", [cut, flip])
def test_evaluation_and_generation_say_that_an_older_checkpoint_is_used(run: Path, change) -> None:
    change(path_of(run, 6))
    for command in (["eval"], ["generate", "-p", "a"]):
        shown = meshwright(command[0], run, *command[1:])
        assert shown.code == 0
        first = shown.err.splitlines()[0]
        assert "step-00000006" in first and "is damaged; step-00000003 is used" in first
        answer = meshwright(command[0], run, *command[1:], "--json").json
        assert answer["checkpoint"] == str(path_of(run, 3))
        assert [entry["path"] for entry in answer["damaged_checkpoints"]] == [str(path_of(run, 6))]


def test_lines_of_the_metrics_are_durable_before_the_checkpoint_of_their_steps(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume does not repeat the steps of a checkpoint, so a power cut must not take their lines."""
    durable, committed = [0], dict[int, int]()

    def sync(descriptor: int, path: Path) -> None:
        durable.append(max(json.loads(line)["step"] for line in path.read_bytes().splitlines()))

    def publish(partial: Path, path: Path, displaced: Path) -> None:
        committed[int(path.name.rpartition("-")[2])] = durable[-1]
        publish_folder(partial, path, displaced)

    monkeypatch.setattr("meshwright.observe.metrics.sync_open_file", sync)
    monkeypatch.setattr("meshwright.checkpoint.write.attempt.publish_folder", publish)
    answer = train_here(tiny, ONE_RANK, "checkpoint.every=3", "checkpoint.mode=sync", "--runs", tmp_path)
    assert answer.code == 0 and committed == {3: 3, 6: 6}, answer.err


def test_a_good_run_says_nothing_about_damage(finished: Path) -> None:
    answer = meshwright("eval", finished, "--json")
    assert answer.json["checkpoint"] == str(path_of(finished, 6)) and "damaged_checkpoints" not in answer.json
    assert "damaged" not in answer.err


@pytest.mark.slow
@pytest.mark.parametrize("follow", [False, True])
def test_the_server_says_that_an_older_checkpoint_is_served(run: Path, follow: bool) -> None:
    cut(path_of(run, 6))
    command = [sys.executable, "-m", "meshwright", "serve", str(run), "--port", "0", *["--follow"] * follow]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ) as server:
        try:
            assert server.stdout is not None and server.stderr is not None
            url = server.stdout.readline().split()[-1]
            (model,) = json.load(urllib.request.urlopen(f"{url}/v1/models", timeout=30))["data"]
        finally:
            server.kill()
        said = server.stderr.read()
    assert model["checkpoint"] == "step-00000003", said
    assert [entry["checkpoint"] for entry in model["damaged_checkpoints"]] == ["step-00000006"]
    assert str(run.absolute()) not in json.dumps(model)
    assert "is damaged; step-00000003 is used" in said.splitlines()[0]
