"""Texts and stop strings that come piece by piece are those of the whole text."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise, product
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from meshwright.data.token_bytes import TokenBytes
from meshwright.data.tokenizer import train_tokenizer
from meshwright.serve.stops import StopStrings, StringSearch
from meshwright.serve.text import TextStream, continuation, text_stream

SAMPLES = ["the quick brown fox, naïve café 日本語 🙂🙃", "seven wizards\n\tjump  over"] * 3
FORMS = ("gpt2", "llama2", "mistral", "gemma", "metaspace")
TEXTS = [
    *SAMPLES[:2],
    " the",
    "  two  spaces ",
    "é🙂 ▁ <0x41> 👩‍👩‍👧",
    "the<tool>fox <tool> é<tool>🙂",
    "<s>the</s> fox<s>",
    " ",
    "",
    "\n\n x",
]


def tokenizer_of(form: str) -> Tokenizer:
    """A small tokenizer with the model and the decoder of a family."""
    if form == "gpt2":
        tokenizer = Tokenizer.from_str(train_tokenizer(SAMPLES, 300).decode())
    else:
        pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁thequickbrownfox,naïvé"]
        merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "▁"), ("t", "h"), ("th", "e"), ("f", "o"), ("▁", "fo")]
        vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys([*pieces, *map("".join, merges)]))}
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        spaces: list[Any] = [normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(spaces if form == "gemma" else [normalizers.Prepend("▁"), *spaces])
        steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if form == "metaspace":
            tokenizer.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback()])
        else:
            tokenizer.decoder = decoders.Sequence(steps if form == "gemma" else [*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("日本", normalized=False)])
    return tokenizer


@pytest.fixture(scope="module", params=FORMS)
def tokens(request: pytest.FixtureRequest) -> TokenBytes:
    return TokenBytes(tokenizer_of(request.param))


@pytest.fixture(scope="module")
def byte_level() -> TokenBytes:
    return TokenBytes(tokenizer_of("gpt2"))


def steps_of(ids: list[int], draws: random.Random) -> list[list[int]]:
    """The ids in steps of random lengths."""
    ends = [0, *accumulate(draws.choices((1, 1, 2, 5), k=len(ids)))]
    return [ids[start:end] for start, end in pairwise(ends)]


def test_pieces_are_the_whole_text_in_complete_characters(tokens: TokenBytes) -> None:
    tokenizer, draws = tokens.tokenizer, random.Random(0)
    assert tokens.form is not None
    for text, special in product(
        [*TEXTS, *("".join(draws.choices(" \nthe日é🙂", k=20)) for _ in range(30))], (False, True)
    ):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        whole = tokenizer.decode(ids, skip_special_tokens=not special)
        for _ in range(4):
            stream = text_stream([], tokens, special=special)
            pieces = [stream.add(step) for step in steps_of(ids, draws)]
            assert "".join(pieces) == whole and stream.finish() == ""
            assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
        stream = text_stream([], tokens, special=special)
        both = [stream.add_one(token) for token in ids]
        assert "".join(text for text, _ in both) == whole and b"".join(content for _, content in both).decode() == whole


def test_a_text_goes_on_after_its_prompt_with_its_first_space(tokens: TokenBytes) -> None:
    tokenizer = tokens.tokenizer
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        for cut in range(1, len(ids)):
            prompt = text_stream([], tokens).add(ids[:cut])
            assert prompt + continuation(ids[:cut], ids[cut:], tokens) == tokenizer.decode(ids)
    begin = tokenizer.token_to_id("<s>")
    ids = tokenizer.encode(" the", add_special_tokens=False).ids
    assert continuation([begin], ids, tokens) == tokenizer.decode([begin, *ids])


def test_bytes_that_are_no_text_become_replacement_characters_at_once(tokens: TokenBytes) -> None:
    tokenizer, draws = tokens.tokenizer, random.Random(1)
    single = [token for token in range(tokenizer.get_vocab_size()) if len(tokens.all[token]) == 1]
    for _ in range(300):
        ids = draws.choices(single, k=draws.randrange(1, 12))
        stream = text_stream([], tokens, special=True)
        content = tokens.at_start(ids[0]) + b"".join(tokens.all[token] for token in ids[1:])
        pieces = [stream.add([token]) for token in ids]
        assert "".join(pieces) + stream.finish() == content.decode("utf-8", "replace")
    stream = text_stream([], tokens)
    continuing = next(token for token in single if tokens.all[token] == b"\x80")
    assert [stream.add([continuing]) for _ in range(3)] == ["\N{REPLACEMENT CHARACTER}"] * 3


def test_a_text_that_ends_within_a_character_shows_it_at_the_end(byte_level: TokenBytes) -> None:
    stream = text_stream([], byte_level)
    ids = byte_level.tokenizer.encode("a🙈").ids[:-1]
    assert stream.add(ids[:1]) == "a" and stream.add(ids[1:]) == "" and stream.incomplete
    assert stream.finish() == byte_level.tokenizer.decode(ids)[1:] != ""


def test_every_token_has_its_own_bytes_and_name(byte_level: TokenBytes) -> None:
    assert byte_level.form is not None and byte_level.form.alphabet is not None
    assert set(byte_level.form.alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    llama = TokenBytes(tokenizer_of("llama2"))
    at = llama.tokenizer.token_to_id
    assert [llama.name(at(piece)) for piece in ("▁the", "the", "<s>", "<0xE2>")] == [
        (" the", b" the"),
        ("the", b"the"),
        ("<s>", b"<s>"),
        ("bytes:\\xe2", b"\xe2"),
    ]
    assert llama.name(9999) == ("token_id:9999", b"")


def decoded(decoder: Any) -> TokenBytes:
    """Tokens of words whose text depends on their neighbours."""
    tokenizer = Tokenizer(models.WordLevel({"the": 0, "fox": 1, "##es": 2, "<unk>": 3}, unk_token="<unk>"))
    tokenizer.decoder = decoder
    return TokenBytes(tokenizer)


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.CTC(), None], ids=["wordpiece", "ctc", "none"])
def test_other_decoders_see_the_tokens_before(decoder: Any) -> None:
    tokens = decoded(decoder)
    assert tokens.form is None
    ids = random.Random(2).choices([0, 1, 2], k=60)
    if isinstance(decoder, decoders.CTC):  # it merges equal tokens, also with those that come later
        ids = [token for token, after in pairwise(ids) if token != after]
    stream = text_stream([], tokens)
    assert "".join(stream.add([token]) for token in ids) + stream.finish() == tokens.tokenizer.decode(ids)
    assert tokens.tokenizer.decode(ids[:9]) + continuation(ids[:9], ids[9:], tokens) == tokens.tokenizer.decode(ids)


def work(stream: TextStream, ids: list[int], tokenizer: Any) -> list[int]:
    """Tokens that the tokenizer decodes for each new one."""
    counts = []
    for token in ids:
        tokenizer.count = 0
        stream.add([token])
        counts.append(tokenizer.count)
    return counts


def test_no_token_is_decoded_again_and_again() -> None:
    class Counting:
        """A tokenizer that makes incomplete text of everything."""

        count = 0
        decoder = None

        def get_added_tokens_decoder(self) -> dict[int, Any]:
            return {}

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            self.count += len(ids)
            return "\N{REPLACEMENT CHARACTER}" * len(ids)

    tokenizer: Any = Counting()
    stream = text_stream([], TokenBytes(tokenizer))
    counts = work(stream, [0] * 5000, tokenizer)
    assert max(counts) <= 40


@pytest.mark.parametrize("stops", [["a"], ["ab"], ["aab", "b"], ["bab", "ab"], ["abba", "bb", "aaa"]], ids=str)
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_cut_every_text_at_the_first(stops: list[str], include: bool) -> None:
    search = StringSearch(stops)
    for characters in product("ab", repeat=7):
        text = "".join(characters)
        ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
        for size in (1, 2, 3, 7):
            stream, shown = StopStrings(search, include=include), ""
            for start in range(0, len(text), size):
                if not stream.complete:
                    shown += stream.add(text[start : start + size])
            assert stream.complete is bool(ends)
            if ends:
                end, start, found = min(ends)
                assert stream.reached == found and shown == text[: end if include else start]
            else:
                assert shown + stream.finish() == text


def test_text_is_held_back_only_while_a_stop_string_may_begin() -> None:
    stream = StopStrings(StringSearch(["END", "N!"]))
    assert [stream.add(piece) for piece in ("a", "bE", "N", "x", "E", "ND")] == ["a", "b", "", "ENx", "", ""]
    assert stream.complete
    stream = StopStrings(StringSearch([]))
    assert stream.add("any") == "any" and not stream.held


@pytest.mark.parametrize("stops", [["ab"], ["aab", "b"], ["bab", "ab"], ["xab", "b"]], ids=str)
def test_a_stop_string_counts_where_its_end_counts(stops: list[str]) -> None:
    search = StringSearch(stops)
    for characters, early in product(product("abx", repeat=6), range(7)):
        stream, shown, text = StopStrings(search), "", "".join(characters)
        for index, character in enumerate(text):
            if not stream.complete:
                shown += stream.add(character, may_stop=index >= early)
        found = [end for end in range(early + 1, len(text) + 1) if text[:end].endswith(tuple(stops))]
        assert stream.complete is bool(found)
        if found:
            whole = text[: found[0]]
            assert shown == whole[: -max(len(stop) for stop in stops if whole.endswith(stop))]
        else:
            assert shown + stream.finish() == text
