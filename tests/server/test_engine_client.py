"""The order in which the texts of a step get their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from meshwright.server.engine_client import NEWS_AT_ONCE, EngineClient, EngineRequest, News, Subscription
from meshwright.server.messages import encode
from meshwright.server.metrics import ServerMetrics

TEXTS = 40
Step = Sequence[tuple[int, list[int]]]
"""Texts and their new tokens."""


async def received_of(groups: Sequence[Sequence[Step]]) -> list[tuple[int, list[int]]]:
    """Texts and tokens in the order in which readers get them. The steps of a group arrive together, once all before are read."""
    client, received = EngineClient(ServerMetrics("model")), []
    subscriptions = [Subscription(whole=False) for _ in range(TEXTS)]

    async def read(index: int) -> None:
        while subscriptions[index].unfinished:
            received.append((index, [token for news in await subscriptions[index].next() for token in news.tokens]))

    for subscription in subscriptions:
        client.submit(EngineRequest(tokens=[1], new_tokens=9), subscription, 0)
    tasks, expected = [asyncio.ensure_future(read(index)) for index in range(TEXTS)], 0
    await asyncio.sleep(0)
    for steps in groups:
        for step in steps:
            client.data_received(encode({"step": step, "figures": [TEXTS, 0, 0.5, 0, 0]}))
            expected += sum(len(tokens) for _, tokens in step)
        async with asyncio.timeout(60):
            while sum(len(tokens) for _, tokens in received) < expected:
                await asyncio.sleep(0)
    read_tokens = list(received)
    client.fail("the end", 1)
    await asyncio.gather(*tasks)
    return read_tokens


def test_a_first_token_goes_before_the_other_tokens_of_its_step() -> None:
    last = TEXTS - 1
    first, second = ([(text, [100 * number + text]) for text in range(TEXTS)] for number in (1, 2))
    received = asyncio.run(received_of([[first[:last]], [second]]))
    assert received[:last] == first[:last]
    assert received[last] == second[last]
    assert sorted(received[last + 1 :]) == second[:last]


def test_tokens_of_steps_that_arrive_together_keep_their_order() -> None:
    steps = [[(text, [100 * number + text]) for text in range(TEXTS)] for number in range(4)]
    received = asyncio.run(received_of([[steps[0][: TEXTS // 2]], steps[1:]]))[TEXTS // 2 :]
    for text in range(TEXTS):
        tokens = [token for index, tokens in received if index == text for token in tokens]
        assert tokens == [100 + text, 200 + text, 300 + text]


def test_a_server_with_a_role_counts_blocks_before_its_engine_reports_any() -> None:
    for exchanges in (False, True):
        client = EngineClient(ServerMetrics("model"), exchanges=exchanges)
        assert ("kv_blocks_sent_total" in client.metrics.text(client.figures, client.transfers)) == exchanges


def test_a_long_whole_answer_is_read_in_parts() -> None:
    async def read() -> tuple[int, bool]:
        subscription = Subscription(whole=True)
        subscription.unfinished = 1
        reader = asyncio.ensure_future(subscription.next())
        await asyncio.sleep(0)
        for token in range(NEWS_AT_ONCE - 1):
            subscription.add(News(0, [token]))
        await asyncio.sleep(0)
        early = reader.done()
        subscription.add(News(0, [1]))
        return len(await reader), early

    assert asyncio.run(read()) == (NEWS_AT_ONCE, False)
