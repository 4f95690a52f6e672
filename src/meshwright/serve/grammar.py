"""Output that follows a JSON schema, a regular expression or a Lark grammar, with llguidance (the extra `grammar`).

For each request a matcher on the host follows its tokens and gives a bitmask of the tokens that may come next. The
sampler on the device removes all other tokens (`logit_filters.keep_allowed`).
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
"""Maximum number of compiled grammars that are kept."""
TRIED_TOKENS = 4
"""Tokens that a new matcher is advanced by as a test, before the request is accepted."""
END = "<|end of a grammar|>"
"""Name of a token that is added to the tokenizer and stands for all end tokens."""


class GrammarTokens:
    """A tokenizer's vocabulary, prepared for grammars. Preparing a large vocabulary takes some seconds.

    `vocab` is the number of logits. Logits without a token of the tokenizer are never allowed. The `MOST_COMPILED`
    grammars that were used last are kept. `compile` may be called in another thread.

    Raises BadGrammar if the extra `grammar` is not installed, or for a byte tokenizer, which llguidance cannot use.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab: int) -> None:
        self._library = llguidance()
        # Each request has its own end tokens. The library is given one end token that no text contains; its bit says
        # whether the text may end.
        copy = type(tokenizer).from_str(tokenizer.to_str())
        copy.add_special_tokens([END])
        end = copy.token_to_id(END)
        assert end is not None
        self.end = end
        self.vocab = vocab
        try:
            self._tokens = self._library.LLTokenizer(
                copy.to_str(), n_vocab=max(vocab, self.end + 1), eos_token=[self.end]
            )
        except ValueError as error:
            raise BadGrammar(f"grammar: this tokenizer cannot be used: {first_line(str(error))}") from None
        self.mask = np.zeros(-(-max(vocab, self.end + 1) // 32), np.int32)
        """Bitmask that is reused for every request, with `vocab` bits and the bit of `end`."""
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()
        """By grammar: the matcher before the first token, or the BadGrammar with which the grammar is refused."""
        self._lock = threading.Lock()

    def matcher(self, grammar: Grammar, end_tokens: Collection[int]) -> GrammarMatcher:
        """Return a matcher for a new text, which ends with one of `end_tokens`. Raises BadGrammar for a wrong grammar."""
        if not end_tokens:
            raise BadGrammar("grammar: a text that follows a grammar ends with an end token; give at least one stop id")
        return GrammarMatcher(self.compile(grammar).deep_copy(), self, end_tokens)

    def has(self, grammar: Grammar) -> bool:
        """Whether the grammar was compiled or refused before, so that `compile` does not have to compile it."""
        with self._lock:
            return grammar in self._compiled

    def refuse(self, grammar: Grammar, reason: str) -> None:
        """Refuse a grammar from now on: `compile` raises BadGrammar with `reason`."""
        self._keep(grammar, BadGrammar(reason))

    def compile(self, grammar: Grammar) -> Any:
        """Return the library's matcher of a grammar before the first token.

        The caller must not change it. Raises BadGrammar.
        """
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
        """Advance by a few tokens that the grammar allows. Raises BadGrammar if a limit is exceeded already."""
        for _ in range(TRIED_TOKENS):
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            filled = np.flatnonzero(bits)
            if not len(filled):
                break
            # The first allowed token: the lowest bit that is set in the first byte that is not 0.
            token = int(8 * filled[0] + np.unpackbits(bits[filled[:1]], bitorder="little").argmax())
            if token == self.end or not matcher.consume_token(token):
                break
        if matcher.is_error():
            raise BadGrammar(exceeded(matcher))


class GrammarMatcher:
    """Checks the tokens of one request against its grammar. The text ends with one of `end_tokens`."""

    def __init__(self, matcher: Any, tokens: GrammarTokens, end_tokens: Collection[int]) -> None:
        self._matcher = matcher
        self._tokens = tokens
        # The 32-bit words of a bitmask that contain end tokens, and the bits of these tokens in them.
        bits = np.zeros_like(tokens.mask)
        for token in end_tokens:
            if 0 <= token < tokens.vocab:
                word, bit = divmod(token, 32)
                bits[word] |= np.uint32(1 << bit).view(np.int32)
        self._end_words = np.flatnonzero(bits)
        self._end_bits = bits[self._end_words]

    @property
    def finished(self) -> bool:
        """Whether only an end token can follow."""
        return self._matcher.is_stopped()

    @property
    def complete(self) -> bool:
        """Whether the text so far matches the grammar."""
        return self._matcher.is_accepting()

    def write_bitmask(self, bitmask: Tensor, index: int) -> None:
        """Set row `index` of `bitmask` `(samples, ceil(vocab / 32))`, int32 on the host, to the tokens that may come
        next.

        Bit `t % 32` of column `t // 32` is set if token `t` may come. Raises BadGrammar if a limit is exceeded, or if
        no token may come.
        """
        row = bitmask[index].numpy()
        mask = self._tokens.mask
        end = self._tokens.end
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            raise BadGrammar(exceeded(self._matcher))
        # The library's bit of `end` says whether the text may end here. It is cleared, since `end` is no token of the
        # model.
        end_word, end_bit = divmod(end, 32)
        may_end = (mask[end_word] >> end_bit) & 1
        mask[end_word] &= ~np.uint32(1 << end_bit).view(np.int32)
        # End tokens are allowed exactly where the text may end, whatever the grammar says about them.
        words = mask[self._end_words]
        mask[self._end_words] = words | self._end_bits if may_end else words & ~self._end_bits
        row[:] = mask[: len(row)]
        if not may_end and not row.any():
            raise BadGrammar("grammar: no token can follow the text so far")

    def advance(self, token: int) -> None:
        """Advance by the next token. Raises BadGrammar if the grammar does not allow it, or if a limit is exceeded."""
        if not self._matcher.consume_token(token):
            raise BadGrammar(exceeded(self._matcher))

    def accepted(self, drafts: Sequence[int]) -> int:
        """Return how many of the draft tokens, from the first on, the grammar allows. The matcher does not advance."""
        return self._matcher.validate_tokens(list(drafts))


def unconstrained(samples: int, vocab: int, *, pin_memory: bool = False) -> Tensor:
    """Return a bitmask `(samples, ceil(vocab / 32))`, int32 on the host, that allows all tokens.

    With `pin_memory` it is in page-locked memory, from which copies to a GPU are asynchronous.
    """
    return torch.full((samples, -(-vocab // 32)), -1, dtype=torch.int32, pin_memory=pin_memory)
