"""Sizes and formats of an engine, by its options, its models and their device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.kernels.fp8_matmuls import E4M3
from meshwright.kernels.grouped import sizes_stay_on_device
from meshwright.models.decoder import Decoder
from meshwright.serve.batch_inputs import PROMPT_UNIT
from meshwright.serve.kv_cache import CacheRoom, KVCache, fitting_blocks
from meshwright.spec.engine import EngineOptions, Speculation


def blocks_that_fit(model: Decoder, options: EngineOptions, draft_model: Decoder | None = None) -> int:
    """Blocks that the options ask for, or else that fit beside the models on their device: `blocks` of `CacheRoom.group_blocks`.

    Raises OutOfResources if not even one request fits.
    """
    weight = model.embed.weight
    speculation = options.speculation or (None if draft_model is None else Speculation())
    return options.cache_blocks or fitting_blocks(
        model.spec,
        weight.device,
        weight.dtype,
        cache_room(model, options),
        cache_dtype=cache_dtype(model, options),
        draft=None if draft_model is None else draft_model.spec,
        drafts=0 if speculation is None else speculation.tokens,
        predictions=options.predictions,
    )


def cache_room(model: Decoder, options: EngineOptions) -> CacheRoom:
    """What decides how many blocks each group of the cache needs."""
    return CacheRoom(context_of(model, options), options.sequences, options.most_step_tokens, options.tokens_per_block)


def prompt_unit(device: torch.device, cache: KVCache, options: EngineOptions, prompt_sizes: Sequence[int]) -> int:
    """`BatchInputs.prompt_unit`; 0 on a GPU with windows, or if results must not depend on where a prompt's chunks begin.

    Also 0 if graphs compute all steps: their attention reads the cache.
    """
    if device.type == "cpu":
        return 1
    windows = any(group.window is not None for group in cache.groups)
    all_graphs = bool(prompt_sizes) and options.most_step_tokens <= prompt_sizes[-1]
    return 0 if windows or all_graphs or cache.scales is not None or options.invariant else PROMPT_UNIT


def cache_dtype(model: Decoder, options: EngineOptions) -> torch.dtype:
    return model.embed.weight.dtype if options.kv_cache is None else E4M3


def has_graphs(model: Decoder, options: EngineOptions) -> bool:
    """Whether steps are replayed as CUDA graphs."""
    if options.graphs is not None:
        return options.graphs
    return model.embed.weight.is_cuda and options.absorb and not _host_reads_experts(model)


def _host_reads_experts(model: Decoder) -> bool:
    """Whether each step waits for the host to read the experts' numbers of rows, which a CUDA graph cannot do."""
    return model.spec.routed_layers > 0 and not sizes_stay_on_device(model.embed.weight)


def context_of(model: Decoder, options: EngineOptions) -> int:
    return min(options.context or model.spec.max_seq_len, model.spec.max_seq_len)
