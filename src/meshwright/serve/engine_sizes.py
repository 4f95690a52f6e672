"""Functions that compute the sizes and formats of an engine from its options, its models and the device."""

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
    """Return the number of cache blocks: `options.cache_blocks`, or else the number that fits on the device in addition to the models.

    It is the argument `blocks` of `CacheRoom.group_blocks`. Raises OutOfResources if the cache of one request does not fit.
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
    """Return the sizes from which `CacheRoom` computes how many blocks each group of the cache needs."""
    return CacheRoom(context_of(model, options), options.sequences, options.most_step_tokens, options.tokens_per_block)


def prompt_unit(device: torch.device, cache: KVCache, options: EngineOptions, prompt_sizes: Sequence[int]) -> int:
    """Return `BatchInputs.prompt_unit`.

    On a CPU it is 1. On a GPU it is `PROMPT_UNIT`, but 0 in these cases, in which all tokens read the cache:

    - a group of layers has a window;
    - CUDA graphs compute all steps with prompts;
    - the cache is fp8, or results are invariant: then they must not depend on where the chunks of a prompt begin.
    """
    if device.type == "cpu":
        return 1
    windows = any(group.window is not None for group in cache.groups)
    all_graphs = bool(prompt_sizes) and options.most_step_tokens <= prompt_sizes[-1]
    return 0 if windows or all_graphs or cache.scales is not None or options.invariant else PROMPT_UNIT


def cache_dtype(model: Decoder, options: EngineOptions) -> torch.dtype:
    return model.embed.weight.dtype if options.kv_cache is None else E4M3


def has_graphs(model: Decoder, options: EngineOptions) -> bool:
    """Return whether the engine replays steps as CUDA graphs."""
    if options.graphs is not None:
        return options.graphs
    return model.embed.weight.is_cuda and options.absorb and not _host_reads_experts(model)


def _host_reads_experts(model: Decoder) -> bool:
    """Return whether the host must read, in each step, how many rows each expert has. This is not possible in a CUDA graph."""
    return model.spec.routed_layers > 0 and not sizes_stay_on_device(model.embed.weight)


def context_of(model: Decoder, options: EngineOptions) -> int:
    return min(options.context or model.spec.max_seq_len, model.spec.max_seq_len)
