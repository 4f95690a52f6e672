"""Attention over the paged cache, in place of the trainer's attention.

A decoder's block calls its hook `attend` with q, k and v of all tokens of a step, `(1, tokens, heads, head_dim)`, after their norm and
before their rotation: the rotation is fused with the write into the cache. Latent attention calls its hook `attend_latents` instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from meshwright.kernels.attention import AttentionMask
from meshwright.kernels.exact_attention import QUERIES, attend_exactly
from meshwright.kernels.latent_attention import latent_attention, rotate_and_write_latents
from meshwright.kernels.norm import HeadNorms
from meshwright.kernels.paged_attention import is_fp8, paged_attention, prompt_attention, rotate_and_write
from meshwright.kernels.rope import RotaryTables, rotate_neighbours
from meshwright.models.attention import Attention
from meshwright.models.block import Block, tables_of
from meshwright.models.decoder import Decoder
from meshwright.models.latent_attention import LatentAttention
from meshwright.models.norm import Norm
from meshwright.models.prediction import PredictionModule
from meshwright.serve.batch_inputs import StepInputs
from meshwright.serve.host_attention import HostDecodes, prepare_decodes, signed_tables
from meshwright.serve.kv_cache import KVCache
from meshwright.spec.blocks.attention import AttentionSpec
from meshwright.workload.cache_size import LayerGroup

INVARIANT_QUERIES = 2048
"""Tokens whose attention an invariant step computes at a time: the partial results of their contexts take memory."""


Rotation = Callable[[Tensor, RotaryTables], Tensor]
"""Rotates heads `(tokens, heads, head_dim)` by tables `(tokens, 1, ·)`."""
AttentionCall = Callable[[Tensor, Tensor], Tensor]
"""`attend(queries, out)` writes a layer's attention of the current step into `out` and returns it.

Both are `(tokens, heads, …)`.
"""


class CurrentStep:
    """The inputs of the step that the model computes; all layers read them."""

    def __init__(self, tables: Sequence[RotaryTables | None], cache: KVCache, *, invariant: bool = False) -> None:
        on_host = cache.tensors[0].device.type == "cpu"
        self.tables = tables
        """`whole_tables` of each group of layers."""
        self._cache = cache
        pairs = zip(cache.groups, tables, strict=True)
        self.ropes = [_written(group, rope, on_cuda=not on_host) for group, rope in pairs]
        """Cosines and sines `(context, ·)` of each group, for the rotation of keys as they are written; None where none is fused."""
        self.scales = cache.scales
        """Scales of an fp8 cache."""
        self.invariant = invariant
        """Whether the bits of a token's attention do not depend on the other tokens of the step."""
        self.exact = False
        """Whether attention has the same bits as the trainer's exact forward (`kernels.exact_attention`). Only on a CPU."""
        self.absorbs = True
        """Whether decodes attend to latents (the absorbed form), or else to keys and values that are expanded from latents."""
        self.at_attention: Callable[[Tensor, int, AttentionCall], Tensor] | None = None
        """If set, called instead of attention, with the queries, the width of the results, and the attention itself.

        It returns memory for the results, which the attention fills later (`serve.prompt_graphs`).
        """
        self._host_ropes = [signed_tables(rope) if on_host and rope is not None else None for rope in self.ropes]
        self._host_decodes_work = on_host and cache.scales is None
        self._host_decodes: dict[int, HostDecodes] = {}
        self._lone_tokens: LoneTokens | None = None
        self._inputs: StepInputs

    @property
    def inputs(self) -> StepInputs:
        """The current step."""
        return self._inputs

    @inputs.setter
    def inputs(self, inputs: StepInputs) -> None:
        self._inputs = inputs
        self._host_decodes.clear()
        self._lone_tokens = None

    def host_decodes(self, group: int) -> HostDecodes | None:
        """What the layers of a group share in a step on a CPU that has only decodes; None for other steps."""
        step = self._inputs
        if self.exact or not self._host_decodes_work or step.decodes != len(step.tokens):
            return None
        if group not in self._host_decodes:
            window = self._cache.groups[group].window
            size = self._cache.tokens_per_block
            self._host_decodes[group] = prepare_decodes(step, group, window, self._host_ropes[group], size)
        return self._host_decodes[group]

    def lone_tokens(self) -> LoneTokens:
        """The step with each token as a decode of its own. All layers share it."""
        if self._lone_tokens is None:
            self._lone_tokens = _split_into_tokens(self._inputs)
        return self._lone_tokens


