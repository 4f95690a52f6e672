"""AdamW (Loshchilov & Hutter 2019) on one rank's shards.

The moments are allocated at the start, so that every checkpoint has the same tensors. The device itself skips a step whose gradient norm
is not finite; the host reads no value. `optim.host` updates parameters whose state is in host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import nn

from meshwright.optim.fused import MOMENTS, Coefficients, StepInputs, count_updates, new_count, update
from meshwright.optim.host import MASTER, HostAdamW, Release, SpanFactory
from meshwright.optim.shards import local
from meshwright.policies.snapshot_copies import SNAPSHOT_GROUPS
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec, parameters
from meshwright.state.parts import StateParts, moment_name, weight_name
from meshwright.state.snapshot import HostState, SnapshotCopies


class AdamW:
    """Optimizer of a (sharded) model; weight decay applies to the parameters whose specification has `decay`.

    `host_offloaded` maps each parameter whose state is in host memory to the function that releases its master weight from the device, or
    to None if the master weight remains on the device. Call `release_master_weights` once the weights have their values. `weights` has this
    rank's pieces of each parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: ModelSpec,
        train: TrainSpec,
        weights: Mapping[str, StateParts],
        host_offloaded: Mapping[str, Release | None] = MappingProxyType({}),
    ) -> None:
        self._parameters = dict(model.named_parameters())
        self._weights = dict(weights)
        self._parts = {name: pieces.local for name, pieces in weights.items()}
        decayed = {parameter.name for parameter in parameters(spec) if parameter.decay}
        self._decays = {name: train.weight_decay if name in decayed else 0.0 for name in self._parts}
        self._coefficients = Coefficients((train.beta1, train.beta2), train.epsilon)
        self._on_device = {name: part for name, part in self._parts.items() if name not in host_offloaded}
        self._moments = {
            moment: {name: torch.zeros_like(part) for name, part in self._on_device.items()} for moment in MOMENTS
        }
        self._counts = {name: new_count(part.device) for name, part in self._on_device.items()}
        self._copies: SnapshotCopies | None = None
        self._host: HostAdamW | None = None
        if host_offloaded:
            parts = {name: self._parts[name] for name in host_offloaded}
            release = {name: function for name, function in host_offloaded.items() if function is not None}
            self._host = HostAdamW(parts, self._decays, release, coefficients=self._coefficients)

    def release_master_weights(self) -> None:
        """Move the current master weights that are host-offloaded to host memory and free them on the device."""
        if self._host is not None:
            self._host.release_master_weights()

    def reload_weights(self) -> None:
        """Bring master weights in host memory, which were overwritten, to the weights that the device computes with."""
        if self._host is not None:
            self._host.reload_weights()

    def step(
        self, learning_rate: float, norm: torch.Tensor, factor: torch.Tensor, concurrent_span: SpanFactory | None = None
    ) -> None:
        """One update at `learning_rate` with the gradients times `factor`, skipped on the device if `norm` is not finite.

        `factor` and `norm` are scalars on the device. Gradients are freed afterwards. `concurrent_span` creates the profiler spans of
        copies to and from host memory.
        """
        inputs = StepInputs(learning_rate, factor, (~norm.isfinite()).float())
        gradients = {
            name: local(parameter.grad) for name, parameter in self._parameters.items() if parameter.grad is not None
        }
        copies, self._copies = self._copies, None
        if self._host is not None:
            offloaded = {name: gradient for name, gradient in gradients.items() if name not in self._on_device}
            self._host.step(offloaded, inputs, concurrent_span, copies)
        on_device = {name: gradients[name] for name in self._on_device if name in gradients}
        if copies is None:
            self._step_on_device(on_device, inputs)
        else:
            for group in copies.groups:
                copies.wait(group)
                self._step_on_device({name: on_device[name] for name in group if name in on_device}, inputs)
        self.zero_grad()

    def protect(self, copies: SnapshotCopies) -> None:
        """Make the next step wait for `copies` of the state, group by group, before it updates the parameters of a group."""
        self._copies = copies

    def snapshot_groups(self, limit: int = SNAPSHOT_GROUPS) -> list[list[str]]:
        """The parameters in the order of their update, in at most `limit` groups of similar size, for `protect`."""
        offloaded = [name for name in self._parts if name not in self._on_device]
        share = self._elements(offloaded) / max(1, self._elements(self._parts))
        first = (
            min(limit - 1, max(1, round(limit * share))) if offloaded and self._on_device else limit * bool(offloaded)
        )
        return self._split(offloaded, first) + self._split(list(self._on_device), limit - first)

    def _split(self, names: Sequence[str], limit: int) -> list[list[str]]:
        """`names` in their order, in at most `limit` groups of similar size."""
        total, size = self._elements(names), 0
        groups: list[list[str]] = []
        for name in names:
            if not groups or (size + self._elements([name]) > total / limit * len(groups) and len(groups) < limit):
                groups.append([])
            groups[-1].append(name)
            size += self._elements([name])
        return groups

    def _elements(self, names: Iterable[str]) -> int:
        return sum(self._parts[name].numel() for name in names)

    def parameter_of_state(self) -> dict[str, str]:
        """The parameter of each tensor in `state`, by the tensor's name."""
        moments = {moment_name(moment, name): name for moment in MOMENTS for name in self._parts}
        return {weight_name(name): name for name in self._parts} | moments

    def host_state(self) -> HostState | None:
        """The state in host memory as the updates given to the device so far leave it; None where none is kept there."""
        return None if self._host is None else self._host.host_state()

    def allocate_second_buffers(self) -> None:
        """Allocate host memory to which updates beside snapshots write, for state that is kept there; see `HostAdamW`."""
        if self._host is not None:
            self._host.allocate_second_buffers()

    def _step_on_device(self, gradients: Mapping[str, torch.Tensor], inputs: StepInputs) -> None:
        tensors_by_name = (self._on_device, gradients, *(self._moments[moment] for moment in MOMENTS), self._counts)
        with count_updates([self._counts[name] for name in gradients], inputs.skip):
            for weight_decay in dict.fromkeys(self._decays[name] for name in gradients):
                names = [name for name in gradients if self._decays[name] == weight_decay]
                update(
                    *([tensors[name] for name in names] for tensors in tensors_by_name),
                    coefficients=self._coefficients,
                    weight_decay=weight_decay,
                    inputs=inputs,
                )

    def zero_grad(self) -> None:
        """Free all gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def state(self) -> list[StateParts]:
        """This rank's pieces of every master weight and moment after the last update, as live memory to read or to overwrite.

        Waits for the last copies to host memory.
        """
        return [
            *(self._weight(name) for name in self._weights),
            *(self._moment(moment, name) for moment in MOMENTS for name in self._weights),
        ]

    def _weight(self, name: str) -> StateParts:
        weight = self._weights[name]
        if name in self._on_device or self._host is None or not self._host.has_master_weights:
            return weight
        return replace(weight, local=self._host.state(MASTER, name), memory="host")

    def _moment(self, moment: str, name: str) -> StateParts:
        weight, state_name = self._weights[name], moment_name(moment, name)
        if self._host is None or name in self._on_device:
            return replace(weight, name=state_name, local=self._moments[moment][name])
        return replace(weight, name=state_name, local=self._host.state(moment, name), memory="host")

    @property
    def host_bytes(self) -> int:
        """Bytes of state in host memory."""
        return 0 if self._host is None else self._host.host_bytes

    def set_steps(self, steps: int) -> None:
        """Set the number of updates so far, for the bias correction of the moments."""
        if self._host is not None:
            self._host.set_steps(steps)
        for count in self._counts.values():
            count.fill_(float(steps))
