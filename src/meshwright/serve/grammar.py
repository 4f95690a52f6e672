"""Output that follows a JSON schema, a regular expression or a Lark grammar, by llguidance (the extra `grammar`).

A matcher follows the tokens of one request on the host and gives a bitmask of the tokens that may come next. The sampler removes all
others on the device (`logit_filters.keep_allowed`).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from meshwright.spec.errors import BadInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Notation = Literal["json_schema", "regex", "lark"]


class BadGrammar(BadInput):
    """A grammar that cannot be followed: it is wrong, or the engine lacks what it needs."""


@dataclass(frozen=True)
class Grammar:
    """Grammar that the new text of a request must match from its first to its last character."""

    notation: Notation
    text: str
    """The schema as JSON, the regular expression, or the grammar in Lark's notation with the rule `start`."""

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """Text that is JSON and valid for a schema; an empty schema allows any JSON."""
        return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


class GrammarTokens:
    """The vocabulary of a tokenizer, prepared for grammars; takes about a second for a large one.

    `end_tokens` end a text: they are allowed where the grammar may end. `vocab` is the number of logits; tokens beyond the tokenizer's
    are never allowed. Raises BadGrammar without the extra `grammar`, an end token, or a tokenizer of bytes.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab: int, end_tokens: Sequence[int]) -> None:
        self._library = _llguidance()
        if not end_tokens:
            raise BadGrammar("grammar: a text that follows a grammar ends with an end token; give at least one stop id")
        self.vocab = vocab
        try:
            self._tokens = self._library.LLTokenizer(tokenizer.to_str(), n_vocab=vocab, eos_token=list(end_tokens))
        except ValueError as error:
            raise BadGrammar(f"grammar: this tokenizer cannot be used: {_first_line(str(error))}") from None

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the beginning of a text. Raises BadGrammar for a grammar that is wrong."""
        if grammar.notation == "json_schema":
            _check_json(grammar.text)
        compiled = getattr(self._library.LLMatcher, f"grammar_from_{grammar.notation}")(grammar.text)
        matcher = self._library.LLMatcher(self._tokens, compiled, log_level=0)
        if matcher.is_error():
            raise BadGrammar(f"grammar: this {grammar.notation} cannot be used: {_first_line(matcher.get_error())}")
        return GrammarMatcher(matcher, self.vocab)


class GrammarMatcher:
    """Follows the text of one request."""

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher, self._words = matcher, -(-vocab // 32)

    @property
    def finished(self) -> bool:
        """Whether nothing but an end token can follow."""
        return self._matcher.is_stopped()

    @property
    def complete(self) -> bool:
        """Whether the text so far matches the grammar."""
        return self._matcher.is_accepting()

    def write_bitmask(self, bitmask: Tensor, index: int) -> None:
        """Set row `index` of `bitmask` `(samples, words)`, int32 and on the host, to the tokens that may come next."""
        words = bitmask[index]
        assert words.numel() == self._words and words.is_contiguous() and words.device.type == "cpu"
        self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), 4 * self._words)

    def advance(self, token: int) -> None:
        """Advance by the next token. Raises ValueError if the grammar does not allow it."""
        if not self._matcher.consume_token(token):
            raise ValueError(f"token {token} does not follow the grammar: {_first_line(self._matcher.get_error())}")

    def accepted(self, drafts: Sequence[int]) -> int:
        """Number of leading draft tokens that the grammar allows; the matcher does not advance."""
        return self._matcher.validate_tokens(list(drafts))


def unconstrained(samples: int, vocab: int, *, pin_memory: bool = False) -> Tensor:
    """A bitmask `(samples, ceil(vocab / 32))` on the host that allows all tokens."""
    return torch.full((samples, -(-vocab // 32)), -1, dtype=torch.int32, pin_memory=pin_memory)


def _check_json(text: str) -> None:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        raise BadGrammar(f"grammar: the schema is not JSON: {error}") from None


def _llguidance() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise BadGrammar("grammar: needs the extra `grammar`: pip install 'meshwright[grammar]'") from None


def _first_line(message: str) -> str:
    return message.strip().split("\n", 1)[0]
