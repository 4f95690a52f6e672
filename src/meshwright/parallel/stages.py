"""The part of a model that one pipeline rank runs, divided into stages and units.

A stage is a range of consecutive layers. A unit is the part of a stage whose parameters are gathered and reduced together: the embedding,
one block, or the final norm with the head and the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.data.loader import MicroBatch
from meshwright.kernels.loss import LossSums
from meshwright.models.decoder import Decoder, SharedInputs
from meshwright.models.moe import RoutedOutput
from meshwright.parallel.context import SplitSequences
from meshwright.parallel.experts import DistributedExperts
from meshwright.parallel.fsdp import ParameterGroup, UnsharedParameterGroup
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.routing import RoutingStatistics
from meshwright.parallel.sharded_unit import ShardedUnit
from meshwright.spec.layout import Division, gradients_final_in_backward, local_shape
from meshwright.spec.model import ModelSpec, parameters
from meshwright.spec.plan import Plan
from meshwright.workload.activations import saved_elements_by_layer

UnitForward = Callable[[Tensor | None, MicroBatch, SharedInputs], Tensor | RoutedOutput | LossSums]
"""Maps a unit's input (None for the embedding), the micro-batch and the inputs that all blocks share to the unit's output."""


@dataclass(frozen=True)
class Unit:
    """One unit of a stage: the function that runs its forward, and its parameters.

    `run` maps the unit's input `(batch, seq, hidden)` (None for the embedding) to its output, or to the sums of the losses for the last
    unit with targets; a block with experts also returns its router's losses and expert loads. `layer` is the index of a block in the
    model, None for the other units. `kept_elements` estimates how many elements per token the forward saves for the backward
    (`workload.activations`); `offloads` tells whether these are offloaded to host memory (`parallel.offload`).
    """

    run: UnitForward
    sharded: ShardedUnit
    layer: int | None = None
    kept_elements: float = 0.0
    offloads: bool = False


@dataclass(frozen=True)
class RankModel:
    """The part of the model that one pipeline rank runs.

    `stages` maps the indices of the rank's virtual stages to their units. Activations between units are divided along the sequence over
    `tensor_ranks`. `context` divides sequences over context ranks, `routing` collects the routers' statistics; both may be None.
    """

    model: Decoder
    stages: Mapping[int, Sequence[Unit]]
    pipeline_rank: int
    dtype: torch.dtype
    device: torch.device
    tensor_ranks: int = 1
    context: SplitSequences | None = None
    routing: RoutingStatistics | None = None

    def local_batch(self, batch: MicroBatch) -> MicroBatch:
        """This context rank's tokens of a micro-batch of whole sequences."""
        return batch if self.context is None else self.context.local_batch(batch)

    def shared_inputs(self, batch: MicroBatch) -> SharedInputs:
        """The inputs that all blocks of a local micro-batch share: token positions, rotary tables, attention mask."""
        if self.context is None:
            return self.model.shared_inputs(batch.tokens, batch.positions, batch.documents, self.dtype)
        return self.context.shared_inputs(batch, self.dtype)

    def message_shape(self, batch: MicroBatch) -> tuple[int, int, int]:
        """Shape of the activation or gradient that stages exchange for a local micro-batch: `(batch, seq, hidden)`."""
        sequences, seq = batch.tokens.shape
        return sequences, seq // self.tensor_ranks, self.model.spec.hidden

    def whole_logits(self, logits: Tensor) -> Tensor:
        """The logits `(batch, seq, vocab)` of whole sequences, from those of this rank's tokens. Collective over context ranks."""
        return logits if self.context is None else self.context.gather_logits(logits)


def remove_other_modules(model: Decoder, parameter_names: Iterable[str]) -> None:
    """Remove from a model on the meta device the modules of other pipeline ranks.

    `parameter_names` are the rank's parameters (`spec.layout.rank_parameters`). The names of the remaining parameters do not change.
    """
    modules = {name.rpartition(".")[0] for name in parameter_names}
    layers = {name.split(".")[1] for name in modules if name.startswith("layers.")}
    for name in [name for name in model.layers if name not in layers]:
        del model.layers[name]
    if "positions" not in modules:
        model.positions = None
    if "embed" not in modules:
        model.embed = None  # type: ignore[assignment]
    if "norm" not in modules:  # the head is on the same rank; a tied head has no parameter of its own to test for
        model.norm = model.head = None  # type: ignore[assignment]


