"""The part of a model one pipeline rank holds, cut into stages and units.

A unit is what is gathered, run and reduced together: the embedding, one block, or the final norm with the head and the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.data.loader import MicroBatch
from meshwright.models.decoder import Decoder, SharedInputs
from meshwright.models.moe import RoutedOutput
from meshwright.parallel.context import SplitSequences
from meshwright.parallel.experts import SpreadExperts
from meshwright.parallel.fsdp import ParameterGroup, UnsharedParameterGroup
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.routing import Routing
from meshwright.parallel.sharded_unit import ShardedUnit
from meshwright.spec.layout import Division, gradients_final_in_backward, local_shape
from meshwright.spec.model import ModelSpec, parameters
from meshwright.spec.plan import Plan
from meshwright.workload.activations import saved_elements_by_layer

Run = Callable[[Tensor | None, MicroBatch, SharedInputs], Tensor | RoutedOutput]


@dataclass(frozen=True)
class Unit:
    """One unit of a stage: a function that runs it, and its parameters.

    `run` maps the unit's input `(batch, seq, hidden)` (None for the embedding) to its output, or to the summed loss; a block with experts
    returns its router's choices too. `layer` is a block's number in the model. `kept_elements` is the number of elements per token that its
    forward saves for its backward, by the memory account, and `offloads` whether they are offloaded to host memory (`parallel.offload`).
    """

    run: Run
    sharded: ShardedUnit
    layer: int | None = None
    kept_elements: float = 0.0
    offloads: bool = False


@dataclass(frozen=True)
class RankModel:
    """The part of the model that one pipeline rank runs.

    `stages` maps the rank's virtual stages to their units. Between units a rank has one of `tensor_ranks` parts of the sequence. With
    `context` the sequence is split over context ranks. `routing` sums what the routers of a mixture of experts did.
    """

    model: Decoder
    stages: Mapping[int, Sequence[Unit]]
    pipeline_rank: int
    dtype: torch.dtype
    device: torch.device
    tensor_ranks: int = 1
    context: SplitSequences | None = None
    routing: Routing | None = None

    def local_batch(self, batch: MicroBatch) -> MicroBatch:
        """This rank's part of a micro-batch of whole sequences."""
        return batch if self.context is None else self.context.part_of(batch)

    def shared_inputs(self, batch: MicroBatch) -> SharedInputs:
        """Rotary tables and mask of a local micro-batch, which all blocks read."""
        if self.context is None:
            return self.model.shared_inputs(batch.tokens, batch.positions, batch.documents, self.dtype)
        return self.context.shared(batch, self.dtype)

    def message_shape(self, batch: MicroBatch) -> tuple[int, int, int]:
        """Shape of the activation or gradient that stages exchange for a local micro-batch."""
        sequences, seq = batch.tokens.shape
        return sequences, seq // self.tensor_ranks, self.model.spec.hidden

    def whole_logits(self, logits: Tensor) -> Tensor:
        """The logits of whole sequences from this rank's part. Collective over context ranks."""
        return logits if self.context is None else self.context.joined(logits)


def keep_only(model: Decoder, held: Iterable[str]) -> None:
    """Take off a (meta) model what has none of the parameters called `held` (`spec.layout.rank_parameters`). Names stay."""
    parts = {name.rpartition(".")[0] for name in held}
    layers = {name.split(".")[1] for name in parts if name.startswith("layers.")}
    for name in [name for name in model.layers if name not in layers]:
        del model.layers[name]
    if "positions" not in parts:
        model.positions = None
    if "embed" not in parts:
        model.embed = None  # type: ignore[assignment]
    if "norm" not in parts:  # the head goes with it: a tied one has no parameter of its own
        model.norm = model.head = None  # type: ignore[assignment]


