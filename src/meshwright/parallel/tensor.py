"""Tensor and sequence parallelism: replaces the modules of a decoder; parameter names stay the same.

`spec.layout.tensor_splits` tells how each weight is divided. A module whose weight is divided by rows all-gathers the tokens before its
matmul; a module whose weight is divided by columns reduce-scatters after it. So each rank has a part of every sequence between modules,
and all tokens inside attention and the feed-forward network (Shoeybi et al. 2019, Korthikanti et al. 2022). The two branches of a
parallel block share one all-gather and one reduce-scatter (Jiang et al. 2024, MegaScale §3.1).

In latent attention each rank computes the latents of its own tokens. The projections to heads all-gather the latents, which are narrower
than the residual stream. The shared part of the keys has an all-gather of its own.

Some parameters are replicated on several ranks: norms, projections to latents, projections of prediction modules, biases after a
reduce-scatter, learned positions, and key/value heads if there are fewer heads than ranks. Each rank computes the gradients of its copy
from its own tokens or heads, and `TensorCopySums` adds the gradients of all copies once per step. A norm over all heads together is
divided with the heads (`norms.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.kernels.attention import AttentionMask
from meshwright.kernels.linear import Linear
from meshwright.kernels.rope import RotaryTables
from meshwright.models.attention import Attention
from meshwright.models.block import Block
from meshwright.models.decoder import Decoder, ScoreHead
from meshwright.models.latent_attention import LatentAttention
from meshwright.models.mlp import GatedMLP
from meshwright.parallel.blocks import numbered_blocks
from meshwright.parallel.linear_exchanges import (
    GatheredLinear,
    ScatteredLinear,
    gather_and_multiply,
    gather_tokens,
    multiply_and_scatter,
)
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.norms import norm_divided_heads
from meshwright.parallel.peers import Peers, close_peers, open_peers
from meshwright.parallel.vocabulary import (
    DividedScoreHead,
    PositionEmbedding,
    VocabularyEmbedding,
    VocabularyHead,
)
from meshwright.spec.errors import BadInput
from meshwright.spec.layout import Box, Division, TensorSplit, check_tensor, even_rows, local_boxes, tensor_splits
from meshwright.spec.model import parameters
from meshwright.spec.plan import Transport

LAYER_CLASSES = {"rows": GatheredLinear, "columns": ScatteredLinear}


def divide_over_tensor_ranks(model: Decoder, mesh: Mesh, transport: Transport = "nccl") -> None:
    """Make each module compute this tensor rank's part. Does nothing on a single tensor rank.

    The model is on the meta device. `transport` tells whether NCCL kernels or copy engines transfer tokens for the blocks' matmuls. Raises
    BadInput if the ranks cannot divide the model, or if copy engines are planned and devices cannot map each other's memory.
    """
    group = mesh.group("tensor")
    part = mesh.part("tensor")
    if group is None:
        return
    if expected := check_tensor(model.spec, part.count):
        raise BadInput(f"plan.tensor: expected {expected}, got {part.count}")
    spec = model.spec
    name = group.group_name
    close_peers(name)
    peers = open_peers(mesh, "tensor", "plan.tensor_transport = copy_engine") if transport == "copy_engine" else None
    for _, block in numbered_blocks(model):
        _divide_block(block, tensor_splits(spec), name, part.count, peers)
    _divide_adapters(model, Division(tensor=part))
    vocabulary = [even_rows(spec.vocab_size, part.count, index) for index in range(part.count)]
    if model.embed is not None:
        model.embed = VocabularyEmbedding(model.embed.weight, vocabulary[part.index].start, name, part.count)
    if model.positions is not None:
        model.positions = PositionEmbedding(model.positions.weight, part.index, part.count)
    if isinstance(model.head, ScoreHead):
        model.head = DividedScoreHead(model.head, part.index, part.count, name)
    elif model.head is not None:
        sizes = tuple(map(len, vocabulary))
        model.head = VocabularyHead(model.head, sizes, part.index, name)


def _divide_block(block: Block, splits: Mapping[str, TensorSplit], group: str, ranks: int, peers: Peers | None) -> None:
    for name, linear in list(block.named_modules()):
        if isinstance(linear, Linear) and name in splits:
            module, _, attribute = name.rpartition(".")
            layer = LAYER_CLASSES[splits[name]](linear, group, ranks, peers)
            setattr(block.get_submodule(module), attribute, layer)
    copies = max(1, ranks // block.attention.kv_heads)
    _divide_heads(block.attention, ranks)
    block.hooks.norm_all_heads = partial(norm_divided_heads, group=group, ranks=ranks, copies=copies)
    block.hooks.gather_tokens = partial(gather_tokens, group=group, ranks=ranks)
    block.hooks.sum_of_branches = _sum_of_branches


def _divide_adapters(model: Decoder, division: Division) -> None:
    """Set how many outputs of each part this rank has, in the adapters of fused layers (for example queries, keys and values)."""
    specs = {parameter.name: parameter for parameter in parameters(model.spec)}
    for name, linear in model.named_modules():
        if isinstance(linear, Linear) and linear.adapter is not None and len(linear.adapter.rows) > 1:
            boxes = local_boxes(specs[f"{name}.weight"], division)
            sizes = (box.sizes[0] for box in boxes)
            linear.adapter.rows = dict(zip(linear.adapter.rows, sizes, strict=True))


def _sum_of_branches(block: Block, normed: Tensor, rope: RotaryTables | None, mask: AttentionMask | None) -> Tensor:
    """`models.hooks.sum_of_branches` for this rank's tokens, with one all-gather and one reduce-scatter for both branches together."""
    attention = block.attention
    mlp = block.mlp
    assert isinstance(attention, Attention), "parallel blocks have no latent attention"
    first = mlp.gate_up if isinstance(mlp, GatedMLP) else mlp.up
    assert isinstance(attention.qkv, GatheredLinear) and isinstance(first, GatheredLinear)
    assert isinstance(attention.out, ScatteredLinear) and isinstance(mlp.down, ScatteredLinear)
    qkv, inner = gather_and_multiply([attention.qkv, first], normed)
    branches = [attention.attend_heads(qkv, rope, mask), mlp.activate(inner)]
    return multiply_and_scatter([attention.out, mlp.down], branches)


