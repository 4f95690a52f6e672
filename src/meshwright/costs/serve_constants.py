"""Constants of the inference engine's step time on devices without a measured profile.

Shares and times were fitted to this engine with Llama-3-8B on one H200 (benchmarks/results, `engine-H200` and
`arrivals-H200`). The constants of experts were fitted with Qwen3-30B-A3B (`serve-moe-H200`, `moe-decode-H200`). On
other devices they are a guess.

"Rounded" means weights, or keys and values, in 8 or 4 bits. The shares were measured in fp8; other narrow formats are
assumed to have the same shares.
"""

from __future__ import annotations

from meshwright.costs.device_rates import Machine
from meshwright.costs.plan_costs import number
from meshwright.spec.deployment import PricedFormat
from meshwright.spec.serve_profile import StepConstants

WEIGHTS_SHARE = 0.71
"""Share of the memory bandwidth with which a step reads weights in 16 bits."""
ROUNDED_WEIGHTS_SHARE = 0.59
"""Share of the memory bandwidth with which a step reads rounded weights."""
EXPERTS_SHARE = 0.88
"""As `WEIGHTS_SHARE`, for routed experts. A step reads each expert that gets at least one token once."""
ROUNDED_EXPERTS_SHARE = 0.80
"""As `ROUNDED_WEIGHTS_SHARE`, for routed experts."""
ROUTED_SECONDS = 22e-6
"""Seconds of a layer with routed experts in addition to reading their weights: eleven kernels run one after another."""
ROUNDED_ROUTED_SECONDS = 27e-6
"""As `ROUTED_SECONDS`, for rounded experts: some of the kernels take longer, because they round to fp8."""
MATMULS_SHARE = 0.63
"""Share of the peak that matmuls with weights in 16 bits reach."""
ROUNDED_MATMULS_SHARE = 0.55
"""Share of the peak that matmuls with rounded weights reach."""
CACHE_SHARE = 0.95
"""Share of the memory bandwidth with which decodes read keys and values in 16 bits."""
ROUNDED_CACHE_SHARE = 0.60
"""Share of the memory bandwidth with which decodes read rounded keys and values, which the attention kernel converts.
"""
ATTENTION_SHARE = 0.55
"""Share of the peak that the attention of prompts reaches."""
TEXT_BYTES_PER_S = 3e10
"""Bytes/s at which one program of the attention kernel reads keys and values.

It counts only if a profile states the number of programs.
"""
DECODE_SECONDS = 0.3e-3
"""`StepConstants.decode_seconds` of an H200."""
PROMPT_SECONDS = 7e-3
"""`StepConstants.prompt_seconds` of an H200.

A step with prompts is launched as several CUDA graphs, while the device may still compute decodes
(`serve-prediction-H200`).
"""
SEQUENCE_SECONDS = 7e-6
"""`StepConstants.sequence_seconds` of an H200."""
CHUNK_SECONDS = 50e-6
"""`StepConstants.chunk_seconds` of an H200."""


def usual_constants(
    machine: Machine,
    weights: PricedFormat | None = None,
    experts: PricedFormat | None = None,
    expert_peak: float = 0.0,
    kv_cache: PricedFormat | None = None,
) -> StepConstants:
    """Return the constants of a device from its datasheet.

    `machine` has the rates of the device, with the peak of matmuls in the format `weights`. `expert_peak` is the peak
    in FLOP/s of matmuls in the format `experts`; 0 means that experts have the peak of the other matmuls. `kv_cache` is
    the format of cached keys and values. A format of None is bf16.
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
