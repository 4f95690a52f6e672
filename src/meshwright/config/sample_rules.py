"""Rules for samples of any length, that is `data.packing: none` with `train.global_batch_tokens`."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.config.run_values import RunValues
from meshwright.spec.errors import Mistake


def samples(run: RunValues) -> Iterator[Mistake]:
    """Yield mistakes of samples of any length: the batch must be given in tokens, and features that need equal lengths are excluded."""
    tokens = run("train.global_batch_tokens")
    longest = run("train.seq_len")
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
    if run("model.prediction_depth"):
        yield run.mistake("data.packing", "stream, as model.prediction_depth is not 0", "stream")
    if run("supervision.on_repeated_failure") == "skip_data":
        yield run.mistake("supervision.on_repeated_failure", "stop, as data.packing is none", "stop")
