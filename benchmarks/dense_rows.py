"""The rows of `dense.py`'s tables, and the runs that a pass makes of them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from dense_table import OURS, PEER
from sides import HERE

from meshwright.config.load import load_run
from meshwright.launch.machine import found_cluster
from meshwright.spec.run import RunSpec

TRACED = 2
"""Steps recorded at a run's end: one ends where the next is measured from."""
WARMED = 2
"""Steps before them in which torchtitan's profiler already runs."""
LOG_EVERY = 5
"""Steps between torchtitan's log lines, unless a row says otherwise: its host waits for the device at each."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One piece of work, and the ways either side may do it, the wished-for one first."""

    name: str
    run: Path
    gpus: int
    sequences: int
    steps: int
    skip: int
    log_every: int
    """Steps between torchtitan's log lines."""
    limit: float
    ours: tuple[tuple[str, ...], ...]
    peer: tuple[tuple[str, ...], ...]
    against: str | None
    spec: RunSpec

    @property
    def last(self) -> int:
        """The last step that counts."""
        return self.steps - TRACED - WARMED

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.sequences * self.spec.train.seq_len


@dataclass(frozen=True)
class Visit:
    """One run to make."""

    row: Row
    side: str
    number: int
    """Of the pass, from 1."""


def read_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Every row of the file, its run resolved, so that a slip of the pen shows before minutes are spent."""
    file = yaml.safe_load(options.table.read_text(encoding="utf-8"))
    for name, own in file["rows"].items():
        given = {**file, **own}
        if options.gpus is not None and given["gpus"] > options.gpus:
            continue
        numbers = [f"train.global_batch={given['sequences']}", f"train.steps={given['steps']}", f"name={name}"]
        shared = [word.replace("=gpus", f"={given['gpus']}") for word in file.get("ours", [])]
        ours = tuple((*shared, *numbers, *words, *options.set) for words in _choices(own.get("ours", [])))
        asked = [*file.get("peer", "").split(), *own.get("peer", "").split()]
        yield Row(
            name=name,
            run=HERE / file["run"],
            gpus=given["gpus"],
            sequences=given["sequences"],
            steps=given["steps"],
            skip=given["skip"],
            log_every=given.get("log_every", LOG_EVERY),
            limit=given["limit"],
            ours=ours,
            peer=tuple((*asked, "--training.local_batch_size", str(batch)) for batch in own.get("peer_batch", [])),
            against=own.get("against"),
            spec=load_run(HERE / file["run"], list(ours[0]), detect=found_cluster),
        )


def _choices(words: list[Any]) -> list[list[str]]:
    return words if words and isinstance(words[0], list) else [words]


def visits(rows: list[Row], number: int) -> Iterator[Visit]:
    """The runs of one pass: row by row, the sides in turn, the other first in every second pass."""
    for row in rows:
        sides = [PEER, OURS] if row.peer else [OURS]
        for side in sides if number % 2 else reversed(sides):
            yield Visit(row, side, number)
