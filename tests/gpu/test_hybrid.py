"""On GPUs two hybrid ranks that divide samples, by rings or exchange of heads, train like one rank that does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.gpu.runs import LAYOUT_BOUND, LLAMA, RUNS_LIMIT, figures, needs, trained

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(RUNS_LIMIT)]

SAMPLES = LLAMA.replace("mix: stdlib", "mix: stdlib, packing: none").replace(
    "global_batch: 8", "global_batch_tokens: 4096"
)
MIXTURE = SAMPLES.replace(
    "family: llama", "family: mixtral, experts: 4, experts_per_token: 2, expert_hidden: 256"
).replace("warmup_steps", "balance_loss: 0.05, warmup_steps")
"""The loss of a rank with other placements of samples has the balance loss's gradients."""
HYBRID = ["plan.hybrid=2", "plan.capacity=256"]


@pytest.mark.parametrize("text", [SAMPLES, MIXTURE], ids=["dense", "mixture"])
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
