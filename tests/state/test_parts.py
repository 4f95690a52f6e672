"""Pieces of a logical tensor are views of live memory."""

from __future__ import annotations

import torch

from meshwright.spec.layout import Box
from meshwright.state.parts import StateParts


def test_pieces_are_views_of_the_memory_that_holds_them() -> None:
    local = torch.arange(10.0).view(5, 2)
    boxes = (Box((4, 0), (2, 2), first_row=0), Box((10, 0), (3, 2), first_row=2))
    parts = StateParts("model.w", (20, 2), boxes, local)
    assert [(box.offsets, tensor.tolist()) for box, tensor in parts.pieces()] == [
        ((4, 0), [[0, 1], [2, 3]]),
        ((10, 0), [[4, 5], [6, 7], [8, 9]]),
    ]
    parts.piece((10, 0)).zero_()
    assert local.tolist() == [[0, 1], [2, 3], [0, 0], [0, 0], [0, 0]]
    assert (parts.dtype, parts.device.type, parts.memory) == (torch.float32, "cpu", "device")


def test_a_whole_tensor_is_one_piece_also_without_dimensions() -> None:
    for shape in ((), (3,), (2, 3), (0, 3)):
        tensor = torch.ones(shape, requires_grad=True)
        parts = StateParts.of_whole("w", tensor)
        ((box, elements),) = parts.pieces()
        assert (box.offsets, box.sizes, parts.shape) == ((0,) * len(shape), shape, shape)
        elements.zero_()
        assert not elements.requires_grad and not tensor.any()


def test_a_rank_may_hold_nothing() -> None:
    assert list(StateParts("w", (4, 2), (), torch.empty(0, 2)).pieces()) == []
