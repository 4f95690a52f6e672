"""Draws have the distribution of the softmax, and depend on seed and position alone."""

from __future__ import annotations

import math

import pytest
import torch

from meshwright.kernels.token_draw import draw_from_scores, draw_tokens, gumbel_noise, gumbel_of_hash

LOGITS = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0])


def drawn(count: int, temperature: float = 1.0, top_k: int = 0, seed: int = 3) -> torch.Tensor:
    """Frequencies of tokens at positions 0 to `count` - 1."""
    fill = (torch.full((count,), value) for value in (temperature, top_k, seed))
    tokens = draw_tokens(LOGITS.expand(count, -1), *fill, torch.arange(count))
    return torch.bincount(tokens, minlength=len(LOGITS)) / count


def test_frequencies_are_the_softmax() -> None:
    for temperature in (0.5, 1.0, 2.0):
        probabilities = torch.softmax(LOGITS / temperature, 0)
        error = (drawn(40_000, temperature) - probabilities) / (probabilities * (1 - probabilities) / 40_000).sqrt()
        assert error.abs().max() < 4  # standard deviations


def test_top_k_draws_from_the_likeliest() -> None:
    frequencies = drawn(20_000, top_k=2)
    assert frequencies.nonzero().flatten().tolist() == [1, 3]
    assert abs(frequencies[3] / frequencies[1] - torch.e) < 0.15


def test_temperature_zero_takes_the_likeliest() -> None:
    assert drawn(100, temperature=0.0)[3] == 1


def test_noise_is_independent_over_seeds_positions_and_tokens() -> None:
    seeds, positions = torch.meshgrid(torch.arange(40), torch.arange(40), indexing="ij")
    noise = gumbel_noise(seeds.flatten(), positions.flatten(), 50).view(40, 40, 50)
    assert abs(noise.mean() - 0.5772) < 0.02 and abs(noise.var() - torch.pi**2 / 6) < 0.05
    for axis in range(3):
        neighbours = torch.corrcoef(torch.stack((noise.narrow(axis, 0, 39), noise.narrow(axis, 1, 39))).flatten(1))
        assert abs(neighbours[0, 1]) < 0.02
    assert noise.unique().numel() > 0.99 * noise.numel()


def test_a_row_does_not_depend_on_the_others() -> None:
    many = gumbel_noise(torch.tensor([5, 2**40 + 5, 9]), torch.tensor([1, 1, 7]), 30)
    assert torch.equal(many[2:], gumbel_noise(torch.tensor([9]), torch.tensor([7]), 30))
    assert not torch.equal(many[0], many[1])


def test_no_hash_gives_infinite_noise_and_the_largest_noise_is_exact() -> None:
    hashes = [0, 1, 77, 2**20, 2**31, 2**32 - 2**16]
    expected = [-math.log(-math.log1p(-(x + 0.5) / 2**32)) for x in hashes]
    assert gumbel_of_hash(torch.tensor(hashes)).tolist() == pytest.approx(expected, abs=1e-4)
    assert (gumbel_of_hash(torch.arange(2**32 - 400, 2**32)) < -2.7).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernel itself")
def test_the_kernel_draws_the_tokens_of_the_plain_operations() -> None:
    pytest.importorskip("triton")
    from meshwright.kernels import token_draw_triton

    torch.manual_seed(0)
    scores = 3 * torch.randn(6, 2100)
    scores[2, 5:] = -torch.inf
    scores[3, [40, 2099]] = 50.0  # the first of equal scores
    temperatures, positions = torch.tensor([1.0, 0.3, 2.0, 0.0, 5.0, 1.0]), torch.tensor([0, 7, 7, 1, 2**31, 3])
    seeds = torch.tensor([3, 2**62 + 1, 5, 6, -9, 3])
    for each in (scores, scores[2:4].bfloat16()):
        options = (
            (temperatures, seeds, positions) if len(each) == 6 else (temperatures[2:4], seeds[2:4], positions[2:4])
        )
        reference = draw_from_scores(each, *options)
        assert token_draw_triton.draw(each, *options, blocks=1).equal(reference)
        assert reference[-3 if len(each) == 6 else 1] == 40
