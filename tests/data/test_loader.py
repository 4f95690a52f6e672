from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.loader import Loader, MicroBatch, Samples, Windows, open_data
from meshwright.data.source import DataSource, SampleBatch
from meshwright.spec.errors import BadInput, Damaged
from meshwright.spec.job import DataSpec


@pytest.fixture(scope="module")
def source(prepared: Path) -> DataSource:
    return open_data(DataSpec(mix={str(prepared): 1.0}, document_mask=True), seq_len=16, seed=3)


class Counting:
    """A source whose samples are their own global index."""

    document_mask = True

    def begin_step(self, indices: range) -> None:
        """All is well."""

    def samples(self, indices: range) -> SampleBatch:
        array = np.array(indices, dtype=np.int64)[:, None]
        return SampleBatch(array, array, array, array)


def steps_of_all_ranks(
    source: Samples, ranks: int, micro_batch: int, steps: int, start: int = 0, global_batch: int = 8
) -> list[torch.Tensor]:
    """Tokens of each step, the ranks' parts put together in the order of the ranks."""
    loaders = [
        Loader(
            Windows(
                source,
                global_batch=global_batch,
                data_rank=rank,
                data_ranks=ranks,
                micro_batch=micro_batch,
            ),
            start_sample=start,
        )
        for rank in range(ranks)
    ]
    result = [torch.cat([micro.tokens for loader in loaders for micro in next(loader)]) for _ in range(steps)]
    for loader in loaders:
        assert loader.consumed == start + steps * global_batch
        loader.close()
    return result


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 8), (1, 1), (2, 2), (4, 2), (4, 1), (8, 1)])
def test_every_layout_reads_the_same_samples(source: DataSource, ranks: int, micro_batch: int) -> None:
    expected = [torch.from_numpy(source.samples(range(t * 8, t * 8 + 8)).tokens) for t in range(3)]
    actual = steps_of_all_ranks(source, ranks, micro_batch, steps=3)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(1, 3)), min_size=1, max_size=4)
)
@settings(max_examples=15, deadline=None)
def test_any_series_of_resizes_reads_what_one_run_reads(parts: list[tuple[int, int, int]]) -> None:
    first_tokens: list[int] = []
    for ranks, micro_batch, steps in parts:
        tokens = steps_of_all_ranks(Counting(), ranks, micro_batch, steps, start=len(first_tokens))
        first_tokens += torch.cat(tokens)[:, 0].tolist()
    assert first_tokens == list(range(len(first_tokens)))


