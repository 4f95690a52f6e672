"""ZeRO stages by layer range: layers with different sharding equal one device, and memory equals the planner's estimate.

docs/design/sharding.md says which fields of a plan are which stage.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.events.span import NullRecorder
from meshwright.parallel.world import World
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec, block_parameters
from meshwright.spec.plan import LayerStrategy, Plan, Precision, layer_range
from meshwright.workload.plan_bytes import fullest_rank_memory, memory_by_rank
from tests.distributed.pool import Pool
from tests.distributed.test_equality import BATCH, SEQ, compare, one_device, sharded
from tests.distributed.test_schedules import DEEP, DEEP_TIED, STEPS, Case
from tests.slow import quick_first

STAGES: dict[int, dict[str, Any]] = {
    1: {"reshard": False, "gradients": "whole"},
    2: {"reshard": False, "gradients": "shard"},
    3: {"reshard": True, "gradients": "shard"},
}
"""Fields of a layer's strategy by ZeRO stage: 1 shards the optimizer, 2 gradients too, 3 weights too."""
RANGES = ("0-2", "3-4", "5-7")


def by_range(case: Case, stages: tuple[int, ...]) -> Plan:
    ranges = RANGES if len(stages) > 1 else ("all",)
    layers = tuple(LayerStrategy(range=text, **STAGES[stage]) for text, stage in zip(ranges, stages, strict=True))
    return replace(case.plan, layers=layers)


ALONE = [(stage,) for stage in STAGES]
MIXED = list(permutations(STAGES))
OVER_SHARDS, HYBRID = Case("1f1b", shard=2), Case("1f1b", replicate=2, shard=2)


@pytest.mark.parametrize("stages", quick_first(1, [MIXED[0], MIXED[-1], *ALONE]), ids=str)
def test_over_shards(pool: Pool, stages: tuple[int, ...]) -> None:
    check(pool, by_range(OVER_SHARDS, stages), tied=False)


BESIDE = [
    (HYBRID, MIXED[1]),
    (Case("1f1b", pipeline=2, shard=2), MIXED[2]),
    (HYBRID, (1,)),
    (Case("breadth_first", shard=2), MIXED[3]),
]


@pytest.mark.parametrize(("case", "stages"), quick_first(1, BESIDE, unpack=True), ids=str)
def test_beside_other_axes(pool: Pool, case: Case, stages: tuple[int, ...]) -> None:
    check(pool, by_range(case, stages), tied=True)


def check(pool: Pool, plan: Plan, tied: bool) -> None:
    spec = DEEP_TIED if tied else DEEP
    compare(pool.run(sharded, plan.ranks, spec, plan, 1.0, STEPS), one_device(spec)[:STEPS], 1e-9)


def test_a_wrong_factor_is_noticed(pool: Pool) -> None:
    results = pool.run(sharded, 2, DEEP, by_range(OVER_SHARDS, MIXED[0]), 2.0, 1)
    with pytest.raises(AssertionError):
        compare(results, one_device(DEEP)[:1], 1e-9, weights=False)


class Watching(NullRecorder):
    """Records the memory of blocks at the start of the third micro-batch, when it has what stays between micro-batches."""

    def __init__(self, engine: Any) -> None:
        self.units = [unit for unit in engine.executor.rank_model.stages[0] if unit.layer is not None]
        self.seen: list[dict[str, list[int]]] = []

    def action(self, index: int, action: Any, tokens: int = 0) -> Any:
        if action.label == "forward 0.2/0":
            self.seen.append({"weights": self.weights(), "gradients": self.gradients()})
        return super().action(index, action, tokens)

    def weights(self) -> list[int]:
        """Bytes of each block's whole weights."""
        return [
            sum(weight.untyped_storage().nbytes() for weight in unit.sharded.gathered_weights) for unit in self.units
        ]

    def gradients(self) -> list[int]:
        """Bytes of each block's gradients: the rank's own whole sum, or its shard of the ranks'."""
        observed = []
        for unit in self.units:
            buffers = (*unit.sharded.whole_gradients, *unit.sharded.gradient_shards)
            observed.append(sum(gradient.numel() * gradient.element_size() for gradient in buffers))
        return observed


def weight_and_gradient_bytes(world: World, plan: Plan) -> dict[str, list[int]]:
    """Bytes of whole weights and of gradients of each block, before the third micro-batch's forward."""
    from meshwright.data.loader import MicroBatch
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh

    engine = build_engine(DEEP, plan, build_mesh(plan, world), loss_chunk=5, seed=0, reference=True)
    tokens = torch.zeros(plan.batch.micro_batch, SEQ, dtype=torch.int64)
    batches = [MicroBatch(tokens, tokens, None, None, tokens.numel())] * plan.batch.accumulate
    watching = Watching(engine)
    engine.executor.play(engine.training, batches, watching, torch.tensor(float(tokens.numel())))
    (observed,) = watching.seen
    return observed


