"""Every element is written exactly once, ranks write about as many bytes, and the order of the pieces has no effect."""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.checkpoint.write.assignment import RankPiece, assign_writers
from meshwright.spec.errors import BadInput
from tests.slow import examples


def row_piece(rank: int, name: str, start: int, stop: int, total: int = 10, dtype: str = "F32") -> RankPiece:
    return RankPiece(rank, name, (total, 2), dtype, (start, 0), (stop - start, 2))


@st.composite
def sharded_tensors(draw: st.DrawFn) -> tuple[list[RankPiece], bool]:
    """Tensors cut along dimension 0, each piece on some ranks; and whether pieces cover each element exactly once."""
    pieces, valid = [], True
    ranks = draw(st.integers(1, 5))
    for index in range(draw(st.integers(1, 4))):
        total = draw(st.integers(1, 6))
        cuts = sorted({0, total, *draw(st.lists(st.integers(0, total), max_size=3))})
        ranks_left = list(range(ranks))
        count: Counter[int] = Counter()
        for start, stop in itertools.pairwise(cuts):
            holders = draw(st.lists(st.sampled_from(ranks_left), unique=True)) if ranks_left else []
            ranks_left = [rank for rank in ranks_left if rank not in holders]
            shift = draw(st.sampled_from([0, 0, 0, -1])) if start else 0
            pieces += [row_piece(rank, f"t{index}", start + shift, stop, total) for rank in holders]
            count.update(range(start + shift, stop) if holders else ())
        if not any(piece.name == f"t{index}" for piece in pieces):
            pieces.append(row_piece(0, f"t{index}", 0, 0, total))
        valid &= all(count[index] == 1 for index in range(total))
    return pieces, valid


@settings(max_examples=examples(80, 300), deadline=None)
@given(sharded_tensors(), st.randoms(use_true_random=False))
def test_every_element_is_written_once_or_the_tensors_are_refused(
    case: tuple[list[RankPiece], bool], generator: random.Random
):
    pieces, valid = case
    try:
        assigned = assign_writers(pieces)
    except BadInput:
        assert not valid
        return
    assert valid
    writes: Counter[tuple[str, int]] = Counter()
    for piece in assigned:
        writes.update((piece.name, row) for row in range(piece.offsets[0], piece.offsets[0] + piece.sizes[0]))
    expected = {(piece.name, row) for piece in pieces for row in range(piece.shape[0])}
    assert writes == dict.fromkeys(expected, 1)
    shuffled = list(pieces)
    generator.shuffle(shuffled)
    assert assign_writers(shuffled) == assigned


def writers(pieces: list[RankPiece]) -> set[tuple[int, str]]:
    return {(piece.rank, piece.name) for piece in assign_writers(pieces)}


def test_a_rank_writes_some_of_its_pieces_of_a_tensor_and_leaves_others():
    """Two tensor ranks hold the same key/value heads and different queries."""
    queries, keys = (
        [row_piece(rank, "qkv", 3 * rank, 3 * rank + 3) for rank in (0, 1)],
        [row_piece(rank, "qkv", 6, 10) for rank in (0, 1)],
    )
    assert assign_writers([*queries, *keys]) == {*queries, keys[0]}


def test_copies_go_to_the_lowest_rank_with_least_to_write():
    tied = [row_piece(rank, "embed", 0, 10) for rank in (0, 3)]
    assert writers(tied) == {(0, "embed")}
    assert writers([*tied, row_piece(0, "layer", 0, 10)]) == {(3, "embed"), (0, "layer")}
    replicas = [row_piece(rank, name, 0, 10) for name in "abcd" for rank in (0, 1)]
    assert Counter(rank for rank, _ in writers(replicas)) == {0: 2, 1: 2}


def test_empty_shards_write_nothing_and_tensors_without_elements_stay():
    assert writers([row_piece(0, "x", 0, 10), row_piece(1, "x", 10, 10)]) == {(0, "x")}
    assert writers([row_piece(rank, "none", 0, 0, total=0) for rank in (0, 1)]) == {(0, "none")}
    scalar = [RankPiece(rank, "step", (), "I64", (), ()) for rank in (1, 2)]
    assert writers(scalar) == {(1, "step")}
    assert assign_writers([]) == set()


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (
            [row_piece(0, "x", 0, 4), row_piece(2, "x", 6, 10)],
            r"4 of its 20 elements .*; rank 0 holds \(4, 2\) at \(0, 0\), rank 2",
        ),
        (
            [row_piece(0, "x", 0, 6), row_piece(1, "x", 4, 10)],
            r"rank 0 holds .* and rank 1 holds \(6, 2\) at \(4, 0\); pieces must",
        ),
        ([row_piece(0, "x", 0, 10), row_piece(1, "x", 0, 4)], "pieces must be the same or share no element"),
        ([row_piece(0, "x", 0, 12)], r"holds \(12, 2\) at \(0, 0\), which is not inside it"),
        ([row_piece(0, "x", 0, 5), row_piece(1, "x", 5, 10, dtype="BF16")], "F32 .* on rank 0 and BF16 .* on rank 1"),
        (
            [row_piece(0, "x", 0, 10), row_piece(1, "x", 11, 11, total=11)],
            r"\(10, 2\) on rank 0 .* \(11, 2\) on rank 1",
        ),
        ([row_piece(5, "x", 0, 0)], "20 of its 20 elements are held by no rank; no rank holds any"),
        ([row_piece(rank, "x", rank, rank + 1) for rank in range(9)], "and 5 more pieces"),
    ],
)
def test_gaps_overlaps_and_contradictions_are_refused(pieces: list[RankPiece], message: str):
    with pytest.raises(BadInput, match=f"^x .*{message}"):
        assign_writers([row_piece(7, "good", 0, 10), *pieces])


def test_work_grows_with_the_number_of_pieces_not_with_its_square():
    def calls(ranks: int) -> int:
        pieces = [row_piece(rank, name, rank, rank + 1, total=ranks) for name in "ab" for rank in range(ranks)]
        events: list[str] = []
        sys.setprofile(lambda _, event, __: events.append(event))
        try:
            assign_writers(pieces)
        finally:
            sys.setprofile(None)
        return len(events)

    assert calls(400) < 5 * calls(100)