def test_micro_batches_have_shape_type_and_a_count_of_valid_targets(source: DataSource) -> None:
    with Loader(Windows(source, global_batch=12, data_rank=1, data_ranks=2, micro_batch=3)) as loader:
        step = next(loader)
        assert loader.wait_seconds >= 0
    assert [micro.tokens.shape for micro in step] == [(3, 16), (3, 16)]
    batch = source.samples(range(6, 9))
    for name in ("tokens", "targets", "positions", "documents"):
        tensor = getattr(step[0], name)
        assert tensor.dtype == torch.int64 and torch.equal(tensor, torch.from_numpy(getattr(batch, name)))
    with Loader(Windows(source, global_batch=4, data_rank=0, data_ranks=1, micro_batch=4)) as loader:
        epoch = [next(loader)[0] for _ in range(source.windows // 4 + 1)]
    assert all(micro.valid_tokens == int((micro.targets >= 0).sum()) for micro in epoch)
    assert any(micro.valid_tokens < 64 for micro in epoch)
    assert [micro.attention_work for micro in epoch] == [squared_lengths(micro.documents) for micro in epoch]
    assert len({micro.attention_work for micro in epoch}) > 1


def squared_lengths(documents: torch.Tensor | None) -> int:
    """Pairs of positions in the same document of a sequence: the sum of the squared lengths."""
    assert documents is not None
    return int((documents[:, :, None] == documents[:, None, :]).sum())


def test_without_document_mask_positions_and_documents_are_left_out(prepared: Path) -> None:
    plain = open_data(DataSpec(mix={str(prepared): 1.0}), seq_len=16, seed=3)
    with Loader(Windows(plain, global_batch=2, data_rank=0, data_ranks=1, micro_batch=2)) as loader:
        micro = next(loader)[0]
    assert micro.positions is None and micro.documents is None and micro.valid_tokens == 32
    assert micro.attention_work == 2 * 16**2


def test_an_error_in_the_thread_reaches_the_consumer(source: DataSource) -> None:
    class Broken(Counting):
        def samples(self, indices: range) -> SampleBatch:
            if indices.start >= 8:
                raise Damaged("shard.bin: offset 12: broken")
            return super().samples(indices)

    loader = Loader(Windows(Broken(), global_batch=4, data_rank=0, data_ranks=1, micro_batch=4))
    next(loader), next(loader)
    with pytest.raises(Damaged, match="offset 12"):
        next(loader)
    assert not loader._thread.is_alive()
    with pytest.raises(StopIteration):
        next(loader)


def test_the_thread_ends_when_the_block_does_also_by_an_error(source: DataSource) -> None:
    before = threading.active_count()
    with (
        pytest.raises(ZeroDivisionError),
        Loader(Windows(source, global_batch=4, data_rank=0, data_ranks=1, micro_batch=4)) as loader,
    ):
        next(loader)
        raise ZeroDivisionError
    assert threading.active_count() == before
    loader.close()


@pytest.mark.parametrize("prefetch", [1, 3])
def test_no_more_is_read_ahead_than_asked_for(prefetch: int) -> None:
    class Watched(Counting):
        def __init__(self) -> None:
            self.read: list[int] = []
            self.enough = threading.Event()

        def samples(self, indices: range) -> SampleBatch:
            self.read.append(indices.start)
            if len(self.read) == prefetch + 1:
                self.enough.set()
            return super().samples(indices)

    watched = Watched()
    with Loader(Windows(watched, global_batch=1, data_rank=0, data_ranks=1, micro_batch=1), prefetch=prefetch):
        assert watched.enough.wait(60)
    # `prefetch` steps lie in the queue and one is in the thread's hands; closing makes room for at most one more.
    assert prefetch + 1 <= len(watched.read) <= prefetch + 2


def test_a_batch_that_cannot_be_cut_names_the_nearest(source: DataSource) -> None:
    with pytest.raises(
        BadInput, match=r"global_batch 10: expected a multiple of 2 data ranks x micro-batch 4 \(nearest: 8\)"
    ):
        Loader(Windows(source, global_batch=10, data_rank=0, data_ranks=2, micro_batch=4))


@pytest.mark.gpu
def test_on_a_gpu_the_same_tokens_arrive_on_the_device(source: DataSource) -> None:
    with Loader(Windows(source, global_batch=4, data_rank=0, data_ranks=1, micro_batch=2), device="cuda") as loader:
        for step in range(5):
            micros: list[MicroBatch] = next(loader)
            assert all(micro.tokens.is_cuda for micro in micros)
            together = torch.cat([micro.tokens for micro in micros]).cpu()
            assert torch.equal(together, torch.from_numpy(source.samples(range(step * 4, step * 4 + 4)).tokens))


@pytest.mark.gpu
def test_on_a_gpu_the_host_gets_the_next_step_while_the_device_is_busy(source: DataSource) -> None:
    with Loader(Windows(source, global_batch=4, data_rank=0, data_ranks=1, micro_batch=2), device="cuda") as loader:
        next(loader)
        busy = torch.cuda.Event()
        torch.cuda._sleep(1_000_000_000)  # half a second
        busy.record()
        micros = next(loader)
        assert not busy.query()
        together = torch.cat([micro.tokens for micro in micros]).cpu()
        assert torch.equal(together, torch.from_numpy(source.samples(range(4, 8)).tokens))
