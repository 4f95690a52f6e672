"""Which part of each parameter a rank of the inference engine has. Without torch.

The parts are as in training (`spec.layout`), except for routed experts. Each tensor rank has a part of the width of
every expert. So all ranks have the same work, whatever the routers choose, and no tokens are sent. Expert ranks have
whole experts, and all of the other layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from meshwright.spec.layout import (
    WHOLE,
    AxisPart,
    Division,
    even_rows,
    local_boxes,
    tensor_split_error,
    tensor_splits,
)
from meshwright.spec.model import ModelSpec, ParameterSpec


class ParameterBox(NamedTuple):
    """A box of a parameter."""

    offsets: tuple[int, ...]
    """First element of the box in each dimension."""
    sizes: tuple[int, ...]
    """Size of the box in each dimension."""


def rank_pieces(
    spec: ModelSpec, parameter: ParameterSpec, part: AxisPart, experts: AxisPart = WHOLE
) -> tuple[ParameterBox, ...]:
    """Return the boxes of a parameter that tensor rank `part`, or expert rank `experts`, has.

    The rank joins its boxes along `piece_dimension`. `split_error` and `experts_error` say which models can be divided. A
    bias that is added after an all-reduce over tensor ranks is only on the first rank.
    """
    if parameter.expert and experts.count > 1:
        owned = even_rows(spec.experts, experts.count, experts.index)
        return (ParameterBox((owned.start, *(0 for _ in parameter.shape[1:])), (len(owned), *parameter.shape[1:])),)
    if parameter.expert:
        return tuple(_expert_pieces(spec, parameter, part))
    if part.index and parameter.name.endswith(".bias") and tensor_splits(spec).get(parameter.module) == "columns":
        return ()
    return tuple(ParameterBox(box.offsets, box.sizes) for box in local_boxes(parameter, Division(tensor=part)))


def piece_dimension(parameter: ParameterSpec) -> int:
    """Return the dimension along which the boxes of a parameter are joined in a rank's part."""
    return 1 if parameter.expert else 0


def rank_shape(spec: ModelSpec, parameter: ParameterSpec, part: AxisPart) -> tuple[int, ...] | None:
    """Return the shape of a rank's part of a parameter; None if the rank has no part of it."""
    sizes = [piece.sizes for piece in rank_pieces(spec, parameter, part)]
    if not sizes:
        return None
    dimension = piece_dimension(parameter)
    total = sum(size[dimension] for size in sizes)
    return (*sizes[0][:dimension], total, *sizes[0][dimension + 1 :])


def rank_dimensions(spec: ModelSpec, ranks: int) -> ModelSpec:
    """Return a model with the dimensions of the blocks of one of `ranks` tensor ranks.

    The number of experts, the vocabulary and the hidden width do not change.
    """
    widths = {name: kind.ffn_hidden and kind.ffn_hidden // ranks for name, kind in spec.blocks.items()}
    return replace(
        spec,
        blocks={name: replace(kind, ffn_hidden=widths[name]) for name, kind in spec.blocks.items()},
        heads=spec.heads // ranks,
        kv_heads=max(1, spec.kv_heads // ranks),
        ffn_hidden=spec.ffn_hidden // ranks,
        expert_hidden=spec.expert_hidden // ranks,
        shared_expert_hidden=spec.shared_expert_hidden // ranks,
    )


def split_error(spec: ModelSpec, ranks: int) -> str | None:
    """Return None if `ranks` tensor ranks can divide the model for inference.

    Otherwise return what an error message says is expected instead, such as "a divisor of model.expert_hidden = 768".
    """
    if error := tensor_split_error(ranks, spec.heads, spec.kv_heads, spec.dense_widths, spec.vocab_size, None):
        return error
    for name in ("expert_hidden", "shared_expert_hidden"):
        if (width := getattr(spec, name)) % ranks:
            return f"a divisor of model.{name} = {width}"
    return None


def experts_error(spec: ModelSpec, ranks: int) -> str | None:
    """Return None if `ranks` ranks can divide the model's experts.

    Otherwise return what an error message says is expected instead, such as "a divisor of model.experts = 128".
    """
    if not spec.experts:
        return "1, as the model has no experts"
    return f"a divisor of model.experts = {spec.experts}" if spec.experts % ranks else None


def _expert_pieces(spec: ModelSpec, parameter: ParameterSpec, part: AxisPart) -> Iterator[ParameterBox]:
    """Yield the boxes of a tensor rank in a parameter of routed experts.

    The ranks divide the width of every expert. In these shapes, `matrices` is 2 for a gate and an up matrix, else 1:

        gate_up or up        (experts, matrices · width, hidden)   dimension 1 is divided, in each matrix
        its bias             (experts, matrices · width)           dimension 1 is divided, in each matrix
        down                 (experts, hidden, width)              dimension 2 is divided
        its bias             (experts, hidden)                     only the first rank has it

    The bias of `down` is added after an all-reduce over the ranks.
    """
    width = spec.expert_hidden
    rank_width = even_rows(width, part.count, part.index)
    if parameter.name.endswith(".down"):
        experts, hidden, _ = parameter.shape
        yield ParameterBox((0, 0, rank_width.start), (experts, hidden, len(rank_width)))
        return
    if parameter.name.endswith(".down_bias"):
        if part.index == 0:
            yield ParameterBox((0, 0), parameter.shape)
        return
    experts, outputs, *inputs = parameter.shape  # A bias has no inputs.
    for matrix in range(outputs // width):
        first_output = matrix * width + rank_width.start
        yield ParameterBox((0, first_output, *(0 for _ in inputs)), (experts, len(rank_width), *inputs))
