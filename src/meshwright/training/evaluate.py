"""Loss on held-out text, over the same tokens for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from meshwright.data.loader import Batch, DataSource, Loader, MicroBatch, Windows, scheduled_micro_batches
from meshwright.data.sample_steps import SampleSteps
from meshwright.data.slots import TokenReader
from meshwright.data.step_samples import lengths_of_step
from meshwright.events.span import NullRecorder
from meshwright.models.decoder import Decoder
from meshwright.parallel.apply import Engine
from meshwright.parallel.mesh import Mesh
from meshwright.policies.sample_balance import RankPool, rank_pool
from meshwright.spec.hybrid import Numbering, exchanged_heads, slot_numbering
from meshwright.spec.plan import CONTEXT_AXES, Plan, SamplePlan

Passes = Callable[["HeldOut", np.ndarray, torch.device], Iterator[list[MicroBatch]]]
"""Reads the samples with the given indices of a source: a rank's micro-batches of each pass."""


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats per token over `tokens` trained tokens, and figures derived from it; NaN if there is no such token."""

    loss: float
    tokens: int
    bits_per_byte: float | None
    by_source: dict[str, float] = field(default_factory=dict)
    """For a mixture, mean loss in nats per token of each source; `loss` is their mean weighted by tokens."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass(frozen=True)
class HeldOut:
    """The data of an evaluation: the first `samples` samples of a source."""

    source: DataSource
    samples: int
    pass_tokens: int | None = None
    """Tokens that all ranks read at a time, of samples of any length; None for samples of equal length."""

    @classmethod
    def of(cls, source: DataSource, max_samples: int) -> HeldOut:
        """`wanted` samples, or all if the source has fewer."""
        return cls(source, min(max_samples, source.windows))

    @classmethod
    def of_documents(cls, source: DataSource, pass_tokens: int, passes: int) -> HeldOut:
        """The first samples that have at most `passes` · `pass_tokens` tokens together, or all if the source has fewer."""
        end = source.windows
        samples = len(lengths_of_step(source, 0, passes * pass_tokens, ((end, end + 1),)))
        return cls(source, samples, pass_tokens)

    def indices_by_source(self) -> dict[str, np.ndarray]:
        """Global indices of the samples, by the name of their source."""
        indices = np.arange(self.samples)
        numbers = self.source.mixture.draws(indices).source
        parts = {name: indices[numbers == number] for number, name in enumerate(self.source.mixture.names)}
        return {name: part for name, part in parts.items() if len(part)}


