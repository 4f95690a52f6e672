"""Chats are packed whole: every conversation once an epoch, in one window, and truncated only if it is longer than one."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.config.presets import MODEL_PRESETS
from meshwright.data.conversations import best_fit
from meshwright.data.indexed import bin_path
from meshwright.data.loader import Loader, Windows
from meshwright.data.prepare import prepare
from meshwright.data.source import DataSource, has_validation, open_data
from meshwright.launch import corpus
from meshwright.launch.prepare import resolve_data
from meshwright.spec.errors import BadInput, Damaged
from meshwright.spec.fields import from_plain
from meshwright.spec.job import DataSpec, TrainSpec
from meshwright.spec.run import ModelSection, RunSpec
from tests.data.chats import CHATML, CHATS, marked, story, turns
from tests.data.test_chat import documents, prepared_chats

SEQ = 60
MANY = [
    *CHATS * 3,
    *(turns("?", "yes " * length) for length in (1, 3, 4, 9, 16, 30)),
    turns(story(5), story(6) * 4),
    turns(story(7) * 3, "Yes."),
]


@given(st.lists(st.integers(1, 30), max_size=60), st.integers(0, 6))
def test_best_fit_decreasing(lengths: list[int], more: int) -> None:
    """Against a search through all bins: each item, the longest first, goes where the least space is left."""
    room = max(lengths, default=1) + more
    bins = best_fit(np.array(lengths, dtype=np.int64), room).tolist()
    spaces: dict[int, int] = {}
    numbers = count()
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        fitting = [space for space in spaces.values() if space >= lengths[item]]
        if fitting:
            assert spaces[bins[item]] == min(fitting)
        else:
            assert bins[item] == next(numbers)
        spaces[bins[item]] = spaces.get(bins[item], room) - lengths[item]
    assert min(spaces.values(), default=0) >= 0


def opened(folder: Path, seq: int = SEQ, **options: Any) -> DataSource:
    return open_data(DataSpec(mix={str(folder): 1.0}, document_mask=True), seq_len=seq, seed=1, **options)


def windows_of(source: DataSource, folder: Path, seq: int = SEQ) -> list[list[tuple[int, ...]]]:
    """The conversations of each window by their tokens, after a check of every array of the window."""
    stored = {tuple(tokens[: seq + 1]): mask[: seq + 1] for tokens, mask in documents(folder)}
    windows = []
    for index in range(source.windows):
        batch = source.samples([index])
        tokens, targets, positions, numbers = (
            array[0].tolist() for array in (batch.tokens, batch.targets, batch.positions, batch.documents)
        )
        found, at = [], 0
        for text in source.describe(index)["documents"]:
            length = text["end"]
            conversation = next(
                whole
                for whole in stored
                if list(whole[:length]) == tokens[at : at + length] and len(whole) - length <= 1
            )
            mask = stored[conversation]
            learned = [conversation[i + 1] if i + 1 < len(conversation) and mask[i + 1] else -1 for i in range(length)]
            assert text["start"] == 0 and targets[at : at + length] == learned
            assert positions[at : at + length] == list(range(length))
            assert set(numbers[at : at + length]) == {len(found)}
            found.append(conversation)
            at += length
        assert set(targets[at:]) <= {-1} and set(numbers[at:]) <= {len(found)}, "the end of a window is filled"
        assert at == source.describe(index)["tokens"]
        windows.append(found)
    return windows


@pytest.mark.parametrize("shard_tokens", [10**6, 200])
def test_every_conversation_is_in_one_window_whole(tmp_path: Path, shard_tokens: int) -> None:
    out = prepared_chats(tmp_path, marked(CHATML), MANY, shard_tokens=shard_tokens)
    source = opened(out)
    windows = windows_of(source, out)
    stored = documents(out)
    left_out = [tokens for tokens, mask in stored if len(tokens) > SEQ + 1 and not any(mask[: SEQ + 1])]
    read = [tokens for tokens, _ in stored if tokens not in left_out]
    assert left_out and len(left_out) < len([tokens for tokens, _ in stored if len(tokens) > SEQ + 1])
    assert sorted(text for window in windows for text in window) == sorted(tuple(tokens[: SEQ + 1]) for tokens in read)
    assert all(sum(map(len, window)) <= SEQ + 1 for window in windows)
    packing = source.sources[str(out)].packing
    assert packing is not None and packing.sequences == len(windows) < len(MANY)
    room = len(windows) * (SEQ + 1)
    assert packing.fill == pytest.approx(sum(len(text) for window in windows for text in window) / room)
    assert packing.truncated == sum(len(tokens) > SEQ + 1 for tokens in read) and packing.left_out == len(left_out)
    assert packing.lost_tokens == sum(len(tokens) for tokens, _ in stored) - sum(
        len(text) for window in windows for text in window
    )
    assert len(windows) <= -(-11 * sum(min(length, SEQ + 1) for length in map(len, read)) // (9 * (SEQ + 1))) + 1


def test_shards_do_not_change_the_windows(tmp_path: Path) -> None:
    one = prepared_chats(tmp_path / "one", marked(CHATML), MANY)
    many = prepared_chats(tmp_path / "many", marked(CHATML), MANY, shard_tokens=100)
    layouts = [next(iter(opened(out).sources.values())).layout for out in (one, many)]
    for window in range(layouts[0].count):
        first, second = (layout.read(window, True) for layout in layouts)
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))


def test_fillers_are_told_for_chats_and_not_for_text(tmp_path: Path) -> None:
    out = prepared_chats(tmp_path, marked(CHATML), MANY)
    source = opened(out)
    batch = source.samples(range(source.windows))
    lengths = [sum(part["end"] - part["start"] for part in source.describe(index)["documents"]) for index in range(8)]
    assert batch.real is not None and batch.real[:8].sum(1).tolist() == lengths
    assert (np.diff(batch.real.astype(int), axis=1) <= 0).all() and not batch.real.all()
    assert (batch.targets[~batch.real] == -1).all()
    (tmp_path / "text.txt").write_text("A text without any chat. " * 400)
    prepare([str(tmp_path / "text.txt")], str(tmp_path / "model"), tmp_path / "text")
    assert opened(tmp_path / "text").samples([0]).real is None
    mixed = open_data(DataSpec(mix={str(out): 1.0, str(tmp_path / "text"): 1.0}), seq_len=SEQ, seed=1)
    for index in range(8):
        (real,) = mixed.samples([index]).real  # type: ignore[misc]
        assert real.all() or mixed.describe(index)["source"] == str(out)


def test_a_loader_continues_with_the_sample_that_it_would_have_read(tmp_path: Path) -> None:
    out = prepared_chats(tmp_path, marked(CHATML), MANY)
    options: dict[str, Any] = {"global_batch": 2, "data_rank": 0, "data_ranks": 1, "micro_batch": 2}
    with Loader(Windows(opened(out), **options)) as loader:
        steps = [next(loader)[0] for _ in range(8)]
    with Loader(Windows(opened(out), **options), start_sample=10) as loader:
        again = next(loader)[0]
    assert again.targets is not None and again.tokens.equal(steps[5].tokens) and again.targets.equal(steps[5].targets)  # type: ignore[arg-type]
    assert all(step.valid_tokens == (step.targets >= 0).sum() > 0 for step in steps)  # type: ignore[operator]


def test_a_token_outside_the_vocabulary_is_named_by_file_and_offset(tmp_path: Path) -> None:
    out = prepared_chats(tmp_path, marked(CHATML), MANY, shard_tokens=200)
    source = opened(out)
    shard = source.sources[str(out)].directory.shards[2].file
    place = shard.tokens // 2
    with bin_path(shard.stem).open("r+b") as file:
        file.seek(shard.token_offset(place))
        file.write(np.array([60_000], dtype=shard.dtype).tobytes())
    (bad,) = [name for name in range(source.windows) if (opened(out).samples([name]).tokens == 60_000).any()]
    with pytest.raises(Damaged, match=rf"{shard.bin_path}: offset {shard.token_offset(place)}: .* found token 60000"):
        opened(out, vocab_size=source.vocab_size).samples([bad])


def test_files_are_verified_before_their_conversations_are_read(tmp_path: Path) -> None:
    out = prepared_chats(tmp_path, marked(CHATML), MANY, shard_tokens=200)
    source = opened(out)
    layout = source.sources[str(out)].layout
    for window in range(layout.count):
        assert layout.files_of(np.array([window])) == {part.shard for part in layout.parts(window)}
    assert len(layout.files_of(np.arange(layout.count))) > 3


def test_a_start_names_what_is_truncated_and_refuses_chats_that_were_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, notes = prepared_chats(tmp_path, marked(CHATML), MANY), list[str]()
    model = from_plain(ModelSection, MODEL_PRESETS["llama-nano"] | {"vocab_size": 4096})
    train = TrainSpec(steps=1, global_batch=1, seq_len=SEQ)
    run = RunSpec(name="chats", seed=1, model=model, train=train, data=DataSpec(mix={str(out): 1.0}))
    resolve_data(run, notes.append)
    source = opened(out)
    assert (
        notes == [f"{out}: {source.sources[str(out)].packing}"]
        and "are longer and truncated, 1 more are left out" in notes[0]
    )
    record: dict[str, Any] = source.record()
    monkeypatch.setattr(corpus, "recorded_corpus", lambda folder: (folder, record))
    corpus.check_unchanged(run, tmp_path, source, notes.append)
    del record[str(out)]["packing"]
    with pytest.raises(BadInput, match=r"changed since .*: packing .*data.changed=accept"):
        corpus.check_unchanged(run, tmp_path, source, notes.append)


def test_few_held_out_chats_are_enough_for_validation(tmp_path: Path) -> None:
    out = prepared_chats(tmp_path, marked(CHATML), MANY, held_out=0.1)
    spec = DataSpec(mix={str(out): 1.0})
    assert has_validation(spec, 4096)
    held_out = open_data(spec, seq_len=4096, seed=0, split="validation")
    assert held_out.windows == 1 and (held_out.samples([0]).targets >= 0).any()


def test_a_source_without_conversations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        prepared_chats(tmp_path, marked(CHATML), [])
