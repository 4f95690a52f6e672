"""Constants of the engine's step time on devices without a measured profile.

Shares and times are fitted to this engine on one H200 with Llama-3-8B (benchmarks/results, `engine-H200` and `arrivals-H200`), those of
experts with Qwen3-30B-A3B (`serve-moe-H200`). On other devices they are a guess.
"""

from __future__ import annotations

from meshwright.costs.device_rates import Machine
from meshwright.costs.plan_costs import number
from meshwright.spec.engine import WeightFormat
from meshwright.spec.serve_profile import StepConstants

WEIGHTS_SHARES: dict[WeightFormat | None, float] = {None: 0.71, "fp8": 0.59, "int8": 0.59}
"""Share of the memory bandwidth with which a step reads weights, by their format; int8's is taken to be that of fp8."""
EXPERT_SHARES: dict[WeightFormat | None, float] = {None: 0.86, "fp8": 0.80, "int8": 0.80}
"""The same share for routed experts, whose kernels read those with a token once; int8's is taken to be that of fp8."""
ROUTED_SECONDS = 26e-6
"""Time of a layer with routed experts beside that of its bytes: eleven kernels follow one another."""
PRODUCTS_SHARES: dict[WeightFormat | None, float] = {None: 0.63, "fp8": 0.55, "int8": 0.55}
"""Share of the peak that products with weights reach; int8's is taken to be that of fp8."""
CACHE_SHARE, ATTENTION_SHARE = 0.95, 0.55
"""Shares of the memory bandwidth that decodes reach with keys and values, and of the peak in the attention of prompts."""
TEXT_BYTES_PER_S = 3e10
"""Rate at which one program of a decode reads keys and values, where a profile says how many there are."""
DECODE_SECONDS, PROMPT_SECONDS, SEQUENCE_SECONDS, CHUNK_SECONDS = 0.3e-3, 7e-3, 7e-6, 50e-6
"""`StepConstants` of these names. Prompts are launched in pieces of graphs, beside decodes (`serve-prediction-H200`)."""


def usual_constants(machine: Machine, weights: WeightFormat | None = None) -> StepConstants:
    """Constants of a device by its datasheet; `machine` has the rates of products in the format of the weights."""
    memory, peak = number(machine.hbm), number(machine.peak)
    return StepConstants(
        weight_bytes_per_s=WEIGHTS_SHARES[weights] * memory,
        expert_bytes_per_s=EXPERT_SHARES[weights] * memory,
        routed_seconds=ROUTED_SECONDS,
        flops_per_s=PRODUCTS_SHARES[weights] * peak,
        cache_bytes_per_s=CACHE_SHARE * memory,
        text_bytes_per_s=TEXT_BYTES_PER_S,
        attention_flops_per_s=ATTENTION_SHARE * number(machine.half_peak),
        decode_seconds=DECODE_SECONDS,
        prompt_seconds=PROMPT_SECONDS,
        sequence_seconds=SEQUENCE_SECONDS,
        chunk_seconds=CHUNK_SECONDS,
    )
