"""The likeliest tokens: single rules, and the Triton kernel against the plain operations in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.kernels.likeliest import keep_likeliest
from tests.slow import quick_first


def test_equal_scores_stay_together_and_the_likeliest_token_always_stays() -> None:
    scores = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    one = torch.ones(1)
    assert keep_likeliest(scores, 2 * one, one, 0 * one).isfinite().tolist() == [[True] * 4 + [False]]
    assert keep_likeliest(scores, 0 * one, 0 * one, one).isfinite().tolist() == [[True] + [False] * 4]


def cases() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores and options: every option alone and with others, ties, removed tokens, zeros of both signs."""
    torch.manual_seed(0)
    options = [
        (0, 1.0, 0.0),
        (1, 1.0, 0.0),
        (7, 1.0, 0.0),
        (1000, 1.0, 0.0),
        (0, 0.0, 0.0),
        (0, 0.3, 0.0),
        (0, 0.999, 0.0),
        (0, 1.0, 0.05),
        (0, 1.0, 1.0),
        (50, 0.8, 0.01),
        (5, 0.999999, 0.2),
    ]
    scores = 3 * torch.randn(len(options), 222)
    scores = torch.cat((scores, scores.round(), scores.relu() * torch.tensor([1.0, -1.0, 0.0]).repeat(74)))
    scores[:, 5::7] = float("-inf")
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*options * 3, strict=True))
    return scores, top_k, top_p, min_p


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernel itself")
@pytest.mark.parametrize(
    ("dtype", "every"), quick_first(1, [(torch.bfloat16, 3), (torch.bfloat16, 1), (torch.float32, 1)], unpack=True)
)
def test_the_kernel_keeps_what_the_plain_operations_keep(dtype: torch.dtype, every: int) -> None:
    """Every third case has each option once, with one form of scores."""
    pytest.importorskip("triton")
    from meshwright.kernels.likeliest_triton import keep

    scores, *options = (column[::every] for column in cases())
    scores = scores.to(dtype)
    expected = keep_likeliest(scores.float(), *options)
    assert torch.equal(keep(scores, *options, block=128), expected)
