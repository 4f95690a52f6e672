"""Selective offload by slot: bit for bit as without offload, equal to one device, in the trace for long slots only."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.data.slots import SampleSlot, rank_slots
from meshwright.events.span import NullRecorder
from meshwright.policies.sample_balance import RankPool, balance_samples
from meshwright.spec.plan import Plan, SamplePlan, SlotOffload
from tests.distributed.pool import Pool
from tests.distributed.test_equality import CLIP, LLAMA, assemble_whole, compare
from tests.distributed.test_hybrid import LONGEST, TIME, Z_LOSS, Case, Samples, micro_batch, one_device
from tests.distributed.test_schedules import named
from tests.slow import examples, quick_first

SPEC = replace(LLAMA, max_seq_len=LONGEST, layers=6)
CAPACITY, OFFLOAD = 16, SlotOffload(capacity=32, layers=5, shortest=24)
"""Slots of twice the tokens, with five of six blocks offloaded: two of these stay on the device, so three are saved."""
CASES = [Case(2), Case(3, schedule="breadth_first", recompute="full"), Case(2, tensor=2), Case(1)]


@dataclass(frozen=True)
class LongSamples(Samples):
    """Samples of which two are so long that they take slots with offload."""

    @property
    def lengths(self) -> np.ndarray:
        draw = np.random.default_rng(self.seed)
        longest = min(self.ranks * OFFLOAD.capacity, LONGEST)
        short = draw.integers(1, CAPACITY + 1, int(draw.integers(0, 3 * self.ranks)))
        return np.array([*short, *draw.integers(OFFLOAD.shortest, longest + 1, 2)])


class CopyNames(NullRecorder):
    """Records the names of copies to and from host memory."""

    detail = True

    def __init__(self) -> None:
        self.names: list[str] = []

    def concurrent_span(self, name: str, lane: str) -> AbstractContextManager[None]:
        self.names += [name] if lane in ("offload", "fetch") else []
        return super().concurrent_span(name, lane)


def slots_of(samples: Samples, ranks: int, rank: int) -> list[SampleSlot]:
    pool = RankPool(ranks, CAPACITY, TIME, offload=OFFLOAD)
    return rank_slots(balance_samples(samples.lengths, pool), rank) or [SampleSlot(CAPACITY)]


def on_ranks(world: Any, plan: Plan, steps: list[Samples], offloads: bool) -> list[dict[str, Any]]:
    """Loss, norm and clipped gradients of each step on this rank, and the micro-batches whose activations were copied."""
    from meshwright.optim.clip import clip_factor, gradient_norm
    from meshwright.optim.shards import local_gradients
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh
    from meshwright.training.train_step import count_valid, loss_divisor

    mesh = build_mesh(plan, world)
    engine = build_engine(SPEC, plan, mesh, loss_chunk=5, seed=0, reference=True, z_loss=Z_LOSS)
    results = []
    for samples in steps:
        slots = slots_of(samples, mesh.data_ranks, mesh.data_rank)
        slots = slots if offloads else [replace(slot, offloaded_layers=0) for slot in slots]
        batches, recorder = [micro_batch(slot, samples, SPEC.vocab_size) for slot in slots], CopyNames()
        divisor = loss_divisor(count_valid(batches, mesh))
        loss = engine.executor.play(engine.training_schedule(len(batches)), batches, recorder, divisor)
        norm = gradient_norm(local_gradients(engine.model, engine.duplicate_rows), mesh.model_copy_group, mesh.device)
        whole = assemble_whole({name: weight.grad for name, weight in engine.model.named_parameters()}, SPEC, mesh)
        clip = clip_factor(norm, CLIP)
        copied = {name.split()[1].split("/")[0] for name in recorder.names}
        results.append(
            {
                "loss": mesh.sum_over_all(loss).item(),
                "norm": norm.item(),
                "weights": {},
                "gradients": {name: gradient * clip for name, gradient in whole.items()},
                "copied": sorted(copied),
                "long": [f"0.{n}" for n, slot in enumerate(slots) if slot.capacity > CAPACITY],
            }
        )
        for weight in engine.model.parameters():
            weight.grad = None
    return results


@pytest.mark.parametrize("case", quick_first(1, CASES), ids=named)
def test_long_slots_are_offloaded_and_every_bit_is_preserved(pool: Pool, case: Case) -> None:
    steps = [LongSamples(seed, case.ranks) for seed in range(examples(2, 8))]
    plan = replace(case.plan, samples=SamplePlan(capacity=CAPACITY, alpha=1e-3, beta=1.0, offload=OFFLOAD))
    results = pool.run(on_ranks, case.ranks * case.tensor, plan, steps, True)
    compare(results, [one_device(SPEC, samples) for samples in steps], 1e-9, weights=False)
    without = pool.run(on_ranks, case.ranks * case.tensor, plan, steps, False)
    for rank, plain in zip(results, without, strict=True):
        for step, want in zip(rank, plain, strict=True):
            assert step["loss"] == want["loss"] and not want["copied"]
            assert all(torch.equal(value, want["gradients"][name]) for name, value in step["gradients"].items())
            assert set(step["copied"]) <= set(step["long"])
    assert any(step["copied"] for rank in results for step in rank)
