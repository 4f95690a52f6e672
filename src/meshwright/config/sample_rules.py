"""Rules of samples of any length: `data.packing: none`, `train.global_batch_tokens` and `samples` of a plan file."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.config.run_values import RunValues
from meshwright.config.yaml_positions import Document
from meshwright.spec.errors import Mistake

_UNDIVIDED = ("pipeline", "context_ring", "context_ulysses", "tensor")
"""Axes that this release does not combine with samples of any length."""


def samples(run: RunValues) -> Iterator[Mistake]:
    """Samples of any length have a batch in tokens, and no feature that needs sequences of equal length."""
    tokens, longest = run("train.global_batch_tokens"), run("train.seq_len")
    if run("data.packing") != "none":
        if tokens:
            expected = "none, as train.global_batch_tokens gives the batch in tokens"
            yield run.mistake("data.packing", expected, "none", run("data.packing"))
        return
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
    if run("model.experts") and run("train.balance_loss"):
        expected = "0, as data.packing is none: no rank has the loads of whole samples (train.balance_bias needs none)"
        yield run.mistake("train.balance_loss", expected, "0")
    if run("model.prediction_depth"):
        yield run.mistake("data.packing", "stream, as model.prediction_depth is not 0", "stream")
    if run("supervision.on_repeated_failure") == "skip_data":
        yield run.mistake("supervision.on_repeated_failure", "stop, as data.packing is none", "stop")


def plan_file_samples(plan: Document, run: RunValues) -> Iterator[Mistake]:
    """A plan file has `samples` exactly if its run has samples of any length, and places them on data ranks only."""
    given, wanted = bool(plan.get(("samples",))), run("data.packing") == "none"
    if given != wanted:
        expected = (
            f"{'capacity, alpha and beta' if wanted else 'no such section'}, as data.packing is {run('data.packing')}"
        )
        yield plan.mistake(("samples",), expected, "a section" if given else "none")
    if not wanted:
        return
    if plan.get(("batch", "micro_batch")) != 1:
        micro = str(plan.get(("batch", "micro_batch")))
        yield plan.mistake(("batch", "micro_batch"), "1: a micro-batch is one slot of samples", micro, "1")
    hybrid = any(axis["axis"] == "hybrid" for axis in plan.get(("mesh",)))
    for index, axis in () if hybrid else enumerate(plan.get(("mesh",))):
        if axis["axis"] in _UNDIVIDED and axis["size"] > 1:
            yield plan.mistake(("mesh", index, "size"), "1, as data.packing is none", str(axis["size"]), "1")
