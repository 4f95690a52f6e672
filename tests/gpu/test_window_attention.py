"""GPU: windows by FlashAttention against the plain form, alone and in compiled blocks; a run with it against one with flex attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.gpu.runs import LAYOUT_BOUND, LLAMA, RUNS_LIMIT, figures, trained
from torch import Tensor

from meshwright.kernels import window_attention
from meshwright.kernels.attention import AttentionMask, attention, make_mask
from meshwright.parallel.recompute import with_recompute

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(RUNS_LIMIT)]

CUDA = torch.device("cuda")
CASES = [
    (300, 4, 2, 256, 100),
    (1024, 8, 4, 256, 512),
    (513, 3, 3, 192, 200),
    (640, 8, 1, 64, 128),
    (500, 6, 2, 128, 2),
    (257, 4, 4, 96, 37),
]
"""seq, heads, kv_heads, head_dim, window."""


def documents_of(seq: int) -> Tensor:
    """Two rows of documents, of which some have one token."""
    draw = torch.Generator().manual_seed(seq)
    documents = torch.rand((2, seq), generator=draw).lt(0.01).cumsum(1)
    documents[1, 10:12] = documents.max() + torch.tensor([1, 2])
    documents[1, 12:] += documents[1, 11] + 1
    return documents.to(CUDA)


def inputs(case: tuple[int, int, int, int, int], dtype: torch.dtype, with_sinks: bool) -> list[Tensor]:
    """q, k and v as parts of one tensor, as a block has them, and sinks."""
    seq, heads, kv_heads, head_dim, _ = case
    draw = torch.Generator("cuda").manual_seed(seq)
    joined = torch.randn(2, seq, heads + 2 * kv_heads, head_dim, generator=draw, device=CUDA, dtype=dtype)
    tensors = [*joined.split((heads, kv_heads, kv_heads), dim=2)]
    if with_sinks:
        tensors.append(torch.randn(heads, generator=draw, device=CUDA, dtype=dtype))
    return [tensor.requires_grad_() for tensor in tensors]


def block(mask: AttentionMask | None, reference: bool, q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
    return attention(q * 1.5, k, v, mask, sinks=sinks[0] if sinks else None, reference=reference).flatten(-2) * 2.0


def results(
    function: Callable[..., Tensor], mask: AttentionMask | None, reference: bool, tensors: list[Tensor]
) -> list[Tensor]:
    """The result and the gradients of all tensors."""
    out = function(mask, reference, *tensors)
    draw = torch.Generator("cuda").manual_seed(1)
    grad = torch.randn(out.shape, generator=draw, device=CUDA, dtype=torch.bfloat16).to(out.dtype)
    return [out, *torch.autograd.grad(out, tensors, grad)]


def masks(case: tuple[int, int, int, int, int], dtype: torch.dtype, with_documents: bool) -> list[AttentionMask]:
    """That of FlashAttention, and the dense one."""
    seq, _, _, head_dim, window = case
    documents = documents_of(seq) if with_documents else None
    flash = make_mask(documents, window, seq, CUDA, head_dim=head_dim, dtype=dtype)
    dense = make_mask(documents, window, seq, CUDA, reference=True)
    assert flash is not None and flash.flash is not None and dense is not None
    return [flash, dense]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for ours, truth in zip(found, expected, strict=True):
        assert (ours - truth).norm() <= 1e-2 * truth.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_those_of_plain_attention(
    case: tuple[int, int, int, int, int], with_documents: bool, with_sinks: bool, dtype: torch.dtype
) -> None:
    flash, dense = masks(case, dtype, with_documents)
    tensors = inputs(case, dtype, with_sinks)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    assert_close(results(block, flash, False, tensors), results(block, dense, True, wide))


@pytest.mark.parametrize(
    ("mode", "with_documents"),
    [("none", False), ("none", True), ("selective", True), ("all_but_attention", True), ("full", True)],
)
def test_a_compiled_block_equals_the_plain_form(
    mode: str, with_documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph for all documents; the operator runs once for forward and backward where the mode saves its result."""
    case = CASES[0]
    runs = list[int]()
    operator = window_attention._aten._flash_attention_forward

    class Counting:
        _flash_attention_backward = window_attention._aten._flash_attention_backward

        @staticmethod
        def _flash_attention_forward(*args: object, **window: int) -> object:
            runs.append(1)
            return operator(*args, **window)

    monkeypatch.setattr(window_attention, "_aten", Counting)
    torch._dynamo.reset()
    compiled = torch.compile(with_recompute(block, mode, compiled=True), fullgraph=True, dynamic=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for flip in (False, True):
            flash, dense = masks(case, torch.bfloat16, with_documents)
            if with_documents and flip:
                documents = documents_of(case[0]).flip(1)
                flash = make_mask(documents, case[4], case[0], CUDA, head_dim=case[3], dtype=torch.bfloat16)
                dense = make_mask(documents, case[4], case[0], CUDA, reference=True)
            assert flash is not None and dense is not None
            tensors = inputs(case, torch.bfloat16, True)
            wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
            runs.clear()
            assert_close(results(compiled, flash, False, tensors), results(block, dense, True, wide))
            assert len(runs) == (2 if mode == "full" else 1)


def test_flex_attention_keeps_other_windows() -> None:
    def by_flash(head_dim: int, window: int, cap: float | None = None, dtype: torch.dtype = torch.bfloat16) -> bool:
        mask = make_mask(None, window, 4096, CUDA, cap=cap, head_dim=head_dim, dtype=dtype)
        assert mask is not None and (mask.flash is None) == (mask.blocks is not None)
        return mask.flash is not None

    assert by_flash(256, 1024) and by_flash(64, 128) and by_flash(192, 1024)
    assert not by_flash(128, 1024) and not by_flash(256, 1024, 50.0) and not by_flash(256, 1024, None, torch.float32)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert not by_flash(256, 1024)
    finally:
        torch.use_deterministic_algorithms(before)


WINDOWED = LLAMA.replace("family: llama", "family: mistral").replace(
    "heads: 8, kv_heads: 4, head_dim: 64", "heads: 4, kv_heads: 2, head_dim: 256, sliding_window: 100"
)


@pytest.mark.parametrize("overrides", [["data.document_mask=false"], ["plan.recompute=selective"]])
def test_a_run_has_the_losses_of_one_with_flex_attention(tmp_path: Path, overrides: list[str]) -> None:
    """With sums in a fixed order windows have flex attention."""
    flash, flex = (
        figures(trained(tmp_path, WINDOWED, name, 1, [*overrides, f"train.deterministic={name == 'flex'}"]))
        for name in ("flash", "flex")
    )
    assert flash == pytest.approx(flex, rel=LAYOUT_BOUND)
