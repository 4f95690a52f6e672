"""On GPUs two hybrid ranks that divide samples, by rings or exchange of heads, train like one rank that does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.gpu.runs import LAYOUT_BOUND, LLAMA, RUNS_LIMIT, figures, needs, trained

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(RUNS_LIMIT)]

SAMPLES = LLAMA.replace("mix: stdlib", "mix: stdlib, packing: none").replace(
    "global_batch: 8", "global_batch_tokens: 4096"
)
MOE = SAMPLES.replace("family: llama", "family: mixtral, experts: 4, experts_per_token: 2, expert_hidden: 256").replace(
    "warmup_steps", "balance_loss: 0.05, warmup_steps"
)
"""The loss of a rank with other placements of samples has the balance loss's gradients."""
HYBRID = ["plan.hybrid=2", "plan.capacity=256"]


@pytest.mark.parametrize("text", [SAMPLES, MOE], ids=["dense", "mixture"])
def test_divided_samples_agree_with_whole_ones(text: str, tmp_path: Path) -> None:
    needs(2)
    whole = figures(trained(tmp_path, text, "whole", 1))
    for attention in ("ring", "ulysses"):
        divided = figures(trained(tmp_path, text, attention, 2, [*HYBRID, f"plan.hybrid_attention={attention}"]))
        assert divided == pytest.approx(whole, rel=LAYOUT_BOUND), attention


def test_recompute_repeats_the_exchange_of_heads(tmp_path: Path) -> None:
    needs(2)
    ulysses = [*HYBRID, "plan.hybrid_attention=ulysses"]
    saved, repeated = (
        figures(trained(tmp_path, SAMPLES, mode, 2, [*ulysses, f"plan.recompute={mode}"])) for mode in ("none", "full")
    )
    assert repeated == pytest.approx(saved, rel=LAYOUT_BOUND)


def test_kernel_combines_parts_of_any_lengths_and_strides() -> None:
    """Samples that ranks divide have another length each time. The reference is the plain form, which CPU ranks use."""
    from meshwright.kernels import partial, partial_triton

    for dtype, heads, head_dim, length, queries in (
        (torch.bfloat16, 32, 128, 512, slice(82, 512)),
        (torch.bfloat16, 5, 80, 300, slice(0, 17)),
        (torch.float32, 64, 256, 33, slice(32, 33)),
        (torch.float64, 4, 8, 77, slice(0, 77)),
        (torch.float32, 4, 8, 77, slice(5, 5)),
    ):
        wide = torch.promote_types(dtype, torch.float32)
        out = torch.randn(2, length, heads, head_dim, device="cuda", dtype=wide)
        sums = torch.randn(2, heads, length, device="cuda", dtype=wide)
        count = queries.stop - queries.start
        other = torch.randn(2, heads, count, head_dim, device="cuda", dtype=dtype).transpose(1, 2)
        other_sums = torch.randn(2, heads, count + 3, device="cuda", dtype=wide)[..., 3:]
        expected, expected_sums = out.clone(), sums.clone()
        partial._combine(expected[:, queries], expected_sums[..., queries], other, other_sums)
        partial_triton.combine(out[:, queries], sums[..., queries], other, other_sums)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(sums, expected_sums)
