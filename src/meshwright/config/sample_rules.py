"""Rules of samples of any length: `data.packing: none`, `train.global_batch_tokens` and `samples` of a plan file."""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwright.config.run_values import RunValues
from meshwright.spec.errors import Mistake

_UNDIVIDED = ("pipeline", "context_ring", "context_ulysses", "tensor")
"""Axes that this release does not combine with samples of any length."""
_ACTIVATIONS = ("activations", "both")
_OF_LONG_SAMPLES = "as slots with offload have activations of long samples only in host memory"


def samples(run: RunValues) -> Iterator[Mistake]:
    """Samples of any length have a batch in tokens, and no feature that needs sequences of equal length."""
    tokens, longest = run("train.global_batch_tokens"), run("train.seq_len")
    if run("data.packing") != "none":
        if tokens:
            expected = "none, as train.global_batch_tokens gives the batch in tokens"
            yield run.mistake("data.packing", expected, "none", run("data.packing"))
        if run.plan_file is not None and run("plan.samples") and run("data.packing"):
            expected = f"no such section, as data.packing is {run('data.packing')}"
            yield run.mistake("plan.samples", expected, None, "a section")
        return
    if run.plan_file is not None and not (run("plan.samples") and run("plan.capacity")):
        key = "plan.capacity" if run("plan.samples") else "plan.samples"
        yield run.mistake(key, "capacity, and samples with alpha and beta, as data.packing is none", None, "none")
    if tokens is None:
        if not run.document.partial and ("train", "global_batch_tokens") not in run.unusable:
            expected = "the tokens of a step in place of train.global_batch, as data.packing is none"
            yield run.mistake("train.global_batch_tokens", expected, None, "none")
        return
    if longest and tokens < longest:
        expected = f"at least the longest sample, train.seq_len = {longest}"
        yield run.mistake("train.global_batch_tokens", expected, str(longest))
    if run("data.document_mask") is False:
        yield run.mistake("data.document_mask", "true, as data.packing is none: each document is a sample", "true")
    if (run("plan.micro_batch") or 1) > 1:
        yield run.mistake("plan.micro_batch", "1, as data.packing is none: a micro-batch is one slot of samples", "1")
    for axis in () if run("plan.hybrid") else _UNDIVIDED:
        if (run(f"plan.{axis}") or 1) > 1:
            yield run.mistake(
                f"plan.{axis}", "1, as data.packing is none: this release divides samples on no such axis", "1"
            )
    if run("model.prediction_depth"):
        yield run.mistake("data.packing", "stream, as model.prediction_depth is not 0", "stream")
    if run("supervision.on_repeated_failure") == "skip_data":
        yield run.mistake("supervision.on_repeated_failure", "stop, as data.packing is none", "stop")


def slot_offload(run: RunValues) -> Iterator[Mistake]:
    """`plan.offload_capacity`: longer slots that need no more device memory, as at most all blocks but two are offloaded."""
    longer, capacity, layers = run("plan.offload_capacity"), run("plan.capacity"), run("model.layers")
    if not longer:
        return
    times = run("plan.samples") or {}
    if not (capacity and (run("plan.hybrid") or times)):
        yield run.mistake("plan.offload_capacity", "no such key without plan.hybrid and plan.capacity", "none")
        return
    most = capacity * (run("plan.hybrid") or 1) + 1
    for key, limit, of in (
        ("offload_layers", layers, "the model's blocks"),
        ("offload_shortest", most, "more than all ranks together hold without offload"),
    ):
        if run.plan_file is not None and not times.get(key):
            yield run.mistake(f"plan.samples.{key}", "a number, as plan.offload_capacity is given", None, "none")
        elif limit and (times.get(key) or 0) > limit:
            yield run.mistake(f"plan.samples.{key}", f"at most {limit}: {of}", str(limit))
    if (run("plan.pipeline") or 1) > 1 or run("plan.stages") or run("model.experts"):
        yield run.mistake(
            "plan.offload_capacity",
            "none beside pipeline ranks or experts, whose layers have unequal activations",
            "none",
        )
    elif layers and (wrong := _offload_error(longer, capacity, run("plan.tensor") or 1, layers)):
        yield run.mistake("plan.offload_capacity", wrong)
    if run("plan.offload") in _ACTIVATIONS:
        yield run.mistake("plan.offload", f"none or optimizer, {_OF_LONG_SAMPLES}", "none")
    if any(layer.get("offload") in _ACTIVATIONS for layer in run("plan.layers") or ()):
        yield run.mistake(
            "plan.layers", f"offload none or optimizer in every range, {_OF_LONG_SAMPLES}", None, "another"
        )


def _offload_error(longer: int, capacity: int, tensor: int, layers: int) -> str | None:
    """Return the unmet rule for slots of `longer` tokens with offload, beside those of `capacity`; None if they are valid."""
    unit, most = math.lcm(2, tensor), capacity * layers // 2
    if longer > capacity and longer % unit == 0 and longer <= most:
        return None
    multiple = "an even number of" if unit == 2 else f"a multiple of {unit}"
    return f"{multiple} tokens above the {capacity} of other slots and at most {most}, where all {layers} blocks are offloaded"
