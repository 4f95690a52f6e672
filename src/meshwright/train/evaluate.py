"""Loss on held-out text: the same tokens every time, whatever the number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.data.loader import DataSource, Loader
from meshwright.models.decoder import Decoder
from meshwright.parallel.fsdp import units
from meshwright.parallel.mesh import Mesh
from meshwright.train.step import forward


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


@torch.no_grad()
def evaluate(
    model: Decoder, held_out: HeldOut, *, mesh: Mesh | None, micro_batch: int, device: torch.device
) -> Evaluation:
    """Mean loss of `model` on the held-out samples; collective when there is a mesh. Sharded parameters are sharded again after."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    rank, ranks = (mesh.data_rank, mesh.data_ranks) if mesh else (0, 1)
    together = ranks * micro_batch
    loader = Loader(
        held_out.source,
        global_batch=together,
        data_rank=rank,
        data_ranks=ranks,
        micro_batch=micro_batch,
        device=device,
    )
    with loader:
        for first in range(0, held_out.samples, together):
            (batch,) = next(loader)
            # All ranks run every forward, as it is collective; what lies past the last sample does not count.
            batch.targets[max(held_out.samples - first - rank * micro_batch, 0) :] = -1
            sums += torch.stack([forward(model, batch).double(), (batch.targets >= 0).sum().double()])
    if mesh:
        mesh.sum_over_data(sums)
    reshard(model)
    loss, tokens = sums[0].item() / sums[1].item(), int(sums[1].item())
    per_byte = held_out.source.bytes_per_token
    return Evaluation(loss, tokens, loss / math.log(2) / per_byte if per_byte else None)


def reshard(model: nn.Module) -> None:
    """Free what forward gathered and no backward released."""
    for unit in units(model):
        unit.reshard()
