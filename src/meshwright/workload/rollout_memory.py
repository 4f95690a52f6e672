"""The inference engine that runs next to an RL trainer: how many requests it runs, the size of its cache, and its
memory on each rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from meshwright.config.complete import dimensions_of_run
from meshwright.families.folder import folder_spec
from meshwright.spec.engine import EngineOptions
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.fields import from_plain
from meshwright.spec.model import ModelSpec, parameter_count, without_adapter
from meshwright.spec.run import RunSpec
from meshwright.workload.cache_size import CacheRoom, activation_bytes, bytes_per_block, layer_groups

SCORED_TOKENS = 1 << 15
"""Maximum number of tokens, padding included, that a reward model scores in one batch (`serve.reward_scorer`).

A single longer sequence is a batch of its own.
"""
MOST_REQUESTS = 256
"""Maximum number of answers that an engine computes at the same time."""


def rollout_options(run: RunSpec, ranks: int) -> EngineOptions:
    """Return the sizes of the engine on each of `ranks` ranks.

    By default its cache holds the longest sequences of all its requests.

    Example: 64 prompts with 8 answers each on 4 ranks are 128 requests per rank. With train.seq_len 1,024 and blocks of
    16 tokens, the cache has 1 + 128 · 65 blocks.
    """
    assert run.rl is not None
    prompts = -(-run.train.global_batch * run.rl.updates // ranks)
    requests = min(MOST_REQUESTS, prompts * run.rl.samples)
    context = min(run.train.seq_len + 1, run.model.max_seq_len)
    sizes = EngineOptions(sequences=requests, context=context, invariant=run.rl.exact, texts=False)
    whole = CacheRoom(context, requests, sizes.most_step_tokens, sizes.tokens_per_block).most_blocks
    blocks = min(whole, -(-run.rl.cache_tokens // sizes.tokens_per_block)) if run.rl.cache_tokens else whole
    return replace(sizes, cache_blocks=blocks)


def rollout_bytes(run: RunSpec, ranks: int, itemsize: int) -> int:
    """Return the bytes that a rank needs in addition to the trainer's; 0 if the run is not RL.

    They are the weights, cache and activations of the engine; the reference model, if there is a KL penalty; and the
    reward model, if there is one. Numbers have `itemsize` bytes.
    """
    if run.rl is None:
        return 0
    options = rollout_options(run, ranks)
    groups = layer_groups(run.model)
    assert options.context is not None and options.cache_blocks is not None
    room = CacheRoom(options.context, options.sequences, options.most_step_tokens, options.tokens_per_block)
    blocks = room.group_blocks(groups, options.cache_blocks)
    cache = sum(
        count * bytes_per_block(group, options.tokens_per_block, itemsize)
        for count, group in zip(blocks, groups, strict=True)
    )
    copies = 1 + (run.rl.kl.weight > 0)
    step = activation_bytes(run.model, itemsize, options.sequences, options.most_step_tokens)
    judge = 0 if run.rl.reward.model is None else _reward_model_bytes(run.rl.reward.model, itemsize)
    return copies * parameter_count(run.model) * itemsize + cache + step + judge


@lru_cache(maxsize=8)
def _reward_model_bytes(folder: str, itemsize: int) -> int:
    """Return the bytes of a reward model and of the activations of one batch.

    They are 0 for a folder that cannot be read; the start of the run reports that.
    """
    try:
        fields = dimensions_of_run(Path(folder)) or folder_spec(Path(folder))
        spec = without_adapter(from_plain(ModelSpec, fields))
    except MeshwrightError:
        return 0
    return parameter_count(spec) * itemsize + activation_bytes(spec, itemsize, 1, SCORED_TOKENS)
