"""The server's own answers keep the tokens that the model has drawn, where a prompt has their text."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from meshwright.data.token_bytes import TokenBytes
from meshwright.server import own_answers
from meshwright.server.own_answers import BLOCK, OwnAnswers
from tests.server.helpers import END


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes, `ab` and a special token: texts of a and b have several encodings."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {END: 0} | {char: index + 1 for index, char in enumerate(alphabet)} | {"ab": 257}
    found = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    found.add_special_tokens([END])
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    return found


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    """A token for each letter, as a model may draw them."""
    return [id for letter in text for id in tokenizer.encode(letter).ids]


def test_a_conversation_keeps_the_drawn_tokens(tokenizer: Tokenizer) -> None:
    draws, own = random.Random(1), OwnAnswers(TokenBytes(tokenizer))
    kept: list[int] = []
    text = ""
    for turn in range(12):
        asked = f"q{turn}" * draws.randrange(1, 200) + END
        text += asked
        prompt = own.replaced(tokenizer.encode(text).ids, "")
        assert list(prompt) == [*kept, *tokenizer.encode(asked).ids]
        answer = "ab" * draws.randrange(1, 300)
        drawn = letters(tokenizer, answer)
        own.keep(prompt, drawn, "")
        kept, text = [*prompt, *drawn, 0], text + answer + END
    assert own.results == {"taken": 66} and len(kept) > 4 * BLOCK


def test_another_text_salt_or_special_token_takes_nothing(tokenizer: Tokenizer) -> None:
    own = OwnAnswers(TokenBytes(tokenizer))
    prompt = tokenizer.encode("Hello?").ids
    assert own.replaced(prompt, "") is prompt
    own.keep(prompt, [*letters(tokenizer, "ab"), 0], "")
    same = [*prompt, *tokenizer.encode("ab" + END).ids, 5]
    assert list(own.replaced(same, "")) == [*prompt, *letters(tokenizer, "ab"), 0, 5]
    spelled = [*prompt, *tokenizer.encode("ab").ids, *letters(tokenizer, END[:-1]), *letters(tokenizer, END[-1])]
    for other, salt in [(same, "x"), (spelled, ""), ([*prompt, *letters(tokenizer, "abc")], ""), (prompt, "")]:
        assert own.replaced(other, salt) is other
    assert own.results == {"taken": 1, "other_text": 2}
    own.keep(prompt, letters(tokenizer, "cd"), "")
    assert own.replaced([*prompt, *letters(tokenizer, "cd")], "")[-2:] == letters(tokenizer, "cd")
    assert own.results["same"] == 1


def test_the_oldest_answers_go_first(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_answers, "MOST_TOKENS", 100)
    own = OwnAnswers(TokenBytes(tokenizer))
    prompts = [tokenizer.encode(f"{number}" * BLOCK).ids for number in range(5)]
    for prompt in prompts:
        own.keep(prompt, letters(tokenizer, "ab" * 20), "")
    found = [len(own.replaced([*prompt, *tokenizer.encode("ab" * 20).ids], "")) - len(prompt) for prompt in prompts]
    assert found == [20, 20, 20, 40, 40]


def test_the_oldest_answer_to_prompts_with_the_same_blocks_goes_first(tokenizer: Tokenizer) -> None:
    """The prompts are shorter than a block; the oldest answer is that to the longest prompt."""
    own = OwnAnswers(TokenBytes(tokenizer))
    prompts = [tokenizer.encode("q" * (100 - number)).ids for number in range(own_answers.MOST_OF_BLOCK + 1)]
    for prompt in prompts:
        own.keep(prompt, letters(tokenizer, "ab"), "")
    found = [len(own.replaced([*prompt, *tokenizer.encode("ab").ids], "")) - len(prompt) for prompt in prompts]
    assert found == [1] + [2] * own_answers.MOST_OF_BLOCK


def test_an_earlier_prompt_counts_once_with_several_answers(tokenizer: Tokenizer) -> None:
    own = OwnAnswers(TokenBytes(tokenizer))
    prompt = tokenizer.encode("Hello?").ids
    for answer in ("cd", "ab", "abab", "ab"):
        own.keep(prompt, letters(tokenizer, answer), "")
    assert own.replaced([*prompt, *tokenizer.encode("xy").ids], "")[-2:] == tokenizer.encode("xy").ids
    assert own.results == {"other_text": 1}
    assert list(own.replaced([*prompt, *tokenizer.encode("abab").ids], "")) == [*prompt, *letters(tokenizer, "abab")]
    assert list(own.replaced([*prompt, *letters(tokenizer, "ab")], "")) == [*prompt, *letters(tokenizer, "ab")]
    assert own.results == {"other_text": 1, "taken": 1, "same": 1}
