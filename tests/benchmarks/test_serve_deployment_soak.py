"""The checks of `make test-soak` find what they are for, and its proxy damages one byte of a message between engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
import serve_deployment_soak
from serve_deployment_soak import DEADLINE_SECONDS, RESTORE_SECONDS, Attempt, Content, SoakError, Verdicts
from soak_processes import HEADER, DamagingProxy, Outage, free_ports

CONTENT = Content((1, 2), "abcdef")


def attempt(began: float, ended: float, text: str | None = "abc", failure: str = "") -> Attempt:
    return Attempt(CONTENT, 3, began, ended, text, failure)


def test_answers_and_failures_that_an_outage_explains_are_taken() -> None:
    verdicts, outages = Verdicts(), [Outage("decode", 10.0, 12.0), Outage("prefill", 0.0)]
    verdicts.unanswered_faults.append(("kill", 10.0))
    verdicts.add(attempt(9.0, 11.0), outages)
    assert verdicts.unanswered_faults, "this answer was asked for before the fault"
    verdicts.add(attempt(11.0, 11.5, None, "lost"), outages)
    verdicts.add(attempt(10.5, 13.0), outages)
    assert verdicts.restore_seconds == [("kill", 3.0)] and not verdicts.unanswered_faults
    assert verdicts.ends == {"answered": 2, "lost": 1}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (attempt(0.0, 1.0, "abd"), "one engine alone gives"),
        (attempt(0.0, 1.0, "abcd"), "one engine alone gives"),
        (attempt(0.0, 1.0, None, "lost"), "while router and decode servers were there"),
        (attempt(10.0, 11.0, None, "unconnected"), "while router and decode servers were there"),
        (attempt(0.0, DEADLINE_SECONDS + 1), "a request took"),
        (attempt(0.0, 10.0 + 2 * RESTORE_SECONDS), "no answer within"),
    ],
)
def test_wrong_ends_are_found(wrong: Attempt, message: str) -> None:
    verdicts = Verdicts()
    verdicts.unanswered_faults.append(("kill", 10.0))
    with pytest.raises(SoakError, match=message):
        verdicts.add(wrong, [Outage("decode", 10.0, 12.0), Outage("prefill", 0.0)])


def test_the_proxy_damages_one_byte_and_acts_in_the_middle_of_a_message() -> None:
    message, content = json.dumps({"blocks": 1}).encode(), bytes(range(90))
    frame = HEADER.pack(len(message), len(content)) + message + content
    acted: list[int] = []

    async def check() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(frame * 2)
            await writer.drain()
            await reader.read()
            writer.close()

        target = await asyncio.start_server(answer, "127.0.0.1", 0)
        (port,) = free_ports(1)
        proxy = DamagingProxy(port, target.sockets[0].getsockname()[1])
        await proxy.start()
        proxy.damage, proxy.at_transfer = 1, lambda: acted.append(1)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        received = await asyncio.wait_for(reader.readexactly(2 * len(frame)), 60)
        assert received[len(frame) :] == frame and proxy.damaged == 1 and acted == [1]
        assert [at for at in range(len(frame)) if received[at] != frame[at]] == [len(frame) - len(content) + 30]
        proxy.cut()
        with pytest.raises((EOFError, ConnectionError)):
            await asyncio.wait_for(reader.readexactly(1), 60)
        writer.close()
        proxy.close()
        target.close()

    asyncio.run(check())


def test_what_is_in_use_at_the_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_deployment_soak, "QUIET_SECONDS", 0.0)

    class Busy(serve_deployment_soak.DeploymentSoak):
        def _start(self, *arguments: Any) -> list[Any]:
            return []

        async def _in_use(self) -> dict[str, Any]:
            return {"decode 0: kv_cache_usage_perc": 0.1}

    async def audit(make: Callable[..., Any]) -> None:
        await make(None, [CONTENT], 0, 1.0, 5.0)._audit()

    with pytest.raises(SoakError, match="in use after the last request: .*kv_cache_usage"):
        asyncio.run(audit(Busy))
