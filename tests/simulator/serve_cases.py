"""Instances whose steps have simple times, and requests for them."""

from __future__ import annotations

import random
from collections.abc import Callable

from meshwright.costs.serve_costs import InstanceCosts
from meshwright.costs.serve_work import DeviceWork
from meshwright.costs.step_times import InstanceStepTimes
from meshwright.spec.deployment import PREFIX_BLOCK, InstanceSpec, ServeLimits, TimedRequest
from meshwright.spec.serve_profile import StepConstants

LIMITS = ServeLimits(ttft_seconds=1.0, tpot_seconds=1.0)
BLOCK = 4
"""Tokens of a cache block."""
BLOCK_BYTES = 100.0


def simple_times(
    step: float = 0.5, token: float = 0.0, position: float = 0.0, launch: float = 0.0, longest: float = 0.0
) -> InstanceStepTimes:
    """Each step takes `step` seconds, and so many for each token, each position of a decode and each of the longest text.

    The host launches a step with a prompt in `launch` seconds.
    """
    work = DeviceWork(
        stored_bytes=0.0,
        dense_bytes=0.0,
        dense_flops=token,
        head_bytes=0.0,
        head_flops=0.0,
        expert_bytes=0.0,
        expert_flops=0.0,
        expert_slots=0.0,
        chosen_share=0.0,
        cache_bytes=position,
        kv_heads=1,
        attention_flops=0.0,
        windows=((None, 1.0),),
        routed_layers=0,
    )
    constants = StepConstants(
        weight_bytes_per_s=1.0,
        flops_per_s=1.0,
        cache_bytes_per_s=1.0,
        attention_flops_per_s=1.0,
        decode_seconds=step,
        prompt_seconds=launch,
        sequence_seconds=0.0,
        chunk_seconds=0.0,
        text_bytes_per_s=position / longest if longest else 0.0,
        decode_programs=1,
    )
    return InstanceStepTimes(work, constants)


def costs_of(
    times: InstanceStepTimes,
    *,
    blocks: int = 1000,
    sequences: int = 8,
    overlap: bool = False,
    size: int = BLOCK,
    rate: float = 1e9,
) -> Callable[[InstanceSpec], InstanceCosts]:
    """The same costs for every instance; blocks of `size` tokens, `rate` in bytes/s of a port."""
    costs = InstanceCosts(
        times=times,
        blocks=blocks,
        tokens_per_block=size,
        window=None,
        sequences=sequences,
        overlap=overlap,
        block_bytes=BLOCK_BYTES,
        port_bytes_per_s=rate,
    )
    return lambda instance: costs


def random_requests(count: int, seed: int, *, every: float, longest: int = 60) -> list[TimedRequest]:
    """Requests of random sizes with Poisson arrivals, on average `every` seconds."""
    draw, now, requests = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(1 / every)
        requests.append(TimedRequest(now, draw.randint(1, longest), draw.randint(1, longest)))
    return requests


def prefix_requests(count: int, seed: int, *, every: float) -> list[TimedRequest]:
    """Requests like `random_requests` whose prompts go on where earlier prompts ended, or within them."""
    draw, prompts, requests = random.Random(seed), [()], []
    for request in random_requests(count, seed, every=every):
        known = draw.choice(prompts)
        shared = known[: draw.randint(0, len(known))]
        prompts.append(blocks := (*shared, *(1000 * len(prompts) + new for new in range(draw.randint(0, 2))))[:4])
        tokens = max(1, len(blocks) * PREFIX_BLOCK - draw.choice([0, 1, 3, 40, 300]) + draw.choice([0, 0, 30]))
        requests.append(request._replace(input_tokens=tokens, prefix_blocks=blocks))
    return requests
