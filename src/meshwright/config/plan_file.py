"""Rules inside a plan file, for any run; `config/key_rules.py` compares a plan file with its run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from meshwright.config.divisors import divisors
from meshwright.config.yaml_positions import Document
from meshwright.spec.errors import Mistake
from meshwright.spec.plan import DATA_AXES, REFUSED_SCHEDULES, SHARD_AXES


def drop_removed_keys(plan: Any) -> None:
    """Deletes `reduce_engine: kernel` from a plan's plain data.

    Earlier versions wrote the key into every plan file. Its other value, exchange, remains and is an error.
    """
    if isinstance(plan, dict) and plan.get("reduce_engine") == "kernel":
        del plan["reduce_engine"]


def plan_rules(plan: Document) -> list[Mistake]:
    """Mistakes of a plan file with valid values: repeated axes, and sizes that do not add up."""
    mistakes: list[Mistake] = []
    listed_axes = set()
    for index, axis in enumerate(plan.get(("mesh",))):
        if axis["axis"] in listed_axes:
            mistakes.append(plan.mistake(("mesh", index, "axis"), "each axis once", f"{axis['axis']} again"))
        listed_axes.add(axis["axis"])
    name = plan.get(("schedule", "name"))
    if name in REFUSED_SCHEDULES:
        mistakes.append(plan.mistake(("schedule", "name"), REFUSED_SCHEDULES[name], name, "zbv"))
    return [*mistakes, *_batch_sum(plan), *_fold(plan)]


def _batch_sum(plan: Document) -> Iterator[Mistake]:
    """global_batch, micro_batch and data ranks give accumulate; a person chooses the micro-batch."""
    batch = plan.get(("batch",))
    global_batch, micro, times = batch["global_batch"], batch["micro_batch"], batch["accumulate"]
    data = math.prod(axis["size"] for axis in plan.get(("mesh",)) if axis["axis"] in DATA_AXES)
    samples_per_rank, remainder = divmod(global_batch, data)
    if remainder:
        expected, near = f"a multiple of replicate × shard = {data}", str(-(-global_batch // data) * data)
        yield plan.mistake(("batch", "global_batch"), expected, str(global_batch), near)
    elif samples_per_rank % micro:
        divisor = max(n for n in divisors(samples_per_rank) if n <= micro)
        expected = f"a divisor of the {samples_per_rank} sequences of a rank"
        yield plan.mistake(("batch", "micro_batch"), expected, str(micro), str(divisor))
    elif times * micro != samples_per_rank:
        expected = f"{samples_per_rank // micro}: global_batch {global_batch} ÷ (replicate × shard {data} × micro_batch {micro})"
        yield plan.mistake(("batch", "accumulate"), expected, str(times), str(samples_per_rank // micro))


def _fold(plan: Document) -> Iterator[Mistake]:
    """The experts are distributed over all ranks that hold one copy of a layer's other weights."""
    fold = plan.get(("experts",)) if plan.has(("experts",)) else None
    if not isinstance(fold, dict):
        return
    ranks = math.prod(axis["size"] for axis in plan.get(("mesh",)) if axis["axis"] in SHARD_AXES)
    product = fold["expert"] * fold.get("expert_shard", 1)
    if product != ranks:
        near = str(ranks // fold["expert"]) if ranks % fold["expert"] == 0 else None
        expected = f"expert × expert_shard = the {ranks} ranks of shard × context"
        yield plan.mistake(("experts",), expected, str(product), near and f"expert_shard: {near}")
