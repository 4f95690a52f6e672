"""Attention over the paged cache, in place of the trainer's attention.

A decoder's block calls its hook `attend` with q, k and v of all tokens of a step, `(1, tokens, heads, head_dim)`. They are normed and not
rotated yet, because the rotation is fused with the write into the cache. Latent attention calls the hook `attend_latents` instead.
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
"""In an invariant step, one kernel call computes the attention of at most this many tokens. More would need too much memory, because the
kernel stores partial results for parts of each token's context."""


Rotation = Callable[[Tensor, RotaryTables], Tensor]
"""`rotate(heads, tables)` rotates heads `(tokens, heads, head_dim)` by rotary tables `(tokens, 1, ·)`."""
AttentionCall = Callable[[Tensor, Tensor], Tensor]
"""`attend(queries, out)` computes a layer's attention for the current step, writes it into `out`, and returns `out`.

`queries` and `out` are `(tokens, heads, …)`.
"""


class CurrentStep:
    """The inputs of the step that the model computes; all layers read them."""

    def __init__(self, tables: Sequence[RotaryTables | None], cache: KVCache, *, invariant: bool = False) -> None:
        on_host = cache.tensors[0].device.type == "cpu"
        self.tables = tables
        """For each group of layers, its rotary tables for all positions (see `whole_tables`)."""
        self._cache = cache
        pairs = zip(cache.groups, tables, strict=True)
        self.ropes = [_written(group, rope, on_cuda=not on_host) for group, rope in pairs]
        """For each group, the cosines and sines `(context, ·)` for the rotation that is fused with the write into the cache.

        None for a group without rotation, and for a group whose layers rotate before the write.
        """
        self.scales = cache.scales
        """Scales of an fp8 cache; None for other caches. See `KVCache.scales`."""
        self.invariant = invariant
        """Whether the attention of a token has the same bits whatever other tokens the step has."""
        self.exact = False
        """Whether attention has the same bits as the trainer's exact forward (`kernels.exact_attention`). Only on a CPU."""
        self.absorbs = True
        """For latent attention: whether decodes attend to the latents (the absorbed form).

        If false, decodes expand keys and values from the latents, and attend to these.
        """
        self.at_attention: Callable[[Tensor, int, AttentionCall], Tensor] | None = None
        """`at_attention(queries, width, attend)`: if set, layers call it instead of computing attention.

        `serve.prompt_graphs` sets it to end a CUDA graph before each attention. `width` is the last dimension of the result, and `attend`
        computes the attention. The call returns memory for the result; `attend` fills this memory later.
        """
        self._host_ropes = [signed_tables(rope) if on_host and rope is not None else None for rope in self.ropes]
        self._host_decodes_work = on_host and cache.scales is None
        self._host_decodes: dict[int, HostDecodes] = {}
        self._lone_tokens: LoneTokens | None = None
        self._inputs: StepInputs

    @property
    def inputs(self) -> StepInputs:
        """The inputs of the current step."""
        return self._inputs

    @inputs.setter
    def inputs(self, inputs: StepInputs) -> None:
        self._inputs = inputs
        self._host_decodes.clear()
        self._lone_tokens = None

    def host_decodes(self, group: int) -> HostDecodes | None:
        """Return the tensors that all layers of a group share in a step that has only decodes, on a CPU; None for other steps."""
        step = self._inputs
        if self.exact or not self._host_decodes_work or step.decodes != len(step.tokens):
            return None
        if group not in self._host_decodes:
            window = self._cache.groups[group].window
            size = self._cache.tokens_per_block
            self._host_decodes[group] = prepare_decodes(step, group, window, self._host_ropes[group], size)
        return self._host_decodes[group]

    def lone_tokens(self) -> LoneTokens:
        """Return the current step with each token as a sequence of its own. It is computed once and used by all layers."""
        if self._lone_tokens is None:
            self._lone_tokens = _split_into_tokens(self._inputs)
        return self._lone_tokens


