"""Functions that ranks run in the tests of checkpoints with pipeline plans.

Each rank has the tensors of its stages only, sharded over the ranks of its pipeline coordinate. The DTensors are constructed from local
tensors, without a collective.
"""

from __future__ import annotations

import errno
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from meshwright.checkpoint.format.manifest import step_of
from meshwright.checkpoint.read.reader import CheckpointReader
from meshwright.checkpoint.store import CheckpointStore
from meshwright.optim.shards import local
from meshwright.parallel.world import World
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.layout import shard_rows
from meshwright.spec.model import ModelSpec, parameters
from tests.checkpoint.reads import counted_reads

LAYERS = 4
MOMENTS = ("optimizer.exp_avg", "optimizer.exp_avg_sq")
EMBED = "model.embed.weight"


@dataclass(frozen=True)
class Stages:
    """For each pipeline coordinate its ranks (replicas × shards) and its layers.

    The embedding lies at both ends, as when it is tied: with the holder of layer 0 and with that of the final norm, the last coordinate
    unless `vee`, under which both ends are the first's.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    layers: tuple[tuple[int, ...], ...]
    vee: bool = False

    @property
    def size(self) -> int:
        return 1 + max(rank for replicas in self.ranks for shard in replicas for rank in shard)

    def names(self, coordinate: int) -> list[str]:
        last = 0 if self.vee else len(self.ranks) - 1
        names = [f"layers.{layer}.{part}" for layer in self.layers[coordinate] for part in ("weight", "bias")]
        names += ["embed.weight"] if coordinate in (0, last) else []
        names += ["norm.weight"] if coordinate == last else []
        return [f"{prefix}.{name}" for name in names for prefix in ("model", *MOMENTS)]


# "apart": replicas whose meshes do not know of each other.
LAYOUTS = {
    "one": Stages((((0,),),), ((0, 1, 2, 3),)),
    "shard4": Stages((((0, 1, 2, 3),),), ((0, 1, 2, 3),)),
    "shard2_replicate2": Stages((((0, 1), (2, 3)),), ((0, 1, 2, 3),)),
    "shard2_apart": Stages((((0, 1),), ((2, 3),)), ((0, 1, 2, 3), (0, 1, 2, 3))),
    "pipeline2": Stages((((0,),), ((1,),)), ((0, 1), (2, 3))),
    "pipeline2_shard2": Stages((((0, 1),), ((2, 3),)), ((0, 1), (2, 3))),
    "pipeline2_shard2_outer": Stages((((0, 2),), ((1, 3),)), ((0,), (1, 2, 3))),
    "pipeline2_replicate2": Stages((((0,), (1,)), ((2,), (3,))), ((0, 1), (2, 3))),
    "pipeline2_vee": Stages((((0, 1),), ((2, 3),)), ((0, 3), (1, 2)), vee=True),
    "pipeline4": Stages((((0,),), ((1,),), ((2,),), ((3,),)), ((0,), (1,), (2,), (3,))),
    "pipeline4_empty": Stages((((0,),), ((1,),), ((2,),), ((3,),)), ((0, 1, 2), (3,), (), ())),
    "pipeline2_ragged": Stages((((0, 1, 2),), ((3,),)), ((0, 1), (2, 3)), vee=True),
}


def values(seed: int) -> dict[str, torch.Tensor]:
    """The whole tensors, equal on every rank; their rows divide by neither 2 nor 4, and leave some ranks without any."""
    chance = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (13, 5), "norm.weight": (5,)}
    shapes |= {f"layers.{layer}.weight": (3 + 2 * layer, 5) for layer in range(LAYERS)}
    shapes |= {f"layers.{layer}.bias": (3,) for layer in range(LAYERS)}
    return {
        f"{prefix}.{name}": torch.randn(shape, generator=chance)
        for prefix in ("model", *MOMENTS)
        for name, shape in shapes.items()
    }


def shard_over_stage(world: World, layout: str, full_tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """This rank's part of `full_tensors`: those of its stage, as DTensors over the ranks of its pipeline coordinate."""
    stages, rank_tensors = LAYOUTS[layout], {}
    assert stages.size == world.ranks
    for coordinate, grid in enumerate(stages.ranks):
        mesh = _mesh(world, grid)
        if mesh is not None:
            rank_tensors = {name: shard_over(full_tensors[name], mesh) for name in stages.names(coordinate)}
    return rank_tensors


