"""The part of a model one pipeline rank holds, cut into stages and units.

A unit is what is gathered, run and reduced together: the embedding, one block, or the final norm with the head and the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.data.loader import MicroBatch
from meshwright.models.decoder import Decoder, SharedInputs
from meshwright.parallel.fsdp import ShardedUnit
from meshwright.schedules.collectives import Gather, Reduce
from meshwright.spec.plan import LayerStrategy, Plan

StageTable = tuple[tuple[range, ...], ...]
"""By pipeline rank, the layers of its virtual stages (`spec.layout.stage_table`)."""
Run = Callable[[Tensor | None, MicroBatch, SharedInputs], Tensor]


@dataclass(frozen=True)
class Unit:
    """One unit of a stage: how to run it, and where its parameters live.

    `run` takes the unit's input `(batch, seq, hidden)` (None for the embedding) and gives its output, or the summed loss.
    """

    run: Run
    sharded: ShardedUnit


def keep_only(model: Decoder, stages: Sequence[range]) -> None:
    """Take off a (meta) model what the stages of one rank do not hold. Names stay."""
    held = {layer for stage in stages for layer in stage}
    first, last = 0 in held, model.spec.layers - 1 in held
    for name in [name for name in model.layers if int(name) not in held]:
        del model.layers[name]
    if not first:
        model.positions = None
        if not (last and model.spec.tied):
            model.embed = None  # type: ignore[assignment]
    if not last:
        model.norm = model.head = None  # type: ignore[assignment]


def make_units(model: Decoder, stages: Sequence[range], plan: Plan, mesh: DeviceMesh) -> list[list[Unit]]:
    """The units of each stage of this rank, their parameters sharded over `mesh`."""
    ends = _ends(model, plan, mesh)
    blocks = {name: ShardedUnit([block], mesh, plan.precision) for name, block in model.layers.items()}
    rows = []
    for stage in stages:
        row = [Unit(_block_run(model.layers[str(layer)]), blocks[str(layer)]) for layer in stage]
        if stage.start == 0:
            row.insert(0, Unit(_embed_run(model), ends["embed"]))
        if stage.stop == model.spec.layers:
            row.append(Unit(_head_run(model), ends["head"]))
        rows.append(row)
    return rows


def _ends(model: Decoder, plan: Plan, mesh: DeviceMesh) -> dict[str, ShardedUnit]:
    """The sharded units of embedding and head; one for both where both are here and share their weight."""
    front = [module for module in (model.embed, model.positions) if module is not None]
    back = [module for module in (model.norm, model.head) if module is not None]
    if front and back and model.spec.tied:
        both = ShardedUnit([*front, *back], mesh, plan.precision, places=2 if _has_front(model) else 1)
        return {"embed": both, "head": both}
    return {
        name: ShardedUnit(modules, mesh, plan.precision)
        for name, modules in (("embed", front), ("head", back))
        if modules
    }


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


def unit_counts(table: StageTable, layers: int) -> list[int]:
    """Units of every stage of the pipeline, in stage order."""
    return [len(stage) + (stage.start == 0) + (stage.stop == layers) for stage in _in_order(table)]


def keeping(table: StageTable, plan: Plan, layers: int) -> tuple[list[list[Gather]], list[list[Reduce]]]:
    """By stage and unit, how long gathered weights stay and when gradients are reduced; the model's ends go by the layer beside them."""
    gathers, reduces = [], []
    for stage in _in_order(table):
        strategies = [plan.strategy(layer, layers) for layer in stage]
        strategies = [strategies[0]] * (stage.start == 0) + strategies + [strategies[-1]] * (stage.stop == layers)
        gathers.append([_gather(strategy) for strategy in strategies])
        reduces.append([_reduce(strategy) for strategy in strategies])
    return gathers, reduces


def _gather(strategy: LayerStrategy) -> Gather:
    return "stretch" if strategy.reshard else "step"


def _reduce(strategy: LayerStrategy) -> Reduce:
    return "stretch" if strategy.gradients == "shard" else "once"


def _in_order(table: StageTable) -> list[range]:
    return sorted((stage for row in table for stage in row), key=lambda stage: stage.start)
