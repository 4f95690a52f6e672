"""The router's kernels against torch's operators in fp64, and the order of copies against a stable sort."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from meshwright.kernels import router
from meshwright.models.hooks import BlockHooks
from meshwright.models.moe import MoELayer
from meshwright.spec.model import ModelSpec, moe_of
from tests.models.tiny import DEEPSEEK_V3, MIXTRAL

triton = pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPECS = {
    "weights sum to 1": replace(MIXTRAL, experts=5, experts_per_token=3),
    "weights are probabilities": replace(MIXTRAL, experts=16, experts_per_token=1, normalised_routing=False),
    "a softmax with a bias": replace(MIXTRAL, experts=24, experts_per_token=4, router="biased_softmax"),
    "sigmoid": replace(DEEPSEEK_V3, experts=24, experts_per_token=4, expert_groups=1, groups_per_token=1),
}


def results(moe: MoELayer, logits: Tensor, seed: int) -> list[Tensor]:
    """A router's choice, and the gradient of logits by random gradients of its weights and sums of probabilities."""
    logits = logits.clone().requires_grad_()
    choice = moe.choose_experts(logits)
    draw = torch.Generator().manual_seed(seed)
    outputs = choice.weights, choice.probability_sums
    slopes = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x) for x in outputs]
    return [*choice, *torch.autograd.grad(outputs, logits, slopes)]


def of_logits(spec: ModelSpec, batch: int, seq: int) -> Tensor:
    """Logits in bf16 without ties within a token, so that every method chooses the same experts."""
    draw = torch.Generator().manual_seed(3)
    ranked = torch.rand(batch, seq, spec.experts, generator=draw).argsort(-1)
    return ((ranked - spec.experts / 2) / 8).bfloat16()


@pytest.mark.parametrize("case", SPECS)
def test_choices_and_gradients_equal_those_of_torch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By several tiles, of which the last of each sequence is not full."""
    spec = SPECS[case]
    moe = MoELayer(moe_of(spec), spec.hidden, reference=False, hooks=BlockHooks())
    if moe.choice_bias is not None:
        moe.choice_bias.data = torch.linspace(-0.3, 0.3, spec.experts)
    moe.to(DEVICE)
    logits = of_logits(spec, 2, 20).to(DEVICE)
    expected = results(moe, logits.double(), 7)
    monkeypatch.setattr("meshwright.models.moe.has_kernel", lambda x, experts: x.dtype != torch.float64)
    monkeypatch.setattr("meshwright.kernels.router_triton.TILE", 16 * triton.next_power_of_2(spec.experts))
    actual = results(moe, logits, 7)
    weights, chosen, sums, loads, gradient = actual
    assert weights.dtype == sums.dtype == torch.float32 and gradient.dtype == torch.bfloat16
    assert torch.equal(chosen, expected[1]) and torch.equal(loads, expected[3])
    for ours, theirs in ((weights, expected[0]), (sums, expected[2])):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), expected[4], rtol=2**-7, atol=1e-5)


def test_experts_without_probability_that_a_bias_chooses_have_finite_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their scores are divided by the least sum, which does not depend on the logits."""
    spec = replace(SPECS["a softmax with a bias"], experts=5, experts_per_token=2)
    moe = MoELayer(moe_of(spec), spec.hidden, reference=False, hooks=BlockHooks())
    assert moe.choice_bias is not None
    moe.choice_bias.data = torch.tensor([0.0, 0.0, 0.0, 2.0, 3.0])
    moe.to(DEVICE)
    logits = torch.tensor([[[9.0, -20.0, 0.0, -22.0, -23.0], [200.0, 0.0, 0.0, 0.0, 0.0]]]).to(DEVICE)
    expected = results(moe, logits.double(), 1)
    monkeypatch.setattr("meshwright.models.moe.has_kernel", lambda x, experts: x.dtype != torch.float64)
    for actual, exact in zip(results(moe, logits, 1), expected, strict=True):
        torch.testing.assert_close(actual.double(), exact.double(), rtol=1e-5, atol=1e-12)
    assert expected[0][0, 0, 1].item() == pytest.approx(math.exp(-22 - 9 - math.log1p(math.exp(-9))) / 1e-12, rel=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_of_equal_scores_the_first_expert_is_chosen_and_nan_never_leaves_the_experts() -> None:
    logits = torch.tensor([[[1.0, 2.0, 2.0, 2.0, 0.0], [torch.nan] * 5, [torch.nan, 1.0, torch.nan, 3.0, 2.0]]])
    chosen = router.choose(logits.to(DEVICE), None, sigmoid=False, copies=3, normalised=True, scale=1.0).chosen
    assert chosen.tolist() == [[[1, 2, 3], [0, 1, 2], [3, 4, 1]]]


@pytest.mark.parametrize(("count", "copies", "experts"), [(0, 2, 4), (1, 1, 1), (41, 3, 5)])
def test_the_order_of_copies_is_that_of_a_stable_sort(
    count: int, copies: int, experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more blocks of tokens than the scan reads at a time."""
    from meshwright.kernels import router_triton

    monkeypatch.setattr(router_triton, "TILE", 64)
    monkeypatch.setattr(router_triton, "SCAN_BLOCK", 4)
    chosen = torch.rand(count, experts, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :copies].to(DEVICE)
    order, positions, offsets = router_triton.sort_by_expert(chosen, experts)
    assert torch.equal(order, chosen.flatten().argsort(stable=True))
    assert torch.equal(order[positions.flatten()], torch.arange(count * copies, device=DEVICE))
    assert torch.equal(offsets, chosen.flatten().bincount(minlength=experts).cumsum(0).int())
