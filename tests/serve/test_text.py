"""Texts and stop strings that come piece by piece are those of the whole text."""

from __future__ import annotations

from itertools import product

import pytest
from tokenizers import Tokenizer, decoders, models

from meshwright.data.tokenizer import train_tokenizer
from meshwright.serve.stops import StopStrings
from meshwright.serve.text import TextStream

SAMPLES = ["the quick brown fox, naïve café 日本語 🙂🙃", "seven wizards\n\tjump  over"] * 3


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer.from_str(train_tokenizer(SAMPLES, 300).decode())


@pytest.mark.parametrize("text", SAMPLES[:2])
def test_pieces_are_the_whole_text_in_complete_characters(byte_level: Tokenizer, text: str) -> None:
    stream = TextStream(byte_level)
    pieces = [stream.add([token]) for token in byte_level.encode(text).ids]
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == text


def test_a_text_that_ends_within_a_character_shows_it_at_the_end(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level)
    tokens = byte_level.encode("a🙈").ids[:-1]
    assert stream.add(tokens[:1]) == "a" and stream.add(tokens[1:]) == ""
    assert stream.finish() == byte_level.decode(tokens)[1:] != ""


def test_a_decoder_that_drops_the_first_space_keeps_those_between_pieces() -> None:
    vocabulary = {"▁the": 0, "▁fox": 1, "es": 2, "<unk>": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    stream = TextStream(tokenizer)
    assert [stream.add([token]) for token in (0, 1, 2, 0, 1, 0, 0, 1)] == [
        "the", " fox", "es", " the", " fox", " the", " the", " fox",
    ]  # fmt: skip


@pytest.mark.parametrize("stops", [["a"], ["ab"], ["aab", "b"], ["bab", "ab"], ["abba", "bb", "aaa"]], ids=str)
def test_stop_strings_cut_every_text_at_the_first(stops: list[str]) -> None:
    for characters in product("ab", repeat=7):
        stream, shown, text = StopStrings(stops), "", "".join(characters)
        for character in text:
            if not stream.complete:
                shown += stream.add(character)
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        assert stream.complete is bool(ends)
        if ends:
            first_end = min(end for end, _ in ends)
            assert shown == text[: min(start for end, start in ends if end == first_end)]
        else:
            assert shown + stream.finish() == text


def test_text_is_held_back_only_while_a_stop_string_may_begin() -> None:
    stream = StopStrings(["END", "N!"])
    assert [stream.add(piece) for piece in ("a", "bE", "N", "x", "E", "ND")] == ["a", "b", "", "ENx", "", ""]
    assert stream.complete


@pytest.mark.parametrize("stops", [["ab"], ["aab", "b"], ["bab", "ab"], ["xab", "b"]], ids=str)
def test_a_stop_string_counts_where_its_end_counts(stops: list[str]) -> None:
    for characters, early in product(product("abx", repeat=6), range(7)):
        stream, shown, text = StopStrings(stops), "", "".join(characters)
        for index, character in enumerate(text):
            if not stream.complete:
                shown += stream.add(character, ends=index >= early)
        found = [end for end in range(early + 1, len(text) + 1) if text[:end].endswith(tuple(stops))]
        assert stream.complete is bool(found)
        if found:
            whole = text[: found[0]]
            assert shown == whole[: -max(len(stop) for stop in stops if whole.endswith(stop))]
        else:
            assert shown + stream.finish() == text