class LoneTokens(NamedTuple):
    """Each token of a step as a sequence of its own."""

    block_tables: tuple[Tensor, ...]
    """Block tables of each group, `(tokens, blocks)`."""
    context_lengths: Tensor
    """`(tokens,)` int32: tokens of the text up to this one; 0 for padding."""
    starts: Tensor
    """`(tokens + 1,)` int32: 0, 1, 2, …"""


def _split_into_tokens(step: StepInputs) -> LoneTokens:
    tokens = len(step.tokens)
    starts = torch.arange(tokens + 1, dtype=torch.int32, device=step.tokens.device)
    if step.decodes == tokens:
        return LoneTokens(step.block_tables, step.context_lengths, starts)
    sequence = torch.searchsorted(step.query_starts[1:].contiguous(), starts[:-1], right=True)
    return LoneTokens(tuple(table[sequence] for table in step.block_tables), step.positions + 1, starts)


class CachedAttention:
    """`attend` of one layer: writes keys and values into the cache and attends to all tokens of each request.

    - `norms`: norms of queries and keys, if the layer leaves them to this object.
    - `query_factor`: multiplies the queries, if the layer leaves that to this object.
    - `rotation`: a rotation before the write into the cache, and its tables `(context, ·)`; None if the write rotates, or nothing does.
    - `neighbours`: whether the write rotates pairs of neighbours, see `rotate_and_write`.
    - `query_growth` `(context, 1)`: factors of queries by position.
    - `cap`: bound of the scores.
    - `rotated_norms`: norms of queries and keys after `rotation`.
    """

    def __init__(
        self,
        step: CurrentStep,
        cache_layer: Tensor,
        group: int,
        window: int | None,
        norms: HeadNorms | None = None,
        query_factor: float = 1.0,
        rotation: tuple[Rotation, RotaryTables] | None = None,
        neighbours: bool = False,
        query_growth: Tensor | None = None,
        cap: float | None = None,
        rotated_norms: tuple[Norm, Norm] | None = None,
    ) -> None:
        self._cap = cap
        self.rotated_norms = rotated_norms
        self._step = step
        self._cache = cache_layer
        self._group = group
        self._window = window
        self.norms = norms
        self._query_factor = query_factor
        self._rotation = rotation
        self._neighbours = neighbours
        self._query_growth = query_growth

    @classmethod
    def of(cls, attention: Attention, step: CurrentStep, cache: KVCache, layer: int) -> CachedAttention:
        """`attend` for the attention module of `layer`. The caller then calls `leave_to`."""
        group, cache_layer = cache.layer(layer)
        norms = None
        query_factor = 1.0
        rope = step.tables[group]
        rotated_norms = (attention.q_norm, attention.k_norm) if attention.rotated_norm else None
        growth = rope[2] if rope is not None and len(rope) > 2 else None
        rotation = None if rope is None or step.ropes[group] is not None else (attention.rotate, rope[:2])
        fused = cache_layer.is_cuda and not attention.whole_norm and growth is None
        if rotated_norms is not None:
            query_factor = attention.query_factor
        elif attention.qk_norm and fused:  # one kernel norms, rotates and writes; the factor is applied after the norm
            norms = _head_norms(attention)
            query_factor = attention.query_factor
        return cls(
            step,
            cache_layer,
            group,
            cache.groups[group].window,
            norms,
            query_factor,
            rotation,
            attention.rotate is rotate_neighbours,
            growth,
            cache.groups[group].mixer.score_cap,
            rotated_norms,
        )

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask | None,
        *,
        sinks: Tensor | None = None,
        plain: bool,
    ) -> Tensor:
        """Attention output of q `(1, tokens, heads, head_dim)`, shaped like q; k and v are `(1, tokens, kv_heads, head_dim)`."""
        q = q[0]
        k = k[0]
        v = v[0]
        positions = self._step.inputs.positions
        if self._rotation is not None:
            rotate, whole_tables = self._rotation
            tables = tuple(table[positions][:, None] for table in whole_tables)
            q = rotate(q, tables)
            k = rotate(k, tables)
        if self.rotated_norms is not None:
            query_norm, key_norm = self.rotated_norms
            q = query_norm(q) * self._query_factor
            k = key_norm(k)
        if self._query_growth is not None:
            q = q * self._query_growth[positions][:, None]
        if not plain and (decodes := self._step.host_decodes(self._group)) is not None:
            return decodes.attend(q, k, v, self._cache, sinks, self._cap)[None]
        step = self._step.inputs
        # With an fp8 cache and in invariant steps all keys are read from the cache, so that results do not depend on where chunks begin.
        # With sinks or a cap on CUDA too: only the kernels that read the cache have them together with a window.
        from_cache = self._step.scales is not None or self._step.invariant
        from_cache = from_cache or (k.is_cuda and (sinks is not None or self._cap is not None))
        keys = torch.empty_like(k) if step.prompts and not from_cache else None
        slots = step.slots[self._group]
        rope = self._step.ropes[self._group]
        scales = self._step.scales
        q = rotate_and_write(
            q,
            k,
            v,
            rope,
            step.positions,
            self._cache,
            slots,
            scales=scales,
            rotated_keys=keys,
            norms=self.norms,
            neighbours=self._neighbours,
            plain=plain,
        )
        if self._query_factor != 1 and self.rotated_norms is None:
            q = q * self._query_factor
        if self._step.at_attention is not None:
            return self._step.at_attention(q, q.shape[-1], partial(self._attend_all, sinks, plain))[None]
        if self._step.exact:
            return self._attend_exactly(q)[None]
        if self._step.invariant and q.is_cuda:
            return self._attend_alone(q, sinks, plain)[None]
        if keys is None:
            return self._attend_all(sinks, plain, q)[None]
        count = step.context_lengths.shape[0] - len(step.prompts)
        cut = q.shape[0] - sum(step.prompts)
        out = torch.empty_like(q)
        if cut:
            tables = step.block_tables[self._group][:count]
            sequences = tables, step.context_lengths[:count], step.query_starts[: count + 1]
            self._attend_to_cache(q[:cut], sequences, sinks, plain, out[:cut])
        options = {"window": self._window, "sinks": sinks, "cap": self._cap, "plain": plain}
        prompt_attention(q[cut:], keys[cut:], v[cut:], step.prompts, out[cut:], **options)
        return out[None]

    def _attend_all(self, sinks: Tensor | None, plain: bool, q: Tensor, out: Tensor | None = None) -> Tensor:
        """Attention of all sequences of the step, with keys and values from the cache."""
        step = self._step.inputs
        sequences = step.block_tables[self._group], step.context_lengths, step.query_starts
        return self._attend_to_cache(q, sequences, sinks, plain, out)

    def _attend_to_cache(
        self,
        q: Tensor,
        sequences: tuple[Tensor, Tensor, Tensor],
        sinks: Tensor | None,
        plain: bool,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attention with keys and values from the cache. `sequences` has block tables, context lengths and starts of queries."""
        step = self._step.inputs
        return paged_attention(
            q,
            self._cache,
            *sequences,
            decodes=step.decodes,
            decode_queries=step.decode_queries,
            window=self._window,
            scales=self._step.scales,
            sinks=sinks,
            cap=self._cap,
            plain=plain,
            out=out,
        )

    def _attend_exactly(self, q: Tensor) -> Tensor:
        """Attention with the same bits as the trainer's exact forward; 0 for padding, which is at the end of q."""
        step = self._step.inputs
        out = torch.zeros_like(q)
        starts = step.query_starts.tolist()
        lengths = step.context_lengths.tolist()
        table = step.block_tables[self._group]
        end = 0
        for count, equal in groupby(stop - start for start, stop in pairwise(starts)):
            # Neighbouring sequences with the same number of tokens in this step are computed together.
            first = end
            end = end + sum(1 for _ in equal)
            tokens = slice(starts[first], starts[end])
            longest = max(lengths[first:end])
            if longest == 0:
                continue
            keys, values = self._stored(table[first:end], step.context_lengths[first:end], longest)
            positions = step.positions[tokens].view(-1, count).long()
            for begin in range(0, count, QUERIES):
                part = slice(begin, begin + QUERIES)
                visible = longest - max(0, count - begin - QUERIES)
                rows = q[tokens].unflatten(0, (-1, count))[:, part]
                attended = attend_exactly(rows, keys[:, :visible], values[:, :visible], positions[:, part])
                out[tokens].unflatten(0, (-1, count))[:, part] = attended
        return out

    def _stored(self, table: Tensor, lengths: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Cached keys and values `(sequences, longest, kv_heads, head_dim)` by block tables; 0 after the length of each sequence."""
        blocks = table[:, : -(-longest // self._cache.shape[3])].long()
        # (sequences, blocks, 2, kv_heads, tokens, head_dim)
        stored = self._cache[blocks].permute(2, 0, 1, 4, 3, 5).flatten(2, 3)[:, :, :longest]
        missing = torch.arange(longest, device=table.device) >= lengths[:, None]
        keys, values = stored.masked_fill(missing[None, :, :, None, None], 0.0)
        return keys, values

    def _attend_alone(self, q: Tensor, sinks: Tensor | None, plain: bool) -> Tensor:
        """Attention of each token by the kernel for decodes, which adds in the same order as if the token were alone in the step."""
        lone = self._step.lone_tokens()
        tables = lone.block_tables[self._group]
        parts = []
        for begin in range(0, len(q), INVARIANT_QUERIES):
            part = slice(begin, begin + INVARIANT_QUERIES)
            count = len(q[part])
            step = (self._cache, tables[part], lone.context_lengths[part], lone.starts[: count + 1])
            options = {"decodes": count, "window": self._window, "scales": self._step.scales, "plain": plain}
            parts.append(paged_attention(q[part], *step, **options, sinks=sinks, cap=self._cap, invariant=True))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class CachedLatents:
    """`attend_latents` of one layer: writes latents and rotated keys into the cache and attends to all tokens of each request.

    It has three forms:

    - Expanded from this step: prompts that begin in this step, without graphs and with a cache that is not fp8. As in training, keys and
      values of each head are expanded from the latents. It needs about a third of the multiplications of the absorbed form.
    - Absorbed: all other tokens attend to the latents themselves.
    - Expanded from the cache: decodes of an engine with `absorb: false`.
    """

    def __init__(self, step: CurrentStep, cache_layer: Tensor, group: int) -> None:
        self._step = step
        self._cache = cache_layer
        self._group = group

    def __call__(
        self,
        attention: LatentAttention,
        q: Tensor,
        latent: Tensor,
        shared_key: Tensor,
        rope: RotaryTables | None,
        mask: AttentionMask | None,
    ) -> Tensor:
        """Attention output `(1, tokens, heads · value_head_dim)`; see `models.latent_attention.expand_and_attend`."""
        step = self._step.inputs
        plain = attention.plain
        latent = latent[0]
        tables = self._step.ropes[self._group]
        assert tables is not None, "latent attention has rotary positions"
        q_plain, q_rotary = attention.split_queries(q[0])
        places = (tables, step.positions, self._cache, step.slots[self._group])
        q_rotated, key = rotate_and_write_latents(q_rotary, shared_key[0], latent, *places, plain=plain)
        if self._step.at_attention is not None:
            q = torch.cat((attention.absorb(q_plain), q_rotated), dim=-1)
            return attention.expand_values(
                self._step.at_attention(q, attention.kv_rank, partial(self._absorb_all, attention))
            )[None]
        # With an fp8 cache all latents are read from the cache, so that results do not depend on where chunks begin.
        prompts = step.prompts if self._step.scales is None else ()
        if not prompts:
            return self._attend_to_cache(attention, q_plain, q_rotated)[None]
        cut = len(q_plain) - sum(prompts)
        parts = []
        if cut:
            parts.append(self._attend_to_cache(attention, q_plain[:cut], q_rotated[:cut]))
        whole, keys, values = attention.expand(q_plain[cut:], q_rotated[cut:], latent[cut:], key[cut:])
        out = torch.empty_like(values, memory_format=torch.contiguous_format)
        prompt_attention(whole, keys, values, prompts, out, plain=plain)
        parts.append(out.flatten(1))
        return torch.cat(parts)[None]

    def _attend_to_cache(self, attention: LatentAttention, q_plain: Tensor, q_rotated: Tensor) -> Tensor:
        """Attention of the first tokens of the step to the cache, `(tokens, heads · value_head_dim)`."""
        step = self._step.inputs
        if not self._step.absorbs and step.decode_queries == 1 and step.decodes == len(step.tokens):
            return self._attend_expanded(attention, q_plain, q_rotated)
        q = attention.absorb(q_plain)
        if not attention.plain and (decodes := self._step.host_decodes(self._group)) is not None:
            scale = attention.score_scale / math.sqrt(attention.head_dim)
            sums = decodes.attend_latents(torch.cat((q, q_rotated), dim=-1), self._cache, scale)
            return attention.expand_values(sums[..., : attention.kv_rank])
        sequences = int(step.context_lengths.shape[0]) - (0 if len(q) == len(step.tokens) else len(step.prompts))
        return attention.expand_values(self._absorbed(attention, q, q_rotated, sequences))

    def _absorb_all(self, attention: LatentAttention, q: Tensor, out: Tensor) -> Tensor:
        """Sums of latents `(tokens, heads, kv_rank)` of all queries; q has their absorbed and rotated parts, joined."""
        absorbed, rotated = q.split((attention.kv_rank, attention.rotated), dim=-1)
        return self._absorbed(attention, absorbed, rotated, None, out)

    def _absorbed(
        self, attention: LatentAttention, q: Tensor, q_rotated: Tensor, sequences: int | None, out: Tensor | None = None
    ) -> Tensor:
        """Sums of latents `(tokens, heads, kv_rank)` of the first `sequences`; None for all."""
        step = self._step.inputs
        return latent_attention(
            q,
            q_rotated,
            self._cache,
            step.block_tables[self._group][:sequences],
            step.context_lengths[:sequences],
            step.query_starts[: None if sequences is None else sequences + 1],
            scale=attention.score_scale / math.sqrt(attention.head_dim),
            decodes=step.decodes if step.decode_queries == 1 else 0,
            plain=attention.plain,
            out=out,
        )

    def _attend_expanded(self, attention: LatentAttention, q_plain: Tensor, q_rotated: Tensor) -> Tensor:
        """A step that has only decodes: expands keys and values of each head for all tokens of the contexts, as in training."""
        step = self._step.inputs
        size = self._cache.shape[1]
        lengths = step.context_lengths.clamp(min=1)  # padding has length 0, and a softmax over nothing is NaN
        tables = step.block_tables[self._group][:, : -(-int(lengths.max()) // size)]
        source = self._cache.view(torch.uint8) if is_fp8(self._cache) else self._cache
        cached = source[tables.long()].view(self._cache.dtype).flatten(1, 2).to(q_plain.dtype)
        latent, key = cached.split((attention.kv_rank, attention.rotated), dim=-1)
        q, keys, values = (
            x.transpose(1, 2) for x in attention.expand(q_plain[:, None], q_rotated[:, None], latent, key)
        )
        visible = torch.arange(cached.shape[1], device=lengths.device) < lengths[:, None]
        out = scaled_dot_product_attention(q, keys, values, attn_mask=visible[:, None, None])
        return out.transpose(1, 2).flatten(1)


def use_cached_attention(
    model: Decoder, cache: KVCache, context: int, *, invariant: bool = False, predictions: int = 0
) -> CurrentStep:
    """Let all layers of `model` and its first `predictions` modules attend to the cache.

    `context` is the longest sequence. The model then computes only steps whose inputs are set in the result.
    """
    weight = model.embed.weight
    ropes = whole_tables(cache, context, weight.dtype)
    step = CurrentStep(ropes, cache, invariant=invariant)
    modules = cast("Iterable[PredictionModule]", model.predictions[:predictions])
    blocks = [*model.layers.values(), *(module.block for module in modules)]
    for number, block in enumerate(blocks):
        attention = cast("Block", block).attention
        hooks = cast("Block", block).hooks
        if isinstance(attention, LatentAttention):
            group, cache_layer = cache.layer(number)
            hooks.attend_latents = CachedLatents(step, cache_layer, group)
        else:
            hooks.attend = CachedAttention.of(attention, step, cache, number)
            leave_to(hooks.attend, attention)
    return step


def whole_tables(cache: KVCache, context: int, dtype: torch.dtype) -> list[RotaryTables | None]:
    """The rotary tables `(context, ·)` of each group of layers, for activations of `dtype`; None without rotation."""
    positions = torch.arange(context, device=cache.tensors[0].device)
    tables = [tables_of(group.mixer.rotary, positions, dtype, context) for group in cache.groups]
    return [None if rope is None else tuple(table[0, :, 0] for table in rope) for rope in tables]


def leave_to(attend: CachedAttention, attention: Attention) -> None:
    """Switch off in an attention module what `attend` does instead: norms of queries and keys, and the factor of queries."""
    if attend.norms is not None or attend.rotated_norms is not None:
        attention.qk_norm = False
        attention.query_factor = 1.0


def _written(group: LayerGroup, rope: RotaryTables | None, *, on_cuda: bool) -> RotaryTables | None:
    """Cosines and sines for the rotation of a group's keys as they are written; None where the layers rotate before the write.

    On a CPU the kernels of decodes can rotate whole heads only, by halves.
    """
    mixer = group.mixer
    rotates_before = isinstance(mixer, AttentionSpec) and not mixer.rotates_as_written(on_cuda=on_cuda)
    return None if rope is None or rotates_before else rope[:2]


def _head_norms(attention: Attention) -> HeadNorms:
    """The norms of queries and keys for the kernel that writes the cache."""
    norm = attention.q_norm
    return HeadNorms(norm.weight, attention.k_norm.weight, norm.eps, plus_one=norm.plus_one)
