"""A step with one decode on a CPU: the forward pass of a dense model in as few operators as possible.

For one token the matmuls of a small model take less time than the calls of modules and operators around them. So this step writes into
fixed buffers, whose views are made once. It also joins operators: a matmul adds the residual, and one matmul is a rotation. Keys and
values of the text are kept a second time outside of the paged cache, where those of a head are contiguous. With the modules a token of
llama-nano takes 2.3 times as long.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from meshwright.kernels.linear import Linear
from meshwright.models.attention import Attention
from meshwright.models.block import Block, tables_of
from meshwright.models.decoder import Decoder, Embedding, Head
from meshwright.models.hooks import unchanged
from meshwright.models.mlp import GatedMLP
from meshwright.models.norm import Norm
from meshwright.policies.batch_request import RequestPart
from meshwright.serve.batch_inputs import BatchInputs, PackedStep
from meshwright.serve.host_attention import signed_tables
from meshwright.serve.kv_cache import KVCache
from meshwright.spec.serving_limits import single_decode_obstacle


class _Layer(NamedTuple):
    """Weights of one layer. Matrices are transposed views, `(in, out)`."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    head_norms: tuple[Tensor, Tensor] | None
    """Weights of the norms of q and k."""


class _Text(NamedTuple):
    """A copy of keys and values of a request's tokens, from the first visible block on."""

    part: RequestPart
    """The decode for which the copy was made: another request may have the same blocks with other content."""
    blocks: list[int]
    """Cache blocks that were copied."""
    first: int
    """Position of the first token."""
    stored: Tensor
    """Keys and values, `(layers, 2, kv_heads, capacity, head_dim)`. Tokens that are decoded later are written after the copied ones."""


CAPACITY_STEP = 256
"""The number of tokens for which a copy has memory is a multiple of this number."""


