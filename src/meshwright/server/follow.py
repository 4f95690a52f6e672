"""Follows a training run: the server loads each new checkpoint."""

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
    """Return the newest committed checkpoint of the run in `folder`.

    Raises BadInput if there is none, Damaged if it is damaged.
    """
    from meshwright.checkpoint.format.inventory import choose_newest

    with attach_key("follow"):
        return choose_newest(folder, contents=False)


class Follower:
    """Checks a run's folder every `seconds` and loads a checkpoint that is newer than the one at `served`."""

    def __init__(self, api: Api, run: Path, served: Path, seconds: float) -> None:
        self._api = api
        self._client = api.client
        self._run = run
        self._seen = served
        self._seconds = seconds
        self._warning = api.client.warning

    async def follow(self) -> None:
        """Check the folder again and again, until the engine has failed.

        A checkpoint is logged and skipped if it cannot be loaded, or if its model has another tokenizer or other end
        tokens. If the newest checkpoint is damaged, `/v1/models` says so too.

        Other errors are raised, for example OSError if no more files can be opened. The caller may then call this
        again.
        """
        while self._client.failure is None:
            await asyncio.sleep(self._seconds)
            try:
                await self._take(await asyncio.to_thread(newest, self._run))
            except MeshwrightError as error:
                log.warning("the newest checkpoint of %s is not served: %s", self._run, error)

    async def _take(self, found: Chosen) -> None:
        """Serve the checkpoint `found`. Nothing happens if it is the one that was served, or tried, last."""
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
