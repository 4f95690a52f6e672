"""Constants of the step times of other inference servers, so that a deployment can be planned as if they ran it.

`costs.serve_work` computes the bytes and FLOPs of a step. Six constants of a server say how long its steps and requests
take: shares of the datasheet's bandwidth and peak, and the seconds of a kernel, of an exchange between devices, of a
sequence in a step, and of a request. serving_software.yaml lists them with the measurements to which they were fitted;
`make fit-serving` writes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import log2
from pathlib import Path

import yaml

from meshwright.costs.device_rates import Machine
from meshwright.costs.plan_costs import number
from meshwright.costs.serve_work import DeviceWork
from meshwright.costs.step_times import ExchangeTime
from meshwright.spec.chips import Chip
from meshwright.spec.deployment import PricedFormat, Quantisation
from meshwright.spec.fields import from_plain
from meshwright.spec.serve_profile import StepConstants

FILE = Path(__file__).with_name("serving_software.yaml")
"""The fitted constants of all servers."""
FOUR_BIT_SHARE = 0.7
"""Rates with 4-bit weights, relative to the rates with other formats.

It applies in two cases. Dense weights: the inputs are scaled and rounded in each step. Experts on a device without
matmuls in such a format: the weights are converted.

With the constants of the table, the median error of the time per token at the 485 points with 4-bit weights is least
here: 14.6% with a share of 0.5, 11.9% with 0.6, 10.6% with 0.7, 12.6% with 0.8, and 16.7% with 1.
"""
FOUR_BITS = ("nvfp4", "mxfp4", "int4")
"""Formats with 4 bits per weight."""
SIXTEEN_BITS = ("bf16", "fp16")
"""Formats with 16 bits per weight."""
LINK_SHARE = 0.7
"""Share of the bandwidth between devices that all-reduces and all-to-alls reach.

It is a usual figure for large all-reduces. The measured points do not determine it, because the all-reduces of decodes
are short: from 0.6 to 1, the median error at 717 points with four devices or more stays between 9.7% and 10.0%. Their
time is in `sum_seconds`.
"""
MATMUL_FORMATS: dict[PricedFormat, tuple[str, ...]] = {
    "bf16": ("bf16", "fp16"),
    "fp8": ("fp8",),
    "int8": ("int8",),
    "mxfp8": ("mxfp8", "fp8", "bf16"),
    "nvfp4": ("nvfp4", "bf16"),
    "mxfp4": ("mxfp8", "bf16"),
    "int4": ("bf16", "fp16"),
}
"""Format of weights → formats of the matmuls with them, the best first.

A device uses the first of these that it has.
"""


@dataclass(frozen=True, kw_only=True)
class ServingSoftware:
    """The constants of one inference server. Shares are relative to the datasheet's figure."""

    memory_share: float
    """Share of the memory bandwidth at which weights, keys and values are read."""
    peak_share: float
    """Share of the peak that matmuls and attention reach."""
    kernel_seconds: float
    """Seconds of a kernel in addition to its bytes and FLOPs."""
    sum_seconds: float
    """Latency of an all-reduce or an all-to-all between two devices in seconds.

    With n devices it takes log2(n) times as long.
    """
    sequence_seconds: float
    """Seconds that each running request adds to a step: sampling, scheduling, decoding of its text."""
    request_seconds: float
    """Seconds from a request's arrival to its first token in addition to steps: HTTP, tokenizer, scheduling."""


@dataclass(frozen=True, kw_only=True)
class SoftwareTable:
    """The constants of all servers, and to what they were fitted."""

    fitted: str
    """Date of the fit, ISO 8601."""
    source: str
    """Where the measurements come from."""
    measured: str
    """Dates of the first and the last measurement."""
    software: dict[str, ServingSoftware]
    """Constants by the name of the server."""


@cache
def software_table() -> SoftwareTable:
    """Return the content of serving_software.yaml."""
    return from_plain(SoftwareTable, yaml.safe_load(FILE.read_text(encoding="utf-8")))


def matmul_format(chip: Chip, weights: PricedFormat | None) -> str:
    """Return the number format in which a device multiplies with weights in the format `weights` (None: bf16).

    If the device has no suitable matmuls, the result is a format that it lacks, so that the caller can report it.
    """
    names = MATMUL_FORMATS[weights or "bf16"]
    return next((name for name in names if name in chip.peak_flops), names[0])


def software_constants(
    software: ServingSoftware, work: DeviceWork, machine: Machine, chip: Chip, formats: Quantisation, expert_peak: float
) -> StepConstants:
    """Return the constants of a step on one device of type `chip`, for a model whose sizes are `work`.

    `machine` has the rates of the device, with the peak of matmuls in the format of the weights. `expert_peak` is the
    peak in FLOP/s of matmuls with routed experts. `formats` are the number formats of the weights and the cache.
    """
    memory = number(machine.hbm) * software.memory_share
    peak = software.peak_share
    experts = formats.experts or formats.weights
    narrow = FOUR_BIT_SHARE if formats.weights in FOUR_BITS else 1.0
    converted = experts in FOUR_BITS and matmul_format(chip, experts) in SIXTEEN_BITS
    expert_narrow = FOUR_BIT_SHARE if converted else 1.0
    half = peak * number(machine.half_peak)
    return StepConstants(
        weight_bytes_per_s=narrow * memory,
        expert_bytes_per_s=expert_narrow * memory,
        flops_per_s=narrow * peak * number(machine.peak),
        expert_flops_per_s=expert_narrow * peak * expert_peak,
        cache_bytes_per_s=memory,
        decode_flops_per_s=half,
        attention_flops_per_s=half * work.attention_flops / work.expanded_flops,
        decode_seconds=software.kernel_seconds * work.kernels,
        prompt_seconds=0.0,
        sequence_seconds=software.sequence_seconds,
        chunk_seconds=0.0,
    )


def software_exchange(
    software: ServingSoftware, machine: Machine, ranks: int, operations: int, token_bytes: float
) -> ExchangeTime:
    """Return the communication time of a step between the `ranks` devices of an instance.

    `operations` is the number of all-reduces and all-to-alls of a step. `token_bytes` are the bytes that a device sends
    for each token, in all of them together.
    """
    rate = LINK_SHARE * number(machine.link if ranks <= number(machine.domain) else machine.nic)
    return ExchangeTime(operations * software.sum_seconds * log2(ranks), token_bytes / rate)
