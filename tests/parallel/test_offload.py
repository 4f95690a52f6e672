"""Saved tensors of a visit are offloaded to the host and restored bit for bit; tensors of others are not."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.parallel.offload import (
    ActivationOffload,
    HostMemory,
    SavedActivations,
    leaf_without_memory,
    storage_addresses,
)
from meshwright.parallel.timetable import Visit

CPU = torch.device("cpu")


def visits(*numbers: int) -> list[tuple[Visit, ...]]:
    return [((0, number, 0),) for number in numbers]


def activations_saved(
    *tensors: torch.Tensor, excluded: frozenset[int] = frozenset(), min_bytes: int = 1
) -> tuple[SavedActivations, list[Any]]:
    activations = SavedActivations(HostMemory(CPU, min_bytes), excluded)
    return activations, [activations._pack(tensor) for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_views_of_one_storage_are_restored_as_views_of_one_storage(dtype: torch.dtype) -> None:
    base = torch.arange(24, dtype=torch.float32).view(4, 6).to(dtype)
    transposed, view = base.t(), base[1:3, 2:]
    originals = [tensor.clone() for tensor in (transposed, view)]
    activations, saved = activations_saved(transposed, view)
    assert activations.device_bytes == base.untyped_storage().nbytes(), "one copy of one storage"
    activations.start_offload()
    base.zero_()  # another tensor may overwrite the device memory
    activations.free_device_memory()
    assert activations.device_bytes == 0
    activations.start_fetch()
    restored = [activations._unpack(packed) for packed in saved]
    assert all(
        torch.equal(tensor.float(), expected.float()) for tensor, expected in zip(restored, originals, strict=True)
    )
    assert [tensor.stride() for tensor in restored] == [transposed.stride(), view.stride()]
    assert restored[0].untyped_storage().data_ptr() == restored[1].untyped_storage().data_ptr()
    assert activations.device_bytes == 0, "memory that the backward has read is no longer counted"


def test_an_autograd_node_may_read_a_saved_tensor_twice() -> None:
    x = torch.randn(5)
    activations, (saved,) = activations_saved(x)
    activations.start_offload()
    activations.free_device_memory()
    activations.start_fetch()
    assert all(torch.equal(activations._unpack(saved), x) for _ in range(2))


def test_weights_small_tensors_and_integers_are_not_offloaded() -> None:
    weight, small, integers, activation = torch.randn(64), torch.randn(2), torch.arange(64), torch.randn(64)
    activations, saved = activations_saved(
        weight.view(8, 8), small, integers, activation, excluded=storage_addresses([weight]), min_bytes=64
    )
    assert [packed is tensor for packed, tensor in zip(saved[1:3], (small, integers), strict=True)] == [True, True]
    assert isinstance(saved[0], torch.Tensor) and not isinstance(saved[3], torch.Tensor)
    assert activations.device_bytes == activation.untyped_storage().nbytes()


def test_the_autograd_graph_does_not_keep_the_units_input_alive() -> None:
    memory = np.ones((3, 4), np.float32)
    alive = weakref.ref(memory)
    leaf, inside = leaf_without_memory(torch.from_numpy(memory))
    y = inside * 2
    del memory, inside
    assert alive() is None
    y.backward(torch.ones(3, 4))
    assert leaf.grad is not None and torch.equal(leaf.grad, torch.full((3, 4), 2.0))
    assert leaf.untyped_storage().nbytes() == 4


def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x @ weight).tanh().exp()


def gradients(steps: int, memory: HostMemory | None) -> list[torch.Tensor]:
    """Weight gradients of four blocks run forward and backward, with offload if `memory` is given."""
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(6, 6, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(4)]
    order = visits(0, 1, 2, 3, 3, 2, 1, 0)
    for step in range(steps):
        sizes = {visit: 1.0 for visits_here in order for visit in visits_here}
        offload = ActivationOffload(memory, order, sizes, sizes if memory else (), lambda name, lane: None)
        x, recorded_visits = torch.full((5, 6), 0.1 * (step + 1), dtype=torch.float64), []
        for number, weight in enumerate(weights):
            offload.begin_compute()
            visit = (0, number, 0)
            leaf, x = leaf_without_memory(x)
            activations = offload.saved_activations(visit, storage_addresses([weight]))
            if activations is None:
                y = block(x, weight)
            else:
                with activations.collect():
                    y = block(x, weight)
            recorded_visits.append((visit, leaf, torch.autograd.graph.get_gradient_edge(y)))
            offload.end_forward(visit)
            x = y.detach()
        gradient = torch.ones_like(x)
        for visit, leaf, output in reversed(recorded_visits):
            offload.begin_compute()
            with offload.backward(visit):
                torch.autograd.backward(output, gradient)
            assert leaf.grad is not None
            gradient = leaf.grad
    return [weight.grad for weight in weights if weight.grad is not None]


def test_gradients_are_the_same_bit_for_bit_and_buffers_are_used_again() -> None:
    memory = HostMemory(CPU)
    first_result = gradients(1, memory), memory.host_bytes
    assert first_result[1] > 0
    third_result = gradients(3, memory)
    assert memory.host_bytes == first_result[1], "later steps need no more"
    for gradient, expected in zip(
        (*first_result[0], *third_result), (*gradients(1, None), *gradients(3, None)), strict=True
    ):
        assert torch.equal(gradient, expected)
