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


async def follow(client: EngineClient, run: Path, served: Path, seconds: float) -> None:
    """Load each checkpoint of a run that is newer than `served`; looks every so many `seconds`, and never returns.

    One that cannot be loaded is logged and left out.
    """
    while client.failure is None:
        await asyncio.sleep(seconds)
        try:
            found = await asyncio.to_thread(newest, run)
            if found == served:
                continue
            served = found
            await client.load(found)
            log.info("serving %s", found)
        except MeshwrightError as error:
            log.warning("the newest checkpoint of %s is not served: %s", run, error)