@pytest.mark.parametrize("stages", quick_first(3, [*ALONE, *MIXED]), ids=str)
def test_between_micro_batches_a_rank_holds_what_its_stages_say(pool: Pool, stages: tuple[int, ...]) -> None:
    """Weights whole below stage 3, gradients whole in stage 1; and the memory model counts the same bytes."""
    plan = by_range(OVER_SHARDS, stages)
    by_text = zip(RANGES, stages * 3 if len(stages) == 1 else stages, strict=True)
    of_layer = [stage for text, stage in by_text for _ in layer_range(text, DEEP.layers)]
    block = 8 * sum(parameter.count for parameter in block_parameters(DEEP, 0))
    for observed in pool.run(weight_and_gradient_bytes, 2, plan):
        # The first block's may be on their way again.
        assert observed["weights"][1:] == [block if stage < 3 else 0 for stage in of_layer[1:]]
        assert observed["gradients"] == [block if stage == 1 else block // 2 for stage in of_layer]
    expected, third = counted(plan), counted(by_range(OVER_SHARDS, (3,)))
    kept_layers, full_gradients = sum(stage < 3 for stage in of_layer), sum(stage == 1 for stage in of_layer)
    table_bytes, end_bytes = 8 * DEEP.vocab_size * DEEP.hidden, 8 * (2 * DEEP.vocab_size + 1) * DEEP.hidden
    assert (
        expected["gathered"] - third["gathered"] == max(0, kept_layers - 2) * block + (of_layer[-1] < 3) * table_bytes
    )
    assert expected["gradients"] - third["gradients"] == pytest.approx(
        full_gradients * block // 2 + (of_layer[-1] == 1) * end_bytes // 2
    )
    assert (expected["weights"], expected["optimizer"]) == (third["weights"], third["optimizer"])


def counted(plan: Plan) -> dict[str, int]:
    """The memory of a rank in its first block's backward: with sequences so long that no other moment is fuller."""
    return fullest_rank_memory(
        DEEP, TrainSpec(steps=1, global_batch=BATCH, seq_len=1 << 20, loss_chunk=5), plan, cpu=True
    )


class LiveBytes(TorchDispatchMode):
    """Records the most bytes that tensors of operators had at once."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._storages = {key: kept for key, kept in self._storages.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._storages.values()))
        return result


def peak_bytes(world: World, spec: ModelSpec, plan: Plan) -> int:
    """Most bytes at once of tensors that a step's forwards and backwards made."""
    from meshwright.data.loader import MicroBatch
    from meshwright.parallel.apply import build_engine
    from meshwright.parallel.mesh import build_mesh

    engine = build_engine(spec, plan, build_mesh(plan, world), loss_chunk=5, seed=0)
    tokens = torch.zeros(plan.batch.micro_batch, SEQ, dtype=torch.int64)
    batches = [MicroBatch(tokens, tokens, None, None, tokens.numel())] * plan.batch.accumulate
    with LiveBytes() as live:
        engine.executor.play(engine.training, batches, NullRecorder(), torch.tensor(float(tokens.numel())))
    return live.peak


@pytest.mark.parametrize("case", quick_first(1, [Case("1f1b", pipeline=2), Case("zbv", pipeline=2), Case("1f1b")]))
def test_without_shards_whole_gradients_need_the_same_memory(pool: Pool, case: Case) -> None:
    """One rank adds each gradient to the earlier sum, without buffers, and the prediction check has none either."""
    large_ends = replace(DEEP, layers=4, vocab_size=4096)
    plan = replace(case.plan, precision=Precision(compute="bf16", reduce="fp32"))
    by_sums = [replace(plan, layers=(replace(plan.layers[0], gradients=kept),)) for kept in ("shard", "whole")]
    sharded_peaks, whole_peaks = (pool.run(peak_bytes, plan.ranks, large_ends, each) for each in by_sums)
    assert sharded_peaks == whole_peaks
    long = TrainSpec(steps=1, global_batch=BATCH, seq_len=1 << 14, loss_chunk=5)
    prediction_checks = [memory_by_rank(large_ends, long, each, cpu=True) for each in by_sums]
    assert prediction_checks[0] == prediction_checks[1]
