"""AdamW (Loshchilov & Hutter 2019) on one rank's shards, with torch's fused kernel.

The moments exist from the start, so a checkpoint always has the same tensors. A step whose gradient norm is not finite is skipped on
the device itself: no value is fetched to decide it. Parameters whose state waits in host memory are stepped by `optim.host`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from meshwright.optim.host import MASTER, MOMENTS, Aside, HostAdamW, Release
from meshwright.optim.shards import like, local
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec, parameters


class AdamW:
    """Optimizer of a (sharded) model; weight decay applies to the parameters whose table row says so.

    `away` names the parameters whose state is in host memory, with how their master weights leave the device (None: they stay). These
    leave with `leave_device`, once the weights have their values.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: ModelSpec,
        train: TrainSpec,
        away: Mapping[str, Release | None] = MappingProxyType({}),
    ) -> None:
        self._parameters = dict(model.named_parameters())
        self._parts = {name: local(parameter.detach()) for name, parameter in self._parameters.items()}
        decayed = {row.name for row in parameters(spec) if row.decay}
        decays = {name: train.weight_decay if name in decayed else 0.0 for name in self._parts}
        betas = (train.beta1, train.beta2)
        self._here = {name: part for name, part in self._parts.items() if name not in away}
        groups = [
            {"params": [part for name, part in self._here.items() if decays[name] == decay], "weight_decay": decay}
            for decay in dict.fromkeys((train.weight_decay, 0.0))
        ]
        self._inner = _fused([group for group in groups if group["params"]], train) if self._here else None
        self._host: HostAdamW | None = None
        if away:
            parts = {name: self._parts[name] for name in away}
            release = {name: leave for name, leave in away.items() if leave is not None}
            self._host = HostAdamW(parts, decays, release, betas=betas, epsilon=train.epsilon)
        for part in self._here.values():
            assert self._inner is not None
            step = torch.zeros((), dtype=torch.float32, device=part.device)
            self._inner.state[part] = {"step": step, **{moment: torch.zeros_like(part) for moment in MOMENTS}}

    def leave_device(self) -> None:
        """From now on the master weights of parameters that are away, as they are now, are in host memory alone, if they are to leave."""
        if self._host is not None:
            self._host.leave()

    def step(self, learning_rate: float, norm: torch.Tensor, aside: Aside | None = None) -> None:
        """One update at `learning_rate`, skipped on the device when `norm` (scalar) is not finite; gradients are then freed.

        `aside` makes the spans of copies to and from host memory.
        """
        skip = (~norm.isfinite()).float()
        gradients = {
            name: local(parameter.grad) for name, parameter in self._parameters.items() if parameter.grad is not None
        }
        if self._host is not None:
            away = {name: gradient for name, gradient in gradients.items() if name not in self._here}
            self._host.step(away, learning_rate, skip, aside)
        if self._inner is not None:
            self._step_here(self._inner, gradients, learning_rate, skip)
        self.zero_grad()

    def _step_here(
        self, inner: torch.optim.AdamW, gradients: Mapping[str, torch.Tensor], learning_rate: float, skip: torch.Tensor
    ) -> None:
        for name, part in self._here.items():
            part.grad = gradients.get(name)
        for group in inner.param_groups:
            group["lr"] = learning_rate
        # The fused kernel reads this attribute (torch.amp's GradScaler sets it): 1 leaves weights and moments untouched.
        inner.found_inf = skip  # type: ignore[attr-defined]
        inner.step()

    def zero_grad(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.grad = None
            self._parts[name].grad = None

    def moments(self) -> dict[tuple[str, str], torch.Tensor]:
        """The moments on the device by their own name and their parameter's, laid out like it and sharing the optimizer's memory."""
        if self._inner is None:
            return {}
        return {
            (moment, name): like(self._inner.state[part][moment], self._parameters[name])
            for moment in MOMENTS
            for name, part in self._here.items()
        }

    def on_host(self) -> dict[tuple[str, str], torch.Tensor]:
        """What is in host memory, by its kind (a moment's name, or `weight`) and its parameter's name: this rank's parts as plain tensors
        that share the optimizer's memory. Waits for the device's last update."""
        if self._host is None:
            return {}
        kinds = (*MOMENTS, MASTER) if self._host.keeps_masters else MOMENTS
        return {
            (kind, name): self._host.state(kind, name)
            for kind in kinds
            for name in self._parts
            if name not in self._here
        }

    @property
    def host_bytes(self) -> int:
        """Of host memory."""
        return 0 if self._host is None else self._host.host_bytes

    def set_steps(self, steps: int) -> None:
        """Tell the bias correction how many updates the moments have seen."""
        if self._host is not None:
            self._host.set_steps(steps)
        if self._inner is not None:
            for part in self._here.values():
                self._inner.state[part]["step"].fill_(float(steps))


def _fused(groups: list[dict[str, Any]], train: TrainSpec) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        groups, lr=train.learning_rate, betas=(train.beta1, train.beta2), eps=train.epsilon, fused=True
    )
