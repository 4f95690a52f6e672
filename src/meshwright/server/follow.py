"""Serves each new checkpoint of a training run."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from meshwright.server.engine_client import EngineClient
from meshwright.spec.errors import MeshwrightError, attach_key

log = logging.getLogger("meshwright.server")


def newest(folder: Path) -> Path:
    """The newest committed checkpoint of the run in `folder`. Raises BadInput or Damaged without one."""
    from meshwright.checkpoint.verify import newest_checkpoint

    with attach_key("follow"):
        return newest_checkpoint(folder, contents=False)


class Follower:
    """Loads each checkpoint of a run that is newer than `served`; looks every so many `seconds`."""

    def __init__(self, client: EngineClient, run: Path, served: Path, seconds: float) -> None:
        self._client, self._run, self._seen, self._seconds = client, run, served, seconds

    async def follow(self) -> None:
        """Look until the engine has failed. A checkpoint that cannot be loaded is logged and left out.

        After another error, e.g. OSError while no file can be opened, it can be called again.
        """
        while self._client.failure is None:
            await asyncio.sleep(self._seconds)
            try:
                found = await asyncio.to_thread(newest, self._run)
                if found == self._seen:
                    continue
                self._seen = found
                await self._client.load(found)
                log.info("serving %s", found)
            except MeshwrightError as error:
                log.warning("the newest checkpoint of %s is not served: %s", self._run, error)
