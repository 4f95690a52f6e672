"""Duplicates are found as comparing all pairs finds them; planted ones with the recall and precision that the page states."""

from __future__ import annotations

import io
import json
import random
import re
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data import duplicates as duplicates_module
from meshwright.data import shingles as shingles_module
from meshwright.data import signatures
from meshwright.data.duplicates import SignedUnit, find_duplicates
from meshwright.data.shingles import shingles, word_hashes
from meshwright.data.signatures import SignatureWriter, shingle_sets


def words(text: str) -> list[str]:
    """The words of a Latin text, by another program than the one under test."""
    return re.findall(r"[0-9a-z]+", text.lower())


def jaccard(one: str, other: str) -> float:
    """The exact similarity of two texts of at least five words, by sets of tuples."""
    first, second = ({tuple(w[i : i + 5]) for i in range(len(w) - 4)} for w in (words(one), words(other)))
    return len(first & second) / len(first | second)


def sign(folder: Path, texts: list[list[str]], near: bool = True) -> list[SignedUnit]:
    units = []
    for number, of_unit in enumerate(texts):
        names = [folder / f"{number}.{sort}" for sort in ("signatures", "sets", "ends")]
        with names[0].open("wb") as file, names[1].open("wb") as sets:
            writer = SignatureWriter(file, sets if near else None)
            for text in of_unit:
                writer.add(text)
            writer.finish()
        names[2].write_bytes(np.array(writer.ends, dtype="<u8").tobytes())
        more = names[1:] if near else [None, None]
        units.append(SignedUnit(names[0], *more, len(of_unit), tuple(writer.segments)))
    return units


VOCABULARY = [f"w{i}" for i in range(5000)]


def text_of(random_: random.Random, count: int) -> list[str]:
    return random_.choices(VOCABULARY, k=count)


def planted(random_: random.Random, original: list[str], similarity: float) -> list[str]:
    """A copy with words replaced until the similarity is only just at least `similarity`."""
    copy, best = list(original), list(original)
    while True:
        copy[random_.randrange(len(copy))] = random_.choice(VOCABULARY)
        if jaccard(" ".join(original), " ".join(copy)) < similarity:
            return best
        best = list(copy)


@pytest.fixture(scope="module")
def corpus() -> tuple[list[str], dict[int, int]]:
    """2,000 texts of 60 to 300 words, and 600 copies of similarity 0.8 behind them with the number of their original."""
    random_ = random.Random(7)
    originals = [text_of(random_, random_.randrange(60, 300)) for _ in range(2000)]
    # Half of the texts share a passage, as pages of a site do: less than a quarter of their words.
    passage = text_of(random_, 20)
    for number in range(0, 2000, 2):
        originals[number] = passage + originals[number]
    chosen = random_.sample(range(2000), 600)
    texts = [" ".join(text) for text in originals]
    copies = {len(texts) + at: number for at, number in enumerate(chosen)}
    texts += [" ".join(planted(random_, originals[number], 0.8)) for number in chosen]
    return texts, copies


def test_planted_near_duplicates_are_found(corpus: tuple[list[str], dict[int, int]], tmp_path: Path) -> None:
    texts, copies = corpus
    found = find_duplicates(sign(tmp_path, [texts[:700], texts[700:2100], texts[2100:]]), 0.75)
    pairs = dict(zip(found.documents.tolist(), found.kept.tolist(), strict=True))
    right = sum(pairs.get(copy) == original for copy, original in copies.items())
    assert right / len(copies) >= 0.95, "recall"
    assert right / len(pairs) >= 0.99, "precision"
    assert not found.exact.any()
    for document, kept, similarity in zip(found.documents[:50], found.kept, found.similarity, strict=False):
        assert similarity == pytest.approx(jaccard(texts[document], texts[kept]), abs=1e-12)


