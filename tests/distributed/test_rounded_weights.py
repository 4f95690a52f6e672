"""Weights that the update rounds into the memory of their gradients for the next gather equal separately cast ones."""

from __future__ import annotations

from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from meshwright.parallel import apply
from meshwright.parallel.fsdp import ShardedParameter
from meshwright.parallel.world import World
from meshwright.spec.run import Assignment
from meshwright.training import train_step
from meshwright.training.session import open_session
from tests.distributed import cases_training
from tests.distributed.pool import Pool
from tests.distributed.test_training import merge_tensors, prepared, same_bits
from tests.training.tiny import make_tiny, ranks

STEPS, VALIDATE_EVERY = 6, 3
SETTINGS = [*ranks(1), "plan.compute=bf16", f"train.steps={STEPS}", f"train.validate_every={VALIDATE_EVERY}"]


def counted(
    world: World, assignment: Assignment, rounds: bool, skipped_step: int
) -> tuple[cases_training.Seen, Counter[bool]]:
    """A run, and how many gathers of a parameter used a rounded weight and how many cast it."""
    counts, steps = Counter[bool](), count(1)
    original, gradient_norm = ShardedParameter.use_rounded_weight, train_step.gradient_norm

    def norm_of(*arguments: Any) -> torch.Tensor:
        norm = gradient_norm(*arguments)
        return norm * torch.nan if next(steps) == skipped_step else norm

    def use_rounded_weight(parameter: ShardedParameter) -> bool:
        used = original(parameter)
        counts[used] += 1
        return used

    chosen = apply._rounded_weight_setters if rounds else lambda *_: {}
    with (
        patch.object(apply, "_rounded_weight_setters", chosen),
        patch.object(ShardedParameter, "use_rounded_weight", use_rounded_weight),
        patch.object(train_step, "gradient_norm", norm_of),
    ):
        return cases_training.run(world, assignment), counts


def test_runs_are_equal_bit_for_bit(pool: Pool, tmp_path: Path) -> None:
    """Also after a skipped update. The first gather casts, and that after a validation."""
    tiny = make_tiny(tmp_path / "data")
    results = []
    for rounds in (False, True):
        assignment = prepared(tiny, tmp_path / str(rounds), *SETTINGS).assignment
        ((seen, counts),) = pool.run(counted, 1, assignment, rounds, 2)
        results.append(seen)
        assert counts[True] == 0 if not rounds else counts[True] > counts[False]
    cast, rounded = results
    assert rounded.losses == cast.losses and len(cast.losses) == STEPS
    assert repr(rounded.validations) == repr(cast.validations)
    assert same_bits(merge_tensors([rounded]), merge_tensors([cast]))


def written(world: World, assignment: Assignment) -> list[bool]:
    """Whether each gathered weight is the cast of its master weight, after an update and after a write to the master weights."""
    session = open_session(assignment, world)
    units = [unit.sharded for units in session.engine.executor.rank_model.stages.values() for unit in units]
    parameters = [parameter for unit in units for group in unit.owners for parameter in group.parameters]
    equal = []
    for write in (False, True):
        for unit in units:
            unit.gather()
            unit.wait_for_gather()
            unit.free_gathered()
        for parameter in parameters:
            parameter.set_rounded_weight(parameter.flat_shard.bfloat16().view(parameter.gathered_shape))
        if write:
            for parts in session.state().values():
                parts.local.add_(1.0)
        for unit in units:
            unit.gather()
            unit.wait_for_gather()
        equal += [torch.equal(p.gathered.flatten(), p.flat_shard.bfloat16()) for p in parameters]
        for unit in units:
            unit.free_gathered()
    return equal


def test_a_write_to_master_weights_is_seen_by_the_next_gather(pool: Pool, tmp_path: Path) -> None:
    assignment = prepared(make_tiny(tmp_path / "data"), tmp_path, *SETTINGS).assignment
    (equal,) = pool.run(written, 1, assignment)
    assert equal and all(equal)
