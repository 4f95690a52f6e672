"""Serves each new checkpoint of a training run."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from meshwright.data.text_format import TextFormat, recorded_text_format
from meshwright.server.engine_client import EngineClient
from meshwright.spec.errors import BadInput, MeshwrightError, attach_key

log = logging.getLogger("meshwright.server")


def newest(folder: Path) -> Path:
    """The newest committed checkpoint of the run in `folder`. Raises BadInput or Damaged without one."""
    from meshwright.checkpoint.verify import newest_checkpoint

    with attach_key("follow"):
        return newest_checkpoint(folder, contents=False)


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


async def follow(client: EngineClient, run: Path, served: Path, seconds: float, text: TextFormat) -> None:
    """Load each checkpoint of a run that is newer than `served`; looks every so many `seconds`, and never returns.

    One that cannot be loaded is logged and left out, and so is one whose texts have another format than `text`, that of the server.
    """
    while client.failure is None:
        await asyncio.sleep(seconds)
        try:
            found = await asyncio.to_thread(newest, run)
            if found == served:
                continue
            served = found
            _check_format(found, text)
            await client.load(found)
            log.info("serving %s", found)
        except MeshwrightError as error:
            log.warning("the newest checkpoint of %s is not served: %s", run, error)
