"""What a visit keeps goes to the host and comes back, bit for bit and no more than is its own."""

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
    *tensors: torch.Tensor, others: frozenset[int] = frozenset(), least: int = 1
) -> tuple[SavedActivations, list[Any]]:
    activations = SavedActivations(HostMemory(CPU, least), others)
    return activations, [activations._pack(tensor) for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_views_of_one_storage_come_back_as_views_of_one(dtype: torch.dtype) -> None:
    whole = torch.arange(24, dtype=torch.float32).view(4, 6).to(dtype)
    turned, part = whole.t(), whole[1:3, 2:]
    before = [tensor.clone() for tensor in (turned, part)]
    activations, saved = activations_saved(turned, part)
    assert activations.device_bytes == whole.untyped_storage().nbytes(), "one copy of one storage"
    activations.start_offload()
    whole.zero_()  # the device's memory is somebody else's from here on
    activations.free_device_memory()
    assert activations.device_bytes == 0
    activations.start_fetch()
    back = [activations._unpack(one) for one in saved]
    assert all(torch.equal(found.float(), truth.float()) for found, truth in zip(back, before, strict=True))
    assert [found.stride() for found in back] == [turned.stride(), part.stride()]
    assert back[0].untyped_storage().data_ptr() == back[1].untyped_storage().data_ptr()
    assert activations.device_bytes == 0, "what a backward has asked for is its own"


def test_a_node_may_ask_twice() -> None:
    x = torch.randn(5)
    activations, (saved,) = activations_saved(x)
    activations.start_offload()
    activations.free_device_memory()
    activations.start_fetch()
    assert all(torch.equal(activations._unpack(saved), x) for _ in range(2))


def test_weights_small_things_and_numbers_stay() -> None:
    weight, small, numbers, own = torch.randn(64), torch.randn(2), torch.arange(64), torch.randn(64)
    activations, saved = activations_saved(
        weight.view(8, 8), small, numbers, own, others=storage_addresses([weight]), least=64
    )
    assert [one is tensor for one, tensor in zip(saved[1:3], (small, numbers), strict=True)] == [True, True]
    assert isinstance(saved[0], torch.Tensor) and not isinstance(saved[3], torch.Tensor)
    assert activations.device_bytes == own.untyped_storage().nbytes()


def test_an_input_is_not_held_by_the_graph_it_is_handed_to() -> None:
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
    """Of four blocks run forward and back in turn, their visits moved by hand."""
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(6, 6, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(4)]
    order = visits(0, 1, 2, 3, 3, 2, 1, 0)
    for step in range(steps):
        keeps = {visit: 1.0 for row in order for visit in row}
        offload = ActivationOffload(memory, order, keeps, keeps if memory else (), lambda name, lane: None)
        x, kept = torch.full((5, 6), 0.1 * (step + 1), dtype=torch.float64), []
        for number, weight in enumerate(weights):
            offload.begin_compute()
            visit = (0, number, 0)
            leaf, x = leaf_without_memory(x)
            activations = offload.saved_activations(visit, storage_addresses([weight]))
            if activations is None:
                y = block(x, weight)
            else:
                with activations.collecting():
                    y = block(x, weight)
            kept.append((visit, leaf, torch.autograd.graph.get_gradient_edge(y)))
            offload.end_forward(visit)
            x = y.detach()
        gradient = torch.ones_like(x)
        for visit, leaf, edge in reversed(kept):
            offload.begin_compute()
            with offload.backward(visit):
                torch.autograd.backward(edge, gradient)
            assert leaf.grad is not None
            gradient = leaf.grad
    return [weight.grad for weight in weights if weight.grad is not None]


def test_gradients_are_the_same_bit_for_bit_and_buffers_are_used_again() -> None:
    memory = HostMemory(CPU)
    once = gradients(1, memory), memory.host_bytes
    assert once[1] > 0
    again = gradients(3, memory)
    assert memory.host_bytes == once[1], "later steps need no more"
    for found, truth in zip((*once[0], *again), (*gradients(1, None), *gradients(3, None)), strict=True):
        assert torch.equal(found, truth)
