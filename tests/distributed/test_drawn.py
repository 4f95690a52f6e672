"""Random plans (`draw_case`) equal one device, in fp8 one rank; bf16 sums over replicas equal fp32 sums within a bound.

Other tests cover features one by one and in pairs; these combine several, with different strategies of layer ranges.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.launch.prepare import plan_yaml
from meshwright.spec.plan import Precision
from tests.distributed import cases_training as cases
from tests.distributed.cases_training import Seen
from tests.distributed.drawn import FAMILIES, GEMMA, GEMMA2, GPT_OSS, LOCAL_GLOBAL, QWEN2_MOE, draw_case
from tests.distributed.pool import Pool
from tests.distributed.test_equality import BF16_SUM_BOUND, compare, one_device, sharded, worst
from tests.distributed.test_equality import plan as plan_of
from tests.distributed.test_fp8 import EMULATION_BOUND, LAYOUT_BOUND, expected_of
from tests.distributed.test_training import compare as same_run
from tests.distributed.test_training import merge_tensors, same_bits, trained
from tests.slow import quick_first
from tests.training.tiny import make_tiny, prepared

STEPS = 2
CANCELLED = 4 * BF16_SUM_BOUND
"""Relative error of a sum over replicas in bf16 whose parts cancel in part: they were rounded by their own size."""
FLOAT64 = Precision(compute="fp64", reduce="fp64")
LOW = Precision(compute="fp32", linear="fp8_tensorwise", gather="fp8")
NARROW = Precision(compute="fp32", reduce_replicas="bf16")
NARROW_LOW = replace(LOW, reduce_replicas="bf16")
SEEDS = [
    1861,
    1942,
    539,
    3389,
    152,
    315,
    2993,
    1078,
    910,
    1011,
    1146,
    142,
    146,
    151,
    1319,
    75,
    1303,
    13,
    78,
    544,
    14,
    54,
]
SEEDS_OF_KINDS = range(12)
"""For a model whose layers differ: together they have every axis."""
OF_KINDS = {"kinds": LOCAL_GLOBAL, "gemma": GEMMA, "gemma2": GEMMA2, "gpt-oss": GPT_OSS, "qwen2 moe": QWEN2_MOE}
SEEDS_OF_FAMILIES = (25, 34)
"""Together they have every axis."""
OF_FAMILIES = [(name, seed) for name in FAMILIES for seed in SEEDS_OF_FAMILIES]
SEEDS_COMPILED = [492, 2220, 98, 2548, 1325, 710, 1393, 1410, 61, 470, 336, 300]
SEEDS_RESUMED = [3, 0, 6, 9, 12, 15, 18, 21]
SEEDS_LOW = [126, 3389, 1273, 136, 2159, 115, 672, 1593, 2225, 336, 1900, 2438, 158, 845, 857, 1783, 5, 33, 143]
SEEDS_NARROW = [
    310,
    1528,
    3465,
    2583,
    720,
    721,
    152,
    3012,
    540,
    1653,
    81,
    538,
    745,
    1526,
    2349,
    151,
    303,
    91,
    163,
    1145,
    2,
    6,
]
"""Seeds from `tests.docs.seeds`: together their plans contain every possible pair of features. The quickest come first."""
FP8 = [*((seed, False) for seed in SEEDS_LOW), *((seed, True) for seed in range(4))]
SUMS = [
    *((seed, NARROW, False) for seed in SEEDS_NARROW),
    *((seed, NARROW_LOW, False) for seed in range(6)),
    *((seed, NARROW, True) for seed in range(3)),
]


@pytest.mark.parametrize(
    ("model", "seed"), quick_first(1, [(model, seed) for seed in SEEDS_OF_KINDS for model in OF_KINDS], unpack=True)
)
def test_layers_of_several_kinds_equal_one_device(pool: Pool, model: str, seed: int) -> None:
    spec, plan, masked = draw_case(seed, FLOAT64, of=OF_KINDS[model])
    results = pool.run(sharded, plan.ranks, spec, plan, 1.0, STEPS, masked)
    compare(results, one_device(spec, masked)[:STEPS], 1e-9)


@pytest.mark.parametrize(("family", "seed"), quick_first(0, OF_FAMILIES, unpack=True))
def test_families_equal_one_device(pool: Pool, family: str, seed: int) -> None:
    spec, plan, masked = draw_case(seed, FLOAT64, of=FAMILIES[family])
    results = pool.run(sharded, plan.ranks, spec, plan, 1.0, STEPS, masked)
    compare(results, one_device(spec, masked)[:STEPS], 1e-9)


@pytest.mark.parametrize("seed", quick_first(1, SEEDS))
def test_float64_equals_one_device(pool: Pool, seed: int) -> None:
    spec, plan, masked = draw_case(seed, FLOAT64)
    results = pool.run(sharded, plan.ranks, spec, plan, 1.0, STEPS, masked)
    compare(results, one_device(spec, masked)[:STEPS], 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS_COMPILED)
def test_compiled(pool: Pool, seed: int) -> None:
    spec, plan, masked = draw_case(seed, FLOAT64, compile=True)
    results = pool.run(sharded, plan.ranks, spec, plan, 1.0, STEPS, masked)
    compare(results, one_device(spec, masked)[:STEPS], 1e-9)


@pytest.mark.parametrize(("seed", "compile"), quick_first(0, FP8, unpack=True))
def test_fp8_equals_one_rank(pool: Pool, seed: int, compile: bool) -> None:
    """The reference has the same micro-batch size, because the activations of a micro-batch share a scale.

    Context ranks and a compiler sum in another order, which may round an activation to the next fp8 number.
    """
    spec, plan, masked = draw_case(seed, LOW, compile=compile)
    one_rank_plan = replace(plan_of(1, 1, plan.batch.micro_batch), precision=plan.precision)
    single_rank = pool.run(sharded, 1, spec, one_rank_plan, 1.0, 1, masked)
    context = plan.axis_size("context_ring") * plan.axis_size("context_ulysses")
    bound = LAYOUT_BOUND if context == 1 and not compile else EMULATION_BOUND
    compare(pool.run(sharded, plan.ranks, spec, plan, 1.0, 1, masked), expected_of(single_rank), bound, weights=False)


@pytest.mark.parametrize(("seed", "precision", "compile"), quick_first(0, SUMS, unpack=True))
def test_sums_over_replicas_in_bf16_round_and_nothing_else(
    pool: Pool, seed: int, precision: Precision, compile: bool
) -> None:
    """First-step gradients against those of the same plan that sums its replicas in fp32."""
    spec, plan, masked = draw_case(seed, precision, compile=compile)
    fp32_plan = replace(plan, precision=replace(precision, reduce_replicas=None))
    exact, rounded = (pool.run(sharded, plan.ranks, spec, variant, 1.0, 1, masked) for variant in (fp32_plan, plan))
    for expected, actual in zip(exact, rounded, strict=True):
        assert actual[0]["loss"] == expected[0]["loss"]
        clip = actual[0]["norm"] / expected[0]["norm"]
        errors = {
            name: worst(actual[0]["gradients"][name] * clip, exactly.double())
            for name, exactly in expected[0]["gradients"].items()
        }
        assert 1e-4 < max(errors.values()) < CANCELLED, max(errors, key=errors.__getitem__)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS_RESUMED)
def test_a_run_goes_on_under_any_plan(pool: Pool, tmp_path: Path, seed: int) -> None:
    """Three plans of a model train two steps each: each loads the exact state of the one before, and all equal one rank."""
    tiny, spec = make_tiny(tmp_path / "data"), draw_case(seed, FLOAT64).spec
    model_overrides = [
        f"model.{key}={value}" for key, value in vars(spec).items() if key != "vocab_size" and value is not None
    ]
    chain = [draw_case(seed + number, FLOAT64, of=spec).plan for number in range(3)]
    attempts: list[list[Seen]] = []
    for number, plan in enumerate(chain):
        file = tmp_path / f"{number}.yaml"
        file.write_text(plan_yaml(plan), encoding="utf-8")
        overrides = [*model_overrides, f"plan={file}", f"cluster.gpus_per_node={plan.ranks}"]
        if attempts:
            assignment = prepared(tiny, tmp_path, *overrides).assignment
            opened = pool.run(cases.opened, plan.ranks, assignment)
            initial = {name: tensor for _, tensors in opened for name, tensor in tensors.items()}
            assert same_bits(initial, merge_tensors(attempts[-1]))
        attempts.append(trained(pool, tiny, tmp_path, *overrides, stop_at=2 * number + 2))
    single_rank = trained(
        pool,
        tiny,
        tmp_path / "one",
        *model_overrides,
        "cluster.gpus_per_node=1",
        "plan.compute=fp64",
        "plan.reduce=fp64",
    )
    same_run(attempts, single_rank[0])