def evaluate(
    engine: Engine,
    held_out: HeldOut,
    *,
    mesh: Mesh,
    micro_batch: int,
    device: torch.device,
    plan: Plan,
) -> Evaluation:
    """Mean loss on the held-out samples under the plan of the run; collective.

    Samples of any length are placed as in training: `plan.samples` has their slots and times.
    """

    def measure(batches: Sequence[MicroBatch]) -> torch.Tensor:
        schedule = engine.evaluation_schedule(scheduled_micro_batches(batches))
        return engine.executor.play(schedule, batches, NullRecorder())

    passes: Passes
    if held_out.pass_tokens is None:
        # As many micro-batches at a time as fill the pipeline.
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
        sums[:, 1] = 0  # these ranks divide a sequence's loss, and each counted all its tokens
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
    """`evaluate` for a whole model on one device, with slots for the longest sample.

    `loss` is the summed loss of a micro-batch, by default `plain_loss`.
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
    """Slots that hold any sample of at most `longest` tokens, balanced by tokens."""
    return SamplePlan(capacity=longest + longest % 2, alpha=0.0, beta=1.0)


def plain_loss(model: Decoder, batch: MicroBatch) -> torch.Tensor:
    """The summed loss of one micro-batch."""
    return model(batch.tokens, targets=batch.targets, positions=batch.positions, documents=batch.documents)


def _sums(
    held_out: HeldOut,
    measure: Callable[[Sequence[MicroBatch]], torch.Tensor],
    passes: Passes,
    device: torch.device,
) -> torch.Tensor:
    """[summed loss, valid tokens] of one data rank's part of each source's samples, float64 `(sources, 2)`.

    All ranks run every pass, as it is collective. Sources share no pass, so a mixture needs at most one additional pass
    per source.
    """
    by_source = []
    for indices in held_out.indices_by_source().values():
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        for batches in passes(held_out, indices, device):
            sums += torch.stack([measure(batches), torch.stack([_valid(batch) for batch in batches]).sum()])
        by_source.append(sums)
    return torch.stack(by_source)


def _window_passes(
    held_out: HeldOut,
    indices: np.ndarray,
    device: torch.device,
    *,
    rank: int,
    ranks: int,
    micro_batch: int,
    at_once: int,
) -> Iterator[list[MicroBatch]]:
    """A data rank's micro-batches of each pass over samples of equal length; those beyond the last sample have no targets."""
    share = at_once * micro_batch
    windows = Windows(
        _SourceSamples(held_out.source, indices),
        global_batch=ranks * share,
        data_rank=rank,
        data_ranks=ranks,
        micro_batch=micro_batch,
    )
    with Loader(windows, device=device) as loader:
        for first in range(0, len(indices), ranks * share):
            batches = next(loader)
            remaining = len(indices) - first - rank * share
            for number, batch in enumerate(batches):
                assert batch.targets is not None, "a loader's batches have targets"
                batch.targets[max(remaining - number * micro_batch, 0) :] = -1
            yield batches


def _document_passes(
    held_out: HeldOut, indices: np.ndarray, device: torch.device, *, pool: RankPool, rank: int, numbering: Numbering
) -> Iterator[list[MicroBatch]]:
    """A rank's slots of each pass over samples of any length."""
    source, end = _SourceSamples(held_out.source, indices), len(indices)
    assert held_out.pass_tokens is not None, "samples of any length are read by tokens"
    tokens = max(held_out.pass_tokens, int(source.lengths(np.arange(end)).max()))
    reader = SampleSteps(source, tokens=tokens, pool=pool, rank=rank, numbering=numbering)
    with Loader(reader, skipped=((end, end + 1),), device=device) as loader:
        while loader.consumed < end:
            yield next(loader)


class _SourceSamples:
    """The samples of `source` with the global indices `indices`, repeated after the last one."""

    def __init__(self, source: DataSource, indices: np.ndarray) -> None:
        self.document_mask = source.document_mask
        self._source, self._indices = source, indices

    def begin_step(self, indices: Sequence[int] | np.ndarray) -> None:
        self._source.begin_step(self._global(indices))

    def samples(self, indices: Sequence[int] | np.ndarray) -> Batch:
        return self._source.samples(self._global(indices))

    def lengths(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        return self._source.lengths(self._global(indices))

    def token_reader(self, indices: Sequence[int] | np.ndarray) -> TokenReader:
        return self._source.token_reader(self._global(indices))

    def _global(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        return self._indices[np.asarray(indices) % len(self._indices)]


def _valid(batch: MicroBatch) -> torch.Tensor:
    """Number of valid tokens of the batch, float64."""
    assert batch.targets is not None, "a loader's batches have targets"
    return (batch.targets >= 0).sum().double()


def _evaluation(held_out: HeldOut, sums: torch.Tensor) -> Evaluation:
    """The Evaluation for [summed loss, valid tokens] by source."""
    sums_by_source = dict(zip(held_out.indices_by_source(), sums.tolist(), strict=True))
    by_source = {name: loss / tokens for name, (loss, tokens) in sums_by_source.items() if tokens}
    loss, tokens = (sum(column) for column in zip(*sums_by_source.values(), strict=True))
    mean, per_byte = loss / tokens if tokens else math.nan, held_out.source.bytes_per_token
    bits = mean / math.log(2) / per_byte if per_byte else None
    return Evaluation(mean, int(tokens), bits, by_source if len(by_source) > 1 else {})
