"""The global gradient norm over all shards, and clipping to it, without waiting for the device."""

from __future__ import annotations

import torch
import torch.distributed as dist


@torch.no_grad()
def clip_gradients(
    gradients: list[torch.Tensor], limit: float | None, shards: dist.ProcessGroup | None
) -> torch.Tensor:
    """Scale `gradients` in place so that their joint norm over `shards` is at most `limit`, and return the norm before that (scalar).

    `gradients` are one rank's parts and every element lives on one rank of `shards` (replicas hold equal copies and are not summed).
    A norm that is not finite leaves the gradients as they are: the optimizer then skips the step.
    """
    present = [gradient for gradient in gradients if gradient.numel()]
    norms = torch._foreach_norm(present) if present else []
    device = gradients[0].device
    squares = (
        torch.stack([norm.double() for norm in norms]).square().sum()
        if norms
        else torch.zeros((), device=device).double()
    )
    if shards is not None:
        dist.all_reduce(squares, group=shards)
    norm = squares.sqrt()
    if limit is not None and present:
        scale = torch.where(norm.isfinite(), (limit / (norm + 1e-6)).clamp(max=1.0), 1.0)
        torch._foreach_mul_(present, scale.to(present[0].dtype))
    return norm