def shrink_to_local_parts(model: Decoder, division: Division) -> None:
    """Replace every parameter of a model on the meta device by one with the shape of the rank's part; names do not change.

    `division` tells which part of the weights the tensor and expert ranks have.
    """
    specs = {parameter.name: parameter for parameter in parameters(model.spec)}
    for name, whole in list(model.named_parameters()):
        module, _, attribute = name.rpartition(".")
        local = whole.new_empty(local_shape(model.spec, specs[name], division))
        setattr(model.get_submodule(module), attribute, nn.Parameter(local, requires_grad=whole.requires_grad))


def make_units(model: Decoder, stages: Sequence[range], plan: Plan, mesh: Mesh) -> list[list[Unit]]:
    """Shard the rank's parameters over the mesh; returns the units of each stage. `stages` are ranges of layers.

    Collective over all ranks of the job.
    """
    end_units = _shard_ends(model, plan, mesh.shards)
    # `expert_shards` is collective over all ranks, also over those whose layers have no experts.
    expert_shards = mesh.expert_shards if model.spec.experts and mesh.experts is not None else None
    blocks = {
        name: _shard_block(block, model.spec, plan, mesh.shards, expert_shards) for name, block in model.layers.items()
    }
    kept, strategies = saved_elements_by_layer(model.spec, plan), plan.strategies(model.spec.layers)
    units_by_stage = []
    for stage in stages:
        units = [
            Unit(
                _block_forward(model.layers[str(layer)]),
                blocks[str(layer)],
                layer,
                kept[layer],
                strategies[layer].activations_offloaded,
            )
            for layer in stage
        ]
        if stage.start == 0:
            units.insert(0, Unit(_embedding_forward(model), end_units["embed"]))
        if stage.stop == model.spec.layers:
            units.append(Unit(_head_forward(model), end_units["head"]))
        units_by_stage.append(units)
    return units_by_stage


def _shard_block(
    block: nn.Module, spec: ModelSpec, plan: Plan, shards: DeviceMesh, expert_shards: DeviceMesh | None
) -> ShardedUnit:
    """Shard a block's parameters over `shards`, but distributed experts over `expert_shards`, the ranks with the same experts."""
    experts = [module for module in block.modules() if isinstance(module, DistributedExperts)]
    if not experts or expert_shards is None:
        return _shard([block], spec, plan, shards)
    # The experts first: FSDP2 then excludes them from the group of the whole block.
    groups = [_parameter_group(experts, plan, expert_shards), _parameter_group([block], plan, shards)]
    return ShardedUnit(groups, final=gradients_final_in_backward(spec, plan))


def _shard_ends(model: Decoder, plan: Plan, mesh: DeviceMesh) -> dict[str, ShardedUnit]:
    """Shard the embedding and the head, if they are on this rank; they are one unit if they are both here and share a weight."""
    front = [module for module in (model.embed, model.positions) if module is not None]
    back = [module for module in (model.norm, model.head) if module is not None]
    if front and back and model.spec.tied:
        both = _shard([*front, *back], model.spec, plan, mesh, uses=2 if _runs_embedding(model) else 1)
        return {"embed": both, "head": both}
    return {
        name: _shard(modules, model.spec, plan, mesh) for name, modules in (("embed", front), ("head", back)) if modules
    }


def _shard(modules: Sequence[nn.Module], spec: ModelSpec, plan: Plan, mesh: DeviceMesh, uses: int = 1) -> ShardedUnit:
    return ShardedUnit(
        [_parameter_group(modules, plan, mesh)], uses=uses, final=gradients_final_in_backward(spec, plan)
    )


def _parameter_group(modules: Sequence[nn.Module], plan: Plan, mesh: DeviceMesh) -> ParameterGroup:
    group_class = ParameterGroup if mesh.size() > 1 else UnsharedParameterGroup
    return group_class(modules, mesh, plan.precision)


def _runs_embedding(model: Decoder) -> bool:
    """Whether the rank runs the embedding; the last pipeline rank may have its weight for a tied head only."""
    return "0" in model.layers


def _embedding_forward(model: Decoder) -> UnitForward:
    return lambda x, batch, shared: model.embed_tokens(batch.tokens, shared)


def _block_forward(block: nn.Module) -> UnitForward:
    # Not `block(...)`, so that no module hooks run; `parallel.apply` wraps `forward` for recompute and compilation.
    return lambda x, batch, shared: block.forward(x, shared.rope, shared.mask)


def _head_forward(model: Decoder) -> UnitForward:
    return lambda x, batch, shared: model.logits_or_loss(x, batch.targets)  # type: ignore[arg-type]
