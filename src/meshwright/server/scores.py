"""Answers POST /score: the scores that a reward model gives to sequences."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from meshwright.server.engine_client import EngineClient, EngineRequest, News, Subscription
from meshwright.server.errors import RequestError
from meshwright.server.replies import ContentResponse, client_left, json_response
from meshwright.server.text_request import CheckedTextRequest

if TYPE_CHECKING:
    from starlette.requests import Request


async def scored(client: EngineClient, model: str, texts: CheckedTextRequest, request: Request) -> ContentResponse:
    """Return the answer with the scores of `texts`, in their order.

    If the client disconnects, sequences that are still queued are not scored.
    """
    subscription = Subscription(whole=True)
    ids = list[int]()
    found = dict[int, float]()
    for index, prompt in enumerate(texts.prompts):
        ids += client.submit(EngineRequest(tokens=prompt, new_tokens=1), subscription, index)
    leaving = asyncio.ensure_future(_watch(request, subscription))
    try:
        while len(found) < len(ids):
            found |= dict(_scores(await subscription.next()))
    finally:
        client.abort(ids)
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await leaving
    data = [{"object": "score", "index": index, "score": found[index]} for index in range(len(ids))]
    usage = {"prompt_tokens": texts.prompt_tokens, "total_tokens": texts.prompt_tokens}
    return json_response({"object": "list", "model": model, "data": data, "usage": usage})


def _scores(news: Sequence[News]) -> Iterator[tuple[int, float]]:
    """Yield (index, score) for each sequence in the news. Raises RequestError if one failed, or if the client disconnected."""
    if not news:
        raise RequestError(400, "the client has closed the connection")
    for item in news:
        if item.reason in ("refused", "failed"):
            raise RequestError.of_failure(item.error, item.code)
        if item.reason == "abort":
            raise RequestError(503, "the server is stopping")
        assert item.score is not None, "a text ends with its score"
        yield item.index, item.score


async def _watch(request: Request, subscription: Subscription) -> None:
    await client_left(request.receive)
    subscription.close()
