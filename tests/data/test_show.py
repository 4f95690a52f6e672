from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshwright.cli import data as data_command
from meshwright.cli import tokenizer as tokenizer_command
from meshwright.data.loader import Loader, Windows
from meshwright.data.manifest import verify
from meshwright.data.show import show_step
from meshwright.data.source import open_data
from meshwright.data.tokenizer import load_tokenizer
from meshwright.spec.errors import BadInput, Damaged
from meshwright.spec.job import DataSpec
from tests.data import megatron

RUNNER = CliRunner()


def test_show_names_the_samples_that_the_loader_reads(prepared: Path) -> None:
    source = open_data(DataSpec(mix={str(prepared): 1.0}), seq_len=24, seed=5)
    shown = show_step(source, 3, global_batch=4, text=True)
    with Loader(Windows(source, global_batch=4, data_rank=0, data_ranks=1, micro_batch=4)) as loader:
        steps = [next(loader)[0].tokens.tolist() for _ in range(3)]
    tokenizer = load_tokenizer(prepared / "train").tokenizer
    assert shown["step"] == 3 and [sample["global_index"] for sample in shown["samples"]] == [8, 9, 10, 11]
    for sample, tokens in zip(shown["samples"], steps[2], strict=True):
        assert sample["text"] == tokenizer.decode(tokens, skip_special_tokens=False)
        assert sum(part["end"] - part["start"] for part in sample["documents"]) == sample["tokens"] == 24
        assert list(sample) == ["global_index", "source", "documents", "tokens", "text"]


def test_show_and_the_loader_leave_out_the_same_samples(prepared: Path) -> None:
    source, skipped = open_data(DataSpec(mix={str(prepared): 1.0}), seq_len=24, seed=5), ((4, 8), (8, 12))
    shown = [show_step(source, step, global_batch=4, skipped=skipped)["samples"] for step in (1, 2)]
    assert [[sample["global_index"] for sample in samples] for samples in shown] == [[0, 1, 2, 3], [12, 13, 14, 15]]
    with Loader(Windows(source, global_batch=4, data_rank=0, data_ranks=1, micro_batch=4), skipped=skipped) as loader:
        second = [next(loader)[0].tokens for _ in range(2)][1]
    assert second.tolist() == source.samples(range(12, 16)).tokens.tolist()


def test_show_refuses_invalid_questions(prepared: Path, tmp_path: Path) -> None:
    megatron.write(tmp_path / "foreign", [[[1, 2, 3, 4, 5]]], code=8)
    foreign = open_data(DataSpec(mix={str(tmp_path): 1.0}), seq_len=2, seed=0)
    with pytest.raises(BadInput, match="its tokenizer is not known"):
        show_step(foreign, 1, 1, text=True)
    with pytest.raises(BadInput, match="--step 0: expected 1 or more"):
        show_step(foreign, 0, 1)


def test_the_show_command_on_a_data_directory(prepared: Path) -> None:
    arguments = ["show", str(prepared), "--step", "2", "--seq-len", "16", "--global-batch", "3", "--seed", "9"]
    answer = RUNNER.invoke(data_command.app, [*arguments, "--json"])
    assert answer.exit_code == 0, answer.output
    source = open_data(DataSpec(mix={str(prepared): 1.0}), seq_len=16, seed=9)
    assert json.loads(answer.stdout) == show_step(source, 2, 3)
    plain = RUNNER.invoke(data_command.app, arguments).stdout
    assert plain.startswith("step 2\nsample 3 from ") and plain.count("sample") == 3
    assert len(RUNNER.invoke(data_command.app, [*arguments, "--text"]).stdout) > len(plain)


def test_the_show_command_on_a_run_file_and_a_run_folder(prepared: Path, tmp_path: Path) -> None:
    text = (
        f"model: llama-nano\ndata: {{mix: {{{prepared}: 1}}}}\nseed: 4\n"
        "train: {steps: 5, global_batch: 2, seq_len: 16}\ncluster: {gpu: cpu}\n"
    )
    source = open_data(DataSpec(mix={str(prepared): 1.0}), seq_len=16, seed=4)
    run = tmp_path / "run.yaml"
    run.write_text(text)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.yaml").write_text("name: x\n" + text)
    for target in (run, tmp_path / "folder"):
        answer = RUNNER.invoke(data_command.app, ["show", str(target), "--step", "3", "--json"])
        assert answer.exit_code == 0, answer.exception
        assert json.loads(answer.stdout) == show_step(source, 3, 2)
    refused = RUNNER.invoke(data_command.app, ["show", str(run), "--step", "1", "--seed", "1"])
    assert isinstance(refused.exception, BadInput) and "--seed: is for data directories" in str(refused.exception)


def test_the_prepare_command(corpus: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["prepare", str(corpus), "--tokenizer", str(tokenizer_file), "--held-out", "0.1", "--out", str(out)]
    answer = RUNNER.invoke(data_command.app, [*arguments, "--json"])
    assert answer.exit_code == 0, answer.output
    summary = json.loads(answer.stdout)
    assert summary["vocab_size"] == 300 and summary["bad"] == {"count": 0, "first": []} and not summary["reused"]
    assert sum(split["documents"] for split in summary["splits"].values()) == 120
    again = RUNNER.invoke(data_command.app, [*arguments, "--verify"])
    assert again.stdout.startswith("already prepared by this command") and verify(out) == []
    path = out / "train" / "shard-00000.bin"
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    damaged = RUNNER.invoke(data_command.app, [*arguments, "--verify"])
    assert isinstance(damaged.exception, Damaged) and "shard-00000.bin: expected digest" in str(damaged.exception)


def test_bad_documents_are_named_on_stderr(tokenizer_file: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine, and long enough"}\nbroken\n')
    arguments = [
        "prepare",
        str(tmp_path / "a.jsonl"),
        "--tokenizer",
        str(tokenizer_file),
        "--out",
        str(tmp_path / "out"),
    ]
    answer = RUNNER.invoke(data_command.app, [*arguments, "--json"])
    assert json.loads(answer.stdout)["bad"]["count"] == 1
    assert "left out:\n1 bad documents:" in answer.stderr and "a.jsonl:2: not JSON" in answer.stderr


def test_the_tokenizer_command(corpus: Path, tmp_path: Path) -> None:
    arguments = ["train", str(corpus), "--size", "280", "--out", str(tmp_path / "t.json")]
    answer = RUNNER.invoke(tokenizer_command.app, [*arguments, "--json"])
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["vocab_size"] == load_tokenizer(tmp_path / "t.json").record.vocab_size == 280
    refused = RUNNER.invoke(tokenizer_command.app, ["train", str(corpus), "--size", "9", "--out", "t.json"])
    assert isinstance(refused.exception, BadInput) and "at least 257" in str(refused.exception)


def test_preparing_and_showing_never_import_torch() -> None:
    modules = ("indexed", "packing", "prepare", "manifest", "source", "show", "stdlib", "tokenizer")
    code = "import sys; sys.modules['torch'] = None\n" + "\n".join(f"import meshwright.data.{name}" for name in modules)
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
