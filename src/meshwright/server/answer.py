"""Carries out a request for text: submits it to the engine and sends the answer, as one body or as server-sent events."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from meshwright.data.token_bytes import TokenBytes
from meshwright.serve.stops import StopStrings, StringSearch
from meshwright.serve.text import text_stream
from meshwright.server.bodies import ResponseBody, TextPiece, joined, usage
from meshwright.server.engine_client import EngineClient, EngineRequest, News, Subscription
from meshwright.server.errors import RequestError
from meshwright.server.output_reader import AnswerPart, OutputReader
from meshwright.server.prompt_output import PromptOutput
from meshwright.server.replies import JSON_HEADERS, client_left
from meshwright.server.text_output import TextOutput
from meshwright.server.text_request import CheckedTextRequest

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

DIRECT_SEND = "meshwright.send"
"""Key of an ASGI scope whose value is uvicorn's own `send`, without the wrappers of the applications around the endpoint."""
EVENT_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class TextAnswer:
    """The answer to one request for text, as an ASGI application.

    A request has `request.count` sequences for each of its prompts: sequence `index` continues prompt `index // count`.
    The engine's output for a sequence arrives as `News`. If the client disconnects, or sending fails, the engine ends
    the request's sequences before its next step.
    """

    def __init__(
        self,
        client: EngineClient,
        tokens: TokenBytes,
        request: CheckedTextRequest,
        body: ResponseBody,
        context: int,
        keep: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """`client`: connection to the engine; `tokens`: the bytes of each token; `request`: the checked request.
        `body`: writes the answer in the form of one API; `context`: maximum number of tokens of prompt and answer together.
        `keep`: called with all new tokens of an answer when it ends, but not if a stop string ended it. It is given
        only for requests with one sequence.
        """
        self._client = client
        self._tokens = tokens
        self._request = request
        self._body = body
        self._context = context
        self._keep = keep
        self._drawn: list[int] = []
        """Tokens that were generated so far, collected for `keep`."""
        self._ids: list[int] = []
        """The engine's request ids, one for each sequence: those of the first prompt, then those of the second, and so on."""
        count = len(request.prompts) * request.count
        self._stop_search = StringSearch(request.stop_strings) if request.stop_strings else None
        self._outputs = [self._output(index) for index in range(count)]
        self._readers = None if request.output is None else [request.output.reader() for _ in range(count)]
        self._reasoning_tokens = 0
        self._open = count
        """Number of sequences that have not ended."""
        scored = "prompt_logprobs" in request.sampling
        self._prompts = {n: PromptOutput(p, tokens) for n, p in enumerate(request.prompts)} if scored else {}
        """Log probabilities of prompts that are still incomplete, by the prompt's number."""
        self._listed: dict[int, str] = {}
        """Complete log probabilities of prompts as JSON in vLLM's format, by the prompt's number."""
        self._subscription = Subscription(whole=not request.stream and not request.stop_strings)

    def _output(self, index: int) -> TextOutput:
        """Return the decoder of sequence `index`, which turns tokens into text and finds stop strings."""
        request = self._request
        search = self._stop_search
        special = request.special_tokens or (request.output is not None and request.output.special)
        # If no new tokens are asked for, the decoder gets no prompt: a character that the prompt left incomplete stays
        # as the echo shows it.
        before = request.prompts[index // request.count] if request.new_tokens else ()
        return TextOutput(
            text_stream(before, self._tokens, special=special),
            None if search is None else StopStrings(search, include=request.include_stop),
            None if request.logprobs is None else self._body.logprobs(self._tokens, len(self._echo(index))),
            request.reported_stops,
            request.sampling.get("min_tokens", 0),
        )

    @property
    def new_tokens(self) -> int:
        """Number of generated tokens in all sequences so far."""
        return sum(output.tokens for output in self._outputs)

    def _usage(self) -> dict[str, Any]:
        """Return the usage object of the answer. The tokens of a prompt count once, however many sequences it has."""
        # The first sequence of each prompt says how many tokens of the prompt were cached.
        cached = sum(output.cached_tokens for output in self._outputs[:: self._request.count])
        reasoning = None if self._readers is None else self._reasoning_tokens
        return usage(self._request.prompt_tokens, self.new_tokens, cached, reasoning)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Submit the request and send its answer. Meanwhile a second task watches whether the client disconnects."""
        self._submit()
        watcher = asyncio.ensure_future(self._watch(receive))
        try:
            if self._request.stream:
                # The events are sent by a task of their own. A coroutine that is awaited here would be resumed through
                # the frames of all applications around this one, each time.
                await asyncio.ensure_future(self._send_events(send, scope.get(DIRECT_SEND, send)))
            else:
                await self._send_whole(send)
        except _ClientGone:
            pass
        finally:
            self._client.abort(self._ids)
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher

    def _submit(self) -> None:
        """Submit each prompt to the engine. A prompt's new tokens are limited by the room that it leaves in the context."""
        request = self._request
        for index, prompt in enumerate(request.prompts):
            room = self._context - len(prompt)
            engine_request = EngineRequest(
                tokens=prompt,
                # At least 1, because the engine always generates a token.
                new_tokens=max(min(request.new_tokens, room), 1),
                # Without the client's seed, each prompt gets a random seed of its own.
                sampling={"seed": secrets.randbits(63), **request.sampling},
                stop_ids=request.stop_ids,
                grammar=request.grammar,
                count=request.count,
                priority=request.priority,
                salt=request.salt,
            )
            self._ids += self._client.submit(engine_request, self._subscription, index * request.count)

    async def _watch(self, receive: Receive) -> None:
        await client_left(receive)
        self._subscription.close()

    async def _next(self) -> dict[int, list[News]]:
        """Wait for the next news and return them by sequence.

        Raises RequestError if the engine refused or failed a sequence, and _ClientGone if the client has disconnected.
        """
        news = await self._subscription.next()
        if not news:
            raise _ClientGone
        for item in news:
            if item.reason is not None:
                self._check(item)
        if self._prompts:
            await self._take_prompts(news)
        if not self._request.new_tokens:
            news = [_without_tokens(item) for item in news]
        if len(self._outputs) == 1:
            return {0: news}
        by_text: dict[int, list[News]] = {}
        for item in news:
            by_text.setdefault(item.index, []).append(item)
        return by_text

    async def _take_prompts(self, news: Sequence[News]) -> None:
        """Take the log probabilities of prompts out of the news, and format those of each prompt that is now complete."""
        request = self._request
        for item in news:
            if item.prompt_logprobs is not None:
                self._prompts[item.index // request.count].add(item.prompt_logprobs)
        for number in [number for number, prompt in self._prompts.items() if prompt.complete]:
            prompt = self._prompts.pop(number)
            if request.prompt_logprobs is not None:
                self._listed[number] = await prompt.listed(request.prompt_logprobs)
            if request.echoes and request.logprobs is not None:
                entries = await prompt.echoed(request.logprobs, request.echoes[number])
                for output in self._outputs[number * request.count : (number + 1) * request.count]:
                    output.add_prompt(entries)

    def _check(self, item: News) -> None:
        """Raise RequestError if the engine refused, failed or aborted a sequence."""
        if item.reason in ("refused", "failed"):
            raise RequestError.of_failure(item.error, item.code, self._request.grammar_key)
        if item.reason == "abort":
            raise RequestError(503, "the server is stopping")

    def _add(self, index: int, news: list[News]) -> TextPiece:
        """Add news to a sequence and return the text, log probabilities and finish reason that the client gets next.

        A stop string is found here, not in the engine. If one ends the sequence, the engine is told to end it too.
        """
        output = self._outputs[index]
        piece = TextPiece(output.add(news)) if self._readers is None else self._read(index, news)
        if self._keep is not None:
            for item in news:
                self._drawn += item.tokens
        if output.finish_reason is not None:
            self._open -= 1
            if self._keep is not None and not isinstance(output.stop_reason, str):
                self._keep(self._drawn)
            if news[-1].reason is None:
                self._client.abort([self._ids[index]], "stop")
        logprobs = output.logprobs() if self._request.stream else None
        if logprobs is None and output.finish_reason is None:
            return piece
        return piece._replace(logprobs=logprobs, finish_reason=output.finish_reason, stop_reason=output.stop_reason)

    def _read(self, index: int, news: list[News]) -> TextPiece:
        """Add news to a sequence whose text is split into content, reasoning and tool calls."""
        assert self._readers is not None
        output = self._outputs[index]
        reader = self._readers[index]
        format = self._request.output
        if reader.may_reason and (len(news) > 1 or len(news[0].tokens) > 1):
            parts: list[AnswerPart] = []
            for some in _one_by_one(news):  # token by token, so that each counts either as reasoning or as content
                parts += self._read_some(output, reader, some).all_parts
                if output.finish_reason is not None:
                    break
            piece = TextPiece("", parts=parts)
        else:
            piece = self._read_some(output, reader, news)
        if reader.count and output.finish_reason == "stop" and not (format and format.named):
            output.finish_reason = "tool_calls"
        return piece

    def _read_some(self, output: TextOutput, reader: OutputReader, news: list[News]) -> TextPiece:
        """Add news to a sequence and read the new text. While there may be reasoning, the news have at most one token."""
        before = output.tokens
        reasoned = reader.reasoning
        text = output.add(news)
        shown = reader.go_on(text) if output.finish_reason is None else None
        if shown is None:
            piece = TextPiece("", parts=reader.add(text, final=output.finish_reason is not None))
        else:
            piece = TextPiece(shown, kind="reasoning") if reasoned else TextPiece(shown)
        if reasoned or reader.reasoning:
            self._reasoning_tokens += output.tokens - before
        return piece

    async def _send_whole(self, send: Send) -> None:
        """Collect the text and other parts of all sequences, and send them as one JSON body."""
        texts = [[self._echo(index)] for index in range(len(self._outputs))]
        parts: list[list[AnswerPart]] = [[] for _ in self._outputs]
        while self._open:
            for index, news in (await self._next()).items():
                if self._outputs[index].finish_reason is None:
                    piece = self._add(index, news)
                    texts[index].append(piece.text)
                    if self._readers is not None:
                        parts[index] += piece.all_parts
        whole = [
            TextPiece(
                "".join(text),
                output.logprobs(whole=True),
                None if self._readers is None else joined(found),
                output.finish_reason,
                output.stop_reason,
                self._listed.get(index // self._request.count),
            )
            for index, (output, text, found) in enumerate(zip(self._outputs, texts, parts, strict=True))
        ]
        content = self._body.whole(whole, self._usage())
        headers = [*JSON_HEADERS, (b"content-length", str(len(content)).encode("ascii"))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _send_events(self, send: Send, send_body: Send) -> None:
        """Send the answer as events. `send` sends the head, and `send_body`, which has fewer wrappers, all that follows."""
        news = await self._next()  # before the head: a request that the engine refuses is answered with its own status
        while self._prompts:
            for index, more in (await self._next()).items():
                news.setdefault(index, []).extend(more)
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
        for index, of_text in news.items():
            self._outputs[index].cached_tokens = of_text[0].cached_tokens
        opening = b"".join(self._opening(index) for index in range(len(self._outputs)))
        if opening:
            await send_body({"type": "http.response.body", "body": opening, "more_body": True})
        try:
            while True:
                if content := self._events(news):
                    await send_body({"type": "http.response.body", "body": content, "more_body": True})
                if not self._open:
                    break
                news = await self._next()
        except RequestError as error:  # the head with status 200 is sent already: the error becomes an event
            ending = self._body.failure(error)
        else:
            ending = self._body.last(self._usage())
        await send_body({"type": "http.response.body", "body": ending})

    def _opening(self, index: int) -> bytes:
        """Return the events that begin a sequence: those of the API, and the echo of the prompt."""
        opening = self._body.first(index, self._usage())
        echo = self._echo(index)
        if not echo:
            return opening
        return opening + self._body.event(
            index, TextPiece(echo, self._outputs[index].logprobs()), self._continuous_usage()
        )

    def _events(self, news: dict[int, list[News]]) -> bytes:
        """Return the events for news. A sequence that has ended already gets no event."""
        events = []
        for index, of_text in news.items():
            if self._outputs[index].finish_reason is None:
                piece = self._add(index, of_text)
                found = piece.text if piece.parts is None else piece.parts
                if found or piece.logprobs or piece.finish_reason is not None:
                    events.append(self._body.event(index, piece, self._continuous_usage()))
        return b"".join(events)

    def _continuous_usage(self) -> dict[str, Any] | None:
        """Return the usage object for every event if the request has asked for it, else None."""
        return self._usage() if self._request.continuous_usage else None

    def _echo(self, index: int) -> str:
        """Return the text of the sequence's prompt if the answer repeats it, else an empty text."""
        echoes = self._request.echoes
        return echoes[index // self._request.count] if echoes else ""


def _one_by_one(news: list[News]) -> Iterator[list[News]]:
    """Split news into news with one token each; the last of an item has its finish reason and other details."""
    for item in news:
        for number in range(len(item.tokens) - 1):
            yield [News(item.index, item.tokens[number : number + 1], logprobs=item.logprobs[number : number + 1])]
        last = len(item.tokens) - 1
        yield [item._replace(tokens=item.tokens[last:], logprobs=item.logprobs[last:])] if last > 0 else [item]


def _without_tokens(item: News) -> News:
    """Return news without their token. The engine always draws one token, also for a request with `max_tokens` 0."""
    return item._replace(tokens=(), logprobs=(), reason=item.reason and "length", stop_token=None)


class _ClientGone(Exception):
    """The client has closed its connection."""
