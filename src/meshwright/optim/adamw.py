"""AdamW (Loshchilov & Hutter 2019) on one rank's shards, with torch's fused kernel.

The moments exist from the start, so a checkpoint always has the same tensors. A step whose gradient norm is not finite is skipped on
the device itself: no value is fetched to decide it.
"""

from __future__ import annotations

import torch
from torch import nn

from meshwright.optim.shards import like, local
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec, parameters

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """Optimizer of a (sharded) model; weight decay applies to the parameters whose table row says so."""

    def __init__(self, model: nn.Module, spec: ModelSpec, train: TrainSpec) -> None:
        self._parameters = dict(model.named_parameters())
        self._parts = {name: local(parameter.detach()) for name, parameter in self._parameters.items()}
        decayed = {row.name for row in parameters(spec) if row.decay}
        groups = [
            {
                "params": [part for name, part in self._parts.items() if name in decayed],
                "weight_decay": train.weight_decay,
            },
            {"params": [part for name, part in self._parts.items() if name not in decayed], "weight_decay": 0.0},
        ]
        self._inner = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=train.learning_rate,
            betas=(train.beta1, train.beta2),
            eps=train.epsilon,
            fused=True,
        )
        for part in self._parts.values():
            step = torch.zeros((), dtype=torch.float32, device=part.device)
            self._inner.state[part] = {"step": step, **{moment: torch.zeros_like(part) for moment in MOMENTS}}

    def step(self, learning_rate: float, norm: torch.Tensor) -> None:
        """One update at `learning_rate`, skipped on the device when `norm` (scalar) is not finite; gradients are then freed."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._parts[name].grad = local(parameter.grad)
        for group in self._inner.param_groups:
            group["lr"] = learning_rate
        # The fused kernel reads this attribute (torch.amp's GradScaler sets it): 1 leaves weights and moments untouched.
        self._inner.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        self._inner.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.grad = None
            self._parts[name].grad = None

    def moments(self) -> dict[tuple[str, str], torch.Tensor]:
        """The moments by their own name and their parameter's, laid out like it and sharing the optimizer's memory."""
        return {
            (moment, name): like(self._inner.state[part][moment], self._parameters[name])
            for moment in MOMENTS
            for name, part in self._parts.items()
        }

    def set_steps(self, steps: int) -> None:
        """Tell the bias correction how many updates the moments have seen."""
        for part in self._parts.values():
            self._inner.state[part]["step"].fill_(float(steps))
