from __future__ import annotations

import logging
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from meshwright.checkpoint.format.manifest import COMMITTED, step_name
from meshwright.checkpoint.read.reader import CheckpointReader
from meshwright.checkpoint.store import CheckpointStore
from meshwright.spec.errors import BadInput, Damaged, OutOfResources
from tests.checkpoint.made import TEXTS, blank, holds, same, save, tensors

SHARD = "tensors-00000.safetensors"


def damage(path: Path) -> None:
    data = bytearray((path / SHARD).read_bytes())
    data[-1] ^= 1
    (path / SHARD).write_bytes(data)


def test_a_deleted_run_folder_is_not_created_again(tmp_path: Path):
    """Its disk may be unmounted: what is written there now would lie on another."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    with pytest.raises(
        OutOfResources, match="run no longer exists: it was deleted or moved during the run, or its disk was unmounted"
    ):
        save(tmp_path, 1, store)
    assert not (tmp_path / "run").exists()


def test_loaded_tensors_equal_the_saved_tensors(tmp_path: Path):
    (tmp_path / "run").mkdir()
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert store.newest_good() is None
    state = {"step": 100, "tokens": 2**53 + 1, "lr": 0.1 + 0.2, "mix": {"a": [1, None, True, "ä"]}}
    saved = store.save(100, tensors(1), state, TEXTS)
    assert saved.path == tmp_path / "run" / "checkpoints" / "step-00000100" and saved.written
    assert (
        saved.bytes
        == sum(file.stat().st_size for file in saved.path.iterdir())
        - 33
        - (saved.path / "manifest.json").stat().st_size
    )
    loaded = blank()
    assert store.load(saved.path, loaded) == state
    assert same(loaded, tensors(1))
    assert (saved.path / "config.yaml").read_text() == TEXTS["config.yaml"]
    assert store.newest_good() == saved.path


def test_a_one_rank_checkpoint_is_a_plain_safetensors_file(tmp_path: Path):
    assert same(safetensors.torch.load_file(save(tmp_path, 4) / SHARD), tensors(4))


def test_parameters_with_gradients_and_views_are_filled_in_place(tmp_path: Path):
    path = CheckpointStore(tmp_path).save(1, {"w": torch.arange(6.0).reshape(2, 3)}, {}, {}).path
    parameter = torch.nn.Parameter(torch.zeros(3, 2).t())
    address = parameter.data_ptr()
    CheckpointStore(tmp_path).load(path, {"w": parameter})
    assert parameter.data_ptr() == address and parameter.requires_grad
    assert torch.equal(parameter.detach(), torch.arange(6.0).reshape(2, 3))


def test_an_intact_checkpoint_of_the_same_step_is_not_rewritten(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    path = save(tmp_path, 1, store)
    second_save = store.save(1, tensors(2), {"other": 1}, {})
    assert not second_save.written and second_save.path == path and holds(path, 1)
    store.save(1, tensors(2), {"step": 2, "samples": 16}, TEXTS, overwrite=True)
    assert holds(path, 2)
    assert [file.name for file in tmp_path.iterdir()] == [step_name(1)]


def test_a_step_that_is_damaged_or_never_committed_is_written_again(tmp_path: Path):
    path = save(tmp_path, 1)
    damage(path)
    assert CheckpointStore(tmp_path).save(1, tensors(1), {"step": 1, "samples": 8}, TEXTS).written
    assert holds(path, 1)
    (path / COMMITTED).unlink()
    assert CheckpointStore(tmp_path).save(1, tensors(1), {"step": 1, "samples": 8}, TEXTS).written
    assert holds(path, 1)


def test_the_newest_good_one_is_taken_and_each_damaged_one_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    paths = [save(tmp_path, step) for step in (1, 2, 3, 4)]
    damage(paths[1])
    (paths[2] / "plan.yaml").unlink()
    (paths[3] / COMMITTED).unlink()
    store = CheckpointStore(tmp_path)
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        assert store.newest_good() == paths[0]
        assert store.newest_good() == paths[0]
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("meshwright")]
    assert len(messages) == 3
    assert [name for name, text in zip((COMMITTED, "plan.yaml", SHARD), messages, strict=True) if name in text] == [
        COMMITTED,
        "plan.yaml",
        SHARD,
    ]


def test_damage_after_verification_is_still_found_by_the_load(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    path = save(tmp_path, 1, store)
    assert store.newest_good() == path
    damage(path)
    with pytest.raises(Damaged, match=SHARD):
        store.load(path, blank())
    with pytest.raises(Damaged, match="COMMITTED: missing"):
        (path / COMMITTED).unlink()
        store.load(path, blank())


def test_nothing_is_pickled_or_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("pickle was used")

    for name in ("load", "loads", "Unpickler", "dump", "dumps", "Pickler"):
        monkeypatch.setattr(pickle, name, refuse)
    for name in ("load", "save"):
        monkeypatch.setattr(torch, name, refuse)
    path = save(tmp_path, 5)
    assert holds(path, 5)
    with CheckpointReader(path) as reader:
        assert torch.equal(reader.read("model.embed.weight"), tensors(5)["model.embed.weight"])


def test_missing_and_unexpected_names_are_reported(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    path = save(tmp_path, 1, store)
    tensors = blank()
    tensors["model.embed.weigth"] = tensors.pop("model.embed.weight")
    with pytest.raises(BadInput, match=r"no model\.embed\.weigth; nearest to the first: model\.embed\.weight"):
        store.load(path, tensors)
    tensors = blank()
    del tensors["optimizer.mask"], tensors["optimizer.count"]
    with pytest.raises(BadInput, match=r"optimizer\.count, optimizer\.mask too"):
        store.load(path, tensors)


def test_the_models_part_alone_is_loaded_by_prefix(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    path = save(tmp_path, 1, store)
    model_tensors = {name: tensor for name, tensor in blank().items() if name.startswith("model.")}
    with pytest.raises(BadInput, match="for which no rank gave a tensor"):
        store.load(path, model_tensors)
    store.load(path, model_tensors, prefix="model.")
    assert same(model_tensors, {name: tensors(1)[name] for name in model_tensors})
    with pytest.raises(BadInput, match="does not start with 'model.', the prefix"):
        store.load(path, blank(), prefix="model.")


def test_shapes_and_dtypes_must_agree(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    path = store.save(1, {"w": torch.randn(3, 2)}, {}, {}).path
    with pytest.raises(BadInput, match=r"w is stored with shape \(3, 2\); the tensor to fill has \(2, 3\)"):
        store.load(path, {"w": torch.zeros(2, 3)})
    with pytest.raises(BadInput, match="w is stored as F32; the tensor to fill is BF16"):
        store.load(path, {"w": torch.zeros(3, 2, dtype=torch.bfloat16)})
    with pytest.raises(BadInput, match="meta"):
        store.load(path, {"w": torch.zeros(3, 2, device="meta")})
    rounded, exact = torch.zeros(3, 2, dtype=torch.bfloat16), torch.zeros(3, 2)
    store.load(path, {"w": rounded}, convert=True)
    store.load(path, {"w": exact})
    assert torch.equal(rounded, exact.bfloat16())


@pytest.mark.parametrize(
    ("tensors", "state", "texts", "message"),
    [
        ({"w": 3}, {}, {}, "w is a int"),
        ({"w": b"bytes"}, {}, {}, "w is a bytes"),
        ({"w": torch.zeros(2, dtype=torch.complex64)}, {}, {}, "complex64"),
        ({"w": torch.zeros(2, device="meta")}, {}, {}, "meta"),
        ({}, {"loss": float("nan")}, {}, r"state\.loss is nan"),
        ({}, {"a": [{"b": (1, 2)}]}, {}, r"state\.a\[0\]\.b is a tuple"),
        ({}, {"a": {1: 2}}, {}, r"state\.a: key 1 is not text"),
        ({}, {}, {"../x": ""}, "plain file name"),
        ({}, {}, {"manifest.json": ""}, "plain file name"),
        ({}, {}, {"x.safetensors": ""}, "plain file name"),
    ],
)
def test_unsupported_state_is_refused_before_anything_is_written(
    tmp_path: Path, tensors: dict[str, Any], state: dict[str, Any], texts: dict[str, str], message: str
):
    with pytest.raises(BadInput, match=message):
        CheckpointStore(tmp_path / "run").save(1, tensors, state, texts)
    assert not (tmp_path / "run").exists()


def test_a_disk_too_small_is_reported_before_writing_with_both_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(tmp_path, 1)
    usage = shutil._ntuple_diskusage(10**9, 10**9 - 12345, 12345)  # type: ignore[attr-defined]  # disk_usage's own type
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OutOfResources, match=r"needs 1,000,\d{3} bytes and 12,345 are free"):
        save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == [step_name(1)]


def test_retention_keeps_the_newest_and_deletes_unfinished_saves(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    for step in range(1, 6):
        save(tmp_path, step, store)
    (tmp_path / ".step-00000009.ab12.partial").mkdir()
    (tmp_path / ".deleted-step-00000001.ab12").mkdir()
    (tmp_path / "step-00000009").mkdir()
    assert store.retain(2) == [tmp_path / step_name(step) for step in (1, 2, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [step_name(4), step_name(5), step_name(9)]
    with pytest.raises(BadInput, match="at least 1"):
        store.retain(0)


def test_retention_never_deletes_the_newest_good_one(tmp_path: Path):
    paths = [save(tmp_path, step) for step in (1, 2, 3, 4)]
    damage(paths[2])
    damage(paths[3])
    assert CheckpointStore(tmp_path).retain(1) == [paths[0], paths[2]]
    assert CheckpointStore(tmp_path).newest_good() == paths[1]


def test_spans_are_reported(tmp_path: Path):
    from meshwright.events.span import NullRecorder

    class Seen(NullRecorder):
        names: list[str] = []

        def span(self, name: str, lane: str = "step") -> Any:
            self.names.append(f"{lane}/{name}")
            return super().span(name, lane)

    store = CheckpointStore(tmp_path, recorder=Seen())
    store.load(save(tmp_path, 1, store), blank())
    assert Seen.names == ["checkpoint/write", "checkpoint/commit", "checkpoint/read"]