class HostDecode:
    """Computes the logits of steps that are one decode, for the models that `supports` names."""

    def __init__(self, model: Decoder, cache: KVCache, context: int) -> None:
        weight = model.embed.weight
        blocks = _blocks(model)
        attention = cast("Attention", blocks[0].attention)
        self._heads = attention.heads
        self._kv_heads = attention.kv_heads
        self._head_dim = attention.head_dim
        self._eps = model.norm.eps
        (group,) = cache.groups
        (self._cache,) = cache.tensors
        self._window = group.window
        self._block_tokens = cache.tokens_per_block
        for parameter in model.parameters():
            _store_transposed(parameter)
        self._embed = weight
        self._norm = model.norm.weight
        self._head = (weight if model.head.weight is None else model.head.weight).t()
        self._layers = [_weights(block) for block in blocks]
        rope = tables_of(blocks[0].attention_kind.rotary, torch.arange(context), weight.dtype, context)
        assert rope is not None
        cos, sin = signed_tables((rope[0][0, :, 0], rope[1][0, :, 0]))
        self._rotations = torch.cat((cos[:, 0], sin[:, 0]), dim=1)
        """`(context, 2 · head_dim)`: elements of `_rotation` by position: its diagonal, then those between the halves of a head."""
        self._rotation = weight.new_zeros(self._head_dim, self._head_dim)
        """A row vector `(head_dim,)` times this matrix is the vector rotated to the step's position."""
        half = self._head_dim // 2
        columns = torch.arange(self._head_dim)
        rows = torch.cat((columns, (columns + half) % self._head_dim))
        self._rotation_places = rows * self._head_dim + columns.repeat(2)
        self._text: _Text | None = None
        self._next = 0
        """The position of the token after the copy."""
        self._make_buffers(weight, self._layers[0].down.shape[0])

    @staticmethod
    def supports(model: Decoder, cache: KVCache) -> bool:
        """Whether the model is on a CPU in fp32 or fp64, its layers are alike, and they have only modules that this file computes."""
        weight = model.embed.weight
        if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.float64) or model.reference:
            return False
        if single_decode_obstacle(model.spec) or cache.tensors[0].dtype != weight.dtype:
            return False
        return all(map(_is_computed, model.modules()))

    def logits(self, inputs: BatchInputs, packed: PackedStep) -> Tensor:
        """Logits `(1, vocab)` of a packed step of one decode, valid until the next call.

        Writes the token's keys and values into the cache.
        """
        position = int(packed.sampled_positions) - 1
        table = inputs.tables[0, int(packed.sampled_rows)].tolist()
        x = self._x
        normed = self._normed
        qkv = self._qkv
        attended = self._attended
        self._rotation.view(-1).index_copy_(0, self._rotation_places, self._rotations[position])
        text = self._text_before(packed.sampled_parts[0], table, position)
        here = position - text.first
        first = 0 if self._window is None else max(0, here + 1 - self._window)
        new = text.stored[:, :, :, here]
        visible = text.stored[:, :, :, first : here + 1]
        layers = zip(
            self._layers, new.unbind(), visible[:, 0].transpose(2, 3).unbind(), visible[:, 1].unbind(), strict=True
        )
        torch.index_select(self._embed, 0, inputs.newest[packed.sampled_rows], out=x)
        for layer, slot, keys, values in layers:
            self._normalise(layer.attention_norm)
            if layer.qkv_bias is None:
                torch.mm(normed, layer.qkv, out=qkv)
            else:
                torch.addmm(layer.qkv_bias, normed, layer.qkv, out=qkv)
            if layer.head_norms is not None:
                self._normalise_heads(*layer.head_norms)
            torch.mm(self._unrotated, self._rotation, out=self._rotated)
            self._unrotated.copy_(self._rotated)
            slot.copy_(self._new)
            scores = torch.baddbmm(self._none, self._q, keys, beta=0, alpha=self._scale)
            torch.bmm(scores.softmax(-1), values, out=self._attended_heads)
            torch.addmm(x, attended, layer.out, out=x)
            self._normalise(layer.mlp_norm)
            torch.mm(normed, layer.gate_up, out=self._gate_up)
            torch.mul(nn.functional.silu(self._gate), self._up, out=self._activated)
            torch.addmm(x, self._activated, layer.down, out=x)
        block = table[position // self._block_tokens]
        offset = position % self._block_tokens
        self._cache.select(0, block).select(3, offset).copy_(new)
        self._next = position + 1
        self._normalise(self._norm)
        return torch.mm(normed, self._head, out=self._logits)

    def forget_text(self) -> None:
        """Drop the copy: another kind of step may have changed the cache."""
        self._text = None

    def _make_buffers(self, weight: Tensor, ffn_hidden: int) -> None:
        heads = self._heads
        kv_heads = self._kv_heads
        head_dim = self._head_dim
        self._width = weight.shape[1]
        self._x = weight.new_empty(1, self._width)
        self._normed = weight.new_empty(1, self._width)
        self._flat = self._x[0]
        self._qkv = weight.new_empty(1, (heads + 2 * kv_heads) * head_dim)
        by_head = self._qkv.view(-1, head_dim)
        self._unrotated = by_head[: heads + kv_heads]
        self._rotated = torch.empty_like(self._unrotated)
        self._q = by_head[:heads].view(kv_heads, heads // kv_heads, head_dim)
        self._new = by_head[heads:].view(2, kv_heads, head_dim)
        self._attended = weight.new_empty(1, heads * head_dim)
        self._attended_heads = self._attended.view(kv_heads, heads // kv_heads, head_dim)
        self._gate_up = weight.new_empty(1, 2 * ffn_hidden)
        self._gate, self._up = self._gate_up.chunk(2, dim=1)
        self._activated = weight.new_empty(1, ffn_hidden)
        self._logits = weight.new_empty(1, self._head.shape[1])
        self._zero = weight.new_zeros(1)
        self._none = weight.new_empty(1, 1, 1)
        self._scale = head_dim**-0.5

    def _normalise(self, weight: Tensor) -> None:
        """Write the RMSNorm of the residual stream."""
        scale = 1.0 / sqrt(self._flat.dot(self._flat).item() / self._width + self._eps)
        torch.addcmul(self._zero, self._x, weight, value=scale, out=self._normed)

    def _normalise_heads(self, q_weight: Tensor, k_weight: Tensor) -> None:
        width = (self._head_dim,)
        for part, weight in ((self._unrotated[: self._heads], q_weight), (self._unrotated[self._heads :], k_weight)):
            part.copy_(nn.functional.rms_norm(part, width, weight, self._eps))

    def _text_before(self, part: RequestPart, table: list[int], position: int) -> _Text:
        """The copy for a decode with this block table, up to `position`, with room for the token there."""
        size = self._block_tokens
        text = self._text
        if text is not None and text.part is part and position == self._next:
            start = text.first // size
            has_room = position - text.first < text.stored.shape[3]
            if has_room and table[start : start + len(text.blocks)] == text.blocks:
                return text
        start = 0 if self._window is None else max(0, position + 1 - self._window) // size
        blocks = table[start : position // size + 1]
        first = start * size
        stored = self._cache.index_select(0, torch.tensor(blocks)).permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        capacity = ((position - first) // CAPACITY_STEP + 1) * CAPACITY_STEP
        self._text = text = _Text(part, blocks, first, stored.new_empty(*stored.shape[:3], capacity, self._head_dim))
        text.stored[:, :, :, : position - first] = stored[:, :, :, : position - first]
        return text


def _weights(block: Block) -> _Layer:
    attention = cast("Attention", block.attention)
    mlp = cast("GatedMLP", block.mlp)
    return _Layer(
        attention_norm=cast("Norm", block.attention_norm).weight,
        qkv=attention.qkv.weight.t(),
        qkv_bias=attention.qkv.bias,
        out=attention.out.weight.t(),
        mlp_norm=cast("Norm", block.mlp_norm).weight,
        gate_up=mlp.gate_up.weight.t(),
        down=mlp.down.weight.t(),
        head_norms=(attention.q_norm.weight, attention.k_norm.weight) if attention.qk_norm else None,
    )


def _blocks(model: Decoder) -> list[Block]:
    return cast("list[Block]", list(model.layers.values()))


def _store_transposed(parameter: nn.Parameter) -> None:
    """Store a matrix in column-major order: its matmul with one token then takes about two thirds of the time."""
    if parameter.dim() == 2:
        parameter.data = parameter.data.t().contiguous().t()


def _is_computed(module: nn.Module) -> bool:
    """Whether the module is one that this file computes: the trainer's own class without hooks, with all heads, not in fp8."""
    if type(module) not in _MODULES or "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        return False
    if isinstance(module, Block):
        return module.hooks.sum_ranks is unchanged
    if isinstance(module, Attention):
        width = (module.heads + 2 * module.kv_heads) * module.head_dim
        return isinstance(module.qkv, Linear) and module.qkv.out_features == width
    return not isinstance(module, Linear) or module.scaling is None


_MODULES = (Decoder, Embedding, nn.ModuleDict, nn.ModuleList, Block, Attention, GatedMLP, Norm, Head, Linear)
