"""Grouped matmuls against one dense matmul a row, and rows sorted by expert and back."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from meshwright.kernels.grouped import (
    GROUPED_OPERATOR,
    from_groups,
    grouped_gradients,
    grouped_gradients_loop,
    grouped_linear,
    order_by_expert,
    sorted_weights,
    sum_copies,
    to_groups,
)
from meshwright.spec.errors import BadInput

SIZES = {"uneven": [3, 0, 9, 1, 0], "one has all": [0, 13, 0, 0, 0], "even": [2, 2, 2, 2, 2]}


def some_rows(sizes: list[int], dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, offsets, and the group of each row."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), 16, generator=draw, dtype=torch.float64).to(dtype)
    weight = torch.randn(len(sizes), 24, 16, generator=draw, dtype=torch.float64).to(dtype)
    offsets = torch.tensor(sizes).cumsum(0).to(torch.int32)
    groups = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    x, weight = (tensor.to(device).requires_grad_() for tensor in (x, weight))
    return x, weight, offsets.to(device), groups.to(device)


def checked(matmul: Tensor, x: Tensor, weight: Tensor, groups: Tensor, bound: float) -> None:
    """Output and both gradients against a matrix of its own for every row."""
    grad_out = torch.randn(matmul.shape, generator=torch.Generator().manual_seed(1)).to(matmul)
    actual = (matmul, *torch.autograd.grad(matmul, (x, weight), grad_out))
    wide_x, wide_weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    dense = (wide_weight[groups] @ wide_x[..., None])[..., 0]
    exact = (dense, *torch.autograd.grad(dense, (wide_x, wide_weight), grad_out.double()))
    for ours, theirs in zip(actual, exact, strict=True):
        assert (ours.double() - theirs).norm() <= bound * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", SIZES)
def test_the_plain_twin_multiplies_every_row_with_its_group_s_matrix(case: str, dtype: torch.dtype) -> None:
    x, weight, offsets, groups = some_rows(SIZES[case], dtype)
    checked(
        grouped_linear(x, weight, offsets, reference=True), x, weight, groups, 1e-14 if dtype == torch.float64 else 1e-6
    )


@pytest.mark.parametrize("case", SIZES)
def test_the_fast_path_s_gradients(case: str) -> None:
    """torch's grouped matmul also runs on a processor, slowly: the same calls, the same formats."""
    x, weight, offsets, groups = some_rows(SIZES[case], torch.bfloat16)
    grad_out = torch.randn(len(groups), 24, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        actual = grouped_gradients(grad_out, x, weight, offsets)
        exact = grouped_gradients_loop(grad_out.double(), x.double(), weight.double(), offsets)
    for ours, theirs in zip(actual, exact, strict=True):
        assert (ours.double() - theirs).norm() <= 1e-2 * theirs.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("case", SIZES)
def test_the_fast_path_on_a_gpu(case: str, compiled: bool) -> None:
    junk = torch.full((1 << 24,), torch.nan, device="cuda")  # an empty group must not see what memory was left with
    del junk
    x, weight, offsets, groups = some_rows(SIZES[case], torch.bfloat16, "cuda")
    matmul = torch.compile(grouped_linear, fullgraph=True) if compiled else grouped_linear
    checked(matmul(x, weight, offsets), x, weight, groups, 1e-2)


@pytest.mark.gpu
def test_widths_that_the_fast_path_cannot_take_are_named() -> None:
    x, weight = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for shape in ((4, 12), (2, 8, 12)))
    with pytest.raises(BadInput, match=r"multiples of 8, got experts of 12 to 8"):
        grouped_linear(x, weight, torch.tensor([2, 4], dtype=torch.int32, device="cuda"))


@pytest.mark.parametrize("experts", [1, 4, 7])
def test_rows_are_sorted_by_expert_and_come_back(experts: int) -> None:
    draw = torch.Generator().manual_seed(experts)
    tokens = torch.randn(11, 3, generator=draw, dtype=torch.float64, requires_grad=True)
    copies = min(2, experts)
    expert_indices = torch.rand(11, experts, generator=draw).topk(copies).indices
    order = order_by_expert(expert_indices, torch.bincount(expert_indices.flatten(), minlength=experts))
    sorted_rows = to_groups(tokens, order)
    sorted_experts = expert_indices.flatten()[order.sorted]
    assert sorted_experts.tolist() == sorted(expert_indices.flatten().tolist())
    assert order.offsets.tolist() == torch.bincount(sorted_experts, minlength=experts).cumsum(0).tolist()
    assert torch.equal(sorted_rows, tokens[order.sorted // copies])
    assert torch.equal(from_groups(sorted_rows, order), tokens[:, None].expand(-1, copies, -1))
    assert torch.autograd.gradcheck(lambda x: to_groups(x, order), tokens)
    assert torch.autograd.gradcheck(lambda x: from_groups(x, order), sorted_rows.detach().requires_grad_())
    assert torch.autograd.gradcheck(lambda x: sum_copies(x, order), sorted_rows.detach().requires_grad_())
    weights = torch.rand(11, copies, generator=draw, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: sorted_weights(x, order), weights)
    weighted = sum_copies(sorted_rows * sorted_weights(weights, order)[:, None], order)
    torch.testing.assert_close(weighted, tokens * weights.sum(1, keepdim=True))


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("copies", "width"), [(1, 64), (8, 2048), (2, 136)])
def test_copies_move_on_a_gpu_as_on_a_processor(copies: int, width: int, compiled: bool) -> None:
    """Integers, so that sums are exact in bf16."""

    def there_and_back(tokens: Tensor, chosen: Tensor, load: Tensor) -> tuple[Tensor, Tensor]:
        order = order_by_expert(chosen, load)
        sorted_rows = to_groups(tokens, order)
        return sorted_rows, sum_copies(sorted_rows, order)

    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(-4, 5, (300, width), generator=draw).bfloat16()
    chosen = torch.rand(300, 16, generator=draw).topk(copies).indices
    load = torch.bincount(chosen.flatten(), minlength=16)
    results = []
    for device in ("cpu", "cuda"):
        moved = tokens.detach().to(device).requires_grad_()
        function = torch.compile(there_and_back, fullgraph=True) if compiled and device == "cuda" else there_and_back
        sorted_rows, sums = function(moved, chosen.to(device), load.to(device))
        (sums.float().sum() + (3 * sorted_rows[:7]).float().sum()).backward()
        results.append([tensor.detach().cpu() for tensor in (sorted_rows, sums, moved.grad)])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")
def test_the_plain_twin_compiles() -> None:
    """Though its sizes are read by the host: the compiler sees one operator."""
    x, weight, offsets, groups = some_rows(SIZES["uneven"], torch.float64)
    compiled = torch.compile(grouped_linear, fullgraph=True, backend="aot_eager")
    checked(compiled(x, weight, offsets), x, weight, groups, 1e-14)
    torch.library.opcheck(GROUPED_OPERATOR, (x, weight, offsets, True), test_utils=("test_schema", "test_faketensor"))
