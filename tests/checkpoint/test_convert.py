"""Checkpoints to Hugging Face folders and back, through the library and through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from meshwright.checkpoint.format.manifest import step_name
from meshwright.checkpoint.format.verify import verify
from meshwright.checkpoint.models import hf
from meshwright.checkpoint.models.convert import export_checkpoint, import_checkpoint
from meshwright.checkpoint.models.hf import import_hf
from meshwright.checkpoint.read.reader import CheckpointReader
from meshwright.checkpoint.store import CheckpointStore
from meshwright.cli.checkpoint import app
from meshwright.config.load import load_run, resolved_yaml
from meshwright.data.tokenizer import END_OF_TEXT, train_tokenizer
from meshwright.spec.errors import BadInput, MeshwrightError
from meshwright.spec.fields import from_plain, to_plain
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec, parameters
from meshwright.spec.run import ModelSection, RunSpec
from tests.checkpoint.made import save, tensors

SPEC = ModelSpec(
    family="llama", layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn_hidden=12, vocab_size=300, max_seq_len=16
)


def weights(seed: int) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {f"model.{parameter.name}": torch.randn(parameter.shape, generator=chance) for parameter in parameters(SPEC)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with checkpoints of steps 10 and 20 and a tokenizer."""
    folder = tmp_path / "runs" / "tiny"
    model = from_plain(ModelSection, to_plain(SPEC))
    config = resolved_yaml(RunSpec(name="tiny", model=model, train=TrainSpec(steps=20, global_batch=1, seq_len=16)))
    folder.mkdir(parents=True)
    store = CheckpointStore(folder / "checkpoints")
    for step in (10, 20):
        moments = {"optimizer.exp_avg.norm.weight": torch.zeros(8)}
        store.save(step, weights(step) | moments, {"step": step, "tokens": 16 * step}, {"config.yaml": config})
    (folder / "tokenizer.json").write_bytes(train_tokenizer(["def f(x):\n    return x\n" * 20], 270))
    return folder


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(word) for word in arguments])


def corrupt(path: Path) -> None:
    shard = path / "tensors-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def test_a_run_exports_its_newest_good_checkpoint_whole(run: Path, tmp_path: Path):
    assert export_checkpoint(run, tmp_path / "hf", dtype="fp32") == run / "checkpoints" / step_name(20)
    spec, reader = import_hf(tmp_path / "hf")
    assert spec == SPEC
    assert all(
        torch.equal(reader.read(parameter), weights(20)[f"model.{parameter.name}"]) for parameter in parameters(SPEC)
    )
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    assert json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())["eos_token"] == END_OF_TEXT
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "Run `tiny`, checkpoint of step 20 over 320 tokens." in card
    assert "| Began with | random weights |" in card and "| Trained on | every token |" in card
    assert "A base model" in card
    corrupt(run / "checkpoints" / step_name(20))
    assert export_checkpoint(run, tmp_path / "older") == run / "checkpoints" / step_name(10)


def test_an_imported_folder_is_a_committed_step_zero_that_any_reader_takes(run: Path, tmp_path: Path):
    export_checkpoint(run, tmp_path / "hf", dtype="fp32")
    path = import_checkpoint(tmp_path / "hf", tmp_path / "base")
    assert path == tmp_path / "base" / "checkpoints" / step_name(0) and verify(path) == []
    loaded = {name: torch.zeros_like(tensor) for name, tensor in weights(20).items()}
    state = CheckpointStore(path.parent).load(path, loaded)
    assert state == {"step": 0, "next_sample": 0, "tokens": 0}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights(20).items())
    assert (tmp_path / "base" / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    model = load_run(path / "config.yaml").model
    assert (
        from_plain(ModelSpec, {key: value for key, value in to_plain(model).items() if key in to_plain(SPEC)}) == SPEC
    )
    with pytest.raises(BadInput, match="already exists"):
        import_checkpoint(tmp_path / "hf", tmp_path / "base")
    export_checkpoint(path, tmp_path / "again", dtype="fp32")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "hf" / "model.safetensors"
    ).read_bytes()


def test_half_precision_folders_become_fp32(run: Path, tmp_path: Path):
    export_checkpoint(run, tmp_path / "hf", dtype="bf16")
    path = import_checkpoint(tmp_path / "hf", tmp_path / "base" / "checkpoints")
    assert path == tmp_path / "base" / "checkpoints" / step_name(0)
    with CheckpointReader(path) as reader:
        for name, tensor in weights(20).items():
            assert torch.equal(reader.read(name), tensor.bfloat16().float())


