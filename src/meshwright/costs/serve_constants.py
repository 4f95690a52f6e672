"""Constants of the engine's step time on devices without a measured profile.

Shares and times are fitted to this engine on one H200 with Llama-3-8B (benchmarks/results, `engine-H200` and `arrivals-H200`), those of
experts with Qwen3-30B-A3B (`serve-moe-H200`, `moe-decode-H200`). On other devices they are a guess.
"""

from __future__ import annotations

from meshwright.costs.device_rates import Machine
from meshwright.costs.plan_costs import number
from meshwright.spec.deployment import PricedFormat
from meshwright.spec.serve_profile import StepConstants

WEIGHTS_SHARE = 0.71
ROUNDED_WEIGHTS_SHARE = 0.59
"""Share of the memory bandwidth with which a step reads weights in 16 bits, and in fp8; other formats are taken to be as fp8."""
EXPERTS_SHARE = 0.88
ROUNDED_EXPERTS_SHARE = 0.80
"""The same shares for routed experts, whose kernels read those with a token once."""
ROUTED_SECONDS = 22e-6
ROUNDED_ROUTED_SECONDS = 27e-6
"""Time of a layer with routed experts beside that of its bytes: eleven kernels follow one another, some longer where they round to fp8."""
MATMULS_SHARE = 0.63
ROUNDED_MATMULS_SHARE = 0.55
"""Share of the peak that matmuls with weights in 16 bits and in fp8 reach; other formats are taken to be as fp8."""
CACHE_SHARE = 0.95
ROUNDED_CACHE_SHARE = 0.60
"""Shares of the memory bandwidth with which decodes read keys and values in 16 bits, and in fp8, which each program converts."""
ATTENTION_SHARE = 0.55
"""Share of the peak that the attention of prompts reaches."""
TEXT_BYTES_PER_S = 3e10
"""Rate at which one program of a decode reads keys and values, where a profile says how many there are."""
DECODE_SECONDS = 0.3e-3
PROMPT_SECONDS = 7e-3
SEQUENCE_SECONDS = 7e-6
CHUNK_SECONDS = 50e-6
"""`StepConstants` of these names. Prompts are launched in pieces of graphs, beside decodes (`serve-prediction-H200`)."""


def usual_constants(
    machine: Machine,
    weights: PricedFormat | None = None,
    experts: PricedFormat | None = None,
    expert_peak: float = 0.0,
    kv_cache: PricedFormat | None = None,
) -> StepConstants:
    """Constants of a device by its datasheet; `machine` has the rates of matmuls with `weights`, `expert_peak` is that
    with experts.

    An `expert_peak` of 0 stands for that of the other matmuls.
    """
    memory = number(machine.hbm)
    peak = number(machine.peak)
    rounded, rounded_experts, rounded_cache = [kind not in (None, "bf16") for kind in (weights, experts, kv_cache)]
    return StepConstants(
        weight_bytes_per_s=(ROUNDED_WEIGHTS_SHARE if rounded else WEIGHTS_SHARE) * memory,
        expert_bytes_per_s=(ROUNDED_EXPERTS_SHARE if rounded_experts else EXPERTS_SHARE) * memory,
        routed_seconds=ROUNDED_ROUTED_SECONDS if rounded_experts else ROUTED_SECONDS,
        flops_per_s=(ROUNDED_MATMULS_SHARE if rounded else MATMULS_SHARE) * peak,
        expert_flops_per_s=(ROUNDED_MATMULS_SHARE if rounded_experts else MATMULS_SHARE) * expert_peak,
        cache_bytes_per_s=(ROUNDED_CACHE_SHARE if rounded_cache else CACHE_SHARE) * memory,
        text_bytes_per_s=TEXT_BYTES_PER_S,
        attention_flops_per_s=ATTENTION_SHARE * number(machine.half_peak),
        decode_seconds=DECODE_SECONDS,
        prompt_seconds=PROMPT_SECONDS,
        sequence_seconds=SEQUENCE_SECONDS,
        chunk_seconds=CHUNK_SECONDS,
    )
