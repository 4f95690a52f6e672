"""Probes of an engine: generating one token after a neutral prompt shows whether the model gives finite logits at all.

The prompt of a single client may make the logits NaN. That fails this client's request only. The server is unhealthy
only if the neutral prompt fails too.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from meshwright.serve.failures import NotFinite
from meshwright.server.background import guarded

if TYPE_CHECKING:
    from meshwright.server.engine_client import EngineClient

FAILURES = 3
"""The engine is probed after this many requests in a row failed with logits that are not finite, and none got a token."""
PROBE_SECONDS = 3.0
"""Seconds between a failed probe and the next one."""
PROMPT = (0,)
"""Token ids of the neutral prompt."""


class EngineProbe:
    """Decides whether an engine's model works. It counts requests with logits that are not finite, and starts probes."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._failures = 0
        self._task: asyncio.Task[None] | None = None
        self.failing = False
        """Whether the last probe failed, that is, whether the server is unhealthy."""

    def note_tokens(self) -> None:
        """Note that some request got a token: the model works."""
        self._failures = 0

    def note_not_finite(self) -> None:
        """Note that a request failed because its logits were not finite."""
        self._failures += 1
        if self._failures >= FAILURES:
            self.start()

    def start(self) -> None:
        """Start probing, and repeat until a probe succeeds. Nothing happens if probes run already."""
        if self._task is None or self._task.done():
            failures = self._client.metrics.task_failures
            self._task = asyncio.ensure_future(guarded("probe", self._probe, failures))

    def close(self) -> None:
        """Stop probing."""
        if self._task is not None:
            self._task.cancel()

    async def _probe(self) -> None:
        """Probe every `PROBE_SECONDS`, until a probe succeeds or the engine has failed."""
        while self._client.usable:
            code = await self._client.first_token(PROMPT)
            self.failing = code == NotFinite.code
            if not self.failing:
                self._failures = 0
                return
            await asyncio.sleep(PROBE_SECONDS)