def test_nothing_depends_on_units_segments_or_memory(
    corpus: tuple[list[str], dict[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = corpus[0][1800:2300]
    once = find_duplicates(sign(tmp_path, [texts]), 0.75)
    assert len(once.documents) > 5
    monkeypatch.setattr(signatures, "SEGMENT_DOCUMENTS", 37)
    monkeypatch.setattr(signatures, "BLOCK_CHARACTERS", 2000)
    monkeypatch.setattr(duplicates_module, "KEYS_AT_ONCE", 20)
    monkeypatch.setattr(duplicates_module, "SETS_IN_MEMORY", 2)
    folder = tmp_path / "divided"
    folder.mkdir()
    divided = find_duplicates(sign(folder, [texts[:3], texts[3:3], texts[3:290], texts[290:]]), 0.75)
    for name in ("documents", "kept", "similarity", "exact"):
        assert np.array_equal(getattr(once, name), getattr(divided, name))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from(["a", "b", "Éa", "漢", " ", "\n", "...", "a-b", "İ", "\U0001f642"]), max_size=12).map(
            "".join
        ),
        max_size=12,
    ),
    st.integers(1, 4),
)
def test_exact_duplicates_are_the_equal_texts(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], units: int
) -> None:
    folder = tmp_path_factory.mktemp("signed")
    parts = [texts[at * len(texts) // units : (at + 1) * len(texts) // units] for at in range(units)]
    for near in (False, True):
        found = find_duplicates(sign(folder, parts, near), 1.0 if near else None)
        if not near:
            first = {text: at for at, text in reversed(list(enumerate(texts)))}
            expected = [at for at, text in enumerate(texts) if first[text] != at]
            assert found.documents.tolist() == expected
            assert found.kept.tolist() == [first[texts[at]] for at in expected]
        removed = set(found.documents.tolist())
        assert not removed & set(found.kept.tolist()), "what a document is a duplicate of stays"
        left = [text for at, text in enumerate(texts) if at not in removed]
        assert len(set(left)) == len(left)


def test_a_removed_document_is_similar_to_one_that_stays(tmp_path: Path) -> None:
    """A chain of texts, each like the one before: the third is like the second, which went, and not like the first."""
    random_ = random.Random(3)
    chain = [text_of(random_, 200)]
    for _ in range(6):
        chain.append(planted(random_, chain[-1], 0.85))
    texts = [" ".join(text) for text in chain]
    found = find_duplicates(sign(tmp_path, [texts]), 0.75)
    removed = found.documents.tolist()
    assert 0 not in removed and 0 < len(removed) < 6
    assert not set(removed) & set(found.kept.tolist())
    for one, other in combinations(set(range(7)) - set(removed), 2):
        assert jaccard(texts[one], texts[other]) < 0.8, "bands find nearly all pairs from here on"


def test_sets_are_those_of_another_program() -> None:
    texts = ["One two, three FOUR five six seven.", "one two three four five", "", "...", "short text", "Short-text!"]
    values, starts = shingle_sets(texts)
    sets = [set(values[a:b].tolist()) for a, b in pairwise(starts)]
    assert [len(each) for each in sets] == [3, 1, 0, 0, 1, 1]
    assert sets[1] < sets[0] and sets[4] == sets[5]


def test_words_of_scripts_without_spaces_are_characters() -> None:
    _, starts = word_hashes(["漢字かな交じり文 and latin", "ไทย", "한국어 텍스트"])
    assert np.diff(starts).tolist() == [10, 3, 2]


def test_a_long_text_has_the_hashes_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(VOCABULARY[:400])
    whole = word_hashes([text, "x"])
    monkeypatch.setattr(shingles_module, "PIECE", 601)
    cut = text[:601].rpartition(" ")[0]
    assert np.array_equal(word_hashes([cut])[0], whole[0][: len(cut.split())])
    hashes, starts = word_hashes([text, "x"])
    assert starts[-1] == len(hashes) and hashes[-1] == whole[0][-1]
    assert len(set(hashes.tolist()) & set(whole[0].tolist())) >= 395


def test_shingles_do_not_cross_texts() -> None:
    hashes, starts = word_hashes(["a b c", "", "d", "a b"])
    values, of_texts = shingles(hashes, starts, 2)
    assert of_texts.tolist() == [0, 2, 2, 2, 3] and values[2] == values[0]


def test_signatures_are_the_same_on_every_machine() -> None:
    """Workers of several hosts compare signatures."""
    files = io.BytesIO(), io.BytesIO()
    writer = SignatureWriter(*files)
    for number in range(20):
        writer.add(json.dumps(VOCABULARY[number : number + 30]))
    writer.finish()
    assert [xxhash.xxh3_64_hexdigest(file.getvalue()) for file in files] == ["cd99a70e1ee83631", "93752c93568d20e4"]
