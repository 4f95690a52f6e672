"""The part of a model one pipeline rank holds, cut into stages and units.

A unit is what is gathered, run and reduced together: the embedding, one block, or the final norm with the head and the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.data.loader import MicroBatch
from meshwright.models.decoder import Decoder, SharedInputs
from meshwright.models.moe import Routed
from meshwright.parallel.experts import SpreadExperts
from meshwright.parallel.fsdp import LoneUnit, ShardedUnit
from meshwright.parallel.joint import JointUnit
from meshwright.parallel.mesh import Mesh
from meshwright.spec.layout import Division, gradients_final_in_backward, local_shape
from meshwright.spec.model import ModelSpec, parameters
from meshwright.spec.plan import Plan
from meshwright.workload.activations import elements_kept

Run = Callable[[Tensor | None, MicroBatch, SharedInputs], Tensor | Routed]
Sharded = ShardedUnit | JointUnit


@dataclass(frozen=True)
class Unit:
    """One unit of a stage: how to run it, and where its parameters live.

    `run` takes the unit's input `(batch, seq, hidden)` (None for the embedding) and gives its output, or the summed loss; a
    block with experts also says what its router did. `layer` is a block's number in the model. `keeps` is how many elements of one token
    its forward leaves for its backward, by the memory account, and `offloads` whether those wait in host memory (`parallel.offload`).
    """

    run: Run
    sharded: Sharded
    layer: int | None = None
    keeps: float = 0.0
    offloads: bool = False


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


def keep_parts(model: Decoder, division: Division) -> None:
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
    keeps, away = elements_kept(model.spec, plan), plan.strategies(model.spec.layers)
    rows = []
    for stage in stages:
        row = [
            Unit(
                _block_run(model.layers[str(layer)]),
                blocks[str(layer)],
                layer,
                keeps[layer],
                away[layer].activations_offloaded,
            )
            for layer in stage
        ]
        if stage.start == 0:
            row.insert(0, Unit(_embed_run(model), ends["embed"]))
        if stage.stop == model.spec.layers:
            row.append(Unit(_head_run(model), ends["head"]))
        rows.append(row)
    return rows


def _block_unit(
    block: nn.Module, spec: ModelSpec, plan: Plan, shards: DeviceMesh, expert_shards: DeviceMesh | None
) -> ShardedUnit | JointUnit:
    """A block's unit; experts that are spread over ranks are sharded by themselves, over those that hold the same ones."""
    spread = [module for module in block.modules() if isinstance(module, SpreadExperts)]
    if not spread or expert_shards is None:
        return _unit([block], spec, plan, shards)
    # What is inside first: the unit around it then leaves it alone.
    return JointUnit([_unit(spread, spec, plan, expert_shards), _unit([block], spec, plan, shards)])


def _ends(model: Decoder, plan: Plan, mesh: DeviceMesh) -> dict[str, ShardedUnit]:
    """The sharded units of embedding and head; one for both where both are here and share their weight."""
    front = [module for module in (model.embed, model.positions) if module is not None]
    back = [module for module in (model.norm, model.head) if module is not None]
    if front and back and model.spec.tied:
        both = _unit([*front, *back], model.spec, plan, mesh, places=2 if _has_front(model) else 1)
        return {"embed": both, "head": both}
    return {
        name: _unit(modules, model.spec, plan, mesh) for name, modules in (("embed", front), ("head", back)) if modules
    }


def _unit(modules: Sequence[nn.Module], spec: ModelSpec, plan: Plan, mesh: DeviceMesh, places: int = 1) -> ShardedUnit:
    if mesh.size() > 1:
        return ShardedUnit(modules, mesh, plan.precision, places)
    return LoneUnit(modules, mesh, plan.precision, places, final=gradients_final_in_backward(spec, plan))


def _has_front(model: Decoder) -> bool:
    """Whether the rank runs the embedding, and does not only hold its weight for a tied head."""
    return "0" in model.layers


def _embed_run(model: Decoder) -> Run:
    return lambda x, batch, shared: model.embedded(batch.tokens, shared)


def _block_run(block: nn.Module) -> Run:
    # Not `block(...)`: `forward` is where recompute and compilation are put (parallel.apply).
    return lambda x, batch, shared: block.forward(x, shared.rope, shared.mask)


def _head_run(model: Decoder) -> Run:
    return lambda x, batch, shared: model.finished(x, batch.targets)  # type: ignore[arg-type]
