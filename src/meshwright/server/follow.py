"""Serves each new checkpoint of a training run."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.data.text_format import TextFormat, recorded_text_format
from meshwright.server.engine_client import EngineClient
from meshwright.spec.errors import BadInput, MeshwrightError, attach_key

if TYPE_CHECKING:
    from meshwright.checkpoint.inventory import Chosen

log = logging.getLogger("meshwright.server")


def newest(folder: Path) -> Chosen:
    """The newest committed checkpoint of the run in `folder`. Raises BadInput or Damaged without one."""
    from meshwright.checkpoint.inventory import choose_newest

    with attach_key("follow"):
        return choose_newest(folder, contents=False)


def _check_format(checkpoint: Path, text: TextFormat) -> None:
    """Raise BadInput if the record of a checkpoint has another tokenizer than the server, or other ends of a text."""
    recorded = recorded_text_format(checkpoint)
    if recorded is None:
        return
    difference = text.difference(recorded, "the server", str(checkpoint))
    if difference is None and recorded.stop_ids != text.stop_ids:
        difference = f"texts of {checkpoint} end with other tokens than those of the server"
    if difference is not None:
        raise BadInput(f"{difference}; start the server again")


class Follower:
    """Loads each checkpoint of a run that is newer than `served`; looks every so many `seconds`."""

    def __init__(self, client: EngineClient, run: Path, served: Path, seconds: float, text: TextFormat) -> None:
        """`text` is the format of the server's texts."""
        self._client, self._run, self._seen, self._seconds, self._text = client, run, served, seconds, text
        self._warning = client.warning

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
            _check_format(found.path, self._text)
            await self._client.load(found.path)
            log.info("serving %s", found.path)
        self._client.weights = found.facts()
