"""Values that commands assume, the messages about them, and the checks of `check` before a start."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cli.options import load
from meshwright.config.load import load_run
from meshwright.data.text_format import tokenizer_identity
from meshwright.durable.writes import digest
from meshwright.families.folder import to_hf_config
from meshwright.launch import machine, prepare
from meshwright.launch.prepare import CheckedWork, Note, Readiness, prepare_run
from meshwright.spec.errors import BadInput
from meshwright.spec.run import RunSpec
from tests.cli.command import meshwright, train_here
from tests.cli.conftest import ONE_RANK
from tests.models.tiny import LLAMA

GPUS = ["NVIDIA H100 80GB HBM3"] * 2
CANNOT = "model.qk_norm: a LlamaForCausalLM folder supports only False, got True (model.family: qwen3 can)"


@pytest.mark.parametrize("arguments", [["train"], ["train", "--fresh"], ["plan"], ["check", "--json"], ["simulate"]])
def test_a_command_without_a_run_prints_its_usage(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = meshwright(*arguments)
    assert (
        answer.code == 2
        and f"meshwright {arguments[0]} [OPTIONS] [RUN.yaml]" in answer.err
        and "model=llama3-1b" in answer.err
    )
    assert not answer.out and not list(tmp_path.iterdir())


def test_the_cluster_is_this_machine_s_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_query", lambda field: GPUS)
    assert (load(["model=llama3-1b"]).cluster.gpu, load(["model=llama3-1b"]).cluster.ranks) == ("H100", 2)
    answer = meshwright("plan", "model=llama3-1b", "train.global_batch=16", "--json")
    first, second = answer.err.splitlines()
    assert first.startswith("no cluster.gpu: cluster=auto assumed, gpu=H100 nodes=1 gpus_per_node=2 host_memory_gib=")
    assert second.startswith("no run file: ") and "train.seq_len=8192" in second and "llama-nano" not in answer.err
    assert answer.json["plan"]["replicate"] == 2


def test_one_rank_of_a_job_says_what_was_assumed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert load(["model=llama3-1b"]).cluster.ranks == 2
        assert ("no run file" in capsys.readouterr().err) is (rank == "0")


def test_dimensions_come_from_the_folder_without_a_file_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(LLAMA)))
    init, batch = f"model.init=hf:{tmp_path}", ["train.seq_len=16", "train.global_batch=2", "cluster.gpu=cpu"]
    assert load([init]).model.hidden == LLAMA.hidden
    answer = meshwright("plan", init, *batch, "--json")
    assert answer.code == 0 and "llama-nano" not in answer.err


def test_a_family_without_its_dimensions_is_refused_with_all_that_is_missing() -> None:
    answer = meshwright("train", "model.family=gpt2", "model.hidden=3072")
    assert answer.code == 2 and "got no layers, heads" in answer.err
    answer = meshwright("plan", "model={family: gpt2, hidden: 768, layers: 2, heads: 12}", "cluster.gpu=H100")
    assert (
        answer.code == 0
        and "ffn_hidden 3072 = 4 × hidden, kv_heads 12 = heads, head_dim 64 = hidden / heads" in answer.err
    )
    assert "llama-nano" not in answer.err + answer.out


def test_a_model_that_no_folder_of_its_family_can_hold_is_named_at_the_start(tiny: Path, tmp_path: Path) -> None:
    checked = meshwright("check", tiny, "model.qk_norm=true", "--runs", tmp_path)
    assert checked.code == 0 and f"not exported to a Hugging Face folder: {CANNOT}\n" in checked.err
    notes: list[str] = []
    assert prepare_run(load_run(tiny, ["model.qk_norm=true"]), tmp_path, profile=None, note=notes.append)
    assert any(CANNOT in text for text in notes)
    assert "cannot be exported" not in meshwright("check", tiny, "--runs", tmp_path / "other").err


def refused(tiny: Path, runs: Path, key: str, output: str, *arguments: str, code: int = 2) -> None:
    """`check` and `train` refuse the run with the same words, and no folder is made."""
    checked = meshwright("check", tiny, ONE_RANK, *arguments, "--runs", runs, "--json")
    (mistake,) = checked.json["errors"]
    assert (checked.code, mistake["key"]) == (code, key) and output in mistake["got"]
    trained = train_here(tiny, ONE_RANK, *arguments, "--runs", runs)
    assert trained.code == code and mistake["got"] in trained.err and not runs.exists()


def test_validation_data_is_found_before_a_start(tiny: Path, tmp_path: Path) -> None:
    missing_folder, other_folder = tmp_path / "datta", tmp_path / "other"
    refused(
        tiny,
        tmp_path / "runs",
        "data.validation",
        f"{missing_folder}: no prepared data",
        f"data.validation={missing_folder}",
    )
    shutil.copytree(tiny.parent / "data", other_folder)
    for manifest in other_folder.glob("*/manifest.json"):
        record = json.loads(manifest.read_text())
        tokenizer = manifest.with_name("tokenizer.json")
        content = json.loads(tokenizer.read_text())
        content["model"]["merges"].pop()
        tokenizer.write_text(json.dumps(content))
        record["tokenizer"]["digest"] = digest(tokenizer.read_bytes())
        record["text_format"]["tokenizer"] = tokenizer_identity(tokenizer.read_bytes())
        manifest.write_text(json.dumps(record))
    output = "have different tokenizers"
    refused(tiny, tmp_path / "runs", "data.validation", output, f"data.validation={other_folder}")
    assert meshwright("check", tiny, f"data.validation={tiny.parent / 'data'}", "--runs", tmp_path / "runs").code == 0


def test_a_tokenizer_that_is_gone_is_found_before_a_start(tiny: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(tiny.parent / "data", data)
    (data / "train" / "tokenizer.json").unlink()
    refused(tiny, tmp_path / "runs", "data.mix", "found no file; put the tokenizer back", f"data.mix={data}", code=4)


def test_check_and_train_run_the_same_checks(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_start(
        run: RunSpec, runs: Path, attempt: CheckedWork, note: Note, *, build_stdlib: bool, fresh: bool = False
    ) -> Readiness:
        def refuse() -> None:
            raise BadInput("a check of both")

        attempt("seed", "another", refuse)
        return Readiness(run)

    monkeypatch.setattr(prepare, "check_start", check_start)
    refused(tiny, tmp_path / "runs", "seed", "a check of both")


def test_validation_data_is_looked_for_before_the_standard_library_is_prepared(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its preparation takes a minute."""
    monkeypatch.setattr(prepare, "stdlib_folder", lambda: tmp_path / "no stdlib")
    run = load_run(tiny, ["data.mix=stdlib", f"data.validation={tmp_path / 'nowhere'}"])
    with pytest.raises(BadInput, match="nowhere: no prepared data"):
        prepare_run(run, tmp_path / "runs", profile=None, note=print)
    swapped = replace(run, data=replace(run.data, mix={str(tmp_path / "nowhere"): 1.0}, validation="stdlib"))
    with pytest.raises(BadInput, match="nowhere: no prepared data"):
        prepare_run(swapped, tmp_path / "runs", profile=None, note=print)
    assert not (tmp_path / "no stdlib").exists()


def test_a_gpu_cluster_may_be_checked_on_another_machine(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    answer = meshwright("check", tiny, "cluster.gpu=H100", "--runs", tmp_path)
    assert answer.code == 0 and "on this machine `train` would stop: cluster.gpu is H100" in answer.err
