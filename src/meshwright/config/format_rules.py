"""Rules about number formats: which formats the devices compute in, and what fp8 products need."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from meshwright.config.run_values import RunValues
from meshwright.spec.chips import CHIPS, formats_on
from meshwright.spec.errors import Mistake
from meshwright.spec.fp8_limits import FP8_MULTIPLE, FP8_WIDTH_KEYS, product_sides
from meshwright.spec.plan import CONTEXT_AXES


def number_formats(run: RunValues) -> Iterator[Mistake]:
    for key, expected in _format_rules(run, {key: run(f"plan.{key}") for key in _FORMATS}):
        yield run.mistake(f"plan.{key}", expected, "fp32")


_FORMATS = ("compute", "reduce", "reduce_replicas")


def _format_rules(run: RunValues, formats: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    """(key of the precision, what is expected) for formats that the devices do not compute in."""
    gpu = run("cluster.gpu")
    for key in _FORMATS:
        if formats.get(key) == "fp64" and gpu not in (None, "cpu"):
            yield key, f"bf16 or fp32 on {gpu}; fp64 runs on cpu only"
    if (supported := formats_on(gpu)) and formats.get("compute") not in (None, "fp64", *supported):
        yield "compute", f"{' or '.join(supported)} on {gpu}"


def fp8_products(run: RunValues) -> Iterator[Mistake]:
    formats = [run("plan.linear"), *(entry.get("linear") for entry in run("plan.layers") or ())]
    context = math.prod(run(f"plan.{axis}") or 1 for axis in CONTEXT_AXES)
    for key, expected in _fp8_rules(run, formats, run("plan.gather"), run("plan.compute"), context):
        yield run.mistake(f"plan.{key}", expected, "compute")


def _fp8_rules(
    run: RunValues, formats: list[str | None], gather: str | None, compute: str | None, context: int
) -> Iterator[tuple[str, str]]:
    """(key of the precision, what is expected) for every rule that forbids fp8 products."""
    if gather == "fp8" and "fp8_tensorwise" not in formats:
        yield "gather", "compute, as no layer's `linear` is fp8_tensorwise: other products need the weight as it is"
    if not any(name and name.startswith("fp8") for name in formats):
        return
    chip = CHIPS.get(run("cluster.gpu") or "")
    if chip is not None and "fp8" not in chip.peak_flops:
        yield "linear", f"compute, as {run('cluster.gpu')} has no fp8 products"
    if compute in ("fp16", "fp64"):
        yield "linear", f"compute, as plan.compute is {compute}: fp8 goes with bf16 or fp32"
    for name, size in product_sides(
        {key: run(f"model.{key}") for key in FP8_WIDTH_KEYS}, run("train.seq_len"), context
    ).items():
        if size % FP8_MULTIPLE:
            yield "linear", f"compute, as {name} = {size} is no multiple of {FP8_MULTIPLE}, which fp8 products need"