class LoneTokens(NamedTuple):
    """The inputs of a step in which each token is a sequence of its own."""

    block_tables: tuple[Tensor, ...]
    """For each group of layers, the block table of each token's request, `(tokens, blocks)`."""
    context_lengths: Tensor
    """`(tokens,)` int32: number of tokens of the request up to this token, itself included; 0 for padding."""
    starts: Tensor
    """`(tokens + 1,)` int32: the query starts 0, 1, 2, …"""


def _split_into_tokens(step: StepInputs) -> LoneTokens:
    tokens = len(step.tokens)
    starts = torch.arange(tokens + 1, dtype=torch.int32, device=step.tokens.device)
    if step.decodes == tokens:
        return LoneTokens(step.block_tables, step.context_lengths, starts)
    sequence = torch.searchsorted(step.query_starts[1:].contiguous(), starts[:-1], right=True)
    return LoneTokens(tuple(table[sequence] for table in step.block_tables), step.positions + 1, starts)


class CachedAttention:
    """The hook `attend` of one layer: it writes the step's keys and values into the cache, and attends to all tokens of each request.

    - `group`: index of the layer's group in `KVCache.groups`.
    - `window`: number of tokens that a query attends to; None for all.
    - `norms`: norms of queries and keys, if this object applies them in place of the attention module; else None.
    - `query_factor`: factor of the queries, if this object applies it in place of the attention module; else 1.
    - `rotation`: the rotation that is applied before the write into the cache, and its tables `(context, ·)`. None if the write rotates,
      and for a layer without rotation.
    - `neighbours`: whether the write rotates pairs of neighbouring elements; see `rotate_and_write`.
    - `query_growth`: `(context, 1)`: a factor of the queries at each position.
    - `cap`: upper bound of the attention scores; None for no bound.
    - `rotated_norms`: norms of queries and keys that are applied after `rotation`.
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
        """Make the hook for the attention module of layer number `layer`.

        The caller must then call `leave_to`, so that the module does not apply its norms a second time.
        """
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
        reference: bool,
    ) -> Tensor:
        """Return the attention output, `(1, tokens, heads, head_dim)` like q. k and v are `(1, tokens, kv_heads, head_dim)`.

        `mask` is not used: the masks follow from the step's inputs. `reference` selects the kernels' PyTorch implementations.
        """
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
        if not reference and (decodes := self._step.host_decodes(self._group)) is not None:
            return decodes.attend(q, k, v, self._cache, sinks, self._cap)[None]
        step = self._step.inputs
        # Chunks that begin at position 0 may use the step's own keys, instead of keys from the cache. Not so with an fp8 cache and in
        # invariant steps, so that results do not depend on where chunks begin. And not with sinks or a cap on CUDA: only the kernels that
        # read the cache support these together with a window.
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
            reference=reference,
        )
        if self._query_factor != 1 and self.rotated_norms is None:
            q = q * self._query_factor
        if self._step.at_attention is not None:
            return self._step.at_attention(q, q.shape[-1], partial(self._attend_all, sinks, reference))[None]
        if self._step.exact:
            return self._attend_exactly(q)[None]
        if self._step.invariant and q.is_cuda:
            return self._attend_alone(q, sinks, reference)[None]
        if keys is None:
            return self._attend_all(sinks, reference, q)[None]
        count = step.context_lengths.shape[0] - len(step.prompts)
        cut = q.shape[0] - sum(step.prompts)
        out = torch.empty_like(q)
        if cut:
            tables = step.block_tables[self._group][:count]
            sequences = tables, step.context_lengths[:count], step.query_starts[: count + 1]
            self._attend_to_cache(q[:cut], sequences, sinks, reference, out[:cut])
        options = {"window": self._window, "sinks": sinks, "cap": self._cap, "reference": reference}
        prompt_attention(q[cut:], keys[cut:], v[cut:], step.prompts, out[cut:], **options)
        return out[None]

    def _attend_all(self, sinks: Tensor | None, reference: bool, q: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the attention of all sequences of the step, with keys and values from the cache. `out` is memory for the result."""
        step = self._step.inputs
        sequences = step.block_tables[self._group], step.context_lengths, step.query_starts
        return self._attend_to_cache(q, sequences, sinks, reference, out)

    def _attend_to_cache(
        self,
        q: Tensor,
        sequences: tuple[Tensor, Tensor, Tensor],
        sinks: Tensor | None,
        reference: bool,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of some sequences, with keys and values from the cache.

        `q` has the queries of these sequences. `sequences` has their block tables, context lengths and query starts, as in `StepInputs`.
        """
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
            reference=reference,
            out=out,
        )

    def _attend_exactly(self, q: Tensor) -> Tensor:
        """Return attention with the same bits as the trainer's exact forward. Padding, at the end of q, gets 0."""
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
        """Read keys and values from the cache by block tables. Both are `(sequences, longest, kv_heads, head_dim)`.

        `lengths` `(sequences,)` has the number of tokens of each sequence, `longest` the largest of them. Shorter sequences end with zeros.
        """
        blocks = table[:, : -(-longest // self._cache.shape[3])].long()
        # (sequences, blocks, 2, kv_heads, tokens, head_dim)
        stored = self._cache[blocks].permute(2, 0, 1, 4, 3, 5).flatten(2, 3)[:, :, :longest]
        missing = torch.arange(longest, device=table.device) >= lengths[:, None]
        keys, values = stored.masked_fill(missing[None, :, :, None, None], 0.0)
        return keys, values

    def _attend_alone(self, q: Tensor, sinks: Tensor | None, reference: bool) -> Tensor:
        """Return the attention of each token, computed as a decode of its own.

        The kernel for decodes adds in an order that depends on the token's context only. So the bits are the same as if the step had no
        other tokens.
        """
        lone = self._step.lone_tokens()
        tables = lone.block_tables[self._group]
        parts = []
        for begin in range(0, len(q), INVARIANT_QUERIES):
            part = slice(begin, begin + INVARIANT_QUERIES)
            count = len(q[part])
            step = (self._cache, tables[part], lone.context_lengths[part], lone.starts[: count + 1])
            options = {"decodes": count, "window": self._window, "scales": self._step.scales, "reference": reference}
            parts.append(paged_attention(q[part], *step, **options, sinks=sinks, cap=self._cap, invariant=True))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class CachedLatents:
    """The hook `attend_latents` of one layer: it writes the step's latents and rotated keys into the cache, then attends.

    Attention has three forms:

    | form | tokens | how |
    |---|---|---|
    | expanded from this step | prompts that begin in this step | expands keys and values of each head from latents, as in training |
    | expanded from the cache | a step of decodes only, if `absorb` is false | the same, for all tokens of each context |
    | absorbed | all other tokens | attends to the latents themselves |

    The first form needs about a third of the multiplications of the absorbed form. It is not used with CUDA graphs, nor with an fp8 cache.
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
        """Return the attention output, `(1, tokens, heads · value_head_dim)`. See `models.latent_attention.expand_and_attend`."""
        step = self._step.inputs
        reference = attention.reference
        latent = latent[0]
        tables = self._step.ropes[self._group]
        assert tables is not None, "latent attention has rotary positions"
        q_plain, q_rotary = attention.split_queries(q[0])
        places = (tables, step.positions, self._cache, step.slots[self._group])
        q_rotated, key = rotate_and_write_latents(q_rotary, shared_key[0], latent, *places, reference=reference)
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
        prompt_attention(whole, keys, values, prompts, out, reference=reference)
        parts.append(out.flatten(1))
        return torch.cat(parts)[None]

    def _attend_to_cache(self, attention: LatentAttention, q_plain: Tensor, q_rotated: Tensor) -> Tensor:
        """Return the attention of the first `len(q_plain)` tokens of the step, read from the cache. `(tokens, heads · value_head_dim)`.

        `q_plain` and `q_rotated` are the parts of the queries without and with rotary positions.
        """
        step = self._step.inputs
        if not self._step.absorbs and step.decode_queries == 1 and step.decodes == len(step.tokens):
            return self._attend_expanded(attention, q_plain, q_rotated)
        q = attention.absorb(q_plain)
        if not attention.reference and (decodes := self._step.host_decodes(self._group)) is not None:
            scale = attention.score_scale / math.sqrt(attention.head_dim)
            sums = decodes.attend_latents(torch.cat((q, q_rotated), dim=-1), self._cache, scale)
            return attention.expand_values(sums[..., : attention.kv_rank])
        sequences = int(step.context_lengths.shape[0]) - (0 if len(q) == len(step.tokens) else len(step.prompts))
        return attention.expand_values(self._absorbed(attention, q, q_rotated, sequences))

    def _absorb_all(self, attention: LatentAttention, q: Tensor, out: Tensor) -> Tensor:
        """Return the attention-weighted sums of latents for all queries of the step, `(tokens, heads, kv_rank)`.

        `q` `(tokens, heads, kv_rank + rotated)` has the absorbed part of each query, then its rotated part.
        """
        absorbed, rotated = q.split((attention.kv_rank, attention.rotated), dim=-1)
        return self._absorbed(attention, absorbed, rotated, None, out)

    def _absorbed(
        self, attention: LatentAttention, q: Tensor, q_rotated: Tensor, sequences: int | None, out: Tensor | None = None
    ) -> Tensor:
        """Return the attention-weighted sums of latents, `(tokens, heads, kv_rank)`, for the step's first `sequences`, or all if None."""
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
            reference=attention.reference,
            out=out,
        )

    def _attend_expanded(self, attention: LatentAttention, q_plain: Tensor, q_rotated: Tensor) -> Tensor:
        """Return the attention of a step that has only decodes, `(tokens, heads · value_head_dim)`.

        It expands keys and values of each head from the cached latents of all tokens of each context, as in training.
        """
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
    """Replace the attention of all layers of `model`, and of its first `predictions` prediction modules, by attention over the cache.

    `context` is the largest number of tokens of a sequence; `invariant` as in `CurrentStep`. Before each forward pass, the
    caller sets `inputs` of the returned object to the inputs of the step.
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
    """Return the rotary tables of each group of layers for positions 0 to `context` - 1, for activations of `dtype`. `(context, ·)`.

    A group without rotation has None.
    """
    positions = torch.arange(context, device=cache.tensors[0].device)
    tables = [tables_of(group.mixer.rotary, positions, dtype, context) for group in cache.groups]
    # A table is `(1, context, 1, ·)`, for the dimensions batch, position and head.
    return [None if rope is None else tuple(table[0, :, 0] for table in rope) for rope in tables]


def leave_to(attend: CachedAttention, attention: Attention) -> None:
    """Switch off the norms and the query factor of an attention module if the hook `attend` applies them instead."""
    if attend.norms is not None or attend.rotated_norms is not None:
        attention.qk_norm = False
        attention.query_factor = 1.0


def _written(group: LayerGroup, rope: RotaryTables | None, *, on_cuda: bool) -> RotaryTables | None:
    """Return the cosines and sines of a group whose rotation is fused with the write into the cache.

    The result is None for a group without rotation, and for a group whose layers must rotate before the write. On a CPU the kernels of
    decodes only support rotation of whole heads, where element i is rotated with element i + head_dim / 2.
    """
    mixer = group.mixer
    rotates_before = isinstance(mixer, AttentionSpec) and not mixer.rotates_as_written(on_cuda=on_cuda)
    return None if rope is None or rotates_before else rope[:2]


def _head_norms(attention: Attention) -> HeadNorms:
    """Return the norms of queries and keys as the kernel that writes the cache takes them."""
    norm = attention.q_norm
    return HeadNorms(norm.weight, attention.k_norm.weight, norm.eps, plus_one=norm.plus_one)
