"""Tiles of feed-forward networks in a plan, and the reason for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwright.planner.candidate import linear_dtypes, pins_of
from meshwright.planner.explain import shortfall
from meshwright.spec.plan import RECOMPUTES_PRODUCTS, SPLITS_BACKWARD, Plan
from meshwright.spec.run import RunSpec

TILE = 8192
"""Tokens of a tile: enough for full matrix products, and a gigabyte of activations for Llama-3-8B."""


def with_tiles(run: RunSpec) -> RunSpec | None:
    """`run` with tiles pinned; None where its pins decide otherwise, or its sequences have few tiles."""
    pins, model = pins_of(run), run.model
    dense = any(not model.routed(layer) for layer in range(model.layers))
    allowed = (
        pins.mlp_tile is None
        and model.adapter is None
        and pins.layers is None
        and (pins.tensor or 1) == 1
        and (pins.recompute is None or pins.recompute in RECOMPUTES_PRODUCTS)
        and pins.schedule not in SPLITS_BACKWARD
        and set(linear_dtypes(run)) == {"compute"}
    )
    if not (dense and allowed and run.train.seq_len >= 2 * TILE):
        return None
    return replace(run, plan=replace(pins, mlp_tile=TILE))


def tile_reason(run: RunSpec, plan: Plan, fits: Callable[[Plan], bool]) -> str:
    """Return why the feed-forward networks of `plan` are in tiles; empty where they are not, or where that is pinned."""
    if not plan.mlp_tile or pins_of(run).mlp_tile is not None:
        return ""
    whole = replace(plan, mlp_tile=0)
    need = "a step is no faster" if fits(whole) else shortfall(run, whole)
    return f"feed-forward networks in tiles of {plan.mlp_tile:,} tokens: without them {need}"
