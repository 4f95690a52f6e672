"""Finds the samples of any training step, past or future. They follow from the seed and the configuration alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import Any

from meshwright.data.source import DataSource
from meshwright.data.step_samples import samples_of_token_step
from meshwright.policies.skipped_samples import SampleRange, samples_of_step
from meshwright.spec.batch_sizes import BatchSizes, BatchStage
from meshwright.spec.errors import BadInput


def show_step(
    source: DataSource,
    step: int,
    global_batch: int,
    text: bool = False,
    skipped: Sequence[SampleRange] = (),
    *,
    global_batch_tokens: int | None = None,
    batch_ramp: Sequence[BatchStage] = (),
) -> dict[str, Any]:
    """Return `{step, samples: [{global_index, source, documents: [{file, id, start, end}], tokens}]}` of one training step.

    Steps count from 1, as in metrics.jsonl. Without further settings, step N reads the samples (N - 1) * `global_batch`
    to N * `global_batch` - 1. These arguments change that:

    - `skipped`: ranges of samples that the run left out. Later samples take their place.
    - `batch_ramp`: stages with smaller batches at the start of the run.
    - `global_batch_tokens`: a step then has as many samples as have at most this many tokens together. To find its
      samples, the lengths of all earlier samples are looked up.

    In the result, `start` and `end` are token numbers in the document (`end` exclusive), and `tokens` is the number of
    tokens of the sample. A sample of chats also has `trained`, the ranges [start, stop) of its tokens on which the
    model is trained. If tokens have weights, it has `weights`, one for each of these ranges. `packing` has the
    `PackingCounts` of each source of chats.

    With `text`, each sample has its decoded `text`. A sample of chats then has `parts`, its text divided where training
    begins and ends; each part has `trained` and `text`, and `weight` if tokens have weights. If the sample fills its
    sequence and the token that its last token predicts is trained on, `predicted` is the text of this token. No sample
    has it among its inputs.

    Raises BadInput if `step` is below 1, and if `text` is requested but the tokenizer of the data is not known.
    """
    if step < 1:
        raise BadInput(f"--step {step}: expected 1 or more; steps count from 1")
    if global_batch_tokens is None:
        indices = range(*samples_of_step(step, BatchSizes(global_batch, batch_ramp), skipped))
    else:
        indices = range(*samples_of_token_step(source, step, global_batch_tokens, skipped))
    samples = [source.describe(index) for index in indices]
    if text:
        for sample, ids, following, decode in _tokens(source, samples, indices):
            sample["text"] = decode(ids)
            if "trained" in sample:
                sample["parts"] = _parts(ids, sample["trained"], sample.get("weights"), decode)
                if following >= 0:
                    sample["predicted"] = decode([following])
    packing = {name: asdict(each.packing) for name, each in source.sources.items() if each.packing}
    return {"step": step, "samples": samples} | ({"packing": packing} if packing else {})


def _tokens(
    source: DataSource, samples: Sequence[dict[str, Any]], indices: range
) -> Iterator[tuple[dict[str, Any], list[int], int, Callable[[list[int]], str]]]:
    """Yield each sample with its token ids, the id that the last of them predicts, and the function that decodes ids.

    The predicted id is negative if it is not trained on.
    """
    from meshwright.data.tokenizer import load_tokenizer

    file = source.tokenizer_file
    if file is None:
        raise BadInput("--text: the data is foreign, so its tokenizer is not known; leave --text out")
    tokenizer = load_tokenizer(file).tokenizer
    for sample, index in zip(samples, indices, strict=True):
        read = source.samples([index])
        count = sample["tokens"]
        following = int(read.targets[0][count - 1])
        yield sample, read.tokens[0][:count].tolist(), following, partial(tokenizer.decode, skip_special_tokens=False)


def _parts(
    ids: list[int], trained: list[list[int]], weights: list[float] | None, decode: Callable[[list[int]], str]
) -> list[dict[str, Any]]:
    """Divide the text of `ids` where training begins and ends. Each trained part gets its weight if there are `weights`."""
    bounds = [0, *(bound for span in trained for bound in span), len(ids)]
    parts: list[dict[str, Any]] = [
        {"trained": number % 2 == 1, "text": decode(ids[start:stop])}
        for number, (start, stop) in enumerate(pairwise(bounds))
    ]
    for part, weight in zip(parts[1::2], weights or (), strict=weights is not None):
        part["weight"] = weight
    return [part for part in parts if part["text"]]
