"""The collectives that torch's flight recorder has recorded in this process, as JSON.

torch keeps the newest 2,000 collectives of NCCL and of Gloo in memory (`TORCH_FR_BUFFER_SIZE`). Its dumps to files are
pickles, which no process reads here. So the rank itself asks for the JSON form, which has no stacks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECORDERS = {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}
"""By backend, the function of `torch._C._distributed_c10d`; a build without NCCL lacks the first."""
KEPT_OPERATIONS = 200
"""Finished collectives of a backend that are kept, the newest."""


def recorded_collectives() -> dict[str, Any]:
    """By backend, the recorder's dump with its unfinished and newest entries; empty before torch is imported.

    A finished entry that is older is left out. Raises ValueError if torch's answer is not JSON.
    """
    module = sys.modules.get("torch._C._distributed_c10d")
    found: dict[str, Any] = {}
    for backend, name in RECORDERS.items():
        dump: Callable[[], bytes] | None = getattr(module, name, None)
        if dump is not None and (record := json.loads(dump())).get("entries"):
            found[backend] = {**record, "entries": _kept(record["entries"], backend)}
    return found


def _kept(entries: list[dict[str, Any]], backend: str) -> list[dict[str, Any]]:
    older = entries[:-KEPT_OPERATIONS]
    newest = entries[-KEPT_OPERATIONS:]
    marked = [{**entry, "finished": is_finished(entry, backend)} for entry in (*older, *newest)]
    return [entry for entry in marked[: len(older)] if not entry["finished"]] + marked[len(older) :]


def is_finished(entry: dict[str, Any], backend: str) -> bool:
    """Whether a collective has finished. Gloo never sets a state; it retires an entry when its work is done."""
    return bool(entry["retired"]) if backend == "gloo" else entry["state"] == "completed"


def write_collectives(path: Path) -> None:
    """Write `recorded_collectives` to a memory file of the launcher, as one line."""
    with path.open("ab") as file:
        file.write(json.dumps(recorded_collectives()).encode() + b"\n")