def shrink_to_local_parts(model: Decoder, division: Division) -> None:
    """Give every parameter of a (meta) model the shape of the rank's part. Names stay."""
    rows = {row.name: row for row in parameters(model.spec)}
    for name, whole in list(model.named_parameters()):
        owner, _, kind = name.rpartition(".")
        mine = whole.new_empty(local_shape(model.spec, rows[name], division))
        setattr(model.get_submodule(owner), kind, nn.Parameter(mine))


def make_units(model: Decoder, stages: Sequence[range], plan: Plan, mesh: Mesh) -> list[list[Unit]]:
    """The units of each stage of this rank, their parameters sharded over the mesh."""
    ends = _ends(model, plan, mesh.shards)
    # Collective over all ranks, so also on those whose layers are all dense.
    spread = mesh.expert_shards if model.spec.experts and mesh.experts is not None else None
    blocks = {name: _block_unit(block, model.spec, plan, mesh.shards, spread) for name, block in model.layers.items()}
    kept, strategies = saved_elements_by_layer(model.spec, plan), plan.strategies(model.spec.layers)
    units_by_stage = []
    for stage in stages:
        units = [
            Unit(
                _block_run(model.layers[str(layer)]),
                blocks[str(layer)],
                layer,
                kept[layer],
                strategies[layer].activations_offloaded,
            )
            for layer in stage
        ]
        if stage.start == 0:
            units.insert(0, Unit(_embed_run(model), ends["embed"]))
        if stage.stop == model.spec.layers:
            units.append(Unit(_head_run(model), ends["head"]))
        units_by_stage.append(units)
    return units_by_stage


def _block_unit(
    block: nn.Module, spec: ModelSpec, plan: Plan, shards: DeviceMesh, expert_shards: DeviceMesh | None
) -> ShardedUnit:
    """A block's unit; experts that are spread over ranks are sharded by themselves, over those that hold the same ones."""
    spread = [module for module in block.modules() if isinstance(module, SpreadExperts)]
    if not spread or expert_shards is None:
        return _unit([block], spec, plan, shards)
    # The inner modules first: the group around them then leaves them out.
    groups = [_group(spread, plan, expert_shards), _group([block], plan, shards)]
    return ShardedUnit(groups, final=gradients_final_in_backward(spec, plan))


def _ends(model: Decoder, plan: Plan, mesh: DeviceMesh) -> dict[str, ShardedUnit]:
    """The sharded units of embedding and head; one for both where both are here and share their weight."""
    front = [module for module in (model.embed, model.positions) if module is not None]
    back = [module for module in (model.norm, model.head) if module is not None]
    if front and back and model.spec.tied:
        both = _unit([*front, *back], model.spec, plan, mesh, uses=2 if _has_front(model) else 1)
        return {"embed": both, "head": both}
    return {
        name: _unit(modules, model.spec, plan, mesh) for name, modules in (("embed", front), ("head", back)) if modules
    }


def _unit(modules: Sequence[nn.Module], spec: ModelSpec, plan: Plan, mesh: DeviceMesh, uses: int = 1) -> ShardedUnit:
    return ShardedUnit([_group(modules, plan, mesh)], uses=uses, final=gradients_final_in_backward(spec, plan))


def _group(modules: Sequence[nn.Module], plan: Plan, mesh: DeviceMesh) -> ParameterGroup:
    group_class = ParameterGroup if mesh.size() > 1 else UnsharedParameterGroup
    return group_class(modules, mesh, plan.precision)


def _has_front(model: Decoder) -> bool:
    """Whether the rank runs the embedding, and does not only hold its weight for a tied head."""
    return "0" in model.layers


def _embed_run(model: Decoder) -> Run:
    return lambda x, batch, shared: model.embed_tokens(batch.tokens, shared)


def _block_run(block: nn.Module) -> Run:
    # Not `block(...)`: `forward` is where recompute and compilation are put (parallel.apply).
    return lambda x, batch, shared: block.forward(x, shared.rope, shared.mask)


def _head_run(model: Decoder) -> Run:
    return lambda x, batch, shared: model.logits_or_loss(x, batch.targets)  # type: ignore[arg-type]
