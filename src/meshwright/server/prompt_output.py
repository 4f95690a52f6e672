"""Log probabilities of prompts as JSON: in OpenAI's format (`echo` with `logprobs`) and in vLLM's (`prompt_logprobs`).

A prompt may have 100,000 tokens. Its entries are written in portions, and the event loop serves other requests between
two portions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from meshwright.data.token_bytes import TokenBytes
from meshwright.serve.prompt_logprobs import PromptLogprobs, PromptToken
from meshwright.serve.text import text_stream
from meshwright.server.token_logprobs import NO_ENTRY, CompletionEntry, completion_entry, number_as_json, text_as_json

ENTRIES_AT_ONCE = 2048
"""Entries that are written before the event loop gets a turn; that takes about 2 ms."""


class PromptOutput:
    """Collects the log probabilities of one prompt, and writes them."""

    def __init__(self, prompt: Sequence[int], tokens: TokenBytes) -> None:
        self._prompt = prompt
        self._tokens = tokens
        self._logprobs = PromptLogprobs.empty()

    def add(self, packed: Sequence[str]) -> None:
        """Add the log probabilities of the next prompt tokens, packed by `PromptLogprobs.packed`."""
        self._logprobs.extend(PromptLogprobs.unpack(packed))

    @property
    def complete(self) -> bool:
        """Whether the log probabilities of all tokens but the first, which has none, have come."""
        return self._logprobs.tokens == len(self._prompt) - 1

    async def echoed(self, most: int, echo: str) -> list[CompletionEntry]:
        """Return the entries of all tokens in OpenAI's format, each with at most `most` alternatives.

        `echo` is the prompt's text in the answer. It lacks tokens that the server put before the text, such as `<s>`.
        The entries of those tokens have offset 0.
        """
        stream = text_stream((), self._tokens, special=True)
        name = self._tokens.name
        texts = [stream.add_one(token)[0] for token in self._prompt]
        texts[-1] += stream.finish()
        # Number of characters at the beginning that the echo does not show.
        hidden = sum(map(len, texts)) - len(echo)
        entries = [NO_ENTRY._replace(text=text_as_json(texts[0]))]
        end = len(texts[0])
        async for token in self._each():
            text = texts[len(entries)]
            entries.append(completion_entry(name, text, token.chosen, token.top[:most], max(end - hidden, 0)))
            end += len(text)
        return entries

    async def listed(self, most: int) -> str:
        """Return the JSON list of vLLM's format, with one element for each token.

        The element of the first token is null. The others are objects with the token itself and its `most` likeliest
        alternatives.
        """
        entries = ["null"]
        async for token in self._each():
            own = self._prompt[len(entries)]
            shown = {own: (token.chosen, token.rank)}
            for rank, (id, value) in enumerate(token.top[:most], 1):
                shown.setdefault(id, (value, rank))
            entries.append(f"{{{','.join([self._shown(id, *values) for id, values in shown.items()])}}}")
        return f"[{','.join(entries)}]"

    def _shown(self, id: int, value: float, rank: int) -> str:
        text = text_as_json(self._tokens.name(id)[0])
        return f'"{id}":{{"logprob":{number_as_json(value)},"rank":{rank},"decoded_token":{text}}}'

    async def _each(self) -> AsyncIterator[PromptToken]:
        """Yield the log probabilities of each token. The event loop gets a turn every `ENTRIES_AT_ONCE` entries."""
        entries = 0
        for token in self._logprobs.each():
            yield token
            entries += 1 + len(token.top)
            if entries >= ENTRIES_AT_ONCE:
                entries = 0
                await asyncio.sleep(0)
