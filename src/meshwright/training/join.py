"""Sends rank 0's assignment (run, plan and folder: `spec.run.Assignment`) to the other ranks that a launcher started."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
import torch.distributed as dist

from meshwright.parallel.world import World
from meshwright.spec.errors import ERROR_CLASS_BY_EXIT_CODE
from meshwright.spec.failures import as_meshwright_error
from meshwright.spec.fields import from_plain, to_plain
from meshwright.spec.run import Assignment


def broadcast_assignment(world: World, prepare: Callable[[], Assignment | None]) -> Assignment | None:
    """Return rank 0's assignment on every rank, or None if the run is finished. Collective.

    `prepare` is called on rank 0 only. If it raises, the exception is raised on rank 0, and an error with the same exit code on the other
    ranks, so that no rank keeps waiting.
    """
    if not world.leads:
        answer = json.loads(_broadcast(world, ""))
        if "error" in answer:
            raise ERROR_CLASS_BY_EXIT_CODE[answer["code"]](f"rank 0 could not prepare the run: {answer['error']}")
        return from_plain(Assignment, answer["assignment"]) if "assignment" in answer else None
    try:
        assignment = prepare()
    except BaseException as error:
        failure = as_meshwright_error(error)
        _broadcast(world, json.dumps({"error": str(failure), "code": failure.exit_code}))
        raise
    _broadcast(world, json.dumps({"assignment": to_plain(assignment)} if assignment else {}))
    return assignment


def _broadcast(world: World, text: str) -> str:
    """Return rank 0's `text` on every rank. It is sent as bytes over the control group."""
    data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
    size = torch.tensor([data.numel()])
    dist.broadcast(size, 0, group=world.control)
    buffer = data if world.leads else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(buffer, 0, group=world.control)
    return bytes(buffer.tolist()).decode()
