"""GPU: updates wait for the copies of a snapshot, group by group, and a run continues from an asynchronous checkpoint."""

from __future__ import annotations

import gc
import mmap
import shutil
from pathlib import Path

import pytest
import torch
from tests.gpu.runs import LAYOUT_BOUND, RUNS_LIMIT, needs, steps, trained
from tests.gpu.test_offload import RUN, same_figures

from meshwright.checkpoint.memory.snapshot_buffer import DATA_OFFSET, SnapshotBuffer
from meshwright.checkpoint.ranks import RankGroup
from meshwright.checkpoint.write import staging
from meshwright.checkpoint.write.checksum import BufferChecksums
from meshwright.checkpoint.write.layout import plan_layout
from meshwright.checkpoint.write.staging import PIN_BYTES, PinnedSnapshotBuffer, Stager
from meshwright.state.parts import StateParts

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(RUNS_LIMIT)]


SIZES = {"a": PIN_BYTES // 4 + 1000, "b": 37, "c": 3 * PIN_BYTES // 8, "d": 100_003}
"""fp32 values of each tensor."""


@pytest.fixture(scope="module")
def buffer() -> SnapshotBuffer:
    return SnapshotBuffer.create(4 * sum(SIZES.values()))


@pytest.fixture(scope="module")
def pinned(buffer: SnapshotBuffer) -> PinnedSnapshotBuffer:
    """One for all tests, because locking pages takes long."""
    pinned = PinnedSnapshotBuffer(buffer, torch.device("cuda"))
    pinned.prepare()
    return pinned


@pytest.mark.parametrize("queued", [staging.QUEUED_COPIES, 0], ids=["at once", "by a thread"])
def test_updates_behind_the_copies_do_not_reach_the_snapshot(
    queued: int, buffer: SnapshotBuffer, pinned: PinnedSnapshotBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors larger than a page-locked part, one of them in host memory; five snapshots into the same snapshot buffer.

    From the third snapshot on, more and more groups are first copied within device memory. The checksums, taken on the device, are those
    of the snapshot buffer; one tensor begins within an 8-byte word.
    """
    monkeypatch.setattr(staging, "QUEUED_COPIES", queued)
    monkeypatch.setattr(staging, "COPIES_AHEAD", 2)
    device = torch.device("cuda")
    tensors = {name: torch.zeros(size, device="cpu" if name == "d" else device) for name, size in SIZES.items()}
    tensors["c"] = torch.zeros(SIZES["c"] + 1, device=device)[1:]
    layout = plan_layout(RankGroup(None), {name: StateParts.of_whole(name, tensor) for name, tensor in tensors.items()})
    assert layout.bytes == 4 * sum(SIZES.values())
    parameter_of = {name: name for name in SIZES}  # every stored tensor is a parameter itself
    stager = Stager(layout, pinned, [["a", "b"], ["d"], ["c"]], parameter_of)
    for step in range(1, 6):
        for tensor in tensors.values():
            tensor.fill_(step)
        buffer.begin_snapshot()
        stager.from_device.buffer_first_groups(max(0, step - 2))
        copies = stager.start()
        for group in copies.groups:
            copies.wait(group)
            for name in group:
                tensors[name].fill_(-step)
        copies.join()
        assert copies.device_seconds is not None and copies.device_seconds > 0
        buffer.complete_snapshot()
        assert torch.all(pinned.data.view(torch.float32) == step), step
        keys, sizes_in_file = (
            [piece.name for piece in layout.pieces],
            [piece.end - piece.start for piece in layout.pieces],
        )
        checksums = BufferChecksums(keys, sizes_in_file, copies.checksums)
        checksums.add(0, buffer.data[: layout.bytes])
        checksums.check()
        assert {checksum.phase for checksum in copies.checksums} == {0, 4}
    torch.cuda.synchronize()
    assert all(torch.all(tensor == -5) for tensor in tensors.values())


@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_a_run_continues_from_an_asynchronous_checkpoint(tmp_path: Path, offload: str) -> None:
    """Two runs of six steps, one of them saved beside training, continue to the ninth with equal figures."""
    common = ["checkpoint.at_end=true", f"plan.offload={offload}"]
    records = []
    for mode in ("sync", "async"):
        trained(tmp_path, RUN, mode, 1, (*common, f"checkpoint.mode={mode}"))
        records.append(steps(trained(tmp_path, RUN, mode, 1, (*common, f"checkpoint.mode={mode}", "train.steps=9"))))
    synchronous, asynchronous = records
    assert [step["step"] for step in asynchronous] == list(range(1, 10))
    assert same_figures(asynchronous, synchronous)


def test_pages_of_a_dropped_buffer_are_no_pinned_memory() -> None:
    """Memory that takes the addresses of a snapshot buffer that is gone holds what is copied to it, as any pageable memory."""
    size, buffer = 1 << 27, SnapshotBuffer.create(1 << 27)
    pinned = PinnedSnapshotBuffer(buffer, torch.device("cuda"))
    pinned.prepare()
    address = pinned.data.data_ptr()
    assert pinned.data.is_pinned()
    del pinned, buffer
    gc.collect()
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    # The kernel places a mapping of the same size at the addresses that became free.
    pages = [torch.frombuffer(mmap.mmap(-1, size + DATA_OFFSET), dtype=torch.uint8) for _ in range(4)]
    assert any(page.data_ptr() <= address < page.data_ptr() + size for page in pages)
    for page in pages:
        assert not page.is_pinned()
        page[:size].copy_(source)
        assert torch.equal(page[:size], source.cpu())


def test_replicas_exchange_the_blocks_of_a_checkpoint_over_nccl(tmp_path: Path) -> None:
    """A checkpoint of one rank is loaded by two replicas, each of which reads half."""
    needs(2)
    common = ["checkpoint.every=2", "checkpoint.keep=5", "plan.compute=bf16"]
    one_rank = steps(trained(tmp_path, RUN, "run", 1, common))
    # Only the checkpoint of step 2 remains, so that the second run has steps to repeat.
    checkpoints = tmp_path / "run" / "checkpoints"
    assert {"step-00000002", "step-00000004"} <= {folder.name for folder in checkpoints.iterdir()}
    for folder in checkpoints.glob("step-*"):
        if folder.name != "step-00000002":
            shutil.rmtree(folder)
    continued = steps(trained(tmp_path, RUN, "run", 2, (*common, "plan.replicate=2")))
    assert [step["step"] for step in continued] == list(range(1, 7))
    assert [step["loss"] for step in continued] == pytest.approx([step["loss"] for step in one_rank], rel=LAYOUT_BOUND)
