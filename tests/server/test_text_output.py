"""Texts of an answer from the news of an engine: stop strings, log probabilities and numbers of tokens."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from typing import Any

import pytest

from meshwright.data.token_bytes import TokenBytes
from meshwright.serve.stops import StopStrings, StringSearch
from meshwright.serve.text import text_stream
from meshwright.server.bodies import ChatBody, CompletionBody, TextPiece
from meshwright.server.engine_client import News, Reason
from meshwright.server.text_output import TextOutput
from meshwright.server.text_request import CheckedTextRequest
from meshwright.server.token_logprobs import ChatLogprobs, CompletionLogprobs
from tests.serve.test_text import FORMS, TEXTS, decoded, tokenizer_of

STOPS = [[], ["fox"], ["é🙂", "ov"], ["wizards\n", "s"], ["🙂🙃"], ["zzz"], ["the<tool>"]]


@pytest.fixture(scope="module", params=[*FORMS, "decoded"])
def tokens(request: pytest.FixtureRequest) -> TokenBytes:
    return decoded(None) if request.param == "decoded" else TokenBytes(tokenizer_of(request.param))


def news_of(ids: list[int], cuts: list[int], reason: Reason = "length") -> list[News]:
    """News with these ids, cut before these places; the last says that the text has ended."""
    logprobs = [[-0.5 - token, [[token, -0.5 - token], [0, -math.inf]]] for token in ids]
    steps = [News(0, ids[a:b], logprobs=logprobs[a:b]) for a, b in pairwise([0, *cuts, len(ids)])]
    return [*steps, News(0, [], reason)]


def read(
    tokens: TokenBytes,
    news: list[News],
    stops: list[str],
    form: Any = ChatLogprobs,
    *,
    include: bool = False,
    special: bool = False,
) -> tuple[TextOutput, str, list[dict[str, Any]]]:
    """The output after all news, its text, and its log probabilities as they are streamed."""
    search = StopStrings(StringSearch(stops), include=include) if stops else None
    output = TextOutput(text_stream([], tokens, special=special), search, form(tokens, 7), [5])
    text, entries = "", []
    for one in news:
        if output.finish_reason is None:
            text += output.add([one])
            shown = output.logprobs()
            entries += [] if shown is None else [json.loads(shown)]
    return output, text, entries


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stops", STOPS, ids=str)
def test_tokens_and_bytes_join_to_the_text(tokens: TokenBytes, stops: list[str], include: bool) -> None:
    draws = random.Random(0)
    for text in [*TEXTS, *("".join(draws.choices(" fosdé🙂🙃", k=20)) for _ in range(20))]:
        ids = tokens.tokenizer.encode(text.split("<")[0] if tokens.form is None else text, add_special_tokens=False).ids
        special = draws.random() < 0.5
        single = None
        for cuts in (list(range(1, len(ids))), [], sorted(draws.choices(range(len(ids) + 1), k=3))):
            output, shown, parts = read(tokens, news_of(ids, cuts), stops, include=include, special=special)
            entries = [entry for part in parts for entry in part["content"]]
            assert "".join(entry["token"] for entry in entries) == shown
            assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == shown
            assert len(entries) == output.tokens
            found = (shown, output.tokens, output.finish_reason, output.stop_reason)
            single = found if single is None else single
            assert found == single
            if output.finish_reason == "stop":
                assert output.stop_reason in stops and (shown.endswith(output.stop_reason) or not include)
            else:
                assert output.tokens == len(ids)


def test_a_text_that_ends_within_a_character_has_it_in_its_last_token() -> None:
    tokens = TokenBytes(tokenizer_of("llama2"))
    ids = tokens.tokenizer.encode("fo🙈", add_special_tokens=False).ids[:-2]
    _, text, parts = read(tokens, news_of(ids, [1, 2, 3]), ["never"])
    assert text == "fo\N{REPLACEMENT CHARACTER}"
    assert "".join(entry["token"] for part in parts for entry in part["content"]) == text


def test_offsets_count_from_the_echo() -> None:
    tokens = TokenBytes(tokenizer_of("llama2"))
    ids = tokens.tokenizer.encode("the fox é", add_special_tokens=False).ids
    _, text, parts = read(tokens, news_of(ids, list(range(1, len(ids)))), [], CompletionLogprobs)
    texts = [token for part in parts for token in part["tokens"]]
    offsets = [offset for part in parts for offset in part["text_offset"]]
    assert "".join(texts) == text == "the fox é"
    assert offsets == [7 + len("".join(texts[:index])) for index in range(len(ids))]


def test_likeliest_tokens_are_never_merged_and_bytes_are_named() -> None:
    tokens = TokenBytes(tokenizer_of("llama2"))
    the, space_the, byte, letter = (tokens.tokenizer.token_to_id(piece) for piece in ("the", "▁the", "<0x66>", "f"))
    split = tokens.tokenizer.token_to_id("<0xF0>")
    top = [[id, -float(rank)] for rank, id in enumerate((the, space_the, letter, byte, split))]
    for form in (CompletionLogprobs, ChatLogprobs):
        shown = form(tokens, 0)
        shown.add("the", b"the", -1.5, top)
        value = json.loads(shown.take())
        if form is CompletionLogprobs:
            assert value["top_logprobs"] == [{"the": 0, " the": -1, "f": -2, f"token_id:{byte}": -3, "bytes:\\xf0": -4}]
        else:
            names = [(entry["token"], entry["bytes"]) for entry in value["content"][0]["top_logprobs"]]
            assert names[0] != names[1] and names[4] == ("bytes:\\xf0", [0xF0])


def test_logarithms_of_nothing_are_numbers_of_json() -> None:
    shown = ChatLogprobs(TokenBytes(tokenizer_of("gpt2")), 0)
    shown.add("x", b"x", -math.inf, [(1, -math.inf)])
    (entry,) = json.loads(shown.take())["content"]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0


@pytest.mark.parametrize(("token", "reported"), [(5, 5), (6, None)])
def test_a_stop_token_of_the_request_is_the_reason_of_the_end(token: int, reported: int | None) -> None:
    tokens = TokenBytes(tokenizer_of("gpt2"))
    output = TextOutput(text_stream([], tokens), None, None, [5])
    output.add([News(0, [1], cached_tokens=3), News(0, [], "stop", stop_token=token)])
    assert (output.finish_reason, output.stop_reason, output.cached_tokens) == ("stop", reported, 3)


REQUEST = CheckedTextRequest(
    count=1,
    new_tokens=1,
    sampling={},
    logprobs=None,
    stop_ids=(),
    stop_strings=(),
    grammar=None,
    stream=True,
    include_usage=False,
)


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_bodies_are_json(body: type[CompletionBody]) -> None:
    shown, pieces = (
        body("1", 2, "a model", REQUEST),
        [TextPiece('é "\ud800', None, None, "stop", "st\n"), TextPiece("", "[]", None, "length")],
    )
    whole = json.loads(shown.whole(pieces, {"total_tokens": 3}))
    assert [choice["stop_reason"] for choice in whole["choices"]] == ["st\n", None] and whole[
        "object"
    ] == body.whole_object
    for index, piece in enumerate(pieces):
        event = json.loads(shown.event(index, piece, {"total_tokens": 3}).removeprefix(b"data: "))
        assert event["usage"] == {"total_tokens": 3} and event["choices"][0]["finish_reason"] == piece.finish_reason
    assert "stop_reason" not in json.loads(shown.event(0, TextPiece("x")).removeprefix(b"data: "))["choices"][0]


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_no_stop_string_ends_the_first_tokens(at_once: int) -> None:
    tokens = TokenBytes(tokenizer_of("gemma"))
    ids = tokens.tokenizer.encode("fox fox fox", add_special_tokens=False).ids
    least = next(count for count in range(len(ids)) if "fox f" in tokens.tokenizer.decode(ids[:count]))
    search = StopStrings(StringSearch(["fox"]))
    output = TextOutput(text_stream([], tokens), search, None, min_tokens=least)
    cuts = list(range(at_once, len(ids), at_once))
    text = "".join(output.add([news]) for news in news_of(ids, cuts) if output.finish_reason is None)
    assert (text, output.stop_reason) == ("fox ", "fox") and least < output.tokens < len(ids)
