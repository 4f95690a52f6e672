"""Probes of an engine: one token after a neutral prompt shows whether the model gives finite logits at all.

A prompt of a client may make a model's logits NaN, which fails that request. Only if the neutral prompt fails too, the server is unhealthy.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from meshwright.serve.failures import NotFinite
from meshwright.server.background import guarded

if TYPE_CHECKING:
    from meshwright.server.engine_client import EngineClient

FAILURES = 3
"""Requests without finite logits, one after the other with no token between, after which the engine is probed."""
PROBE_SECONDS = 3.0
"""Time between a failed probe and the next."""
PROMPT = (0,)


class EngineProbe:
    """Decides whether an engine's model works, by its requests without finite logits and by probes."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._failures = 0
        self._task: asyncio.Task[None] | None = None
        self.failing = False
        """Whether the last probe has failed."""

    def note_tokens(self) -> None:
        """Note that requests got tokens."""
        self._failures = 0

    def note_not_finite(self) -> None:
        """Note a request that ended without finite logits."""
        self._failures += 1
        if self._failures >= FAILURES:
            self.start()

    def start(self) -> None:
        """Probe until a probe succeeds, unless probes run already."""
        if self._task is None or self._task.done():
            failures = self._client.metrics.task_failures
            self._task = asyncio.ensure_future(guarded("probe", self._probe, failures))

    def close(self) -> None:
        """End probes."""
        if self._task is not None:
            self._task.cancel()

    async def _probe(self) -> None:
        while self._client.usable:
            code = await self._client.first_token(PROMPT)
            self.failing = code == NotFinite.code
            if not self.failing:
                self._failures = 0
                return
            await asyncio.sleep(PROBE_SECONDS)
