"""Serves each new checkpoint of a training run."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.spec.errors import MeshwrightError, attach_key

if TYPE_CHECKING:
    from meshwright.checkpoint.format.inventory import Chosen
    from meshwright.server.endpoints import Api

log = logging.getLogger("meshwright.server")


def newest(folder: Path) -> Chosen:
    """The newest committed checkpoint of the run in `folder`. Raises BadInput or Damaged without one."""
    from meshwright.checkpoint.format.inventory import choose_newest

    with attach_key("follow"):
        return choose_newest(folder, contents=False)


class Follower:
    """Loads each checkpoint of a run that is newer than `served`; looks every so many `seconds`."""

    def __init__(self, api: Api, run: Path, served: Path, seconds: float) -> None:
        self._api = api
        self._client = api.client
        self._run = run
        self._seen = served
        self._seconds = seconds
        self._warning = api.client.warning

    async def follow(self) -> None:
        """Look until the engine has failed. A checkpoint that cannot be loaded, or has texts of another format, is logged and left out.

        Of one that is damaged also `/v1/models` says so. After another error, e.g. OSError while no file can be opened, it can be called
        again.
        """
        while self._client.failure is None:
            await asyncio.sleep(self._seconds)
            try:
                await self._take(await asyncio.to_thread(newest, self._run))
            except MeshwrightError as error:
                log.warning("the newest checkpoint of %s is not served: %s", self._run, error)

    async def _take(self, found: Chosen) -> None:
        """Serve a checkpoint, unless it is served or was refused."""
        if (found.path, found.warning) == (self._seen, self._warning):
            return
        if found.warning not in (None, self._warning):
            log.warning("%s", found.warning)
        self._warning = found.warning
        if found.path != self._seen:
            self._seen = found.path
            await self._api.load(found.path)
            log.info("serving %s", found.path)
        self._client.weights = found.facts()
