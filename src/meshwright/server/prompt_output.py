"""Log probabilities of a request's prompts as JSON, in OpenAI's form (`echo` with `logprobs`) and in vLLM's (`prompt_logprobs`).

A prompt may have 100,000 tokens: they are written some at a time, and the other requests have their turn between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from meshwright.data.token_bytes import TokenBytes
from meshwright.serve.prompt_logprobs import PromptLogprobs, PromptToken
from meshwright.serve.text import text_stream
from meshwright.server.token_logprobs import NO_ENTRY, CompletionEntry, completion_entry, number_as_json, text_as_json

ENTRIES_AT_ONCE = 2048
"""Log probabilities that are written in one turn of the event loop, about 2 ms."""


class PromptOutput:
    """The log probabilities of one prompt."""

    def __init__(self, prompt: Sequence[int], tokens: TokenBytes) -> None:
        self._prompt = prompt
        self._tokens = tokens
        self._logprobs = PromptLogprobs.empty()

    def add(self, packed: Sequence[str]) -> None:
        """Add those of the next tokens, as the engine sends them."""
        self._logprobs.extend(PromptLogprobs.unpack(packed))

    @property
    def complete(self) -> bool:
        """Whether all have come; the first token has none."""
        return self._logprobs.tokens == len(self._prompt) - 1

    async def echoed(self, most: int, echo: str) -> list[CompletionEntry]:
        """Entries of all tokens for OpenAI's form; `echo` is the prompt's text in the answer.

        Tokens that the server has put before a text, as one that begins every text, are not in the echo and have offset 0.
        """
        stream = text_stream((), self._tokens, special=True)
        name = self._tokens.name
        texts = [stream.add_one(token)[0] for token in self._prompt]
        texts[-1] += stream.finish()
        hidden = sum(map(len, texts)) - len(echo)
        entries = [NO_ENTRY._replace(text=text_as_json(texts[0]))]
        end = len(texts[0])
        async for token in self._each():
            text = texts[len(entries)]
            entries.append(completion_entry(name, text, token.chosen, token.top[:most], max(end - hidden, 0)))
            end += len(text)
        return entries

    async def listed(self, most: int) -> str:
        """The list of vLLM's form: for each token an object with its own id and the likeliest ones, null for the first."""
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
        """The log probabilities of each token; the event loop has a turn after some."""
        entries = 0
        for token in self._logprobs.each():
            yield token
            entries += 1 + len(token.top)
            if entries >= ENTRIES_AT_ONCE:
                entries = 0
                await asyncio.sleep(0)
