"""Loss on held-out text: the same tokens every time, whatever the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from meshwright.data.loader import DataSource, Loader, MicroBatch
from meshwright.events.span import NullRecorder
from meshwright.models.decoder import Decoder
from meshwright.parallel.apply import Engine
from meshwright.parallel.mesh import Mesh
from meshwright.spec.plan import CONTEXT_AXES


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats per token over `tokens` tokens, and what follows from it."""

    loss: float
    tokens: int
    bits_per_byte: float | None

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass(frozen=True)
class HeldOut:
    """What one evaluation reads: the first `samples` samples of a source."""

    source: DataSource
    samples: int

    @classmethod
    def of(cls, source: DataSource, wanted: int) -> HeldOut:
        """`wanted` samples, or all when the source has fewer."""
        return cls(source, min(wanted, source.windows))


def evaluate(engine: Engine, held_out: HeldOut, *, mesh: Mesh, micro_batch: int, device: torch.device) -> Evaluation:
    """Mean loss on the held-out samples under the plan of the run; collective."""
    # As many micro-batches at a time as fill the pipeline.
    at_once = mesh.layout.size("pipeline")
    schedule = engine.evaluating(at_once)

    def measure(batches: Sequence[MicroBatch]) -> torch.Tensor:
        return engine.executor.play(schedule, batches, NullRecorder())

    sums = _sums(held_out, measure, mesh.data_rank, mesh.data_ranks, micro_batch, at_once, device)
    if not engine.holds_loss:
        sums.zero_()
    if any(mesh.coordinate(axis) for axis in ("tensor", *CONTEXT_AXES)):
        sums[1] = 0  # these ranks divide a sequence's loss, and each counted all its tokens
    return _evaluation(held_out, mesh.sum_over_all(sums))


@torch.no_grad()
def evaluate_plain(model: Decoder, held_out: HeldOut, *, micro_batch: int, device: torch.device) -> Evaluation:
    """The same for a whole model on one device."""

    def measure(batches: Sequence[MicroBatch]) -> torch.Tensor:
        return torch.stack([plain_loss(model, batch).double() for batch in batches]).sum()

    return _evaluation(held_out, _sums(held_out, measure, 0, 1, micro_batch, 1, device))


def plain_loss(model: Decoder, batch: MicroBatch) -> torch.Tensor:
    """The summed loss of one micro-batch."""
    return model(batch.tokens, targets=batch.targets, positions=batch.positions, documents=batch.documents)


def _sums(
    held_out: HeldOut,
    measure: Callable[[Sequence[MicroBatch]], torch.Tensor],
    rank: int,
    ranks: int,
    micro_batch: int,
    at_once: int,
    device: torch.device,
) -> torch.Tensor:
    """[summed loss, valid tokens] of one data rank's part of the samples, float64. All ranks run every pass, as it is collective."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    share = at_once * micro_batch
    loader = Loader(
        held_out.source,
        global_batch=ranks * share,
        data_rank=rank,
        data_ranks=ranks,
        micro_batch=micro_batch,
        device=device,
    )
    with loader:
        for first in range(0, held_out.samples, ranks * share):
            batches = next(loader)
            own = first + rank * share
            valid = torch.stack(
                [_valid(batch, held_out.samples - own - number * micro_batch) for number, batch in enumerate(batches)]
            ).sum()
            sums += torch.stack([measure(batches), valid])
    return sums


def _valid(batch: MicroBatch, rows: int) -> torch.Tensor:
    """The batch's valid tokens, float64, after what lies past its first `rows` rows was taken out."""
    assert batch.targets is not None, "a loader's batches have targets"
    batch.targets[max(rows, 0) :] = -1
    return (batch.targets >= 0).sum().double()


def _evaluation(held_out: HeldOut, sums: torch.Tensor) -> Evaluation:
    loss, tokens = sums[0].item() / sums[1].item(), int(sums[1].item())
    per_byte = held_out.source.bytes_per_token
    return Evaluation(loss, tokens, loss / math.log(2) / per_byte if per_byte else None)
