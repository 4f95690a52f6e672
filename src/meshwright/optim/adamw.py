"""AdamW (Loshchilov & Hutter 2019) on one rank's shards.

The moments exist from the start, so a checkpoint always has the same tensors. A step whose gradient norm is not finite is skipped on
the device itself: no value is fetched to decide it. Parameters whose state waits in host memory are stepped by `optim.host`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn

from meshwright.optim.fused import MOMENTS, Coefficients, Told, counted, new_count, update
from meshwright.optim.host import MASTER, Aside, HostAdamW, Release
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
        self._decays = {name: train.weight_decay if name in decayed else 0.0 for name in self._parts}
        self._coefficients = Coefficients((train.beta1, train.beta2), train.epsilon)
        self._here = {name: part for name, part in self._parts.items() if name not in away}
        self._moments = {
            moment: {name: torch.zeros_like(part) for name, part in self._here.items()} for moment in MOMENTS
        }
        self._counts = {name: new_count(part.device) for name, part in self._here.items()}
        self._host: HostAdamW | None = None
        if away:
            parts = {name: self._parts[name] for name in away}
            release = {name: leave for name, leave in away.items() if leave is not None}
            self._host = HostAdamW(parts, self._decays, release, coefficients=self._coefficients)

    def leave_device(self) -> None:
        """From now on the master weights of parameters that are away, as they are now, are in host memory alone, if they are to leave."""
        if self._host is not None:
            self._host.leave()

    def step(self, learning_rate: float, norm: torch.Tensor, factor: torch.Tensor, aside: Aside | None = None) -> None:
        """One update at `learning_rate` by the gradients times `factor` (scalar, on the device), skipped there when `norm` (scalar) is not
        finite; gradients are then freed.

        `aside` makes the spans of copies to and from host memory.
        """
        told = Told(learning_rate, factor, (~norm.isfinite()).float())
        gradients = {
            name: local(parameter.grad) for name, parameter in self._parameters.items() if parameter.grad is not None
        }
        if self._host is not None:
            away = {name: gradient for name, gradient in gradients.items() if name not in self._here}
            self._host.step(away, told, aside)
        self._step_here({name: gradients[name] for name in self._here if name in gradients}, told)
        self.zero_grad()

    def _step_here(self, gradients: Mapping[str, torch.Tensor], told: Told) -> None:
        held = (self._here, gradients, *(self._moments[moment] for moment in MOMENTS), self._counts)
        with counted([self._counts[name] for name in gradients], told.skip):
            for weight_decay in dict.fromkeys(self._decays[name] for name in gradients):
                names = [name for name in gradients if self._decays[name] == weight_decay]
                update(
                    *([tensors[name] for name in names] for tensors in held),
                    coefficients=self._coefficients,
                    weight_decay=weight_decay,
                    told=told,
                )

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def moments(self) -> dict[tuple[str, str], torch.Tensor]:
        """The moments on the device by their own name and their parameter's, laid out like it and sharing the optimizer's memory."""
        return {
            (moment, name): like(part, self._parameters[name])
            for moment, parts in self._moments.items()
            for name, part in parts.items()
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
        for count in self._counts.values():
            count.fill_(float(steps))
