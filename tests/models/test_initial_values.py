"""Initial values: their distribution, and that nothing but seed, name and index decides them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.models.initial_values import initial_values
from meshwright.spec.model import ParameterSpec, parameters
from tests.models.tiny import LLAMA, built

PARAMETER = ParameterSpec("layers.0.mlp.down.weight", (1000, 1024), "normal", 0.02)
COUNT = PARAMETER.count


def whole(parameter=PARAMETER, seed=0):
    return initial_values(seed, parameter, 0, parameter.count, "cpu")


def in_python(seed, name, index, std):
    """The same number computed with Python integers only."""
    from hashlib import blake2b

    digest, word, total = blake2b(f"{seed}:{name}".encode(), digest_size=16).digest(), 2**64 - 1, 0
    for key in (digest[:8], digest[8:]):
        z = (int.from_bytes(key, "little") + index * 0x9E3779B97F4A7C15) & word
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & word
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & word
        z ^= z >> 31
        total += sum(z >> shift & 0xFFFF for shift in (0, 16, 32, 48))
    return (total - 4 * 65535) * std / math.sqrt(8 * (65536**2 - 1) / 12)


def test_values_equal_a_computation_with_python_integers():
    parameter = replace(PARAMETER, shape=(1 << 40,))
    for start in (0, 12345, (1 << 39) + 7):
        got = initial_values(3, parameter, start, 5, "cpu").tolist()
        expected = [in_python(3, parameter.name, start + i, parameter.std) for i in range(5)]
        assert got == pytest.approx(expected, rel=1e-6)


def test_moments():
    values = whole().double() / PARAMETER.std
    noise = 1 / math.sqrt(COUNT)
    assert abs(values.mean()) < 4 * noise
    assert abs(values.var() - 1) < 4 * noise * math.sqrt(2)
    assert abs(values.pow(3).mean()) < 4 * noise * math.sqrt(15)
    assert abs(values.pow(4).mean() - (3 - 1.2 / 8)) < 4 * noise * math.sqrt(96)
    assert 4.0 < values.abs().max() < 4.9


def test_neighbours_and_other_names_and_seeds_are_independent():
    values = whole().double() / PARAMETER.std
    others = [
        values.roll(1),
        values.roll(1024),
        whole(replace(PARAMETER, name="layers.1.mlp.down.weight")).double() / PARAMETER.std,
        whole(seed=1).double() / PARAMETER.std,
    ]
    for other in others:
        assert abs((values * other).mean()) < 4 / math.sqrt(COUNT)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, COUNT - 1), st.integers(1, 5000))
def test_a_slice_equals_the_slice_of_the_whole(start, count):
    count = min(count, COUNT - start)
    assert torch.equal(initial_values(0, PARAMETER, start, count, "cpu"), WHOLE[start : start + count])


WHOLE = whole()


def test_standard_deviation_only_scales():
    doubled = whole(replace(PARAMETER, std=0.04))
    assert torch.equal(doubled, 2 * WHOLE)
    assert doubled.dtype == torch.float32


def test_ones_and_zeros():
    assert torch.equal(initial_values(0, replace(PARAMETER, fill="ones"), 3, 4, "cpu"), torch.ones(4))
    assert torch.equal(initial_values(0, replace(PARAMETER, fill="zeros"), 3, 4, "cpu"), torch.zeros(4))


def test_a_model_has_the_initial_values_of_its_parameters():
    model = built(LLAMA, dtype=torch.float32, vary=False)
    for parameter in parameters(LLAMA):
        assert torch.equal(
            model.get_parameter(parameter.name).flatten(), initial_values(1, parameter, 0, parameter.count, "cpu")
        )


@pytest.mark.gpu
def test_cuda_gives_the_same_bits():
    assert torch.equal(initial_values(0, PARAMETER, 0, COUNT, "cuda").cpu(), WHOLE)
