"""Every Triton kernel against its plain implementation, in Triton's interpreter, which needs no GPU.

The tests in `tests/gpu` run the compiled kernels, with the sizes of models.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from meshwright.kernels.fp8_matmuls import E4M3
from meshwright.kernels.gated import _swiglu, _swiglu_gradient
from meshwright.kernels.pack import pack
from meshwright.kernels.sums import add, scale
from meshwright.kernels.swiglu import gated_activation
from meshwright.optim import fused
from tests.gpu.test_loss import gradients_agree
from tests.kernels.test_fp8_matmuls import numbers

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves")

PAIRS = [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.float32)]
COUNTS = [1, 2047, 2 * 2048 + 1]


def same(ours: Tensor, theirs: Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(ours.view(torch.uint8), theirs.contiguous().view(torch.uint8))


def next_to(ours: Tensor, theirs: Tensor) -> bool:
    """Not apart by more than one step of their format: the interpreter cuts off where a GPU rounds to nearest."""
    out_dtype = torch.finfo(theirs.dtype)
    step = out_dtype.eps * theirs.double().abs().clamp(min=out_dtype.smallest_normal)
    return ours.dtype == theirs.dtype and bool(((ours.double() - theirs.double()).abs() <= step).all())


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("gradient_dtype", "out_dtype"), PAIRS)
def test_sums(count: int, gradient_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    from meshwright.kernels.sums_triton import fused_add, fused_scale

    gradient, total = (torch.randn(count) for _ in range(2))
    gradient, kernel_sum, by_torch = gradient.to(gradient_dtype), total.to(out_dtype), total.to(out_dtype)
    fused_add(kernel_sum, gradient)
    add(by_torch, gradient, reference=True)
    assert next_to(kernel_sum, by_torch)
    factor, out = torch.tensor(1 / 3), torch.empty(count, dtype=out_dtype)
    fused_scale(out, gradient, factor)
    assert next_to(out, scale(gradient, factor, out_dtype, reference=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [7, 8192, 20001])
def test_loss(columns: int, dtype: torch.dtype) -> None:
    gradients_agree(6, columns, dtype, "cpu")


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float32])
def test_pack(ranks: int, gradient_dtype: torch.dtype) -> None:
    from meshwright.kernels.pack_triton import copy_rows

    gradients = [torch.randn(shape).to(gradient_dtype) for shape in [(7, 300), (64, 3, 5), (1030,), (1, 7), (2,)]]
    elements_per_rank = sum(-(-gradient.shape[0] // ranks) * gradient[0].numel() for gradient in gradients)
    packed, by_torch = (torch.full((ranks * elements_per_rank,), torch.nan) for _ in range(2))
    offset = 0
    for gradient in gradients:
        offset += copy_rows(gradient, packed, ranks, offset, elements_per_rank)
    pack(gradients, by_torch, ranks, reference=True)
    assert offset == elements_per_rank and same(packed, by_torch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("shape", "gelu"),
    [((2, 9, 2 * 344), False), ((3, 2 * 1500), False), ((5, 2 * 3), False), ((0, 16), False), ((3, 2 * 1100), True)],
)
def test_gated_activation(shape: tuple[int, ...], gelu: bool, weighted: bool, dtype: torch.dtype) -> None:
    from meshwright.kernels.swiglu_triton import fused_gated_activation

    tensors = [torch.randn(shape).to(dtype), *([torch.rand(shape[:-1])] if weighted else [])]
    grad_out = torch.randn(*shape[:-1], shape[-1] // 2).to(dtype)
    actual_inputs = [tensor.clone().requires_grad_() for tensor in tensors]
    exact_inputs = [tensor.double().requires_grad_() for tensor in tensors]
    ours = fused_gated_activation(*actual_inputs, gelu=gelu)
    theirs = gated_activation(*exact_inputs, gelu=gelu, reference=True)
    ours.backward(grad_out)
    theirs.backward(grad_out.double())
    bound = torch.finfo(dtype).eps
    rounded = bound if dtype == torch.bfloat16 else 4 * bound  # in fp32 the kernel's own operations round too
    torch.testing.assert_close(ours.double(), theirs, rtol=rounded, atol=rounded)
    torch.testing.assert_close(actual_inputs[0].grad.double(), exact_inputs[0].grad, rtol=4 * bound, atol=4 * bound)
    if weighted:
        torch.testing.assert_close(actual_inputs[1].grad.double(), exact_inputs[1].grad, rtol=1e-5, atol=1e-5)


SHAPES = [(160, 96), (128, 64), (16, 48)]
"""Tiles are 128 by 64 or 32."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """All but the rounding, which the interpreter gets wrong: what is made is asked for in fp32."""
    from meshwright.kernels.fp8_triton import round_both, round_flat, round_transposed, transpose

    x, out_dtype = numbers(0, *shape).to(dtype), torch.float32
    scale, by_column = torch.tensor(2.0**-7), torch.randn(shape[1], 1)
    straight, transposed = round_both(x, scale, out_dtype)
    expected = x.float() * scale
    assert same(straight, expected) and same(transposed, expected.t())
    assert same(round_transposed(x, scale, out_dtype), transposed) and same(round_flat(x, scale, out_dtype), straight)
    assert same(round_transposed(x, by_column, out_dtype), x.float().t() * by_column)
    fp8_values = x.to(E4M3)
    assert same(transpose(fp8_values), fp8_values.t())


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gated(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from meshwright.kernels.gated_triton import round_swiglu, round_swiglu_gradient

    tokens, width = shape
    projected, grad_out = numbers(0, tokens, 2 * width).to(dtype), numbers(1, tokens, width).to(dtype)
    factor, out_dtype = torch.tensor(2.0**-7), torch.float32
    for (straight, transposed), theirs in (
        (round_swiglu(projected, factor, out_dtype), _swiglu(projected)),
        (
            round_swiglu_gradient(projected, grad_out, factor, out_dtype),
            torch.cat(_swiglu_gradient(projected, grad_out), dim=1),
        ),
    ):
        assert same(transposed, straight.t())
        torch.testing.assert_close(straight, theirs * factor, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("skip", [False, True])
def test_adamw(skip: bool, gradient_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, tensor = torch.device("cpu"), torch.tensor
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=1))
    monkeypatch.setattr(torch, "tensor", lambda values, pin_memory: tensor(values))

    def stepped(update) -> list[Tensor]:
        draw = torch.Generator().manual_seed(0)
        shapes = [(1000, 21), (37,), (0, 8), (1024,), (1025,)]
        weights, gradients, first, second = ([torch.randn(shape, generator=draw) for shape in shapes] for _ in range(4))
        second = [gradient.square() for gradient in second]
        update_counts = [fused.new_count(cpu) + index for index in range(len(shapes))]
        inputs = fused.UpdateInputs(1e-2, torch.full((), 0.3), torch.full((), float(skip)))
        with fused.count_updates(update_counts, inputs.skip):
            update(
                weights,
                [gradient.to(gradient_dtype) for gradient in gradients],
                first,
                second,
                update_counts,
                coefficients=fused.Coefficients((0.9, 0.95), 1e-8),
                weight_decay=0.1,
                inputs=inputs,
            )
        return [*weights, *first, *second]

    for ours, theirs in zip(stepped(fused._fast), stepped(fused._plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "plus_one"), [((2, 3, 48), False), ((2, 3, 48), True), ((1, 4096), False), ((0, 16), False)]
)
def test_add_norm(shape: tuple[int, ...], plus_one: bool, dtype: torch.dtype) -> None:
    from meshwright.kernels.add_norm_triton import fused_add_rms_norm

    x, delta, weight = (torch.randn(size).to(dtype) for size in (shape, shape, shape[-1:]))
    total, normed = fused_add_rms_norm(x, delta, weight, 1e-5, plus_one=plus_one)
    assert next_to(total, x + delta)
    assert dtype == torch.bfloat16 or same(total, x + delta)
    exact = (
        total.double() / (total.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * (plus_one + weight.double())
    )
    assert normed.dtype == dtype and normed.shape == x.shape
    torch.testing.assert_close(normed.double(), exact, rtol=max(torch.finfo(dtype).eps, 1e-6), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("plus_one", [False, True])
def test_norm_alone(plus_one: bool, dtype: torch.dtype) -> None:
    from meshwright.kernels.add_norm_triton import fused_rms_norm

    x = torch.randn(48, 3, 5).to(dtype).movedim(0, -1)  # not contiguous
    weight = torch.randn(48).to(dtype)
    normed = fused_rms_norm(x, weight, 1e-5, plus_one=plus_one)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * (plus_one + weight.double())
    assert normed.dtype == dtype and normed.shape == x.shape and normed.is_contiguous()
    torch.testing.assert_close(normed.double(), exact, rtol=max(torch.finfo(dtype).eps, 1e-6), atol=1e-6)


@pytest.mark.parametrize(("shared", "plus_one"), [(False, False), (True, False), (True, True)])
def test_add_copies_norm(shared: bool, plus_one: bool) -> None:
    """The sums of copies and of the shared expert are rounded as by separate operators."""
    from meshwright.kernels.add_norm_triton import fused_add_copies_rms_norm, fused_add_rms_norm

    x, weight = torch.randn(1, 5, 48).half(), torch.randn(48).half()
    copies, other = torch.randn(5, 3, 48).half(), torch.randn(1, 5, 48).half()
    delta = copies.float().sum(1).half()[None]
    expected = fused_add_rms_norm(x, delta + other if shared else delta, weight, 1e-5, plus_one=plus_one)
    results = fused_add_copies_rms_norm(x, copies, other if shared else None, weight, 1e-5, plus_one=plus_one)
    assert all(next_to(ours, theirs) for ours, theirs in zip(results, expected, strict=True))


def test_matrices_of_experts_are_rounded_and_transposed() -> None:
    """In fp32, as the interpreter rounds wrongly to fp8; `kernels/test_grouped_fp8.py` compares the bytes on a GPU."""
    from meshwright.kernels.grouped_fp8_triton import round_transposed

    matrices, factor = torch.randn(3, 144, 80).bfloat16(), torch.tensor([0.5, 2.0, 8.0])
    expected = matrices.float().transpose(1, 2) * factor[:, None, None]
    assert torch.equal(round_transposed(matrices, factor, torch.float32), expected)


@pytest.mark.parametrize(("copies", "width"), [(1, 64), (3, 80)])
def test_copies_of_tokens(copies: int, width: int) -> None:
    from meshwright.kernels.grouped_copies_triton import spread_tokens

    tokens, order = torch.randn(7, width), torch.randperm(7 * copies)
    assert torch.equal(spread_tokens(tokens, order.argsort().view(7, copies)), tokens[order // copies])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sums_of_copies(dtype: torch.dtype) -> None:
    from meshwright.kernels.grouped_copies_triton import gather_sum

    sorted_rows, positions = torch.randint(-50, 50, (21, 80)).to(dtype), torch.randperm(21).view(7, 3)
    assert same(gather_sum(sorted_rows, positions), sorted_rows[positions].sum(1))
