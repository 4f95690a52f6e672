"""The global gradient norm over all shards, and the factor that clips to it, without waiting for the device."""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright.kernels.norm import accumulate_dtype


@torch.no_grad()
def gradient_norm(gradients: list[torch.Tensor], group: dist.ProcessGroup | None, device: torch.device) -> torch.Tensor:
    """The joint norm of `gradients` over `group`, fp64 scalar on `device`.

    They are one rank's parts, and every element is in those of one rank of `group`: replicas hold equal copies and are not summed.
    """
    present = [gradient for gradient in gradients if gradient.numel()]
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for kind in dict.fromkeys(gradient.dtype for gradient in present):
        alike = [gradient for gradient in present if gradient.dtype == kind]
        norms = torch._foreach_norm(alike, dtype=accumulate_dtype(kind))
        squares += torch.stack(norms).double().square().sum()
    if group is not None:
        dist.all_reduce(squares, group=group)
    return squares.sqrt()


def clip_factor(norm: torch.Tensor, limit: float | None) -> torch.Tensor:
    """Factor (fp64 scalar) that scales gradients of this norm to at most `limit`.

    1 without a limit and for a norm that is not finite: the optimizer then skips the step. The update multiplies the
    gradients by it, which saves a pass over them.
    """
    if limit is None:
        return torch.ones_like(norm)
    return torch.where(norm.isfinite(), (limit / (norm + 1e-6)).clamp(max=1.0), 1.0)
