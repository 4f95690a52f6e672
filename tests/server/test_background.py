"""The guard of tasks beside requests: logged, counted, begun again or fatal."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from meshwright.server import background
from meshwright.server.background import guarded


def failing(*errors: Exception) -> Callable[[], Awaitable[None]]:
    """Work that raises each error in turn and then returns."""
    left = list(errors)

    async def work() -> None:
        await asyncio.sleep(0)
        if left:
            raise left.pop(0)

    return work


def test_what_fails_is_logged_counted_and_begun_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "FIRST_PAUSE", 0.001)
    failures: Counter[str] = Counter()
    with caplog.at_level(logging.WARNING):
        asyncio.run(guarded("follow", failing(OSError(24, "Too many open files"), KeyError("x")), failures))
    assert failures == {"follow": 2}
    first, second = caplog.records
    assert "follow: OSError: [Errno 24] Too many open files; it begins again in 0.001 s" in first.getMessage()
    assert "follow: KeyError: 'x'; it begins again in 0.002 s" in second.getMessage() and second.exc_info


def test_a_fatal_failure_ends_the_server_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    failures: Counter[str] = Counter()
    reasons: list[str] = []
    asyncio.run(guarded("HTTP", failing(RuntimeError("boom")), failures, fatal=reasons.append))
    assert reasons == ["HTTP: RuntimeError: boom"] and failures == {"HTTP": 1}


def test_a_cancelled_task_ends() -> None:
    async def check() -> None:
        task = asyncio.ensure_future(guarded("follow", asyncio.Event().wait, Counter()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(check())
