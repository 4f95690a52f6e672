"""Resume from the memory of hosts in one process: a rank that is left loads what two ranks have saved."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash

from meshwright.checkpoint.format.files import BLOCK_BYTES, FileRecord
from meshwright.checkpoint.memory.file_image import FileImage
from meshwright.checkpoint.memory.record import SnapshotRecord
from meshwright.checkpoint.memory.snapshot_buffer import BUFFER_VARIABLE, SnapshotBuffer, empty_memory
from meshwright.checkpoint.memory.snapshots import SnapshotMemory
from meshwright.checkpoint.memory.tier import MemorySnapshot, find_snapshot
from meshwright.checkpoint.memory.transport import SERVER_VARIABLE, SnapshotClient
from meshwright.checkpoint.ranks import RankGroup
from meshwright.events.span import NullRecorder
from meshwright.spec.errors import Damaged
from meshwright.spec.job_token import TOKEN_VARIABLE
from tests.checkpoint.test_snapshot_transport import TOKEN, host

PART_HEIGHT, COLUMNS = 1100, 4096
"""Of the part of each rank: its file has two blocks."""
WHOLE = torch.arange(2 * PART_HEIGHT * COLUMNS, dtype=torch.float32).view(2 * PART_HEIGHT, COLUMNS)
CONTENTS = {
    "weight": {
        "shape": [2 * PART_HEIGHT, COLUMNS],
        "dtype": "F32",
        "chunks": [
            {
                "offsets": [PART_HEIGHT * rank, 0],
                "sizes": [PART_HEIGHT, COLUMNS],
                "file": f"tensors-{rank:05d}.safetensors",
                "key": "part",
            }
            for rank in range(2)
        ],
    }
}
HEADERS = [["part", "F32", [PART_HEIGHT, COLUMNS]]]


def record(rank: int, file: FileRecord | None) -> SnapshotRecord:
    contents, state = (CONTENTS, '{"step": 10}') if rank == 0 else ({}, None)
    return SnapshotRecord("run", "1-100000001", 10, rank, 2, HEADERS, file, contents, state)


def image(rank: int) -> FileImage:
    part = WHOLE[PART_HEIGHT * rank : PART_HEIGHT * (rank + 1)]
    return FileImage(HEADERS, memoryview(bytearray(part.numpy().tobytes())))


def complete_record(rank: int) -> SnapshotRecord:
    snapshot = image(rank)
    blocks = tuple(xxhash.xxh3_64(snapshot.block(index)).hexdigest() for index in range(snapshot.blocks))
    return record(rank, FileRecord(snapshot.bytes, blocks))


def fill_buffer(rank: int, replica: int | None = None) -> str:
    """The path of a snapshot buffer with the snapshot of `rank`, and that of `replica` behind it."""
    path, written = f"/proc/self/fd/{empty_memory()}", [rank] if replica is None else [rank, replica]
    data = b"".join(image(each).data for each in written)
    with closing(SnapshotBuffer.create(len(data), {BUFFER_VARIABLE: path})) as buffer:
        generation = buffer.begin_snapshot()
        buffer.data[: len(data)] = data
        buffer.complete_snapshot()
        of_replica = None if replica is None else complete_record(replica)
        buffer.write_record(replace(complete_record(rank), replica=of_replica).encode(), generation)
    return path


@pytest.mark.parametrize("own", [0, 1])
def test_one_rank_loads_its_own_snapshot_and_the_copy_of_a_lost_host(
    own: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The rank that is left is rank 0 now, whichever it was; it has its own snapshot in its snapshot buffer, and a copy of the other."""
    (tmp_path / "token").touch(mode=0o600)
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setenv(TOKEN_VARIABLE, str(tmp_path / "token"))
    monkeypatch.setenv(BUFFER_VARIABLE, fill_buffer(own))
    ranks, other = RankGroup(None), 1 - own
    with host() as (address, slots):
        monkeypatch.setenv(SERVER_VARIABLE, address)
        assert find_snapshot(ranks, "run") is None, "the other rank's snapshot is missing"
        with closing(SnapshotClient(address, TOKEN)) as client:
            client.store(
                record(other, None).name, image(other), lambda file: record(other, file).encode(), bytes_per_second=1e12
            )
        tensors = {"weight": torch.zeros_like(WHOLE)}
        with closing(open_snapshot_of_run(ranks)) as snapshot:
            assert (snapshot.tier, snapshot.step, snapshot.readers) == ("partner memory", 10, (0, 0))
            snapshot.verify(ranks)
            assert snapshot.load(ranks, tensors, NullRecorder()) == {"step": 10}
        assert torch.equal(tensors["weight"], WHOLE)
        copy = SnapshotBuffer.of_last_process({BUFFER_VARIABLE: slots[0]})
        assert copy is not None
        copy.data[BLOCK_BYTES + 5] ^= 1
        with (
            closing(open_snapshot_of_run(ranks)) as snapshot,
            pytest.raises(Damaged, match=f"tensors-{other:05d}.*byte {BLOCK_BYTES:,}"),
        ):
            snapshot.load(ranks, tensors, NullRecorder())
        assert find_snapshot(ranks, "run") is None, "the snapshot buffer is not offered again"


@pytest.mark.parametrize("own", [0, 1])
def test_one_rank_loads_its_own_snapshot_and_that_of_its_replica_from_its_buffer(
    own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ranks, other = fill_buffer(own, replica=1 - own), RankGroup(None), 1 - own
    names = [record(rank, None).name for rank in (own, other)]
    memory = SnapshotMemory([path], [])
    assert memory.names() == ([names[0]], [names[1]]) and memory.path(names[1]) == path
    for name in names:
        opened = memory.open(name)
        assert opened is not None and opened.record.name == name and opened.image.data == image(name.rank).data
    monkeypatch.setenv(BUFFER_VARIABLE, path)
    tensors = {"weight": torch.zeros_like(WHOLE)}
    with closing(open_snapshot_of_run(ranks)) as snapshot:
        assert (snapshot.tier, snapshot.step, snapshot.readers) == ("partner memory", 10, (0, 0))
        assert snapshot.load(ranks, tensors, NullRecorder()) == {"step": 10}
    assert torch.equal(tensors["weight"], WHOLE)
    buffer = SnapshotBuffer.of_last_process()
    assert buffer is not None
    buffer.data[buffer.size - 5] ^= 1
    with closing(open_snapshot_of_run(ranks)) as snapshot, pytest.raises(Damaged, match=f"tensors-{other:05d}"):
        snapshot.verify(ranks)
    assert find_snapshot(ranks, "run") is None, "the snapshot buffer is not offered again"


def open_snapshot_of_run(ranks: RankGroup) -> MemorySnapshot:
    snapshot = find_snapshot(ranks, "run")
    assert snapshot is not None
    return snapshot
