"""Who writes what: exactly once, evenly, and the same whatever the order ranks are heard in."""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.checkpoint.pieces import Piece, assign_writers
from meshwright.spec.errors import BadInput


def rows(rank: int, name: str, start: int, stop: int, of: int = 10, dtype: str = "F32") -> Piece:
    return Piece(rank, name, (of, 2), dtype, (start, 0), (stop - start, 2))


@st.composite
def holdings(draw: st.DrawFn) -> tuple[list[Piece], bool]:
    """Tensors cut into rows, each cut held by some ranks; and whether every element is covered by one kind of piece."""
    pieces, good = [], True
    ranks = draw(st.integers(1, 5))
    for index in range(draw(st.integers(1, 4))):
        of = draw(st.integers(1, 6))
        cuts = sorted({0, of, *draw(st.lists(st.integers(0, of), max_size=3))})
        free = list(range(ranks))
        count: Counter[int] = Counter()
        for start, stop in itertools.pairwise(cuts):
            holders = draw(st.lists(st.sampled_from(free), unique=True)) if free else []
            free = [rank for rank in free if rank not in holders]
            shift = draw(st.sampled_from([0, 0, 0, -1])) if start else 0
            pieces += [rows(rank, f"t{index}", start + shift, stop, of) for rank in holders]
            count.update(range(start + shift, stop) if holders else ())
        if not any(piece.name == f"t{index}" for piece in pieces):
            pieces.append(rows(0, f"t{index}", 0, 0, of))
        good &= all(count[row] == 1 for row in range(of))
    return pieces, good


@settings(max_examples=300, deadline=None)
@given(holdings(), st.randoms(use_true_random=False))
def test_every_element_is_written_once_or_the_tensors_are_refused(
    held: tuple[list[Piece], bool], chance: random.Random
):
    pieces, good = held
    try:
        chosen = assign_writers(pieces)
    except BadInput:
        assert not good
        return
    assert good
    written: Counter[tuple[str, int]] = Counter()
    for piece in chosen:
        written.update((piece.name, row) for row in range(piece.offsets[0], piece.offsets[0] + piece.sizes[0]))
    expected = {(piece.name, row) for piece in pieces for row in range(piece.shape[0])}
    assert written == dict.fromkeys(expected, 1)
    shuffled = list(pieces)
    chance.shuffle(shuffled)
    assert assign_writers(shuffled) == chosen


def writers(held: list[Piece]) -> set[tuple[int, str]]:
    return {(piece.rank, piece.name) for piece in assign_writers(held)}


def test_a_rank_writes_some_of_its_pieces_of_a_tensor_and_leaves_others():
    """Key/value heads that two tensor ranks hold alike, beside the queries that each has for itself."""
    queries, keys = (
        [rows(rank, "qkv", 3 * rank, 3 * rank + 3) for rank in (0, 1)],
        [rows(rank, "qkv", 6, 10) for rank in (0, 1)],
    )
    assert assign_writers([*queries, *keys]) == {*queries, keys[0]}


def test_copies_go_to_the_lowest_rank_with_least_to_write():
    tied = [rows(rank, "embed", 0, 10) for rank in (0, 3)]
    assert writers(tied) == {(0, "embed")}
    assert writers([*tied, rows(0, "layer", 0, 10)]) == {(3, "embed"), (0, "layer")}
    replicas = [rows(rank, name, 0, 10) for name in "abcd" for rank in (0, 1)]
    assert Counter(rank for rank, _ in writers(replicas)) == {0: 2, 1: 2}


def test_empty_shards_write_nothing_and_tensors_without_elements_stay():
    assert writers([rows(0, "x", 0, 10), rows(1, "x", 10, 10)]) == {(0, "x")}
    assert writers([rows(rank, "none", 0, 0, of=0) for rank in (0, 1)]) == {(0, "none")}
    scalar = [Piece(rank, "step", (), "I64", (), ()) for rank in (1, 2)]
    assert writers(scalar) == {(1, "step")}
    assert assign_writers([]) == set()


@pytest.mark.parametrize(
    ("held", "says"),
    [
        (
            [rows(0, "x", 0, 4), rows(2, "x", 6, 10)],
            r"4 of its 20 elements .*; rank 0 holds \(4, 2\) at \(0, 0\), rank 2",
        ),
        (
            [rows(0, "x", 0, 6), rows(1, "x", 4, 10)],
            r"rank 0 holds .* and rank 1 holds \(6, 2\) at \(4, 0\); pieces must",
        ),
        ([rows(0, "x", 0, 10), rows(1, "x", 0, 4)], "pieces must be the same or share no element"),
        ([rows(0, "x", 0, 12)], r"holds \(12, 2\) at \(0, 0\), which is not inside it"),
        ([rows(0, "x", 0, 5), rows(1, "x", 5, 10, dtype="BF16")], "F32 .* on rank 0 and BF16 .* on rank 1"),
        ([rows(0, "x", 0, 10), rows(1, "x", 11, 11, of=11)], r"\(10, 2\) on rank 0 .* \(11, 2\) on rank 1"),
        ([rows(5, "x", 0, 0)], "20 of its 20 elements are held by no rank; no rank holds any"),
        ([rows(rank, "x", rank, rank + 1) for rank in range(9)], "and 5 more pieces"),
    ],
)
def test_what_does_not_make_a_whole_tensor_is_told(held: list[Piece], says: str):
    with pytest.raises(BadInput, match=f"^x .*{says}"):
        assign_writers([rows(7, "good", 0, 10), *held])


def test_work_grows_with_the_number_of_pieces_not_with_its_square():
    def calls(ranks: int) -> int:
        pieces = [rows(rank, name, rank, rank + 1, of=ranks) for name in "ab" for rank in range(ranks)]
        made: list[str] = []
        sys.setprofile(lambda _, event, __: made.append(event))
        try:
            assign_writers(pieces)
        finally:
            sys.setprofile(None)
        return len(made)

    assert calls(400) < 5 * calls(100)
