from __future__ import annotations

import functools
import operator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.indexed import IndexedFile
from meshwright.data.packing import IGNORED, TokenStream, pack
from tests.data import megatron

SEQUENCE = st.lists(st.integers(0, 100), max_size=5)
SHARDS = st.lists(st.lists(st.lists(SEQUENCE, max_size=3), max_size=6), min_size=1, max_size=4)


def naive_window(
    documents: list[list[int]], window: int, seq_len: int, masked: bool
) -> list[tuple[int, int, int, int]]:
    """(token, target, position, document) for each input, one token at a time."""
    stream = [(token, number) for number, document in enumerate(documents) for token in document]
    entries: list[tuple[int, int, int, int]] = []
    position, seen = 0, 0
    for at in range(window * seq_len, (window + 1) * seq_len):
        (token, owner), (following, next_owner) = stream[at], stream[at + 1]
        if not masked:
            entries.append((token, following, at - window * seq_len, 0))
            continue
        entries.append((token, following if owner == next_owner else IGNORED, position, seen))
        same = owner == next_owner
        position, seen = (position + 1, seen) if same else (0, seen + 1)
    return entries


def open_shards(folder: str, shards: list[list[list[list[int]]]]) -> TokenStream:
    for number, documents in enumerate(shards):
        megatron.write(Path(folder) / f"shard{number}", documents, 4)
    return TokenStream([IndexedFile(Path(folder) / f"shard{number}") for number in range(len(shards))])


@given(SHARDS, st.integers(1, 7), st.booleans())
@settings(max_examples=120, deadline=None)
def test_every_window_equals_a_reference_that_walks_token_by_token(
    shards: list[list[list[list[int]]]], seq_len: int, masked: bool
) -> None:
    documents = [functools.reduce(operator.iadd, document, []) for shard in shards for document in shard]
    total = sum(map(len, documents))
    with TemporaryDirectory() as folder:
        stream = open_shards(folder, shards)
        assert len(stream) == total
        assert stream.windows(seq_len) == max(total - 1, 0) // seq_len
        for window in range(stream.windows(seq_len)):
            start, stop = window * seq_len, (window + 1) * seq_len + 1
            packed = pack(stream.read(start, stop), stream.begins(start, stop), masked)
            columns = (packed.tokens, packed.targets, packed.positions, packed.documents)
            assert all(column.shape == (seq_len,) and column.dtype == np.int64 for column in columns)
            actual = list(zip(*(column.tolist() for column in columns), strict=True))
            assert actual == naive_window(documents, window, seq_len, masked)


@given(SHARDS, st.data())
@settings(max_examples=60, deadline=None)
def test_parts_name_the_document_and_the_tokens_within_it(
    shards: list[list[list[list[int]]]], data: st.DataObject
) -> None:
    flat = [[functools.reduce(operator.iadd, document, []) for document in shard] for shard in shards]
    stream_tokens = [token for shard in flat for document in shard for token in document]
    if not stream_tokens:
        return
    start = data.draw(st.integers(0, len(stream_tokens) - 1))
    stop = data.draw(st.integers(start + 1, len(stream_tokens)))
    with TemporaryDirectory() as folder:
        parts = open_shards(folder, shards).parts(start, stop)
    part_tokens = [token for part in parts for token in flat[part.shard][part.document][part.start : part.stop]]
    assert part_tokens == stream_tokens[start:stop]
    assert [part.offset for part in parts] == list(np.cumsum([start] + [p.stop - p.start for p in parts[:-1]]))


def test_the_end_of_a_document_predicts_the_next_one_only_without_mask(tmp_path: Path) -> None:
    stream = open_shards(str(tmp_path), [[[[5, 6, 0]], [[7, 8, 9, 0]]]])
    tokens, begins = stream.read(0, 7), stream.begins(0, 7)
    masked, plain = pack(tokens, begins, True), pack(tokens, begins, False)
    assert masked.tokens.tolist() == plain.tokens.tolist() == [5, 6, 0, 7, 8, 9]
    assert masked.targets.tolist() == [6, 0, IGNORED, 8, 9, 0]
    assert plain.targets.tolist() == [6, 0, 7, 8, 9, 0]
    assert masked.positions.tolist() == [0, 1, 2, 0, 1, 2]
    assert plain.positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert masked.documents.tolist() == [0, 0, 0, 1, 1, 1]


def test_a_target_just_behind_the_window_is_masked_when_it_is_another_document(tmp_path: Path) -> None:
    stream = open_shards(str(tmp_path), [[[[5, 0]], [[7, 8, 0]]]])
    packed = pack(stream.read(0, 3), stream.begins(0, 3), True)
    assert packed.targets.tolist() == [0, IGNORED]
