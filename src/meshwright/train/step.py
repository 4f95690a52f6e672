"""One optimizer step: count the tokens, run the micro-batches, clip, update.

The number of valid tokens is summed over all ranks before the first backward and every micro-batch's loss is divided by it; gradients
are then summed, never averaged. So the update is that of the global batch's mean token loss for any number of ranks and micro-batches,
also when ranks hold different numbers of valid tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshwright.data.loader import MicroBatch
from meshwright.events.span import Recorder
from meshwright.models.decoder import Decoder
from meshwright.optim.adamw import AdamW
from meshwright.optim.clip import clip_gradients
from meshwright.optim.shards import local_gradients
from meshwright.parallel.fsdp import accumulate_only
from meshwright.parallel.mesh import Mesh


@dataclass(frozen=True)
class StepFigures:
    """What a step leaves on the device, as one float64 tensor.

    In order: loss (nats per valid token), gradient norm, valid tokens, stop flag, sum of all token ids. The last is the same for
    any number of ranks exactly when they read the same samples.
    """

    values: torch.Tensor


def train_step(
    model: Decoder,
    optimizer: AdamW,
    mesh: Mesh,
    micro_batches: Sequence[MicroBatch],
    *,
    learning_rate: float,
    clip_norm: float | None,
    stop_flag: int,
    recorder: Recorder,
) -> StepFigures:
    """Run one step on this rank's micro-batches. Collective; nothing waits for the device."""
    valid = count_valid(micro_batches, stop_flag, mesh)
    loss = backward_all(model, micro_batches, valid[0], recorder)
    with recorder.span("reduce"):
        norm = clip_gradients(local_gradients(model), clip_norm, mesh.group("shard"))
        mesh.sum_over_data(loss)
    with recorder.span("optim"):
        optimizer.step(learning_rate, norm)
    return StepFigures(torch.stack([loss, norm, *valid]))


def count_valid(micro_batches: Sequence[MicroBatch], stop_flag: int, mesh: Mesh) -> torch.Tensor:
    """[valid tokens, stop flag, sum of token ids] summed over all ranks, float64."""
    sums = torch.zeros(3, dtype=torch.float64, device=mesh.device)
    sums[0] = sum(batch.valid_tokens for batch in micro_batches)
    sums[1] = stop_flag
    for batch in micro_batches:
        sums[2] += batch.tokens.sum()
    return mesh.sum_over_data(sums)


def backward_all(
    model: Decoder, micro_batches: Sequence[MicroBatch], valid: torch.Tensor, recorder: Recorder
) -> torch.Tensor:
    """Forward and backward of every micro-batch; returns this rank's share of the mean loss (float64)."""
    total = torch.zeros((), dtype=torch.float64, device=valid.device)
    for number, batch in enumerate(micro_batches, start=1):
        accumulate_only(model, number < len(micro_batches))
        with recorder.span("forward"):
            loss = forward(model, batch)
            loss = loss / valid.to(loss.dtype)
        with recorder.span("backward"):
            loss.backward()
        total += loss.detach()
    return total


def forward(model: Decoder, batch: MicroBatch) -> torch.Tensor:
    """The summed loss of one micro-batch."""
    return model(batch.tokens, targets=batch.targets, positions=batch.positions, documents=batch.documents)
