"""Steps of samples of any length: the slots of all ranks hold exactly the documents, in order, for any number of ranks."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.data.indexed import IndexedFile
from meshwright.data.loader import LoadedStep, Loader, open_data
from meshwright.data.sample_steps import SampleSteps
from meshwright.data.show import show_step
from meshwright.data.source import DataSource
from meshwright.data.step_samples import samples_of_token_step
from meshwright.policies.sample_balance import RankPool
from meshwright.policies.sample_time import SampleTime
from meshwright.spec.errors import BadInput, Damaged
from meshwright.spec.job import DataSpec
from tests.data.chats import CHATML, CHATS, marked
from tests.data.test_chat import prepared_chats

LONGEST, TOKENS = 50, 400


@pytest.fixture
def source(prepared: Path) -> DataSource:
    return opened(prepared)


def opened(prepared: Path, seq_len: int = LONGEST) -> DataSource:
    spec = DataSpec(mix={str(prepared): 1.0}, packing="none", document_mask=True)
    return open_data(spec, seq_len=seq_len, seed=3)


def reader(source: DataSource, rank: int, ranks: int, capacity: int = LONGEST) -> SampleSteps:
    pool = RankPool(ranks, capacity, SampleTime(1e-9, 1e-6, 1e-4))
    return SampleSteps(source, tokens=TOKENS, pool=pool, rank=rank)


def texts_of(step: LoadedStep) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(inputs, targets) of each document in a rank's slots, without padding."""
    texts = []
    for micro in step.micro_batches:
        assert micro.targets is not None and micro.documents is not None and micro.slot is not None
        assert micro.valid_tokens == int((micro.targets >= 0).sum()) == micro.slot.tokens
        for number in range(len(micro.slot.parts)):
            where = micro.documents[0] == number
            texts.append((tuple(micro.tokens[0][where].tolist()), tuple(micro.targets[0][where].tolist())))
    return texts


def documents_on_disk(prepared: Path) -> list[tuple[int, ...]]:
    files = [IndexedFile(path.with_suffix("")) for path in sorted((prepared / "train").glob("*.idx"))]
    bounds = [(file, first, last) for file in files for first, last in pairwise(file.document_bounds().tolist())]
    return [tuple(file.read(first, last).tolist()) for file, first, last in bounds]


@pytest.mark.parametrize("seq_len", [7, 50, 1000])
def test_an_epoch_reads_every_document_once_cut_at_the_longest_sample(prepared: Path, seq_len: int) -> None:
    source = opened(prepared, seq_len)
    expected = Counter(
        text[start : start + seq_len + 1]
        for text in documents_on_disk(prepared)
        for start in range(0, len(text) - 1, seq_len)
    )
    read, lengths = source.token_reader(range(source.windows)), source.lengths(range(source.windows)).tolist()
    assert max(lengths) <= seq_len
    samples = Counter(tuple(read(sample, 0, length + 1).tolist()) for sample, length in enumerate(lengths))
    assert samples == expected


def test_lengths_are_known_without_reading_tokens(source: DataSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IndexedFile, "read", lambda *_: pytest.fail("a token was read"))
    assert int(source.lengths(range(500)).sum()) > 0
    assert samples_of_token_step(source, 5, TOKENS)[0] > 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("capacity", [LONGEST, 200])
def test_slots_of_all_ranks_are_the_next_samples_whatever_the_number_of_ranks(
    source: DataSource, ranks: int, capacity: int
) -> None:
    first = 0
    for _ in range(4):
        steps = [reader(source, rank, ranks, capacity).read(first) for rank in range(ranks)]
        lengths = source.lengths(range(first, first + 200))
        end = first + int(np.searchsorted(np.cumsum(lengths), TOKENS, side="right"))
        assert all(step.samples == (first, end) for step in steps) and end > first
        assert len({len(step.micro_batches) for step in steps}) == 1, "all ranks run as many micro-batches"
        assert {tuple(micro.tokens.shape) for step in steps for micro in step.micro_batches} == {(1, capacity)}
        batch = [source.samples([index]) for index in range(first, end)]
        expected = Counter((tuple(each.tokens[0].tolist()), tuple(each.targets[0].tolist())) for each in batch)
        assert Counter(text for step in steps for text in texts_of(step)) == expected
        tokens = sum(step.tokens for step in steps)
        slots = sum(len(step.micro_batches) for step in steps)
        assert tokens == lengths[: end - first].sum() <= TOKENS
        assert steps[0].padding == pytest.approx(1 - tokens / (slots * capacity))
        first = end


def test_a_loader_continues_at_the_sample_after_a_step_on_another_number_of_ranks(source: DataSource) -> None:
    with Loader(reader(source, 0, 1)) as loader:
        whole = [texts_of(_next_step(loader)) for _ in range(6)]
        ended = loader.consumed
    with Loader(reader(source, 0, 1)) as loader:
        parts = [texts_of(_next_step(loader)) for _ in range(2)]
        first = loader.consumed
    loaders = [Loader(reader(source, rank, 3), start_sample=first) for rank in range(3)]
    parts += [[text for loader in loaders for text in texts_of(_next_step(loader))] for _ in range(4)]
    assert all(loader.consumed == ended for loader in loaders)
    for loader in loaders:
        loader.close()
    assert [Counter(step) for step in parts] == [Counter(step) for step in whole]


def _next_step(loader: Loader) -> LoadedStep:
    next(loader)
    assert loader.step is not None
    return loader.step


def test_skipped_samples_are_left_out_and_steps_before_them_do_not_change(source: DataSource) -> None:
    ranges = [samples_of_token_step(source, step, TOKENS) for step in range(1, 6)]
    skipped = (ranges[2],)
    with Loader(reader(source, 0, 1), skipped=skipped) as loader:
        read = [_next_step(loader).samples for _ in range(4)]
    assert read == [ranges[0], ranges[1], ranges[3], ranges[4]]
    assert [samples_of_token_step(source, step, TOKENS, skipped) for step in range(1, 5)] == read
    shown = show_step(source, 3, 1, text=True, skipped=skipped, global_batch_tokens=TOKENS)["samples"]
    assert [sample["global_index"] for sample in shown] == list(range(*ranges[3]))
    assert [sample["tokens"] for sample in shown] == source.lengths(range(*ranges[3])).tolist()
    assert all(sample["text"] and len(sample["documents"]) == 1 for sample in shown)


def test_a_step_ends_where_skipped_samples_begin(source: DataSource) -> None:
    step = reader(source, 0, 1).read(0, ((2, 9),))
    assert step.samples == (0, 2)


def test_padding_is_not_trained_on(source: DataSource) -> None:
    for micro in reader(source, 0, 2).read(0).micro_batches:
        assert micro.slot is not None and micro.targets is not None and micro.positions is not None
        padding = slice(micro.slot.tokens, None)
        assert (micro.targets[0, padding] == -1).all() and not torch.any(micro.tokens[0, padding])
        assert int(micro.positions.max()) < LONGEST and micro.attention_work is not None


def test_a_token_outside_the_vocabulary_is_named(prepared: Path) -> None:
    source = opened(prepared)
    source._limit = 5
    with pytest.raises(Damaged, match=r"offset \d+: expected an id below model.vocab_size 5"):
        reader(source, 0, 1).read(0)


def test_chats_are_refused(tmp_path: Path) -> None:
    out = prepared_chats(tmp_path, marked(CHATML), CHATS)
    with pytest.raises(BadInput, match=r"has chats, which data.packing none does not train on"):
        opened(out)
