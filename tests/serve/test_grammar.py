"""Texts drawn at random among the tokens that a grammar allows match the grammar."""

from __future__ import annotations

import importlib.util
import json
import re
import sys

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from meshwright.serve.grammar import Grammar, GrammarMatcher, GrammarTokens, unconstrained
from meshwright.serve.sampling import Sampler, SamplingOptions
from meshwright.spec.errors import BadInput

needs_llguidance = pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="needs the extra grammar")
VOCAB = 300
END = (260,)
"""Token <end>."""
"""Logits; the last ones have no token."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["x", "yy"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
LARK = 'start: greeting ("," " "? name)+\ngreeting: "hi" | "ho"\nname: /[A-Z][a-z]{1,3}/\n'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "i"), ("t", "r"), ("tr", "u"), ("{", '"')]
    words = [*letters, *("".join(pair) for pair in merges), "<end>"]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    assert tokenizer.token_to_id("<end>") == END[0]
    return tokenizer


@pytest.fixture(scope="module")
def tokens(tokenizer: Tokenizer) -> GrammarTokens:
    return GrammarTokens(tokenizer, vocab=VOCAB)


def drawn_text(matcher: GrammarMatcher, tokenizer: Tokenizer, seed: int) -> str:
    """A text whose tokens the sampler draws from random logits, until the end token."""
    sampler, bitmask = Sampler(1, torch.device("cpu"), VOCAB), unconstrained(1, VOCAB)
    sampler.assign(0, SamplingOptions(seed=seed, temperature=3.0))
    random_logits = torch.Generator().manual_seed(seed)
    end, row, text = tokenizer.token_to_id("<end>"), torch.tensor([0]), []
    for position in range(400):
        matcher.write_bitmask(bitmask, 0)
        logits = torch.randn(1, VOCAB, generator=random_logits)
        logits[0, [tokenizer.token_to_id(space) for space in ("Ġ", "Ċ", "ĉ", "č")]] -= 8.0  # JSON may have any number
        token = int(sampler.sample(logits, row, torch.tensor([position]), bitmask))
        if token == end:
            assert matcher.complete
            return tokenizer.decode(text)
        matcher.advance(token)
        text.append(token)
    raise AssertionError(f"no end: {tokenizer.decode(text)}")


@needs_llguidance
@pytest.mark.parametrize("seed", range(5))
def test_texts_match_their_grammar(seed: int, tokens: GrammarTokens, tokenizer: Tokenizer) -> None:
    pattern = r"(ab|c{2,4})x[0-9]?"
    assert re.fullmatch(pattern, drawn_text(tokens.matcher(Grammar("regex", pattern), END), tokenizer, seed))
    value = json.loads(drawn_text(tokens.matcher(Grammar.json_schema(SCHEMA), END), tokenizer, seed))
    assert set(value) == {"name", "tags"} and value["name"] in ("x", "yy") and len(value["tags"]) <= 3
    assert all(isinstance(tag, bool) for tag in value["tags"])
    greetings = drawn_text(tokens.matcher(Grammar("lark", LARK), END), tokenizer, seed)
    assert re.fullmatch(r"(hi|ho)(, ?[A-Z][a-z]{1,3})+", greetings)


@needs_llguidance
def test_the_bitmask_has_exactly_the_tokens_that_may_follow(tokens: GrammarTokens, tokenizer: Tokenizer) -> None:
    matcher = tokens.matcher(Grammar("regex", "(h|x)i+"), END)
    bitmask = unconstrained(3, VOCAB)

    def allowed() -> set[str]:
        matcher.write_bitmask(bitmask, 1)
        bits = [int(bitmask[1, token // 32]) >> token % 32 & 1 for token in range(VOCAB)]
        assert not any(bits[tokenizer.get_vocab_size() :])
        return {tokenizer.id_to_token(token) for token in range(VOCAB) if bits[token]}

    assert allowed() == {"h", "x", "hi"}
    assert matcher.accepted([tokenizer.token_to_id(letter) for letter in ("h", "i", "i", "x")]) == 3
    assert allowed() == {"h", "x", "hi"}
    matcher.advance(tokenizer.token_to_id("hi"))
    assert allowed() == {"i", "<end>"} and matcher.complete and not matcher.finished
    assert (bitmask[[0, 2]] == -1).all()
    with pytest.raises(BadInput, match="the text cannot go on"):
        matcher.advance(tokenizer.token_to_id("h"))


@needs_llguidance
@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("regex", "[ab"), "this regex cannot be used: .*invalid regex"),
        (Grammar("lark", "start: nothing"), 'this lark cannot be used: .*unknown name: "nothing"'),
        (Grammar("json_schema", "{"), "the schema is not JSON"),
        (Grammar.json_schema({"type": "wrong"}), "this json_schema cannot be used: Invalid type: wrong"),
    ],
)
def test_a_wrong_grammar_is_refused(grammar: Grammar, message: str, tokens: GrammarTokens) -> None:
    with pytest.raises(BadInput, match=message):
        tokens.matcher(grammar, END)


@needs_llguidance
def test_a_grammar_needs_an_end_token(tokens: GrammarTokens) -> None:
    with pytest.raises(BadInput, match="give at least one stop id"):
        tokens.matcher(Grammar("regex", "a"), ())


def test_the_missing_extra_is_named(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(BadInput, match=r"pip install 'meshwright\[grammar\]'"):
        GrammarTokens(tokenizer, vocab=VOCAB)


@needs_llguidance
def test_a_tokenizer_without_bytes_is_refused() -> None:
    with pytest.raises(BadInput, match="grammar: this tokenizer cannot be used: can't determine decoder type"):
        GrammarTokens(Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[])), vocab=2)
