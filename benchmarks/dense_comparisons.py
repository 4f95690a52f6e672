"""Reads the comparisons of a `dense.py` table and orders the runs of a pass."""

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

TRACED_STEPS = 2
"""Steps recorded at a run's end; a step is measured from the end of the one before."""
PROFILER_WARM_UP_STEPS = 2
"""Steps before them in which torchtitan's profiler warms up."""
LOG_EVERY = 5
"""Default number of steps between torchtitan's log lines; its host waits for the device at each."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The same training work for both sides, each with its variants in order of preference."""

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
        """The last counted step."""
        return self.steps - TRACED_STEPS - PROFILER_WARM_UP_STEPS

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.sequences * self.spec.train.seq_len


@dataclass(frozen=True)
class Visit:
    """A run of one side in a pass."""

    comparison: Comparison
    side: str
    number: int
    """Number of the pass, from 1."""


def read_comparisons(options: argparse.Namespace) -> Iterator[Comparison]:
    """All comparisons of the file, with resolved runs, so that mistakes are found before any run starts."""
    file = yaml.safe_load(options.table.read_text(encoding="utf-8"))
    for name, overrides in file["rows"].items():
        merged = {**file, **overrides}
        if options.gpus is not None and merged["gpus"] > options.gpus:
            continue
        batch_and_steps = [
            f"train.global_batch={merged['sequences']}",
            f"train.steps={merged['steps']}",
            f"name={name}",
        ]
        shared = [override.replace("=gpus", f"={merged['gpus']}") for override in file.get("ours", [])]
        our_variants = tuple(
            (*shared, *batch_and_steps, *variant, *options.set) for variant in _variants(overrides.get("ours", []))
        )
        peer_arguments = [*file.get("peer", "").split(), *overrides.get("peer", "").split()]
        yield Comparison(
            name=name,
            run=HERE / file["run"],
            gpus=merged["gpus"],
            sequences=merged["sequences"],
            steps=merged["steps"],
            skip=merged["skip"],
            log_every=merged.get("log_every", LOG_EVERY),
            limit=merged["limit"],
            ours=our_variants,
            peer=tuple(
                (*peer_arguments, "--training.local_batch_size", str(batch))
                for batch in overrides.get("peer_batch", [])
            ),
            against=overrides.get("against"),
            spec=load_run(HERE / file["run"], list(our_variants[0]), detect=found_cluster),
        )


def _variants(overrides: list[Any]) -> list[list[str]]:
    return overrides if overrides and isinstance(overrides[0], list) else [overrides]


def visits(comparisons: list[Comparison], number: int) -> Iterator[Visit]:
    """The runs of a pass: for each comparison both sides, in alternating order from pass to pass."""
    for comparison in comparisons:
        sides = [PEER, OURS] if comparison.peer else [OURS]
        for side in sides if number % 2 else reversed(sides):
            yield Visit(comparison, side, number)
