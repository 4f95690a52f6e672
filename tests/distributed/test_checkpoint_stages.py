"""Checkpoints with pipeline plans: ranks have different tensors, and any plan loads the checkpoint of any other plan."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from meshwright.checkpoint.format.verify import verify
from meshwright.checkpoint.models.convert import export_checkpoint
from meshwright.checkpoint.models.hf import import_hf
from meshwright.cli.checkpoint import app
from meshwright.config.load import resolved_yaml
from meshwright.models.decoder import Decoder
from meshwright.parallel.apply import local_weights
from meshwright.spec.fields import from_plain, to_plain
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec, parameters
from meshwright.spec.run import ModelSection, RunSpec
from meshwright.training.run_state import load_initial
from tests.checkpoint.made import stored
from tests.distributed import cases_checkpoint_stages as cases
from tests.distributed.pool import Pool
from tests.slow import quick_first

ORDER = list(cases.LAYOUTS)
LOADED_BY_ALL = ("pipeline2_shard2", "shard4")


@pytest.mark.parametrize(
    "saved_plan", quick_first(5, sorted(ORDER, key=lambda name: (name != "pipeline2_shard2", name == "shard4")))
)
def test_every_plan_loads_every_other_bit_for_bit_and_reads_each_byte_once(pool: Pool, tmp_path: Path, saved_plan: str):
    (path, *_) = pool.run(cases.save, cases.LAYOUTS[saved_plan].size, str(tmp_path), saved_plan, 7)
    assert verify(Path(path)) == []
    around = "pipeline2_shard2" if saved_plan != "pipeline2_shard2" else "shard4"
    reads = ORDER if saved_plan in LOADED_BY_ALL else [saved_plan, around]
    for loaded_plan in reads:
        answers = pool.run(cases.load, cases.LAYOUTS[loaded_plan].size, path, loaded_plan)
        assert all(answer["equal"] and answer["whole"] for answer in answers), loaded_plan
        total = sum((Counter(answer["read"]) for answer in answers), Counter())
        assert total == {file.name: file.stat().st_size for file in Path(path).iterdir()}, loaded_plan


def test_a_tied_embedding_is_written_once_by_the_same_ranks_each_time(pool: Pool, tmp_path: Path):
    (single, *_) = pool.run(cases.save, 1, str(tmp_path / "one"), "one", 7)
    paths = [pool.run(cases.save, 4, str(tmp_path / name), "pipeline2_shard2", 7)[0] for name in "ab"]
    first, second = (stored(Path(path)) for path in paths)
    assert first == second and first.keys() == stored(Path(single)).keys()
    assert [(chunk.offsets, chunk.sizes) for chunk in first[cases.EMBED].chunks] == [((0, 0), (7, 5)), ((7, 0), (6, 5))]
    files = [file.read_bytes() for file in Path(paths[0]).glob("*.safetensors")]
    data = [len(file) - 8 - int.from_bytes(file[:8], "little") for file in files]
    assert sum(data) == sum(record.bytes for record in first.values()) and len(data) == 4


def test_copies_on_meshes_of_their_own_are_shared_out(pool: Pool, tmp_path: Path):
    (path, *_) = pool.run(cases.save, 4, str(tmp_path), "shard2_apart", 7)
    sizes = [file.stat().st_size for file in Path(path).glob("*.safetensors")]
    assert len(sizes) == 4 and max(sizes) < 1.5 * min(sizes)


def test_a_rank_that_holds_nothing_takes_part(pool: Pool, tmp_path: Path):
    (path, *_) = pool.run(cases.save, 4, str(tmp_path), "pipeline4_empty", 7)
    files = sorted(file.name for file in Path(path).glob("*.safetensors"))
    assert "tensors-00002.safetensors" not in files and len(files) == 3


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        ("missing piece", "model.layers.2.weight of shape (7, 5): 15 of its 35 elements are held by no rank; rank 2"),
        ("missing with rows", "model.norm.weight of shape (5,): 3 of its 5 elements are held by no rank; rank 3"),
        ("only an empty shard", "model.extra of shape (1, 5): 5 of its 5 elements are held by no rank; no rank holds"),
        ("only outside its mesh", "rank 0 passes model.extra but is not in its device mesh"),
        ("overlap at the same row", "rank 0 holds (7, 5) at (0, 0) and rank 2 holds (13, 5) at (0, 0); pieces must"),
        ("overlap in the middle", "model.embed.weight of shape (13, 5): rank 0 holds (7, 5) at (0, 0) and rank 2"),
        ("another shape", "is F32 of shape (13, 5) on rank 0 and F32 of shape (13, 6) on rank 2"),
        ("another dtype", "is F32 of shape (3, 5) on rank 0 and BF16 of shape (3, 5) on rank 1"),
        ("unreduced", "model.norm.weight is a sum that is not reduced over its ranks yet"),
    ],
)
def test_pieces_that_do_not_make_whole_tensors_are_refused_before_anything_is_visible(
    pool: Pool, tmp_path: Path, breakage: str, message: str
):
    answers = pool.run(cases.broken_save, 4, str(tmp_path), breakage)
    assert len(set(answers)) == 1 and answers[0].startswith("BadInput: rank ")
    assert "saving step 1: " in answers[0] and message in answers[0]
    assert list(tmp_path.iterdir()) == []


def test_one_stages_full_disk_is_every_ranks_error(pool: Pool, tmp_path: Path):
    pool.run(cases.save, 4, str(tmp_path), "pipeline2_shard2", 1)
    answers = pool.run(cases.failing_save, 4, str(tmp_path))
    assert len(set(answers)) == 1 and answers[0].startswith("OutOfResources: rank 3 of 4: saving step 2")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_names_that_are_missing_on_one_rank_or_requested_by_no_rank_are_reported(pool: Pool, tmp_path: Path):
    (path, *_) = pool.run(cases.save, 4, str(tmp_path), "pipeline2_shard2", 1)
    answers = pool.run(cases.load_other_names, 4, path, 2, "model.layers.9.weight", None)
    assert len(set(answers)) == 1 and answers[0].startswith("BadInput: rank 2 of 4: ")
    assert "has no model.layers.9.weight; nearest to the first: model.layers." in answers[0]
    answers = pool.run(cases.load_other_names, 4, path, 0, None, "model.layers.1.bias")
    assert len(set(answers)) == 1 and "has model.layers.1.bias too, for which no rank gave a tensor" in answers[0]


def test_no_tensor_travels_between_ranks(pool: Pool, tmp_path: Path):
    assert all(0 < size < 20_000 for size in pool.run(cases.messages, 4, str(tmp_path)))


def test_fsdp_stages_load_into_one_fsdp_model(pool: Pool, tmp_path: Path):
    assert pool.run(cases.fsdp_stages, 4, str(tmp_path)) == [True] * 4


def test_what_stages_wrote_is_read_from_files_alone(pool: Pool, tmp_path: Path):
    """Verification, the Hugging Face export and `model.init: checkpoint:` need no ranks and no Plan."""
    spec = ModelSpec(
        family="qwen3",
        layers=2,
        hidden=8,
        heads=2,
        kv_heads=1,
        head_dim=4,
        ffn_hidden=6,
        vocab_size=27,
        max_seq_len=16,
        qk_norm=True,
        tied=True,
    )
    train = TrainSpec(steps=9, global_batch=4, seq_len=16)
    config = resolved_yaml(RunSpec(name="staged", model=from_plain(ModelSection, to_plain(spec)), train=train))
    (tmp_path / "staged").mkdir()
    (saved, *_) = pool.run(cases.save_model, 4, str(tmp_path / "staged" / "checkpoints"), spec, config)
    run, weights = tmp_path / "staged", cases.model_values(spec)
    assert CliRunner().invoke(app, ["verify", str(run)]).exit_code == 0
    assert len(list(Path(saved).glob("*.safetensors"))) == 4
    assert export_checkpoint(run, tmp_path / "hf", dtype="fp32") == Path(saved)
    exported, reader = import_hf(tmp_path / "hf")
    assert exported == spec
    assert all(
        torch.equal(reader.read(parameter), weights[f"model.{parameter.name}"]) for parameter in parameters(spec)
    )
    model = Decoder(spec)
    load_initial(local_weights(model), spec, f"checkpoint:{run}")
    assert all(torch.equal(weight.detach(), weights[f"model.{name}"]) for name, weight in model.named_parameters())