def _mesh(world: World, grid: tuple[tuple[int, ...], ...]) -> DeviceMesh | None:
    """A mesh of replicas × shards, or of shards made from their group as training makes it; None on ranks outside."""
    if len(grid) > 1:
        mesh = DeviceMesh("cpu", torch.tensor(grid))
        return mesh if mesh.get_coordinate() is not None else None
    group = dist.new_group(list(grid[0]))
    # DTensor's caches outlive a case and take meshes of equal ranks and names for one; no other case has this name.
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("rows",)) if world.rank in grid[0] else None


def shard_over(full: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's rows of `whole`, sharded along the last axis of `mesh` and replicated along the others."""
    local_rows = shard_rows(full.shape[0], mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1))
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    shard = full[local_rows.start : local_rows.stop].clone()
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def save(world: World, folder: str, layout: str, seed: int) -> str:
    store = CheckpointStore(Path(folder), group=world.control)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return str(store.save(seed, shard_over_stage(world, layout, values(seed)), {"seed": seed}, {}).path)


def model_values(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Weights and moments of a whole model, equal on every rank."""
    chance = torch.Generator().manual_seed(3)
    names = [
        (f"{prefix}.{parameter.name}", parameter.shape)
        for prefix in ("model", *MOMENTS)
        for parameter in parameters(spec)
    ]
    return {name: torch.randn(shape, generator=chance) for name, shape in names}


def save_model(world: World, folder: str, spec: ModelSpec, config: str) -> str:
    """A whole model's weights and moments under pipeline 2 × shard 2, its tied embedding on both stages."""
    coordinate, layers_per_stage = world.rank // 2, spec.layers // 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))["shard"]
    stage_parts = [
        f".layers.{layer}." for layer in range(coordinate * layers_per_stage, (coordinate + 1) * layers_per_stage)
    ]
    stage_parts += [".embed.", ".norm."] if coordinate else [".embed."]
    tensors: dict[str, torch.Tensor] = {
        name: shard_over(value, mesh)
        for name, value in model_values(spec).items()
        if any(
            name.startswith(f"{prefix}{stage_prefix}") for prefix in ("model", *MOMENTS) for stage_prefix in stage_parts
        )
    }
    store = CheckpointStore(Path(folder), group=world.control)
    return str(store.save(5, tensors, {"step": 5, "samples": 20, "tokens": 320}, {"config.yaml": config}).path)


def load(world: World, path: str, layout: str) -> dict[str, Any]:
    """Whether this rank got exactly its rows, and how many bytes it read of each file."""
    store = CheckpointStore(Path(path).parent, group=world.control)
    loaded = shard_over_stage(
        world, layout, {name: torch.full_like(tensor, torch.nan) for name, tensor in values(0).items()}
    )
    seed = step_of(Path(path).name) or 0
    expected = {name: shard_over(values(seed)[name], tensor.device_mesh) for name, tensor in loaded.items()}
    with counted_reads() as read:
        assert store.load(Path(path), loaded) == {"seed": seed}
    with CheckpointReader(Path(path)) as reader:
        full_equal = set(reader.names()) == set(values(seed))
        full_equal &= all(torch.equal(reader.read(name), tensor) for name, tensor in values(seed).items())
    return {
        "equal": all(torch.equal(local(loaded[name]), local(expected[name])) for name in expected),
        "whole": full_equal,
        "read": dict(read),
    }


def broken_save(world: World, folder: str, breakage: str) -> str:
    """A save under two stages of two ranks whose tensors do not add up: the error every rank raises."""
    tensors = shard_over_stage(world, "pipeline2_shard2", values(1))
    BREAKAGES[breakage](world.rank, tensors)
    return _error(lambda: CheckpointStore(Path(folder), group=world.control).save(1, tensors, {}, {}))


def _drop_tensor(rank: int, name: str) -> Callable[[int, dict[str, torch.Tensor]], None]:
    def change(mine: int, tensors: dict[str, torch.Tensor]) -> None:
        if mine == rank:
            del tensors[name]

    return change


def _add_tensor(
    ranks: tuple[int, ...], name: str, create: Callable[[], Any]
) -> Callable[[int, dict[str, torch.Tensor]], None]:
    """`made()` under `name` on some ranks; it is called on all, for it may make a mesh."""

    def change(rank: int, tensors: dict[str, torch.Tensor]) -> None:
        value = create()
        if rank in ranks:
            tensors[name] = value

    return change


def _on(ranks: list[int], full: torch.Tensor) -> Any:
    mesh = DeviceMesh("cpu", ranks)
    if mesh.get_coordinate() is not None:
        return shard_over(full, mesh)
    return DTensor.from_local(torch.empty(0), mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())


BREAKAGES: dict[str, Callable[[int, dict[str, torch.Tensor]], None]] = {
    "missing piece": _drop_tensor(3, "model.layers.2.weight"),
    "missing with rows": _drop_tensor(2, "model.norm.weight"),
    "only an empty shard": _add_tensor((3,), "model.extra", lambda: _on([2, 3], torch.zeros(1, 5))),
    "only outside its mesh": _add_tensor((0, 1), "model.extra", lambda: _on([2, 3], torch.zeros(4, 5))),
    "overlap at the same row": _add_tensor((2, 3), EMBED, lambda: values(1)[EMBED]),
    "overlap in the middle": _add_tensor((2,), EMBED, lambda: _on([2], values(1)[EMBED])),
    "another shape": _add_tensor((2, 3), EMBED, lambda: torch.zeros(13, 6)),
    "another dtype": _add_tensor(
        (1,), "model.layers.0.weight", lambda: _on([0, 1, 2, 3], torch.zeros(3, 5).bfloat16())
    ),
    "unreduced": _add_tensor(
        (2,),
        "model.norm.weight",
        lambda: DTensor.from_local(torch.ones(5), DeviceMesh("cpu", [0, 1, 2, 3]), [Partial()], run_check=False),
    ),
}


def failing_save(world: World, folder: str) -> str:
    """A save in which the disk of the last stage's last rank is full."""
    tensors, real = shard_over_stage(world, "pipeline2_shard2", values(2)), os.pwrite

    def refuse(descriptor: int, data: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if world.rank == world.ranks - 1:
        os.pwrite = refuse
    try:
        return _error(lambda: CheckpointStore(Path(folder), group=world.control).save(2, tensors, {}, {}))
    finally:
        os.pwrite = real


def load_other_names(world: World, path: str, rank: int, missing_name: str | None, omitted_name: str | None) -> str:
    """A load under pipeline 4 in which one rank asks for a tensor too many, or all leave one out."""
    tensors = shard_over_stage(world, "pipeline4", values(0))
    if world.rank == rank and missing_name is not None:
        tensors[missing_name] = torch.zeros(3, 5)
    if omitted_name is not None:
        tensors.pop(omitted_name, None)
    return _error(lambda: CheckpointStore(Path(path).parent, group=world.control).load(Path(path), tensors))


def _error(work: Callable[[], object]) -> str:
    try:
        work()
    except MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def messages(world: World, folder: str) -> int:
    """The most elements this rank hands to one collective of a save and a load of 8 MB of tensors under two stages."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))["shard"]
    tensors: dict[str, torch.Tensor] = {f"stage.{world.rank // 2}": shard_over(torch.ones(1024, 1024), mesh)}
    store = CheckpointStore(Path(folder), group=world.control)
    with torch.profiler.profile(record_shapes=True) as profiled:
        store.load(store.save(1, tensors, {}, {}).path, tensors)
    events = [event for event in profiled.events() if event.name.startswith(("gloo:", "c10d::"))]
    return max(math.prod(shape) for event in events for shape in event.input_shapes)


def fsdp_stages(world: World, folder: str) -> bool:
    """FSDP2 stages with real optimizer steps, saved under pipeline 2 × shard 2, then loaded by FSDP2 over all four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))
    coordinate = world.rank // 2
    model, optimizer = _stage([2 * coordinate, 2 * coordinate + 1], mesh["shard"])
    for step in range(2):
        model(torch.ones(3, 5) * (world.rank + step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    store = CheckpointStore(Path(folder), group=world.control)
    path = store.save(1, _state(model, optimizer), {}, {}).path
    own_state = {name: tensor.full_tensor() for name, tensor in _state(model, optimizer).items()}
    states: list[Any] = [None] * world.ranks
    dist.all_gather_object(states, own_state)
    expected = states[0] | states[2]
    model, optimizer = _stage(list(range(LAYERS)), init_device_mesh("cpu", (4,)))
    optimizer.step()
    loaded = _state(model, optimizer)
    store.load(path, loaded)
    return loaded.keys() == expected.keys() and all(
        torch.equal(tensor.full_tensor(), expected[name]) for name, tensor in loaded.items()
    )


def _stage(layers: list[int], mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(layers[0])
    stage = nn.Sequential()
    for layer in layers:
        stage.add_module(str(layer), nn.Linear(5, 5))
    fully_shard(stage, mesh=mesh)
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return stage, torch.optim.AdamW(stage.parameters(), lr=0.1)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    return weights | {
        f"optimizer.{moment}.{name}": optimizer.state[parameter][moment]
        for moment in ("exp_avg", "exp_avg_sq")
        for name, parameter in model.named_parameters()
    }
