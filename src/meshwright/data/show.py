"""The samples of a training step, past or future, from seed and configuration only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.data.source import DataSource
from meshwright.policies.skipped_samples import SampleRange, samples_of_step
from meshwright.spec.errors import BadInput


def show_step(
    source: DataSource, step: int, global_batch: int, text: bool = False, skipped: Sequence[SampleRange] = ()
) -> dict[str, Any]:
    """`{step, samples: [{global_index, source, documents: [{file, id, start, end}], tokens}]}` of one training step.

    Steps count from 1, as in metrics.jsonl: step N reads samples (N - 1) * global_batch to N * global_batch - 1, or later ones if
    the run left out those of `skipped`. `start` and `end` are
    tokens within the document (end exclusive), `tokens` is how many the sample has. With `text` each sample also holds
    its decoded `text`. Raises BadInput for a step below 1, or when text is asked of data whose tokenizer is not known.
    """
    if step < 1:
        raise BadInput(f"--step {step}: expected 1 or more; steps count from 1")
    indices = range(*samples_of_step(step, global_batch, skipped))
    samples = [source.describe(index) for index in indices]
    if text:
        for sample, decoded in zip(samples, _decode(source, indices), strict=True):
            sample["text"] = decoded
    return {"step": step, "samples": samples}


def _decode(source: DataSource, indices: range) -> list[str]:
    from meshwright.data.tokenizer import load_tokenizer

    file = source.tokenizer_file
    if file is None:
        raise BadInput("--text: the data is foreign, so its tokenizer is not known; leave --text out")
    tokenizer = load_tokenizer(file).tokenizer
    return tokenizer.decode_batch(source.samples(indices).tokens.tolist(), skip_special_tokens=False)
