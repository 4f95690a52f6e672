"""Attention over the paged cache, in the place of the trainer's attention.

The blocks of a decoder call `attend` with q, k and v of all tokens of a step, `(1, tokens, heads, head_dim)`, after their norm. They are
called without rotary tables, because the rotation is fused with the write into the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.kernels.attention import AttentionMask
from meshwright.kernels.paged_attention import paged_attention, prompt_attention, rotate_and_write
from meshwright.kernels.rope import RotaryTables
from meshwright.models.decoder import Attention, Decoder
from meshwright.serve.batch_inputs import StepInputs
from meshwright.serve.kv_cache import KVCache


class CurrentStep:
    """The inputs of the step that the model computes; all layers read them."""

    inputs: StepInputs


class CachedAttention:
    """`attend` of one layer: writes keys and values into the cache and attends to all tokens of each request."""

    def __init__(
        self, step: CurrentStep, cache_layer: Tensor, group: int, window: int | None, rope: RotaryTables | None
    ) -> None:
        self._step, self._cache, self._group, self._window, self._rope = step, cache_layer, group, window, rope

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None, *, plain: bool) -> Tensor:
        """Attention output of q `(1, tokens, heads, head_dim)`, shaped like q; k and v are `(1, tokens, kv_heads, head_dim)`."""
        step = self._step.inputs
        q, k, v = q[0], k[0], v[0]
        keys = torch.empty_like(k) if step.prompts else None
        slots = step.slots[self._group]
        q = rotate_and_write(q, k, v, self._rope, step.positions, self._cache, slots, rotated_keys=keys, plain=plain)
        if keys is None:
            return self._attend_to_cache(q, step, step.context_lengths.shape[0], plain)[None]
        sequences = step.context_lengths.shape[0] - len(step.prompts)
        cut = q.shape[0] - sum(step.prompts)
        prompts = prompt_attention(q[cut:], keys[cut:], v[cut:], step.prompts, window=self._window, plain=plain)
        if not cut:
            return prompts[None]
        return torch.cat((self._attend_to_cache(q[:cut], step, sequences, plain), prompts))[None]

    def _attend_to_cache(self, q: Tensor, step: StepInputs, sequences: int, plain: bool) -> Tensor:
        return paged_attention(
            q,
            self._cache,
            step.block_tables[self._group][:sequences],
            step.context_lengths[:sequences],
            step.query_starts[: sequences + 1],
            decodes=step.decodes,
            window=self._window,
            plain=plain,
        )


def use_cached_attention(model: Decoder, cache: KVCache) -> CurrentStep:
    """Let every layer of `model` attend to the cache; the model then computes only steps whose inputs are set in the result."""
    step = CurrentStep()
    weight = model.embed.weight
    rope = model.rope(torch.arange(model.spec.max_seq_len, device=weight.device), weight.dtype)
    if rope is not None:
        rope = (rope[0][0, :, 0], rope[1][0, :, 0])
    for number, layer in model.layers.items():
        group, cache_layer = cache.layer(int(number))
        attention = layer.attention
        assert isinstance(attention, Attention)
        attention.attend = CachedAttention(step, cache_layer, group, cache.groups[group].window, rope)
    return step
