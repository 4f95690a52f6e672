"""`warm_up` computes some steps before the first request, so that no request waits while a kernel is compiled."""

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
"""Number of tokens of a prompt: enough that its matmuls use the libraries' kernels, and not the kernels for few tokens."""
SAMPLING = GREEDY, SamplingOptions(temperature=0.5), SamplingOptions(temperature=0.5, top_p=0.5)
"""Options of the requests. Together they use all kernels that draw tokens."""


@torch.inference_mode()
def warm_up(
    runner: ModelRunner, inputs: BatchInputs, sampler: Sampler, groups: Sequence[CacheGroup], context: int
) -> None:
    """Compute some prompts, without and with decodes in the same step. There must be no requests yet.

    A kernel is compiled at its first use, which takes about a second. If the cache or the context is too small for these prompts, the part
    with whole steps is left out.
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
