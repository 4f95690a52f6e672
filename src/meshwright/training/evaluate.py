"""Computes the loss on held-out text. It reads the same tokens for any batch, number of ranks and layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from meshwright.data.loader import (
    DataSource,
    Loader,
    MicroBatch,
    SampleBatch,
    Samples,
    Windows,
    scheduled_micro_batches,
)
from meshwright.data.sample_steps import SampleSteps
from meshwright.data.slots import TokenReader
from meshwright.data.validation import validation_samples
from meshwright.events.span import NullRecorder
from meshwright.models.decoder import Decoder
from meshwright.parallel.apply import PlannedModel
from meshwright.parallel.mesh import Mesh
from meshwright.policies.sample_balance import RankPool, rank_pool
from meshwright.spec.hybrid import Numbering, exchanged_heads, slot_numbering
from meshwright.spec.plan import CONTEXT_AXES, Plan, SamplePlan

Passes = Callable[["HeldOut", np.ndarray, torch.device], Iterator[list[MicroBatch]]]
"""A function that reads the samples with the given indices of a source, and yields a rank's micro-batches of each pass."""


@dataclass(frozen=True)
class Evaluation:
    """The mean loss on held-out text, and figures derived from it.

    - `loss`: nats per token, the mean over `tokens` tokens that are trained on, each counted once; NaN if there is no such token.
    - `bits_per_byte`: the loss of these tokens in bits, divided by the bytes of text that they stand for; None if bytes are not known.
    - `by_source`, `bits_by_source`: the same figures for each source of a mixture; empty for a single source. The loss of the mixture is
      the mean of the sources' losses, weighted by `data.mix`; its `bits_per_byte` is the mean bits divided by the mean bytes per token.
    """

    loss: float
    tokens: int
    bits_per_byte: float | None
    by_source: dict[str, float] = field(default_factory=dict)
    bits_by_source: dict[str, float] = field(default_factory=dict)
    preferences: dict[str, Any] = field(default_factory=dict)
    """Figures of a run on preferences, about good and bad answers. `loss` is then the loss per pair or per answer."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass(frozen=True)
class HeldOut:
    """The data of an evaluation: for each source, the global indices of the samples to read."""

    source: DataSource
    samples: dict[str, np.ndarray]
    pass_tokens: int | None = None
    """For samples of any length: number of tokens that all ranks read per pass. None for samples of equal length."""

    @classmethod
    def of(cls, source: DataSource, tokens: int | None, pass_tokens: int | None = None) -> HeldOut:
        """Choose the samples that every validation of about `tokens` tokens reads (`data.validation_tokens`)."""
        return cls(source, validation_samples(source, tokens), pass_tokens)

    def unigram_entropy(self) -> float:
        """Return the entropy of the targets in nats per token, with sources weighted as in the loss.

        It is the loss of a model that knows only how often each token occurs.
        """
        counts = [self.source.target_counts(indices) for indices in self.samples.values()]
        weights = [self.source.weights[name] for name in self.samples]
        parts = [(weight, count) for weight, count in zip(weights, counts, strict=True) if count.any()]
        shares = np.zeros(max(len(count) for _, count in parts))
        for weight, count in parts:
            shares[: len(count)] += weight * count / count.sum()
        shares = shares[shares > 0] / shares.sum()
        return float(-(shares * np.log(shares)).sum())


def evaluate(
    engine: PlannedModel,
    held_out: HeldOut,
    *,
    mesh: Mesh,
    micro_batch: int,
    device: torch.device,
    plan: Plan,
) -> Evaluation:
    """Return the mean loss on the held-out samples, computed under the plan of the run. Collective.

    Samples of any length are placed in slots as in training; `plan.samples` has the slots' capacity and the cost of samples.
    """

    def measure(batches: Sequence[MicroBatch]) -> torch.Tensor:
        schedule = engine.evaluation_schedule(scheduled_micro_batches(batches))
        return engine.executor.play(schedule, batches, NullRecorder())

    passes: Passes
    if held_out.pass_tokens is None:
        # A pass has one micro-batch for each pipeline rank, which fills the pipeline.
        at_once = mesh.layout.size("pipeline")
        passes = partial(
            _window_passes, rank=mesh.data_rank, ranks=mesh.data_ranks, micro_batch=micro_batch, at_once=at_once
        )
    else:
        assert plan.samples is not None, "a plan for samples of any length has their slots"
        heads = exchanged_heads(engine.model.spec.kv_heads, mesh.axis_size("tensor"))
        pool = rank_pool(plan.samples, mesh.data_ranks, mesh.axis_size("pipeline"), heads)
        passes = partial(_document_passes, pool=pool, rank=mesh.data_rank, numbering=slot_numbering(plan))
    sums = _sums(held_out, measure, passes, device)
    if not engine.holds_loss:
        sums.zero_()
    if any(mesh.coordinate(axis) for axis in ("tensor", *CONTEXT_AXES)):
        sums[:, 1:] = 0  # these ranks share a sequence's loss, but each of them counted all its tokens
    return _evaluation(held_out, mesh.sum_over_all(sums))


@torch.no_grad()
def evaluate_plain(
    model: Decoder,
    held_out: HeldOut,
    *,
    micro_batch: int,
    device: torch.device,
    loss: Callable[[MicroBatch], torch.Tensor] | None = None,
) -> Evaluation:
    """`evaluate` for a whole model on one device. Slots have room for the longest sample.

    `loss` computes the summed loss of a micro-batch; None: `plain_loss`.
    """

    def measure(batches: Sequence[MicroBatch]) -> torch.Tensor:
        losses = [plain_loss(model, batch) if loss is None else loss(batch) for batch in batches]
        return torch.stack(losses).double().sum()

    passes: Passes = partial(_window_passes, rank=0, ranks=1, micro_batch=micro_batch, at_once=1)
    if held_out.pass_tokens is not None:
        pool = rank_pool(undivided_samples(held_out.source.seq_len), 1)
        passes = partial(_document_passes, pool=pool, rank=0, numbering="own")
    return _evaluation(held_out, _sums(held_out, measure, passes, device))


def undivided_samples(longest: int) -> SamplePlan:
    """Return a sample plan whose slots have room for any sample of at most `longest` tokens. Slots are balanced by tokens."""
    return SamplePlan(capacity=longest + longest % 2, alpha=0.0, beta=1.0)


def plain_loss(model: Decoder, batch: MicroBatch) -> torch.Tensor:
    """Return the summed loss of one micro-batch."""
    return model(batch.tokens, targets=batch.targets, positions=batch.positions, documents=batch.documents)


def _sums(
    held_out: HeldOut,
    measure: Callable[[Sequence[MicroBatch]], torch.Tensor],
    passes: Passes,
    device: torch.device,
) -> torch.Tensor:
    """Return for each source the sums over one data rank's samples, float64 `(sources, 3)`: [loss, valid tokens, bytes of these tokens].

    A pass is collective, so all ranks run every pass. A pass reads only one source, so a mixture needs at most one more pass per source.
    """
    by_source = []
    table = held_out.source.token_bytes
    token_bytes = None if table is None else torch.from_numpy(table).to(device)
    for indices in held_out.samples.values():
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        for batches in passes(held_out, indices, device):
            counts = torch.stack([_counts(batch, token_bytes) for batch in batches]).sum(0)
            sums += torch.cat([measure(batches)[None], counts])
        by_source.append(sums)
    return torch.stack(by_source)


def window_passes(
    samples: Samples, count: int, device: torch.device, *, rank: int, ranks: int, micro_batch: int, at_once: int
) -> Iterator[list[MicroBatch]]:
    """Yield a data rank's micro-batches of each pass over `count` samples of equal length.

    The last pass may need more samples than remain. It then repeats samples from the beginning, but without targets and answers.
    """
    share = at_once * micro_batch
    windows = Windows(samples, global_batch=ranks * share, data_rank=rank, data_ranks=ranks, micro_batch=micro_batch)
    if not count:
        return
    with Loader(windows, device=device) as loader:
        for first in range(0, count, ranks * share):
            batches = next(loader)
            remaining = count - first - rank * share
            for number, batch in enumerate(batches):
                assert batch.targets is not None, "a loader's batches have targets"
                beyond = max(remaining - number * micro_batch, 0)
                batch.targets[beyond:] = -1
                if "signs" in batch.columns:
                    batch.columns["signs"][beyond:] = 0
                if "mismatched_targets" in batch.columns:
                    batch.columns["mismatched_targets"][beyond:] = -1
            yield batches


def _window_passes(
    held_out: HeldOut, indices: np.ndarray, device: torch.device, **size: int
) -> Iterator[list[MicroBatch]]:
    """Yield a data rank's micro-batches of each pass over held-out samples of equal length."""
    return window_passes(_SourceSamples(held_out.source, indices), len(indices), device, **size)