def test_a_failed_import_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    export_checkpoint(run, tmp_path / "hf")

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.fsync", fail)
    (tmp_path / "base" / "checkpoints").mkdir(parents=True)
    assert isinstance(call("from-hf", tmp_path / "hf", tmp_path / "base").exception, MeshwrightError)
    assert list((tmp_path / "base" / "checkpoints").iterdir()) == []


def test_a_checkpoint_without_a_model_description_is_refused(tmp_path: Path):
    with pytest.raises(BadInput, match="no section `model`"):
        export_checkpoint(save(tmp_path, 1), tmp_path / "hf")
    for text, message in (
        (": :", "not YAML"),
        ("model: {layers: many}", "expected the dimensions"),
        ("[1]", "no section"),
    ):
        path = CheckpointStore(tmp_path / "one").save(1, tensors(1), {}, {"config.yaml": text}, overwrite=True).path
        with pytest.raises(BadInput, match=message):
            export_checkpoint(path, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_list_and_verify_print_one_object_and_end_with_the_code_of_damage(run: Path):
    good = call("verify", run, "--json")
    checkpoints = json.loads(good.stdout)["checkpoints"]
    assert good.exit_code == 0 and [checkpoint["ok"] for checkpoint in checkpoints] == [True, True]
    assert set(checkpoints[0]) == {"path", "step", "committed", "ok", "damaged"}
    corrupt(run / "checkpoints" / step_name(20))
    assert [checkpoint["ok"] for checkpoint in json.loads(call("list", run, "--json").stdout)["checkpoints"]] == [
        True,
        True,
    ]
    bad = call("verify", run, "--json")
    assert bad.exit_code == 4 and step_name(20) in bad.stderr
    assert json.loads(bad.stdout)["checkpoints"][1]["damaged"] == [
        {"file": "tensors-00000.safetensors", "offset": 0, "kind": "digest"}
    ]


def test_text_output_has_a_line_for_each_checkpoint_and_each_damage(run: Path):
    (run / "checkpoints" / step_name(10) / "COMMITTED").unlink()
    corrupt(run / "checkpoints" / step_name(20))
    printed = call("verify", run).stdout
    assert "never committed, not loaded" in printed and "DAMAGED" in printed
    assert "tensors-00000.safetensors: digest in the 16 MiB from byte 0" in printed
    assert "DAMAGED" not in call("list", run).stdout


def test_conversion_commands(run: Path, tmp_path: Path):
    assert call("to-hf", run / "checkpoints" / step_name(10), tmp_path / "hf", "--dtype", "fp32").exit_code == 0
    imported = call("from-hf", tmp_path / "hf", tmp_path / "base")
    assert imported.exit_code == 0 and imported.stdout == ""
    assert call("verify", tmp_path / "base").exit_code == 0
    assert isinstance(call("list", tmp_path / "bas").exception, BadInput)
    for command in ("list", "verify", "to-hf", "from-hf"):
        assert "Example" in call(command, "--help").stdout


def test_an_export_has_few_rows_in_memory_at_a_time(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []
    read_rows = CheckpointReader.read_rows

    def measured(reader: CheckpointReader, name: str, start: int, stop: int) -> torch.Tensor:
        rows = read_rows(reader, name, start, stop)
        sizes.append(rows.nbytes)
        return rows

    monkeypatch.setattr(CheckpointReader, "read_rows", measured)
    monkeypatch.setattr(CheckpointReader, "read", lambda reader, name: pytest.fail(f"{name} is read whole"))
    monkeypatch.setattr(hf, "SLICE_BYTES", 100)
    export_checkpoint(run, tmp_path / "hf", dtype="fp32")
    assert 0 < max(sizes) <= 100 and sum(sizes) == sum(tensor.nbytes for tensor in weights(20).values())
    _, reader = import_hf(tmp_path / "hf")
    assert all(
        torch.equal(reader.read(parameter), weights(20)[f"model.{parameter.name}"]) for parameter in parameters(SPEC)
    )


def test_the_average_of_the_weights_is_exported_on_request(run: Path, tmp_path: Path) -> None:
    store = CheckpointStore(run / "checkpoints")
    averages = {name.replace("model.", "ema."): tensor for name, tensor in weights(7).items()}
    config = (run / "checkpoints" / step_name(20) / "config.yaml").read_text()
    with pytest.raises(BadInput, match=r"sets no train\.ema_decay"):
        export_checkpoint(run, tmp_path / "none", average=True)
    store.save(30, weights(30) | averages, {"step": 30, "tokens": 480}, {"config.yaml": config})
    assert call("to-hf", run, tmp_path / "hf", "--dtype", "fp32", "--ema").exit_code == 0
    _, reader = import_hf(tmp_path / "hf")
    assert all(torch.equal(reader.read(p), weights(7)[f"model.{p.name}"]) for p in parameters(SPEC))
