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
    """Which samples of a source one evaluation reads: whole global batches from its beginning."""

    source: DataSource
    global_batch: int
    batches: int

    @classmethod
    def of(cls, source: DataSource, global_batch: int, batches: int, divisor: int = 1) -> HeldOut:
        """At most `batches` batches; a source smaller than one batch is read in the largest multiple of `divisor` it holds."""
        if source.windows >= global_batch:
            return cls(source, global_batch, min(batches, source.windows // global_batch))
        return cls(source, source.windows // divisor * divisor, 1)

    @property
    def samples(self) -> range:
        return range(self.global_batch * self.batches)


@torch.no_grad()
def evaluate(
    model: Decoder, held_out: HeldOut, *, mesh: Mesh | None, micro_batch: int, device: torch.device
) -> Evaluation:
    """Mean loss of `model` on the held-out samples; collective when there is a mesh. Sharded parameters are sharded again after."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    rank, ranks = (mesh.data_rank, mesh.data_ranks) if mesh else (0, 1)
    micro_batch = math.gcd(micro_batch, held_out.global_batch // ranks)
    loader = Loader(
        held_out.source,
        global_batch=held_out.global_batch,
        data_rank=rank,
        data_ranks=ranks,
        micro_batch=micro_batch,
        device=device,
    )
    with loader:
        for _ in range(held_out.batches):
            for batch in next(loader):
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
