"""Computes the global gradient norm over all shards, and the clipping factor, without a wait of the host for the device."""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright.optim.norms import norms


@torch.no_grad()
def gradient_norm(gradients: list[torch.Tensor], group: dist.ProcessGroup | None, device: torch.device) -> torch.Tensor:
    """Return the norm of all gradients on the ranks of `group`, as an fp64 scalar on `device`.

    `gradients` are this rank's parts, and each element must be on exactly one rank of `group`. Replicas have equal gradients, so `group`
    has the ranks of one copy of the model. None: this rank only.
    """
    non_empty = [gradient for gradient in gradients if gradient.numel()]
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for dtype in dict.fromkeys(gradient.dtype for gradient in non_empty):
        squares += norms([gradient for gradient in non_empty if gradient.dtype == dtype]).square().sum()
    if group is not None:
        dist.all_reduce(squares, group=group)
    return squares.sqrt()


def clip_factor(norm: torch.Tensor, limit: float | None) -> torch.Tensor:
    """Return the factor (fp64 scalar) that scales gradients with this norm to at most `limit`.

    It is 1 without a limit, and also if the norm is not finite, because the optimizer then skips the step. The update multiplies the
    gradients by it, which saves a pass over them.
    """
    if limit is None:
        return torch.ones_like(norm)
    return torch.where(norm.isfinite(), (limit / (norm + 1e-6)).clamp(max=1.0), 1.0)
