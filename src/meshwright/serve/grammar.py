"""Output that follows a JSON schema, a regular expression or a Lark grammar, by llguidance (the extra `grammar`).

A matcher follows the tokens of one request on the host and gives a bitmask of the tokens that may come next. The sampler removes all
others on the device (`logit_filters.keep_allowed`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from meshwright.serve.compiled_grammar import BadGrammar, Grammar, compiled, exceeded, first_line, llguidance

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["BadGrammar", "Grammar", "GrammarMatcher", "GrammarTokens", "unconstrained"]

MOST_COMPILED = 64
"""Compiled grammars that are kept."""
TRIED_TOKENS = 4
"""Tokens by which a compiled grammar is tried before a request is accepted."""
END = "<|end of a grammar|>"
"""Name of the token that stands for all end tokens."""


class GrammarTokens:
    """The vocabulary of a tokenizer, prepared for grammars; takes some seconds for a large one.

    `vocab` is the number of logits; tokens beyond the tokenizer's are never allowed. Compiled grammars are kept, the `MOST_COMPILED` that
    were used last. `compile` may be called in another thread. Raises BadGrammar without the extra `grammar`, or for a tokenizer of bytes.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab: int) -> None:
        self._library = llguidance()
        # Each request has end tokens of its own, so the library gets a token that no text has: its bit says where a text may end.
        own = type(tokenizer).from_str(tokenizer.to_str())
        own.add_special_tokens([END])
        end = own.token_to_id(END)
        assert end is not None
        self.end = end
        self.vocab = vocab
        try:
            self._tokens = self._library.LLTokenizer(
                own.to_str(), n_vocab=max(vocab, self.end + 1), eos_token=[self.end]
            )
        except ValueError as error:
            raise BadGrammar(f"grammar: this tokenizer cannot be used: {first_line(str(error))}") from None
        self.mask = np.zeros(-(-max(vocab, self.end + 1) // 32), np.int32)
        """Memory for the bits of one request: more than `vocab`, with that of `end`."""
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()
        """Matchers at the beginning of a text, or the BadGrammar of a grammar that is refused."""
        self._lock = threading.Lock()

    def matcher(self, grammar: Grammar, end_tokens: Collection[int]) -> GrammarMatcher:
        """A matcher at the beginning of a text that ends with one of `end_tokens`. Raises BadGrammar for a grammar that is wrong."""
        if not end_tokens:
            raise BadGrammar("grammar: a text that follows a grammar ends with an end token; give at least one stop id")
        return GrammarMatcher(self.compile(grammar).deep_copy(), self, end_tokens)

    def has(self, grammar: Grammar) -> bool:
        """Whether a grammar is compiled, or refused, already."""
        with self._lock:
            return grammar in self._compiled

    def refuse(self, grammar: Grammar, reason: str) -> None:
        """Raise BadGrammar from now on for a grammar."""
        self._keep(grammar, BadGrammar(reason))

    def compile(self, grammar: Grammar) -> Any:
        """The library's matcher of a grammar at the beginning of a text; not to be changed. Raises BadGrammar."""
        with self._lock:
            if (known := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
        if known is None:
            try:
                known = compiled(self._library, self._tokens, grammar)
                self._try(known.deep_copy())
            except BadGrammar as error:
                known = error
            self._keep(grammar, known)
        if isinstance(known, BadGrammar):
            raise BadGrammar(str(known))
        return known

    def _keep(self, grammar: Grammar, known: Any) -> None:
        with self._lock:
            self._compiled[grammar] = known
            while len(self._compiled) > MOST_COMPILED:
                self._compiled.popitem(last=False)

    def _try(self, matcher: Any) -> None:
        """Advance by a few tokens that the grammar allows. Raises BadGrammar if that exceeds a limit already."""
        for _ in range(TRIED_TOKENS):
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            filled = np.flatnonzero(bits)
            if not len(filled):
                break
            token = int(8 * filled[0] + np.unpackbits(bits[filled[:1]], bitorder="little").argmax())
            if token == self.end or not matcher.consume_token(token):
                break
        if matcher.is_error():
            raise BadGrammar(exceeded(matcher))


class GrammarMatcher:
    """Follows the text of one request, which ends with one of `end_tokens`."""

    def __init__(self, matcher: Any, tokens: GrammarTokens, end_tokens: Collection[int]) -> None:
        self._matcher = matcher
        self._tokens = tokens
        bits = np.zeros_like(tokens.mask)
        for token in (token for token in end_tokens if 0 <= token < tokens.vocab):
            bits[token // 32] |= np.uint32(1 << token % 32).view(np.int32)
        self._end_words = np.flatnonzero(bits)
        self._end_bits = bits[self._end_words]

    @property
    def finished(self) -> bool:
        """Whether nothing but an end token can follow."""
        return self._matcher.is_stopped()

    @property
    def complete(self) -> bool:
        """Whether the text so far matches the grammar."""
        return self._matcher.is_accepting()

    def write_bitmask(self, bitmask: Tensor, index: int) -> None:
        """Set row `index` of `bitmask` `(samples, words)`, int32 and on the host, to the tokens that may come next.

        Raises BadGrammar if that exceeds a limit, or if no token may come.
        """
        row = bitmask[index].numpy()
        mask = self._tokens.mask
        end = self._tokens.end
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            raise BadGrammar(exceeded(self._matcher))
        may_end = mask[end // 32] >> end % 32 & 1
        mask[end // 32] &= ~np.uint32(1 << end % 32).view(np.int32)
        # An end token is never part of the text.
        mask[self._end_words] = (
            mask[self._end_words] | self._end_bits if may_end else mask[self._end_words] & ~self._end_bits
        )
        row[:] = mask[: len(row)]
        if not may_end and not row.any():
            raise BadGrammar("grammar: no token can follow the text so far")

    def advance(self, token: int) -> None:
        """Advance by the next token. Raises BadGrammar if the grammar does not allow it, or if it exceeds a limit."""
        if not self._matcher.consume_token(token):
            raise BadGrammar(exceeded(self._matcher))

    def accepted(self, drafts: Sequence[int]) -> int:
        """Number of leading draft tokens that the grammar allows; the matcher does not advance."""
        return self._matcher.validate_tokens(list(drafts))


def unconstrained(samples: int, vocab: int, *, pin_memory: bool = False) -> Tensor:
    """A bitmask `(samples, ceil(vocab / 32))` on the host that allows all tokens."""
    return torch.full((samples, -(-vocab // 32)), -1, dtype=torch.int32, pin_memory=pin_memory)
