"""Serves each new checkpoint of a training run."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.server.engine_client import EngineClient
from meshwright.spec.errors import MeshwrightError, attach_key

if TYPE_CHECKING:
    from meshwright.checkpoint.inventory import Chosen

log = logging.getLogger("meshwright.server")


def newest(folder: Path) -> Chosen:
    """The newest committed checkpoint of the run in `folder`. Raises BadInput or Damaged without one."""
    from meshwright.checkpoint.inventory import choose_newest

    with attach_key("follow"):
        return choose_newest(folder, contents=False)


async def follow(client: EngineClient, run: Path, served: Path, seconds: float) -> None:
    """Load each checkpoint of a run that is newer than `served`; looks every so many `seconds`, and never returns.

    One that cannot be loaded is logged and left out; of one that is damaged also `/v1/models` says so.
    """
    warning = client.warning
    while client.failure is None:
        await asyncio.sleep(seconds)
        try:
            found = await asyncio.to_thread(newest, run)
            if (found.path, found.warning) == (served, warning):
                continue
            if found.warning not in (None, warning):
                log.warning("%s", found.warning)
            warning = found.warning
            if found.path != served:
                served = found.path
                await client.load(served)
                log.info("serving %s", served)
            client.weights = found.facts()
        except MeshwrightError as error:
            log.warning("the newest checkpoint of %s is not served: %s", run, error)
