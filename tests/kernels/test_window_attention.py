"""Windows by FlashAttention, whose kernels stand in for: which windows it computes, documents, sinks, gradients, compilation, recompute."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright.data.packing import document_sizes
from meshwright.kernels import window_attention
from meshwright.kernels.attention import AttentionMask, attention, make_mask
from meshwright.kernels.window_attention import flash_window
from meshwright.parallel.recompute import with_recompute
from meshwright.spec.blocks.attention import window_by_flash

CPU = torch.device("cpu")
SEQ, WINDOW = 24, 5
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 14 + [2], [0] * 2 + [1] * 1 + [2] * 21])


@pytest.mark.parametrize(
    ("head_dim", "window", "cap", "number_format", "chosen"),
    [
        (256, 4096, None, "bf16", True),
        (136, 1024, None, "fp16", True),
        (128, 128, None, "bf16", True),
        (64, 1, None, "bf16", True),
        (128, 129, None, "bf16", False),
        (256, 4096, 50.0, "bf16", False),
        (256, 4096, None, "fp32", False),
        (264, 128, None, "bf16", False),
        (100, 128, None, "bf16", False),
    ],
)
def test_wide_heads_and_short_windows_are_chosen(
    head_dim: int, window: int, cap: float | None, number_format: str, chosen: bool
) -> None:
    assert window_by_flash(head_dim, window, cap, number_format) == chosen


def test_it_is_not_chosen_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(window_attention, "_is_supported", lambda *_: True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    assert window_attention.is_chosen(256, 1024, None, torch.bfloat16, device)
    assert not window_attention.is_chosen(None, 1024, None, torch.bfloat16, device)  # values narrower than keys
    assert not window_attention.is_chosen(256, 1024, None, torch.float32, device)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not window_attention.is_chosen(256, 1024, None, torch.bfloat16, device)
    assert make_mask(None, WINDOW, SEQ, CPU, head_dim=64, dtype=torch.bfloat16).flash is None


@pytest.mark.parametrize("count_on_host", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_documents_are_ranges_of_the_rows_one_after_another(seed: int, count_on_host: bool) -> None:
    """The ranges that the kernel gets allow exactly the pairs of the dense mask."""
    draw = torch.Generator().manual_seed(seed)
    documents = torch.rand((3, 40), generator=draw).lt([0.0, 0.1, 0.5, 1.0][seed]).cumsum(1)
    sizes = document_sizes(documents.numpy()) if count_on_host else None
    window = flash_window(7, documents, sizes)
    assert window.begins is not None and window.sizes is not None
    assert window.begins.shape == (121,) and window.begins.dtype == torch.int32
    count, longest = window.sizes.tolist()
    ends = window.begins[: count + 1]
    assert ends[0] == 0 and ends[-1] == 120 and ends.diff().min() > 0 and ends.diff().max() == longest
    number = torch.repeat_interleave(torch.arange(count), ends.diff().long())
    token = torch.arange(120)
    allowed = (token <= token[:, None]) & (token[:, None] - token < 7) & (number == number[:, None])
    dense = make_mask(documents, 7, 40, CPU)
    assert dense is not None and dense.dense is not None
    assert torch.equal(allowed, torch.block_diag(*dense.dense[:, 0]).bool())


def test_sizes_of_documents() -> None:
    assert document_sizes(DOCUMENTS.numpy()) == (6, 21)
    assert document_sizes(np.zeros((2, 5), dtype=np.int64)) == (2, 5)
    assert document_sizes(np.array([3, 3, 1, 2])) == (3, 2)


def visible(q: Tensor, lengths: tuple[Tensor | None, ...], window: int) -> Tensor:
    """What FlashAttention lets queries attend to, `(tokens, tokens)`, of sequences of one length or of documents."""
    token = torch.arange(q.shape[-3])
    allowed = (token <= token[:, None]) & (token[:, None] - token <= window)
    if lengths[0] is not None:
        number = torch.searchsorted(lengths[0], token.int(), right=True)
        allowed = allowed & (number == number[:, None])
    return allowed


def scores_of(q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
    keys = k.repeat_interleave(q.shape[-2] // k.shape[-2], dim=-2)
    scores = q.transpose(-3, -2) @ keys.transpose(-3, -2).mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(~allowed, float("-inf"))


class Operators:
    """Stands in for torch's two operators, with their arguments and shapes, in explicit arithmetic."""

    def _flash_attention_forward(
        self, q: Tensor, k: Tensor, v: Tensor, *lengths: Any, **window: int
    ) -> tuple[Any, ...]:
        assert lengths[4:] == (0.0, True, False) and window["window_size_right"] == 0
        scores = scores_of(q, k, visible(q, lengths, window["window_size_left"]))
        values = v.repeat_interleave(q.shape[-2] // v.shape[-2], dim=-2).transpose(-3, -2)
        out = (scores.softmax(-1) @ values).transpose(-3, -2)
        return out.contiguous(), scores.logsumexp(-1).float(), None, None, None

    def _flash_attention_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        *lengths: Any,
        **window: int,
    ) -> tuple[Tensor, ...]:
        assert grad.is_contiguous() and logsumexp.is_contiguous() and logsumexp.dtype == torch.float32
        scores = scores_of(q, k, visible(q, lengths, window["window_size_left"]))
        shared = q.shape[-2] // k.shape[-2]
        keys, values = (x.repeat_interleave(shared, dim=-2).transpose(-3, -2) for x in (k, v))
        grad, result, queries = (x.transpose(-3, -2) for x in (grad, out, q))
        weights = torch.exp(scores - logsumexp[..., None])
        of_scores = weights * (grad @ values.mT - (grad * result).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        of_keys, of_values = (
            x.unflatten(-3, (-1, shared)).sum(-3).transpose(-3, -2) for x in (of_scores.mT @ queries, weights.mT @ grad)
        )
        return (of_scores @ keys).transpose(-3, -2), of_keys, of_values


@pytest.fixture(autouse=True)
def _operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(window_attention, "_aten", Operators())
    yield


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k and v as parts of one tensor, as a block has them, and sinks."""
    draw = torch.Generator().manual_seed(0)
    joined = torch.randn(2, SEQ, 8, 16, generator=draw, dtype=dtype)
    sinks = torch.randn(4, generator=draw, dtype=dtype)
    return [*(x.requires_grad_() for x in joined.split((4, 2, 2), dim=2)), sinks.requires_grad_()]


def block(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: AttentionMask) -> Tensor:
    return attention(q * 1.5, k, v, mask, sinks=sinks).flatten(-2) * 2.0


def run(function: Callable[..., Tensor], mask: AttentionMask, with_sinks: bool) -> list[Tensor]:
    """The result, and the gradients of q, k, v and the sinks."""
    q, k, v, sinks = inputs()
    out = function(q, k, v, sinks if with_sinks else None, mask)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out, *torch.autograd.grad(out, [q, k, v, *([sinks] if with_sinks else [])], grad)]


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_results_and_gradients_are_those_of_the_dense_mask(documents: Tensor | None, with_sinks: bool) -> None:
    dense = make_mask(documents, WINDOW, SEQ, CPU)
    assert dense is not None
    expected = run(block, dense, with_sinks)
    flash = AttentionMask(flash=flash_window(WINDOW, documents))
    for found, truth in zip(run(block, flash, with_sinks), expected, strict=True):
        torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5)


def test_one_compiled_block_serves_other_documents_and_saves_its_attention() -> None:
    """With selective recompute the operator runs once in forward and backward together."""
    runs = list[str]()

    class Counting(Operators):
        def _flash_attention_forward(self, *args: Any, **window: int) -> tuple[Any, ...]:
            runs.append("forward")
            return super()._flash_attention_forward(*args, **window)

    window_attention._aten = Counting()  # the fixture restores the operators
    compiled = torch.compile(
        with_recompute(block, "selective", compiled=True), backend="aot_eager", fullgraph=True, dynamic=False
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for documents in (DOCUMENTS, DOCUMENTS.flip(1)):
            mask = AttentionMask(flash=flash_window(WINDOW, documents))
            expected = run(block, mask, True)
            runs.clear()
            for found, truth in zip(run(compiled, mask, True), expected, strict=True):
                torch.testing.assert_close(found, truth)
            assert runs == ["forward"]
            runs.clear()
            run(with_recompute(block, "selective"), mask, True)
            assert runs == ["forward"]
