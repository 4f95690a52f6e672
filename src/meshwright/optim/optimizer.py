"""The optimizer of one rank. It owns the state of all parameters and updates it by the rule that `train.optimizer` names.

State is allocated at the start, so that every checkpoint has the same tensors. If the gradient norm is not finite, the device itself skips
the step; the host reads no value. Parameters whose state is in host memory are updated by `optim.host`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import nn

from meshwright.optim.adamw import AdamWRule
from meshwright.optim.average import WeightAverage
from meshwright.optim.fused import Coefficients, UpdateInputs, new_count
from meshwright.optim.host import MASTER, HostAdamW, Release, SpanFactory
from meshwright.optim.lamb import LambRule
from meshwright.optim.muon import MuonRule
from meshwright.optim.rule import RuleTensors, UpdateRule
from meshwright.optim.sgd import SgdRule
from meshwright.optim.shards import local
from meshwright.policies.snapshot_copies import SNAPSHOT_GROUPS
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec, ParameterSpec, parameters
from meshwright.spec.optimizers import (
    AdamWSpec,
    LambSpec,
    MuonSpec,
    OptimizerSpec,
    SgdSpec,
    state_names,
    weight_decay_of,
)
from meshwright.spec.plan import Moments
from meshwright.state.parts import StateParts, average_name, moment_name, weight_name
from meshwright.state.shared_ranks import SharedRanks
from meshwright.state.snapshot import HostState, SnapshotCopies


class Optimizer:
    """Optimizer of a model, which may be sharded; also keeps the moving average of the weights if the run has one (`train.ema_decay`).

    - `weights`: this rank's pieces of each parameter.
    - `host_offloaded`: the parameters whose state is in host memory, for AdamW only. The value is a function that releases the master
      weight on the device, or None if the master weight stays there. Call `release_master_weights` once the weights have their values.
    - `ranks`: the ranks that share the weights, for a rule that updates whole matrices; None: this rank has whole weights.
    - `moments`, `offload_fraction`, `offload_staging` (in bytes): settings of the plan, see `HostAdamW`.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: ModelSpec,
        train: TrainSpec,
        weights: Mapping[str, StateParts],
        host_offloaded: Mapping[str, Release | None] = MappingProxyType({}),
        ranks: SharedRanks | None = None,
        *,
        moments: Moments = "fp32",
        offload_fraction: float = 1.0,
        offload_staging: int = 0,
    ) -> None:
        self._parameters = dict(model.named_parameters())
        specs = {parameter.name: parameter for parameter in parameters(spec)}
        frozen = {name for name, parameter in specs.items() if parameter.frozen}
        self._weights = {name: pieces for name, pieces in weights.items() if name not in frozen}
        self._parts = {name: pieces.local for name, pieces in self._weights.items()}
        self._specs = {name: specs.get(name) or _undecayed(name, part) for name, part in self._parts.items()}
        self._decays = {
            name: weight_decay_of(parameter, train.weight_decay, train.decay_groups)
            for name, parameter in self._specs.items()
        }
        self._state_names = {name: state_names(train.optimizer, self._specs[name]) for name in self._parts}
        self._on_device = {name: part for name, part in self._parts.items() if name not in host_offloaded}
        self._states: dict[str, dict[str, torch.Tensor]] = {}
        for name, part in self._on_device.items():
            for state in self._state_names[name]:
                self._states.setdefault(state, {})[name] = torch.zeros_like(part)
        self._counts = {name: new_count(part.device) for name, part in self._on_device.items()}
        tensors = RuleTensors(self._specs, self._on_device, self._states, self._counts, self._decays)
        self._rule = _rule(train.optimizer, tensors, ranks or SharedRanks.alone())
        self._ema = WeightAverage(self._parts, train.ema_decay) if train.ema_decay is not None else None
        self._copies: SnapshotCopies | None = None
        self._host: HostAdamW | None = None
        if host_offloaded:
            assert isinstance(train.optimizer, AdamWSpec), "config and planner offload the state of AdamW only"
            parts = {name: self._parts[name] for name in in_order_of_gathers(host_offloaded, spec)}
            release = {name: function for name, function in host_offloaded.items() if function is not None}
            betas = train.optimizer.beta1, train.optimizer.beta2
            self._host = HostAdamW(
                parts,
                self._decays,
                release,
                coefficients=Coefficients(betas, train.optimizer.epsilon),
                moments=moments,
                fraction=offload_fraction,
                staging=offload_staging,
            )

    def release_master_weights(self) -> None:
        """Move the master weights of host-offloaded parameters to host memory and free them on the device."""
        if self._host is not None:
            self._host.release_master_weights()

    def defer_updates(self) -> None:
        """From now on, leave updates of state in host memory to `complete_updates`, which must be called before weights are gathered."""
        if self._host is not None:
            self._host.deferred = True

    def complete_updates(self, names: Iterable[str] | None = None) -> bool:
        """Launch the rest of the last update, up to the parameters `names` (None: all). Returns whether there was something left."""
        return self._host is not None and self._host.complete_updates(names)

    def launch_copies(self) -> None:
        """Launch copies of state in host memory, which overlap with compute. Executors call it before each action."""
        if self._host is not None:
            self._host.launch_copies()

    def step(
        self, learning_rate: float, norm: torch.Tensor, factor: torch.Tensor, concurrent_span: SpanFactory | None = None
    ) -> None:
        """Update all parameters with the gradients multiplied by `factor`. If `norm` is not finite, the device skips the update.

        `factor` and `norm` are scalars on the device. Gradients are freed afterwards. `concurrent_span` creates the profiler spans of
        copies to and from host memory. If the rule is collective, this is collective over the ranks of a pipeline stage.
        """
        inputs = UpdateInputs(learning_rate, factor, (~norm.isfinite()).float())
        gradients = {
            name: local(parameter.grad) for name, parameter in self._parameters.items() if parameter.grad is not None
        }
        copies = self._copies
        self._copies = None
        if self._host is not None:
            offloaded = {name: gradient for name, gradient in gradients.items() if name not in self._on_device}
            self._host.step(offloaded, inputs, concurrent_span, copies)
            del offloaded
        if copies is None:
            self._update(list(self._on_device), gradients, inputs)
        else:
            for group in copies.groups:
                copies.wait(group)
                self._update([name for name in group if name in self._on_device], gradients, inputs)
        self.zero_grad()

    def _update(self, names: Sequence[str], gradients: Mapping[str, torch.Tensor], inputs: UpdateInputs) -> None:
        self._rule.update(names, gradients, inputs)
        if self._ema is not None:
            self._ema.update(names, inputs)

    def start_average(self) -> None:
        """Set the moving average to the current weights. Only for a run that begins: a checkpoint has its own average."""
        if self._ema is not None:
            self._ema.start()

    def protect(self, copies: SnapshotCopies) -> None:
        """Make the next step wait for `copies` of the state: before it updates a group of parameters, for the copies of this group."""
        self._copies = copies

    def wait_for_copies(self) -> None:
        """Wait for the copies that `protect` was given, because the state is about to change without an update."""
        if self._copies is not None:
            for group in self._copies.groups:
                self._copies.wait(group)

    def snapshot_groups(self, limit: int = SNAPSHOT_GROUPS) -> list[list[str]]:
        """Return the parameters in the order of their update, in at most `limit` groups of similar size, for `protect`."""
        offloaded = [[name] for name in self._parts if name not in self._on_device]
        share = sum(map(self._elements, offloaded)) / max(1, self._elements(self._parts))
        first = (
            min(limit - 1, max(1, round(limit * share))) if offloaded and self._on_device else limit * bool(offloaded)
        )
        return self._split(offloaded, first) + self._split(self._rule.bundles(), limit - first)

    def _split(self, bundles: Sequence[Sequence[str]], limit: int) -> list[list[str]]:
        """Join `bundles` in their order to at most `limit` groups of similar size."""
        total = sum(map(self._elements, bundles))
        size = 0
        groups: list[list[str]] = []
        for bundle in bundles:
            elements = self._elements(bundle)
            if not groups or (size + elements > total / limit * len(groups) and len(groups) < limit):
                groups.append([])
            groups[-1].extend(bundle)
            size += elements
        return groups

    def _elements(self, names: Iterable[str]) -> int:
        """Return the number of elements of parameters: on this rank, or on all ranks together if all ranks must form the same groups."""
        if self._rule.collective:
            return sum(self._specs[name].count for name in names)
        return sum(self._parts[name].numel() for name in names)

    def parameter_of_state(self) -> dict[str, str]:
        """Return, by the name of each tensor in `state`, the name of its parameter."""
        states = {moment_name(state, name): name for name in self._parts for state in self._state_names[name]}
        averages = {average_name(name): name for name in self._parts} if self._ema is not None else {}
        return {weight_name(name): name for name in self._parts} | states | averages

    def host_state(self) -> HostState | None:
        """Return the state in host memory after all updates launched so far; None if no state is kept there."""
        return None if self._host is None else self._host.host_state()

    def allocate_second_buffers(self) -> None:
        """For state in host memory, allocate memory to which updates write while a snapshot is copied; see `HostAdamW`."""
        if self._host is not None:
            self._host.allocate_second_buffers()

    def zero_grad(self) -> None:
        """Free all gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def state(self) -> list[StateParts]:
        """Return this rank's pieces of all master weights, state tensors and averages after the last update, to be read or overwritten."""
        self.complete_updates()
        parts = [self._weight(name) for name in self._weights]
        # State by state, for example the first moments of all parameters before the second moments.
        states = dict.fromkeys(state for names in self._state_names.values() for state in names)
        for state in states:
            parts += [self._state(state, name) for name in self._weights if state in self._state_names[name]]
        averages = self._ema.tensors if self._ema is not None else {}
        for name, average in averages.items():
            parts.append(replace(self._weights[name], name=average_name(name), local=average))
        return parts

    def _weight(self, name: str) -> StateParts:
        weight = self._weights[name]
        if name in self._on_device or self._host is None or not self._host.has_master_weights:
            return weight
        return replace(weight, local=self._host.part(MASTER, name), memory="host", encoded=self._host)

    def _state(self, state: str, name: str) -> StateParts:
        weight = self._weights[name]
        logical_name = moment_name(state, name)
        if self._host is None or name in self._on_device:
            return replace(weight, name=logical_name, local=self._states[state][name])
        part = self._host.part(state, name)
        return replace(weight, name=logical_name, local=part, memory="host", encoded=self._host)

    @property
    def host_bytes(self) -> int:
        """Bytes of state in host memory."""
        return 0 if self._host is None else self._host.host_bytes

    def set_steps(self, steps: int) -> None:
        """Set the number of updates so far, which the bias correction of the moments needs."""
        if self._host is not None:
            self._host.set_steps(steps)
        for count in self._counts.values():
            count.fill_(float(steps))