def _document_passes(
    held_out: HeldOut, indices: np.ndarray, device: torch.device, *, pool: RankPool, rank: int, numbering: Numbering
) -> Iterator[list[MicroBatch]]:
    """Yield a rank's slots of each pass over held-out samples of any length."""
    source = _SourceSamples(held_out.source, indices)
    end = len(indices)
    assert held_out.pass_tokens is not None, "samples of any length are read by tokens"
    tokens = max(held_out.pass_tokens, int(source.lengths(np.arange(end)).max()))
    reader = SampleSteps(source, tokens=tokens, pool=pool, rank=rank, numbering=numbering)
    with Loader(reader, skipped=((end, end + 1),), device=device) as loader:
        while loader.consumed < end:
            yield next(loader)


class _SourceSamples:
    """The samples of `source` with these global `indices`. After the last sample they start again."""

    def __init__(self, source: DataSource, indices: np.ndarray) -> None:
        self.document_mask = source.document_mask
        self._source = source
        self._indices = indices

    def begin_step(self, indices: Sequence[int] | np.ndarray) -> None:
        self._source.begin_step(self._global(indices))

    def samples(self, indices: Sequence[int] | np.ndarray) -> SampleBatch:
        # Without weights, because perplexity and bits per byte are defined by the mean over tokens in which each token counts once.
        return replace(self._source.samples(self._global(indices)), weights=None)

    def lengths(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        return self._source.lengths(self._global(indices))

    def token_reader(self, indices: Sequence[int] | np.ndarray) -> TokenReader:
        return self._source.token_reader(self._global(indices))

    def _global(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        return self._indices[np.asarray(indices) % len(self._indices)]


def _counts(batch: MicroBatch, token_bytes: torch.Tensor | None) -> torch.Tensor:
    """Return [valid tokens, bytes of these tokens], float64 `(2,)`. `token_bytes` `(vocabulary,)`; without it the bytes are 0."""
    assert batch.targets is not None, "a loader's batches have targets"
    valid = batch.targets >= 0
    tokens = valid.sum()
    text = torch.zeros_like(tokens) if token_bytes is None else (token_bytes[batch.targets.clamp(min=0)] * valid).sum()
    return torch.stack([tokens, text]).double()


def _evaluation(held_out: HeldOut, sums: torch.Tensor) -> Evaluation:
    """Return the Evaluation for `sums` `(sources, 3)`: [summed loss, valid tokens, bytes] of each source."""
    rows = {name: row for name, row in zip(held_out.samples, sums.tolist(), strict=True) if row[1]}
    weights = {name: held_out.source.weights[name] for name in rows}
    by_source = {name: loss / tokens for name, (loss, tokens, _) in rows.items()}
    bytes_by_source = {name: text / tokens for name, (_, tokens, text) in rows.items()}

    def mean(values: Mapping[str, float]) -> float:
        return sum(weights[name] * value for name, value in values.items()) / sum(weights.values())

    tokens = int(sum(row[1] for row in rows.values()))
    if not tokens:
        return Evaluation(math.nan, 0, None)
    loss = mean(by_source)
    evaluation = Evaluation(loss, tokens, bits_per_byte=None, by_source=by_source if len(rows) > 1 else {})
    if not all(bytes_by_source.values()):  # the bytes of some source are not known
        return evaluation
    bits_by_source = {name: value / math.log(2) / bytes_by_source[name] for name, value in by_source.items()}
    return replace(
        evaluation,
        bits_per_byte=loss / math.log(2) / mean(bytes_by_source),
        bits_by_source=bits_by_source if len(rows) > 1 else {},
    )
