"""Packed state: master weights are restored bit for bit, moments rounded as stated, kernels equal the reference."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.slow import quick_first
from torch import Tensor

from meshwright.optim.packing import (
    BLOCK,
    MASTER,
    NEAREST,
    ChunkPacking,
    join_master,
    moment_of,
    pack,
    put_master,
    put_moment,
    random_bits,
    rounded_down_of,
    seed_of,
    split_master,
    unpack,
)
from meshwright.spec.optimizers import MOMENTS
from meshwright.spec.plan import Moments

FORMS: list[tuple[bool, Moments]] = [(master, form) for form in ("fp32", "bf16", "int8") for master in (True, False)]
LOWS = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF], dtype=torch.int64)


def from_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def check_split(weight: Tensor) -> None:
    rounded, remainder, rounded_down = split_master(weight)
    nan = weight.isnan()
    assert torch.equal(rounded[~nan].view(torch.int16), weight.to(torch.bfloat16)[~nan].view(torch.int16)), (
        "torch's own rounding"
    )
    joined = join_master(rounded, remainder, rounded_down)
    assert torch.equal(joined[~nan].view(torch.int32), weight[~nan].view(torch.int32))
    assert bool(joined[nan].isnan().all() and rounded[nan].isnan().all())
    assert remainder.dtype == torch.int16


def test_every_sign_exponent_and_bf16_mantissa_is_restored() -> None:
    """All 65,536 upper halves with the lower halves around a tie and around 0."""
    check_split(from_bits((torch.arange(1 << 16)[:, None] << 16 | LOWS).view(-1)))


@pytest.mark.parametrize(
    "upper", quick_first(1, [0x3F80, 0x3F81, 0x7F7F, 0x8000, 0xFF7F, 0x7F80, *range(0, 1 << 16, 127)])
)
def test_every_remainder_is_restored(upper: int) -> None:
    check_split(from_bits((upper << 16) + torch.arange(1 << 16)))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=64))
def test_any_values_are_restored(values: list[float]) -> None:
    check_split(torch.tensor(values, dtype=torch.float32))


def record_of(packing: ChunkPacking, size: int) -> tuple[dict[str, Tensor], Tensor]:
    return packing.fields(torch.zeros(packing.bytes(size), dtype=torch.uint8), size), torch.zeros(
        size, dtype=torch.bfloat16
    )


def states_of(size: int, seed: int = 0) -> dict[str, Tensor]:
    """Moments over many binades, with zeros and values too small for their block, and weights with ties of both sorts."""
    draw = torch.Generator().manual_seed(seed)
    first, second, weight = (torch.randn(size, generator=draw) for _ in range(3))
    scale = torch.exp2(torch.randint(-40, 4, (size,), generator=draw).float())
    first, second = first * scale, (second * scale).square()
    first[::17], second[::19] = 0, 0
    bits = weight.view(torch.int32)
    bits[::5] = (bits[::5] & ~0xFFFF) | 0x8000
    return {MOMENTS[0]: first, MOMENTS[1]: second, MASTER: weight}


def unpacked(packing: ChunkPacking, fields: dict[str, Tensor], rounded: Tensor | None) -> dict[str, Tensor]:
    outputs = {name: torch.empty(fields[MOMENTS[0]].shape) for name in packing.states}
    unpack(packing, fields, rounded, outputs)
    return outputs


@pytest.mark.parametrize(("master", "form"), FORMS)
def test_a_packed_state_is_packed_to_the_same_bits_again(master: bool, form: Moments) -> None:
    """So a skipped update, and a checkpoint in fp32 that is loaded, change nothing."""
    packing, size = ChunkPacking(master, form), 4 * BLOCK
    fields, rounded = record_of(packing, size)
    states = states_of(size)
    seed = seed_of(torch.tensor(7.0))
    pack(packing, states, fields, rounded if master else None, seed, 100)
    held = unpacked(packing, fields, rounded if master else None)
    if form != "int8" and master:
        assert torch.equal(held[MASTER].view(torch.int32), states[MASTER].view(torch.int32))
    if form == "fp32":
        assert all(torch.equal(held[name], states[name]) for name in packing.states)
    before = {name: field.clone() for name, field in fields.items()}
    pack(packing, held, fields, rounded if master else None, seed_of(torch.tensor(8.0)), 100)
    assert all(torch.equal(field, before[name]) for name, field in fields.items())
    for name in MOMENTS:
        put_moment(packing, name, held[name], fields, NEAREST.get(form, 0))
    if master:
        put_master(packing, held[MASTER], fields, rounded)
    assert all(torch.equal(field, before[name]) for name, field in fields.items()), (
        "rounded to nearest, as after a load"
    )


@pytest.mark.parametrize(("form", "step"), [("bf16", 2.0**-7), ("int8", 2.0**-3)])
def test_rounding_is_within_one_step_and_unbiased(form: Moments, step: float) -> None:
    packing, size = ChunkPacking(False, form), 400 * BLOCK
    value, fields = torch.full((size,), 1.3), record_of(packing, size)[0]
    pack(packing, {MOMENTS[0]: -value, MOMENTS[1]: value}, fields, None, seed_of(torch.tensor(5.0)), 0)
    first, second = (moment_of(packing, name, fields) for name in MOMENTS)
    below = 1.3 // step * step
    assert set(second.unique().tolist()) == {below, below + step} == {-entry for entry in first.unique().tolist()}
    share = (1.3 - below) / step
    deviation = (share * (1 - share) / size) ** 0.5
    rounded_up = (second > 1.3).float(), (first < -1.3).float()
    assert all(abs(float(up.mean()) - share) < 5 * deviation for up in rounded_up)
    correlation = (rounded_up[0] * rounded_up[1]).mean() - rounded_up[0].mean() * rounded_up[1].mean()
    assert abs(float(correlation)) < 5 * share * (1 - share) / size**0.5, "the moments are rounded independently"


def test_a_moment_that_is_not_a_number_stays_so() -> None:
    """The usual NaN of a GPU has all bits set: random bits would carry into its sign."""
    packing, fields = ChunkPacking(False, "bf16"), record_of(ChunkPacking(False, "bf16"), BLOCK)[0]
    nan = from_bits(torch.full((BLOCK,), 0x7FFFFFFF))
    pack(packing, {MOMENTS[0]: nan, MOMENTS[1]: nan}, fields, None, seed_of(torch.tensor(5.0)), 0)
    assert all(bool(moment_of(packing, name, fields).isnan().all()) for name in MOMENTS)


def test_eight_bits_keep_what_the_update_divides_by() -> None:
    """A second moment far below its block's largest is not 0; relative errors are below 1/8 within the format's range."""
    packing = ChunkPacking(False, "int8")
    fields, _ = record_of(packing, BLOCK)
    exponents = torch.arange(BLOCK, dtype=torch.float32) / 2.1
    values = 1.5 * torch.exp2(-exponents)
    pack(packing, {MOMENTS[0]: -values, MOMENTS[1]: values}, fields, None, seed_of(torch.ones(())), 0)
    first, second = (moment_of(packing, name, fields) for name in MOMENTS)
    near, inside = exponents <= 14, exponents <= 30
    assert bool(((first[near] / -values[near] - 1).abs() < 1 / 8).all() and (first[exponents > 15] == 0).all())
    assert bool(((second[inside] / values[inside] - 1).abs() < 1 / 8).all() and (second > 0).all())


def test_random_bits_differ_by_step_and_position() -> None:
    positions = torch.arange(1 << 14)
    draws = torch.stack([random_bits(positions, seed_of(torch.tensor(float(step)))) for step in range(4)])
    assert draws.unique().numel() > 0.999 * draws.numel()
    bits = (draws[..., None] >> torch.arange(32)) & 1
    assert bool(((bits.float().mean((0, 1)) - 0.5).abs() < 0.01).all())


CASES = [
    (*FORMS[0], True),
    *((*FORMS[index], False) for index in (0, 2, 4)),
    *((*form, True) for form in FORMS[1:]),
    *((*form, False) for form in FORMS[1::2]),
]


@pytest.mark.parametrize(("master", "form", "skip"), quick_first(4, CASES, unpack=True))
def test_the_kernel_equals_the_passes(master: bool, form: Moments, skip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as unpacking, AdamW's kernel for state on the device, and packing; the last block is not whole."""
    pytest.importorskip("triton")
    from meshwright.optim import fused
    from meshwright.optim.packed_update import StepTable, _update_in_passes
    from meshwright.optim.packing_triton import TILE, update_record

    tensor = torch.tensor
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=1))
    monkeypatch.setattr(torch, "tensor", lambda values, pin_memory=False, **options: tensor(values, **options))
    monkeypatch.setattr(fused, "_plain", fused._fast)
    packing, count, position = ChunkPacking(master, form), TILE + 77, (1 << 33) + 12345
    padded = -(-count // BLOCK) * BLOCK
    counts = {"other": torch.tensor(9.0), "weight": torch.tensor(3.0)}
    coefficients = fused.Coefficients((0.9, 0.95), 1e-8)
    inputs = fused.UpdateInputs(1e-2, torch.tensor(0.3, dtype=torch.float64), torch.tensor(float(skip)))
    table = StepTable.of(counts, coefficients, inputs)
    states = {name: torch.where(torch.arange(padded) < count, state, 0) for name, state in states_of(padded, 1).items()}
    states[MASTER][7] = torch.nan
    if form == "bf16":
        states[MOMENTS[0]][9] = states[MOMENTS[1]][9] = from_bits(torch.tensor(0x7FFFFFFF))
    gradient = torch.randn(count, generator=torch.Generator().manual_seed(2)).bfloat16()
    results = []
    for by_kernel in (True, False):
        fields, rounded = record_of(packing, padded)
        pack(packing, states, fields, rounded if master else None, seed_of(torch.tensor(2.0)), position)
        weights = rounded[:count] if master else states[MASTER][:count].clone()
        before = weights.clone()
        if by_kernel:
            update_record(
                packing,
                fields,
                weights,
                gradient,
                position,
                rates=table.rates,
                seeds=table.seeds,
                index=1,
                factor=table.factor,
                skip=inputs.skip,
                betas=coefficients.betas,
                epsilon=1e-8,
                decay_factor=1 - 1e-2 * 0.1,
            )
        else:
            _update_in_passes(packing, fields, weights, gradient.clone(), table, "weight", position, 0.1)
        results.append({**fields, "weights": weights})
    for name, value in results[0].items():
        assert torch.equal(value.view(torch.uint8), results[1][name].view(torch.uint8)), name
    assert torch.equal(weights.view(torch.uint8), before.view(torch.uint8)) == skip
    assert not skip or bool(rounded_down_of(packing, fields).any()) == (master and packing.tie_bits)
