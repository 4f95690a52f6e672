"""Predicts a plan's step in every number format of matmuls, for dense layers and for experts (the command `plan
--precision`).

This release cannot train in some of these formats; each result says whether it can. The rates of fp4 and MXFP8 are those
of the datasheet, times the share that published trainings on Blackwell reach (constants.yaml: gemm_low, gemm_block,
gemm_fp4).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.costs.device_rates import BLOCKWISE, FOUR_BIT, ROWWISE, TENSORWISE, Machine
from meshwright.costs.machine_rates import FORMATS, chip_of, machine_of
from meshwright.costs.plan_costs import Pricing, as_nodes, mean_cost, number, pricing
from meshwright.spec.named_values import value_named
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec


@dataclass(frozen=True)
class MatmulFormat:
    """A number format of matmuls, with its scales."""

    name: str
    """The name that `--precision` takes."""
    number_format: str
    """The number format under which the chip table has the matmul rate (`Chip.peak_flops`): fp8 for all scales of fp8."""
    kind: float
    """The value of `Machine.matmul_format`."""
    bits: int
    """Bits of a number."""
    linear: str | None
    """The value of `plan.linear` that trains in this format; None if this release cannot."""
    accuracy: str
    """What is known about the accuracy of training in this format."""


MATMUL_FORMATS = (
    MatmulFormat("bf16", "bf16", 0.0, 16, "compute", "the reference"),
    MatmulFormat(
        "fp8-tensor",
        "fp8",
        TENSORWISE,
        8,
        "fp8_tensorwise",
        "one scale a tensor: a product of normally distributed numbers is 3.5% off, losses agree with bf16 in the mean "
        "(docs/design/fp8.md)",
    ),
    MatmulFormat("fp8-row", "fp8", ROWWISE, 8, "fp8_rowwise", "one scale a row: outliers of one row harm no other"),
    MatmulFormat(
        "fp8-block",
        "fp8",
        BLOCKWISE,
        8,
        None,
        "scales of 128 × 128 weights and 128 activations: loss within 0.25% of bf16 (DeepSeek-V3, arXiv 2412.19437, appendix B)",
    ),
    MatmulFormat(
        "mxfp8",
        "mxfp8",
        BLOCKWISE,
        8,
        None,
        "one scale for 32 numbers: same loss as bf16 for an 8B model and 15T tokens (NVIDIA, arXiv 2506.08027)",
    ),
    MatmulFormat(
        "nvfp4",
        "nvfp4",
        FOUR_BIT,
        4,
        None,
        "one scale for 16 numbers: MMLU-Pro 62.58% (fp8: 62.62%) for a 12B model and 10T tokens, with parts in bf16 (NVIDIA, "
        "arXiv 2509.25149)",
    ),
)
"""The formats, the widest first."""


@dataclass(frozen=True)
class FormatPrice:
    """The plan's predicted step, with the dense layers in one format and the experts in the same or another one."""

    dense: str
    """Name of the format of the dense layers."""
    experts: str
    """Name of the format of the experts; the same as `dense` for a model without experts."""
    seconds: float
    """Predicted seconds of a step."""
    cannot_train: str
    """Why this release cannot train with these formats; empty if it can."""
    accuracy: str
    """What is known about the accuracy of the narrower of the two formats."""


def format_named(name: str) -> MatmulFormat:
    """Return the format with this name. Raises BadInput with the nearest name.

    Case does not matter:

    >>> format_named("FP8-Row").name
    'fp8-row'
    """
    return value_named(name, {entry.name: entry for entry in MATMUL_FORMATS}, "--precision")


def priced_formats(run: RunSpec, plan: Plan, narrowest: MatmulFormat) -> tuple[FormatPrice, ...]:
    """Return the plan's predicted step in each format of the chip with at least as many bits as `narrowest`, the
    fastest first.

    The plan's own prediction comes from a simulation. It is multiplied by a ratio of two times by the cost model's closed
    form (`plan_costs.mean_cost`): the step with these formats, divided by the step with the plan's formats. The result is
    empty if the plan has no predicted step time.
    """
    cluster = as_nodes(run.cluster)
    chip = chip_of(cluster)
    priced = pricing(run.model, run.train, plan, cluster)
    if priced is None or chip is None or plan.predicted is None or not plan.predicted.step_seconds:
        return ()
    share = plan.predicted.memory_peak_bytes / number(priced.machine.memory)
    allowed = [
        entry
        for entry in MATMUL_FORMATS
        if entry.bits >= narrowest.bits and entry.number_format in chip.peak_flops and entry.number_format in FORMATS
    ]

    def closed_form_seconds(inputs: Pricing) -> float:
        return number(mean_cost(run.model, run.train, plan, inputs, share).seconds)

    scale = plan.predicted.step_seconds / closed_form_seconds(priced)
    entries = []
    for dense in allowed:
        # Without experts, there is only the entry in which `experts` is the same as `dense`.
        expert_formats = [dense] if plan.experts is None else allowed
        for experts in expert_formats:
            datasheet = machine_of(cluster, dense.number_format)
            machine = _machine(priced, datasheet, dense, chip.peak_flops[experts.number_format], experts)
            entries.append(
                FormatPrice(
                    dense.name,
                    experts.name,
                    scale * closed_form_seconds(_on(priced, machine)),
                    _refusal(dense, experts),
                    dense.accuracy if dense.bits <= experts.bits else experts.accuracy,
                )
            )
    return tuple(sorted(entries, key=lambda entry: entry.seconds))


def _refusal(dense: MatmulFormat, experts: MatmulFormat) -> str:
    """Return why this release cannot train with these two formats; empty if it can."""
    missing = next((entry.name for entry in (dense, experts) if entry.linear is None), None)
    if missing:
        return f"this release has no matmuls in {missing}"
    return "" if dense is experts else "plan.linear is one format for dense layers and experts"


def _machine(
    priced: Pricing, datasheet: Machine, dense: MatmulFormat, expert_peak: float, experts: MatmulFormat
) -> Machine:
    """Return the plan's machine with the matmul rates of these formats.

    Its measured rates of other operations do not change.
    """
    return replace(
        priced.machine,
        peak=datasheet.peak,
        half_peak=datasheet.half_peak,
        matmul_format=dense.kind,
        expert_peak=expert_peak,
        expert_format=experts.kind,
    )


def _on(priced: Pricing, machine: Machine) -> Pricing:
    """Return the inputs of the cost model with another machine, which all blocks use."""
    return replace(priced, machine=machine, other_formats={})
