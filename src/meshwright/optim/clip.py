"""The global gradient norm over all shards, and clipping to it, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


@torch.no_grad()
def clip_gradients(
    gradients: list[torch.Tensor],
    limit: float | None,
    group: dist.ProcessGroup | None,
    copies: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Scale `gradients` in place so that their joint norm over `group` is at most `limit`, and return the norm before that (scalar).

    `gradients` are one rank's parts and every element lives on one rank of `group` (replicas hold equal copies and are not summed);
    `copies` are scaled too, but their squares are another rank's to count. A norm that is not finite leaves the gradients as they are:
    the optimizer then skips the step.
    """
    present = [gradient for gradient in gradients if gradient.numel()]
    norms = torch._foreach_norm(present) if present else []
    device = (*gradients, *copies)[0].device
    squares = (
        torch.stack([norm.double() for norm in norms]).square().sum()
        if norms
        else torch.zeros((), device=device).double()
    )
    if group is not None:
        dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    scaled = [gradient for gradient in (*gradients, *copies) if gradient.numel()]
    if limit is not None and scaled:
        scale = torch.where(norm.isfinite(), (limit / (norm + 1e-6)).clamp(max=1.0), 1.0)
        torch._foreach_mul_(scaled, scale.to(scaled[0].dtype))
    return norm
