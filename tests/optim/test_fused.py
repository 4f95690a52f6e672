"""One update equals torch's clipping and AdamW; narrow gradients give the same update as the same numbers in fp32."""

from __future__ import annotations

import pytest
import torch

from meshwright.optim.clip import clip_factor, gradient_norm
from meshwright.optim.fused import Coefficients, UpdateInputs, count_updates, new_count, update

SHAPES = [(33, 7), (5,), (0, 4), (64, 64)]
BETAS, EPSILON, RATE, DECAY = (0.9, 0.95), 1e-8, 1e-2, 0.1
STEPS = 4


def random_tensors(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def trained(
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    limit: float | None,
    wide: bool = False,
    skipped: int = -1,
    error: float = 1.0,
) -> list[torch.Tensor]:
    """Weights after STEPS steps; with `wide` gradients are converted to `dtype` first. Step `skipped` has an infinite norm."""
    weights = random_tensors(0, dtype)
    moments = [[torch.zeros_like(weight) for weight in weights] for _ in range(2)]
    counts = [new_count(torch.device("cpu")) for _ in weights]
    for step in range(STEPS):
        gradients = [gradient.to(dtype) if wide else gradient for gradient in random_tensors(step + 1, gradient_dtype)]
        norm = gradient_norm(gradients, None, torch.device("cpu")) * (torch.inf if step == skipped else 1)
        inputs = UpdateInputs(RATE, clip_factor(norm, limit) * error, (~norm.isfinite()).float())
        with count_updates(counts, inputs.skip):
            update(
                weights,
                gradients,
                *moments,
                counts,
                coefficients=Coefficients(BETAS, EPSILON),
                weight_decay=DECAY,
                inputs=inputs,
            )
    return weights


def truth(dtype: torch.dtype, limit: float | None, skipped: int = -1) -> list[torch.Tensor]:
    weights = [torch.nn.Parameter(weight) for weight in random_tensors(0, dtype)]
    optimizer = torch.optim.AdamW(weights, lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY)
    for step in range(STEPS):
        for weight, gradient in zip(weights, random_tensors(step + 1, dtype), strict=True):
            weight.grad = gradient
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(weights, limit)
        if step != skipped:
            optimizer.step()
    return [weight.detach() for weight in weights]


def error(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True) if a.numel())


@pytest.mark.parametrize("limit", [None, 1e-3, 1e3])
@pytest.mark.parametrize("skipped", [-1, 0, 2])
def test_equals_clipping_and_adamw(limit: float | None, skipped: int) -> None:
    ours = trained(torch.float64, torch.float64, limit, skipped=skipped)
    assert error(ours, truth(torch.float64, limit, skipped)) < 1e-12


def test_a_wrong_factor_changes_the_weights() -> None:
    """AdamW depends on the scale of gradients only where `epsilon` matters, as with so low a limit."""
    wrong = trained(torch.float64, torch.float64, 1e-6, error=0.5)
    assert error(wrong, truth(torch.float64, 1e-6)) > 1e-6


@pytest.mark.parametrize("limit", [None, 1e-3])
def test_narrow_gradients_give_the_same_update_as_wide_gradients(limit: float | None) -> None:
    narrow, wide = (trained(torch.float32, torch.bfloat16, limit, wide) for wide in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(narrow, wide, strict=True))


def test_the_norm_covers_gradients_of_all_dtypes() -> None:
    parts = [*random_tensors(1, torch.bfloat16), *random_tensors(2, torch.float32), *random_tensors(3, torch.float64)]
    whole = torch.cat([part.double().flatten() for part in parts]).norm()
    assert abs(gradient_norm(parts, None, torch.device("cpu")) / whole - 1) < 1e-6
    assert gradient_norm([], None, torch.device("cpu")) == 0


def test_a_norm_that_is_not_finite_changes_no_gradient() -> None:
    assert clip_factor(torch.tensor(torch.inf), 1.0) == 1 and clip_factor(torch.tensor(torch.nan), 1.0) == 1
    assert clip_factor(torch.tensor(4.0), None) == 1