def _divide_heads(attention: Attention | LatentAttention, ranks: int) -> None:
    attention.heads //= ranks
    attention.kv_heads = max(1, attention.kv_heads // ranks)


class TensorCopySums:
    """Sums the gradients of parameters that are replicated on neighbouring tensor ranks, once per step.

    Parameters with the same number of copies share one all-reduce. Gradients are summed in their stored dtype, after the reduction over
    shards. All copies get the same bits. `boxes` has, for each parameter name, the rectangular regions that this rank has.
    """

    def __init__(self, model: Decoder, boxes: Mapping[str, Sequence[Box]], mesh: Mesh) -> None:
        ranks = mesh.axis_size("tensor")
        kv_heads = model.spec.kv_heads
        self._groups: dict[int, dist.ProcessGroup] = {}
        self._replicated: dict[int, list[tuple[nn.Parameter, range]]] = {}
        # Creating a group is collective over all ranks of the job, also those without such parameters.
        for copies in sorted({ranks, max(1, ranks // kv_heads)} - {1}):
            self._groups[copies] = mesh.consecutive_group("tensor", copies)
            self._replicated[copies] = [
                (parameter, rows_of(box))
                for name, parameter in model.named_parameters()
                for box in boxes[name]
                if box.copies == copies and parameter.requires_grad
            ]

    @torch.no_grad()
    def sum(self) -> None:
        """Sum the gradients. Collective over tensor ranks; call it when every gradient is complete."""
        for copies, group in self._groups.items():
            parts = [_local(parameter.grad)[rows.start : rows.stop] for parameter, rows in self._replicated[copies]]
            if not parts:
                continue
            flat = torch.cat([part.flatten() for part in parts])
            dist.all_reduce(flat, group=group)
            sums = flat.split([part.numel() for part in parts])
            torch._foreach_copy_(parts, [total.view_as(part) for total, part in zip(sums, parts, strict=True)])


def rows_of(box: Box) -> range:
    """Return the rows of the rank's local tensor that contain `box`, a rectangular region of the parameter."""
    return range(box.first_row, box.first_row + box.sizes[0])


def _local(gradient: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(gradient, DTensor), "a unit's gradients are shards"
    return gradient.to_local()
