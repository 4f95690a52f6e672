"""Host time for each token of one text, from the engine's news to the bytes of the answer, by the length of the text.

For every kind of text it prints microseconds per token at 100 to 100,000 tokens, one token at a time as in a stream, and once for a
whole answer. The work for a token must not grow with the text.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from meshwright.data.token_bytes import TokenBytes
from meshwright.serve.stops import StopStrings, StringSearch
from meshwright.serve.text import text_stream
from meshwright.server.bodies import ChatBody, TextPiece, joined
from meshwright.server.engine_client import News
from meshwright.server.output_reader import AnswerPart, OutputFormat
from meshwright.server.text_output import TextOutput
from meshwright.server.text_request import CheckedTextRequest

LENGTHS = (100, 1_000, 10_000, 100_000)
END = "<|endoftext|>"
TOP = 5
"""Likeliest tokens of each new one, with log probabilities."""
STOPS = ["\n\nUser:", "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxy", "###", "</answer>"]

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


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose tokens are the end of text and all bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({END: 0} | {character: index + 1 for index, character in enumerate(alphabet)}, []))
    tokenizer.add_special_tokens([END])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def answer_seconds(
    tokens: TokenBytes,
    ids: Sequence[int],
    *,
    whole: bool,
    stops: Sequence[str] = (),
    calls: bool = False,
    logprobs: bool = False,
) -> float:
    """Seconds for all tokens of a text, as events or as one answer."""
    body = ChatBody("1", 0, "model", REQUEST)
    top = [(token, -float(token)) for token in range(1, 1 + TOP)]
    begin = time.perf_counter()
    output = TextOutput(
        text_stream([1, 2], tokens),
        StopStrings(StringSearch(stops)) if stops else None,
        body.logprobs(tokens, 0) if logprobs else None,
    )
    reader = OutputFormat("hermes").reader() if calls else None
    pieces: list[str] = []
    found: list[AnswerPart] = []
    size = 0
    for index, token in enumerate(ids):
        reason = "length" if index == len(ids) - 1 else None
        text = output.add([News(0, [token], reason, logprobs=[(-0.5, top)] if logprobs else ())])
        parts = None if reader is None else reader.add(text, final=reason is not None)
        if whole:
            pieces.append(text)
            found += parts or ()
        elif (text if parts is None else parts) or reason is not None:
            size += len(body.event(0, TextPiece(text, output.logprobs(), parts, output.finish_reason)))
    if whole:
        read = None if reader is None else joined(found)
        size = len(body.whole([TextPiece("".join(pieces), output.logprobs(whole=True), read, "length")], {}))
    seconds = time.perf_counter() - begin
    if output.tokens != len(ids) or not size or (calls and reader is not None and reader.count != 1):
        raise RuntimeError("the text was not answered as a whole")
    return seconds


def grammar_seconds(tokenizer: Tokenizer, ids: Sequence[int]) -> float:
    """Seconds for a matcher and its bitmask over all tokens."""
    from meshwright.serve.grammar import Grammar, GrammarTokens, unconstrained

    grammar = Grammar.json_schema({"type": "array", "items": {"type": "integer"}})
    matcher = GrammarTokens(tokenizer, vocab=257).matcher(grammar, [0])
    bitmask = unconstrained(1, 257)
    begin = time.perf_counter()
    for token in ids:
        matcher.write_bitmask(bitmask, 0)
        matcher.advance(token)
    return time.perf_counter() - begin


def kinds(tokenizer: Tokenizer) -> dict[str, Callable[[int], float]]:
    """The seconds of each kind of text by its number of tokens."""
    tokens = TokenBytes(tokenizer)

    def encoded(text: str, length: int) -> list[int]:
        return tokenizer.encode((text * (length // len(text) + 1))[:length]).ids

    def call(length: int) -> list[int]:
        begin, end = '<tool_call>{"name":"f","arguments":{"text":"', '"}}</tool_call>'
        return tokenizer.encode(
            begin + ("code {a: [1]} " * length)[: length - len(begin) - len(end) - 1] + "x" + end
        ).ids

    (invalid,) = [token for token in range(257) if tokens.all[token] == b"\xbf"]
    made: dict[str, Callable[[int], float]] = {}
    for whole in (False, True):
        form = "whole" if whole else "stream"
        made |= {
            f"text {form}": lambda n, w=whole: answer_seconds(tokens, encoded("plain words of a text. ", n), whole=w),
            f"invalid bytes {form}": lambda n, w=whole: answer_seconds(tokens, [invalid] * n, whole=w),
            f"tool arguments {form}": lambda n, w=whole: answer_seconds(tokens, call(n), whole=w, calls=True),
            f"stop strings {form}": lambda n, w=whole: answer_seconds(
                tokens, encoded("xxx words ##\n", n), whole=w, stops=STOPS
            ),
            f"held stop string {form}": lambda n, w=whole: answer_seconds(
                tokens, encoded("x", n), whole=w, stops=STOPS
            ),
            f"logprobs {form}": lambda n, w=whole: answer_seconds(
                tokens, encoded("plain words. ", n), whole=w, logprobs=True
            ),
        }
    if importlib.util.find_spec("llguidance") is not None:
        made["grammar"] = lambda n: grammar_seconds(tokenizer, encoded("[" + "12345678," * n, n))
    return made


def main() -> None:
    """Parse the arguments and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of a text")
    parser.add_argument("--repeats", type=int, default=5, help="texts of each kind and length; their median counts")
    options = parser.parse_args()
    figures = {
        kind: [
            round(1e6 * statistics.median(seconds(length) for _ in range(options.repeats)) / length, 2)
            for length in options.lengths
        ]
        for kind, seconds in kinds(byte_tokenizer()).items()
    }
    growth = max(values[-1] / values[min(1, len(values) - 1)] for values in figures.values())
    print(
        json.dumps(
            {
                "tokens": list(options.lengths),
                "microseconds_per_token": figures,
                "largest_growth": round(growth, 2),
                "repeats": options.repeats,
                "python": platform.python_version(),
                "tokenizers": version("tokenizers"),
                "cores": os.cpu_count(),
            }
        )
    )


if __name__ == "__main__":
    main()
