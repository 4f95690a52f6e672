"""The collectives that torch's flight recorder has recorded in this process, as JSON.

torch keeps the newest 2,000 collectives of NCCL and of Gloo in memory (`TORCH_FR_BUFFER_SIZE`). Its dump files are
pickles, which this project never reads. Therefore each rank asks torch for the JSON form, which has no stack traces.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECORDERS = {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}
"""Function of `torch._C._distributed_c10d` that returns the records, by backend.

A build without NCCL has no "nccl" function.
"""
KEPT_OPERATIONS = 200
"""Number of collectives of each backend, the newest, that are kept even if they have finished."""


def recorded_collectives() -> dict[str, Any]:
    """Return the recorder's records by backend; empty before torch is imported.

    The entries are the newest `KEPT_OPERATIONS` collectives and all older ones that have not finished. Raises
    ValueError if torch's answer is not JSON.
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
    """Whether a collective has finished. An entry of Gloo has no state; it is retired when its work is done."""
    return bool(entry["retired"]) if backend == "gloo" else entry["state"] == "completed"


def write_collectives(path: Path) -> None:
    """Append `recorded_collectives` as one line to a file in memory that the launcher has given this rank."""
    with path.open("ab") as file:
        file.write(json.dumps(recorded_collectives()).encode() + b"\n")
