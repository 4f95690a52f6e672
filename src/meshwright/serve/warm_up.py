"""Steps before the first request, so that no kernel is compiled while a request waits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.policies.batch_request import BatchLimits, CacheGroup, Request
from meshwright.policies.batching import BatchPolicy
from meshwright.policies.cache_blocks import CacheBlocks
from meshwright.serve.batch_inputs import BatchInputs
from meshwright.serve.model_runner import ModelRunner
from meshwright.serve.sampling import GREEDY, Sampler, SamplingOptions

PROMPT_TOKENS = 17
"""Tokens of a prompt, so many that its matmuls take the libraries' kernels and not those for few tokens."""
SAMPLING = GREEDY, SamplingOptions(temperature=0.5), SamplingOptions(temperature=0.5, top_p=0.5)
"""Options that take all kernels by which tokens are drawn."""


@torch.inference_mode()
def warm_up(
    runner: ModelRunner, inputs: BatchInputs, sampler: Sampler, groups: Sequence[CacheGroup], context: int
) -> None:
    """Compute prompts, the later ones beside decodes, while there are no requests.

    A kernel is compiled when it is first used, which takes about a second. A cache or a context too small for that is left as it is.
    """
    if inputs.prompt_unit > 1:
        for tokens in range(inputs.prompt_unit, min(context, inputs.step_tokens) + 1, inputs.prompt_unit):
            runner.warm_prompt(tokens)
    for tokens in runner.few_tokens:
        if tokens <= min(context, inputs.step_tokens):
            runner.warm_prompt(tokens)
    size = inputs.tokens_per_block
    new_tokens = len(SAMPLING)
    tokens = min(PROMPT_TOKENS, min(context, *((group.blocks - 1) * size for group in groups)) - new_tokens)
    if tokens < 1:
        return
    limits = BatchLimits(tokens=tokens, sequences=len(SAMPLING), prefix_cache=False)
    policy = BatchPolicy(limits, CacheBlocks(groups, size))
    rows = {number: number for number in range(min(len(SAMPLING), inputs.padding_row))}
    for number in rows:
        sampler.assign(number, SAMPLING[number])
        policy.add(Request(number, [0] * tokens, new_tokens))
        step = policy.next_step(0.0)
        assert step is not None
        packed = inputs.pack(step, rows, runner.decode_sizes)
        new = sampler.sample(runner.logits(packed), packed.sampled_rows, packed.sampled_positions)
        policy.complete(step, new.tolist())
    for row in rows.values():
        sampler.release(row)
        inputs.forget_row(row)