def in_order_of_gathers(names: Iterable[str], spec: ModelSpec) -> list[str]:
    """Sort the parameters `names` of one rank by when the forward gathers their units. They are given in the model's order.

    The two orders differ on a rank that has the embedding and a head that uses the embedding's weight, because it gathers both at once:
    before the blocks if it has the first stage, otherwise after the blocks.
    """
    names = list(names)
    if not spec.embedding_at_both_ends or "embed.weight" not in names:
        return names
    has_first_stage = any(name.startswith("layers.0.") for name in names)
    return sorted(names, key=lambda name: name.startswith("layers.") is has_first_stage)


def _undecayed(name: str, part: torch.Tensor) -> ParameterSpec:
    """Return a specification, without weight decay, for a parameter that is not part of the model, such as one of a benchmark."""
    return ParameterSpec(name, tuple(part.shape), "zeros", 0.0, decay=False)


def _rule(spec: OptimizerSpec, tensors: RuleTensors, ranks: SharedRanks) -> UpdateRule:
    """Create the update rule of an optimizer."""
    if isinstance(spec, SgdSpec):
        return SgdRule(tensors, spec.momentum, nesterov=spec.nesterov)
    if isinstance(spec, MuonSpec):
        return MuonRule(tensors, spec, ranks)
    coefficients = Coefficients((spec.beta1, spec.beta2), spec.epsilon)
    if isinstance(spec, LambSpec):
        return LambRule(tensors, coefficients, ranks)
    return AdamWRule(tensors, coefficients, list(tensors.weights))
