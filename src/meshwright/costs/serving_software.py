"""Constants of the step times of other servers, so that a deployment can be planned as if they ran it.

A step's bytes and FLOPs are `costs.serve_work`'s. Six constants of a server say how fast its steps and requests are: shares of the
datasheet's bandwidth and peak, and times of a kernel, of a sum between devices, of a sequence in a step, and of a request.
serving_software.yaml lists them with the measurements that they were fitted to; `make fit-serving` writes it.
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
FOUR_BIT_SHARE = 0.7
"""Share of the other formats' rates that matmuls with 4-bit weights reach where these are dense, as their inputs are
scaled and rounded in each step, and where a device without matmuls of such a format converts the weights of experts.

With the constants of the table, the median error of a token's time at the 485 points with such weights is smallest here: 14.6% with 0.5,
11.9% with 0.6, 10.6% with 0.7, 12.6% with 0.8, 16.7% without."""
FOUR_BITS = ("nvfp4", "mxfp4", "int4")
SIXTEEN_BITS = ("bf16", "fp16")
LINK_SHARE = 0.7
"""Share of the bandwidth between devices that sums reach.

A usual figure of large sums. The points do not determine it: sums of decodes are short, and from 0.6 to 1 the median error at 717 points of
four devices or more stays between 9.7% and 10.0%, as `sum_seconds` has the time of a sum."""
MATMUL_FORMATS: dict[PricedFormat, tuple[str, ...]] = {
    "bf16": ("bf16", "fp16"),
    "fp8": ("fp8",),
    "int8": ("int8",),
    "mxfp8": ("mxfp8", "fp8", "bf16"),
    "nvfp4": ("nvfp4", "bf16"),
    "mxfp4": ("mxfp8", "bf16"),
    "int4": ("bf16", "fp16"),
}
"""By format of weights, the formats of matmuls with them; the first that a device has counts."""


@dataclass(frozen=True, kw_only=True)
class ServingSoftware:
    """The constants of one server. Shares are relative to the datasheet's figure."""

    memory_share: float
    """Share of the memory bandwidth at which weights, keys and values are read."""
    peak_share: float
    """Share of the peak that matmuls and attention reach."""
    kernel_seconds: float
    """Time of a kernel beside its bytes and FLOPs."""
    sum_seconds: float
    """Latency of a sum or an exchange between two devices; of n devices, log2(n) times as long."""
    sequence_seconds: float
    """Time of each running request in a step: sampling, scheduling, text."""
    request_seconds: float
    """Time from a request's arrival to its first token beside steps: HTTP, tokenizer, scheduling."""


@dataclass(frozen=True, kw_only=True)
class SoftwareTable:
    """The table of servers, with what it was fitted to."""

    fitted: str
    """Day of the fit, ISO 8601."""
    source: str
    """The measurements."""
    measured: str
    """Days of the first and the last measurement."""
    software: dict[str, ServingSoftware]
    """Constants by name of the server."""


@cache
def software_table() -> SoftwareTable:
    """The constants in serving_software.yaml."""
    return from_plain(SoftwareTable, yaml.safe_load(FILE.read_text(encoding="utf-8")))


def matmul_format(chip: Chip, weights: PricedFormat | None) -> str:
    """The number format of a device's matmuls with weights in a format; one that it lacks if it has none for them."""
    names = MATMUL_FORMATS[weights or "bf16"]
    return next((name for name in names if name in chip.peak_flops), names[0])


def software_constants(
    software: ServingSoftware, work: DeviceWork, machine: Machine, chip: Chip, formats: Quantisation, expert_peak: float
) -> StepConstants:
    """Constants of a step on one device, a `chip`, for a model's `work`.

    `machine` has the rates of matmuls with the weights, `expert_peak` is that with routed experts.
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
    """Communication of a step between the devices of an instance: so many operations, which send `token_bytes` a token in all."""
    rate = LINK_SHARE * number(machine.link if ranks <= number(machine.domain) else machine.nic)
    return ExchangeTime(operations * software.sum_seconds * log2(ranks), token_bytes / rate)
