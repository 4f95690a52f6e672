"""GPU: layers in fp8 with a scale for each block of 128 × 128: rounding, matmuls by both ways, and the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.gpu.test_formats import SHAPES, engine_of, error, logits_of
from tests.kernels.test_block_matmuls import exact_matmul, grouped_draws, stored_weight
from tests.serve.test_stored_formats import block_folder
from torch import Tensor

from meshwright.checkpoint.models.single_device import load_model
from meshwright.kernels.add_norm import add_rms_norm
from meshwright.kernels.block_matmuls import (
    Fp8Blocks,
    Fp8Groups,
    block_linear,
    group_values,
    library_agrees,
    library_matmul,
    quantize_groups,
)
from meshwright.kernels.row_quantize import quantize_add_rms_norm, quantize_gated, quantize_rows
from meshwright.kernels.swiglu import gated_activation
from meshwright.serve.formats import rounded_parameters
from meshwright.serve.load import load_for_engine
from meshwright.spec.engine import EngineOptions

pytestmark = pytest.mark.gpu

BLOCK_SHAPES = [*SHAPES[:4], (7168, 576), (1408, 2048), (200, 144)]
"""(inputs, outputs), among them widths that are no multiples of 128 or 512."""


@pytest.fixture(autouse=True)
def multiplies_fp8() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs Ada, Hopper or later")


def on_gpu(weight: Fp8Blocks) -> Fp8Blocks:
    return Fp8Blocks(weight.values.cuda(), weight.scale.cuda())


def operands(tokens: int, inner: int, outer: int) -> tuple[Fp8Groups, Fp8Blocks, Tensor]:
    x = quantize_rows(grouped_draws(tokens, inner).cuda(), "fp8 blocks")
    assert isinstance(x, Fp8Groups)
    return x, on_gpu(stored_weight(outer, inner)), torch.randn(outer, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 4096), (7, 1000), (3, 28672), (2, 40000), (5, 40)])
def test_rounding_is_that_of_a_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = grouped_draws(*shape[:-1], min(shape[-1], 1024), dtype=dtype).repeat_interleave(-(-shape[-1] // 1024), -1)[
        ..., : shape[-1]
    ]
    ours, theirs = quantize_rows(x.cuda(), "fp8 blocks"), quantize_groups(x)
    rows = x.numel() // x.shape[-1]
    assert torch.equal(ours.scale[:, :rows].cpu(), theirs.scale[:, :rows])
    assert torch.equal(ours.values.cpu().view(torch.uint8), theirs.values.view(torch.uint8))


def test_fused_operations_round_what_the_separate_ones_return() -> None:
    """But for numbers that differ in the last place of bf16."""
    x, delta, weight = (grouped_draws(*shape).cuda() for shape in ((33, 4096), (33, 4096), (2, 4096)))
    weight = weight[1]  # the first row of the draws is 0
    total, normed = quantize_add_rms_norm(x, delta, weight, 1e-5, "fp8 blocks")
    expected_total, expected = add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, expected_total) and isinstance(normed, Fp8Groups)
    gate_up = grouped_draws(33, 2048).cuda()
    gated = quantize_gated(gate_up, "fp8 blocks")
    assert isinstance(gated, Fp8Groups)
    for ours, separate in ((normed, expected), (gated, gated_activation(gate_up))):
        theirs = group_values(quantize_groups(separate))
        assert (group_values(ours) - theirs).norm() < 0.005 * theirs.norm()


@pytest.mark.parametrize("tokens", [1, 5, 33, 64, 65, 300, 1003])
@pytest.mark.parametrize(("inner", "outer"), BLOCK_SHAPES)
def test_matmul(inner: int, outer: int, tokens: int) -> None:
    x, weight, bias = operands(tokens, inner, outer)
    exact = exact_matmul(x, weight) + bias.double()
    for invariant in (False, True):
        out = block_linear(x, weight, bias, torch.bfloat16, invariant=invariant)
        assert out.dtype == torch.bfloat16
        assert (out.double() - exact).norm() < 5e-3 * exact.norm() + 1e-3


@pytest.mark.parametrize(("inner", "outer"), BLOCK_SHAPES[:4])
def test_bits_of_a_matmul_do_not_depend_on_the_number_of_tokens(inner: int, outer: int) -> None:
    x, (_, weight, bias) = grouped_draws(600, inner).cuda(), operands(1, inner, outer)

    def matmul(x: Tensor) -> Tensor:
        rounded = quantize_rows(x, "fp8 blocks")
        assert isinstance(rounded, Fp8Groups)
        return block_linear(rounded, weight, bias, torch.bfloat16, invariant=True)

    whole = matmul(x)
    for begin, count in ((0, 1), (7, 1), (500, 2), (3, 17), (100, 64), (0, 65), (1, 129), (299, 257)):
        assert torch.equal(matmul(x[begin : begin + count]), whole[begin : begin + count]), (begin, count)


@pytest.mark.parametrize(("inner", "outer"), BLOCK_SHAPES[:3])
def test_hopper_with_a_new_library_multiplies_by_it(inner: int, outer: int) -> None:
    version = tuple(map(int, (torch.version.cuda or "0.0").split(".")))
    if torch.cuda.get_device_capability()[0] != 9 or version < (12, 9):
        pytest.skip("needs Hopper and CUDA 12.9 or later")
    x, weight, _ = operands(301, inner, outer)
    exact = exact_matmul(x, weight)
    for rounded in (x, Fp8Groups(x.values.clone(), x.scale)):  # with memory behind the last token, and without
        out = library_matmul(rounded, weight)
        assert out.shape == exact.shape and (out.double() - exact).norm() < 5e-3 * exact.norm()
    assert library_agrees(torch.device("cuda", 0), outer, inner)


@pytest.mark.parametrize("options", [{}, {"graphs": False}, {"invariant": True}], ids=str)
def test_engine_multiplies_stored_blocks(options: dict[str, bool], tmp_path: Path) -> None:
    """Not farther from the exact model than the same formats on a CPU and bf16 without them, together."""
    block_folder(tmp_path / "out")
    device, cpu = torch.device("cuda", 0), torch.device("cpu")
    invariant = EngineOptions(invariant=options.get("invariant", False))
    model = load_for_engine(tmp_path / "out", device, torch.bfloat16, invariant)
    assert set(rounded_parameters(model).values()) == {"fp8 blocks"}
    on_cpu = load_for_engine(tmp_path / "out", cpu, torch.float32, EngineOptions(weights="fp8"))
    exact = load_model(tmp_path / "out", cpu, torch.float32)
    expanded = load_model(tmp_path / "out", device, torch.bfloat16)
    bound = error(engine_of(on_cpu, weights="fp8"), exact) + error(engine_of(expanded), exact)
    assert error(engine_of(model, **options), exact) < 1.5 * bound
    if "invariant" in options:
        whole = logits_of(engine_of(model, **options))
        alone = logits_of(engine_of(model, **options, sequences=1))
        assert all(torch.equal(alone[number], rows) for number, rows in whole.items())
