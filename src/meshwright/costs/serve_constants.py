"""Constants of the engine's step time on devices without a measured profile."""

from __future__ import annotations

from meshwright.costs.device_rates import Machine
from meshwright.costs.plan_costs import number
from meshwright.spec.engine import Fp8
from meshwright.spec.serve_profile import StepConstants

WEIGHTS_SHARE, CACHE_SHARE = 0.77, 0.80
"""Shares of the memory bandwidth with which a step reads weights, and keys and values."""
PRODUCTS_SHARE, ATTENTION_SHARE = 0.66, 0.40
"""Shares of the peak of products with weights, and of the attention of prompts."""
DECODE_SECONDS, PROMPT_SECONDS, SEQUENCE_SECONDS, CHUNK_SECONDS = 0.4e-3, 10e-3, 8e-6, 50e-6


def usual_constants(machine: Machine, weights: Fp8 | None = None) -> StepConstants:
    """Constants of a device by its datasheet; `machine` has the rates for products in the format of the weights."""
    del weights
    memory, peak = number(machine.hbm), number(machine.peak)
    return StepConstants(
        weight_bytes_per_s=WEIGHTS_SHARE * memory,
        flops_per_s=PRODUCTS_SHARE * peak,
        cache_bytes_per_s=CACHE_SHARE * memory,
        attention_flops_per_s=ATTENTION_SHARE * number(machine.half_peak),
        decode_seconds=DECODE_SECONDS,
        prompt_seconds=PROMPT_SECONDS,
        sequence_seconds=SEQUENCE_SECONDS,
        chunk_seconds=CHUNK_SECONDS,
    )
