"""Checkpoints on several ranks: any layout loads into any other, and every rank hears of every failure."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.format.files import BLOCK_BYTES
from tests.checkpoint.made import stored
from tests.distributed import cases_checkpoint as cases
from tests.distributed.pool import Pool
from tests.slow import quick_first

PAIRS = [
    ("one", "rows4"),
    ("rows2", "rows4"),
    ("rows4", "rows2"),
    ("rows4", "one"),
    ("hsdp2x2", "rows2"),
    ("rows2", "hsdp2x2"),
    ("grid2x2", "columns4"),
    ("columns4", "grid2x2"),
    ("copies2", "rows4"),
    ("hsdp2x2", "copies2"),
    ("rows4", "rows4"),
]


@pytest.mark.parametrize(("saved_layout", "loaded_layout"), PAIRS)
def test_any_layout_loads_into_any_other_bit_for_bit(pool: Pool, tmp_path: Path, saved_layout: str, loaded_layout: str):
    saved = pool.run(cases.save, cases.LAYOUTS[saved_layout].ranks, str(tmp_path), saved_layout, 7)
    assert all(checkpoint == saved[0] for checkpoint in saved)
    assert pool.run(cases.load, cases.LAYOUTS[loaded_layout].ranks, str(tmp_path), loaded_layout) == [
        {"seed": 7, "equal": True, "whole": True} for _ in range(cases.LAYOUTS[loaded_layout].ranks)
    ]


def test_copies_are_written_once_and_shared_out(pool: Pool, tmp_path: Path):
    (single, *_) = pool.run(cases.save, 1, str(tmp_path / "one"), "one", 7)
    (copies, *_) = pool.run(cases.save, 2, str(tmp_path / "copies"), "copies2", 7)
    (hsdp, *_) = pool.run(cases.save, 4, str(tmp_path / "hsdp"), "hsdp2x2", 7)
    shards = [
        [name for name in checkpoint["files"] if name.endswith(".safetensors")] for checkpoint in (single, copies, hsdp)
    ]
    assert [len(checkpoint) for checkpoint in shards] == [1, 2, 4]
    bytes_of = [
        sum((Path(checkpoint["path"]) / name).stat().st_size for name in names)
        for checkpoint, names in zip((single, copies, hsdp), shards, strict=True)
    ]
    assert max(bytes_of) < 1.7 * min(bytes_of)  # headers aside, nothing is stored twice
    assert (Path(copies["path"]) / "config.yaml").read_text() == "rank: 0"


@pytest.mark.parametrize(
    ("rank", "number", "error_type", "code"), [(1, cases.ENOSPC, "OutOfResources", 3), (0, cases.EIO, "Damaged", 4)]
)
def test_one_ranks_disk_failure_is_every_ranks_error(
    pool: Pool, tmp_path: Path, rank: int, number: int, error_type: str, code: int
):
    pool.run(cases.save, 2, str(tmp_path), "rows2", 1)
    answers = pool.run(cases.failing_save, 2, str(tmp_path), rank, OSError(number, os.strerror(number)))
    assert answers[0] == answers[1]
    assert answers[0][:2] == (error_type, code) and answers[0][2].startswith(f"rank {rank} of 2: saving step 2")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert pool.run(cases.newest, 2, str(tmp_path)) == ["step-00000001"] * 2


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryError()]
)
@pytest.mark.parametrize("planning", [False, True])
def test_a_rank_out_of_memory_while_saving_or_planning_is_every_ranks_error(
    pool: Pool, tmp_path: Path, error: Exception, planning: bool
):
    answers = pool.run(cases.failing_save, 2, str(tmp_path), 1, error, planning)
    assert answers[0] == answers[1]
    assert answers[0][:2] == ("OutOfResources", 3)
    assert (
        answers[0][2].startswith("rank 1 of 2: saving step 2: out of memory: ") and "plan.micro_batch" in answers[0][2]
    )


def test_a_bad_state_on_the_first_rank_is_every_ranks_error(pool: Pool, tmp_path: Path):
    answers = pool.run(cases.unequal_state, 2, str(tmp_path / "run"))
    assert (
        answers[0] == answers[1]
        and answers[0].startswith("BadInput: rank 0 of 2")
        and "state.seed is nan" in answers[0]
    )
    assert not (tmp_path / "run").exists()


def test_ranks_may_hold_different_tensors(pool: Pool, tmp_path: Path):
    assert pool.run(cases.own_names, 2, str(tmp_path)) == [True, True]


def test_ranks_with_nothing_to_write_write_no_file(pool: Pool, tmp_path: Path):
    assert pool.run(cases.one_row, 4, str(tmp_path)) == [["tensors-00000.safetensors"]] * 4
    (record,) = stored(tmp_path / "step-00000001").values()
    assert [chunk.sizes for chunk in record.chunks] == [(1, 3)]


def test_damage_in_any_ranks_file_makes_all_ranks_load_the_older_checkpoint(pool: Pool, tmp_path: Path):
    pool.run(cases.save, 2, str(tmp_path), "rows2", 1)
    pool.run(cases.save, 2, str(tmp_path), "rows2", 2)
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "good")
    for file in ("tensors-00000.safetensors", "tensors-00001.safetensors", "state.json"):
        path = tmp_path / "step-00000002" / file
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 16
        path.write_bytes(data)
        assert pool.run(cases.newest, 2, str(tmp_path)) == ["step-00000001"] * 2
        answers = pool.run(cases.load_error, 2, str(tmp_path), "step-00000002")
        assert answers[0] == answers[1] and answers[0].startswith("Damaged: ") and file in answers[0]
        shutil.copy(tmp_path / "good" / file, path)
    assert pool.run(cases.newest, 2, str(tmp_path)) == ["step-00000002"] * 2


def test_a_folder_that_hosts_do_not_share_is_reported(pool: Pool, tmp_path: Path):
    pool.run(cases.save, 2, str(tmp_path / "0"), "rows2", 1)
    answers = pool.run(cases.unseen, 2, str(tmp_path))
    for answer in answers:
        assert answer.startswith("BadInput: ") and "rank 1 does not see" in answer and "that all hosts share" in answer


def test_the_first_rank_deletes_checkpoints_and_all_ranks_learn_which(pool: Pool, tmp_path: Path):
    assert pool.run(cases.deleted_checkpoints, 2, str(tmp_path)) == [["step-00000001", "step-00000002"]] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize(("ranks", "hidden"), [(2, 7), (4, 2)])
def test_fsdp_parameters_and_moments_come_back_exactly(pool: Pool, tmp_path: Path, ranks: int, hidden: int):
    assert pool.run(cases.fsdp, ranks, str(tmp_path), hidden) == [True] * ranks


@pytest.mark.parametrize(
    ("saved_layout", "loaded_layout", "device_exchange"),
    quick_first(
        1,
        [
            ("rows2", "copies2", False),
            ("columns4", "hsdp2x2", True),
            ("one", "grid2x2", False),
            ("columns4", "hsdp2x2", False),
            ("rows2", "copies2", True),
        ],
        unpack=True,
    ),
)
def test_every_byte_of_files_of_several_blocks_is_read_once_and_passed_on(
    pool: Pool, tmp_path: Path, saved_layout: str, loaded_layout: str, device_exchange: bool
):
    (path, *_) = pool.run(cases.save_large, cases.LAYOUTS[saved_layout].ranks, str(tmp_path), saved_layout)
    answers = pool.run(
        cases.load_large, cases.LAYOUTS[loaded_layout].ranks, str(tmp_path), loaded_layout, device_exchange
    )
    assert all(answer["equal"] for answer in answers)
    total = sum((Counter(answer["read"]) for answer in answers), Counter())
    assert total == {file.name: file.stat().st_size for file in Path(path).iterdir()}
    bytes_read_by_rank = [sum(answer["read"].values()) for answer in answers]
    # Ranks read about equally much of the whole checkpoint: blocks are assigned across files, not within each.
    assert max(bytes_read_by_rank) - min(bytes_read_by_rank) <= 3 * BLOCK_BYTES


@pytest.mark.parametrize(
    ("offset", "device_exchange"),
    quick_first(1, [(20 << 20, False), (20 << 20, True), (100, False), (40 << 20, False)], unpack=True),
)
def test_damage_that_one_rank_reads_makes_all_ranks_load_the_older_checkpoint(
    pool: Pool, tmp_path: Path, offset: int, device_exchange: bool
):
    for step in (1, 2):
        pool.run(cases.save_large, 2, str(tmp_path), "rows2", step)
    file = tmp_path / "step-00000002" / "tensors-00001.safetensors"
    with file.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte[0] ^ 4]))
    answers = pool.run(cases.load_large, 2, str(tmp_path), "copies2", device_exchange)
    assert [(answer["path"], answer["equal"]) for answer in answers] == [("step-00000001", True)] * 2
