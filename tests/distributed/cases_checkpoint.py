"""Functions that the ranks of a Gloo job run in the checkpoint tests; each returns plain values."""

from __future__ import annotations

import errno
import math
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshwright.checkpoint.read.block_exchange import DeviceExchange, HostExchange
from meshwright.checkpoint.read.reader import CheckpointReader
from meshwright.checkpoint.store import CheckpointStore
from meshwright.checkpoint.write import layout as layouts
from meshwright.parallel.world import World, world_group
from meshwright.spec.errors import MeshwrightError
from tests.checkpoint.reads import counted_reads


class DistributedLayout(NamedTuple):
    """How the test's tensors are distributed."""

    ranks: int
    mesh_shape: tuple[int, ...]
    placements: tuple[Any, ...]


LAYOUTS: dict[str, DistributedLayout] = {
    "one": DistributedLayout(1, (1,), (Shard(0),)),
    "rows2": DistributedLayout(2, (2,), (Shard(0),)),
    "rows4": DistributedLayout(4, (4,), (Shard(0),)),
    "columns4": DistributedLayout(4, (4,), (Shard(1),)),
    "copies2": DistributedLayout(2, (2,), (Replicate(),)),
    "hsdp2x2": DistributedLayout(4, (2, 2), (Replicate(), Shard(0))),
    "grid2x2": DistributedLayout(4, (2, 2), (Shard(0), Shard(1))),
}
"""The shapes below divide by no layout's ranks, and leave some ranks without rows."""


def values(seed: int) -> dict[str, torch.Tensor]:
    """The whole tensors, equal on every rank."""
    chance = torch.Generator().manual_seed(seed)
    sharded = {
        "model.embed.weight": torch.randn(13, 5, generator=chance),
        "model.few.weight": torch.randn(3, 7, generator=chance),
        "optimizer.exp_avg.embed.weight": torch.randn(13, 5, generator=chance, dtype=torch.float64),
        "model.half": torch.randn(6, 3, generator=chance).bfloat16(),
    }
    return sharded | {"plain.step": torch.tensor(seed), "plain.table": torch.randn(4, generator=chance)}


def local_pieces(layout: str, full_tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`whole` as DTensors in the layout; what is called plain stays an ordinary tensor on every rank."""
    _, shape, placements = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", shape)
    return {
        name: tensor if name.startswith("plain.") else distribute_tensor(tensor, mesh, placements)
        for name, tensor in full_tensors.items()
    }


def save(world: World, folder: str, layout: str, seed: int) -> dict[str, Any]:
    store = CheckpointStore(Path(folder), group=world.control)
    saved = store.save(seed, local_pieces(layout, values(seed)), {"seed": seed}, {"config.yaml": f"rank: {world.rank}"})
    return {"path": str(saved.path), "bytes": saved.bytes, "files": sorted(os.listdir(saved.path))}


def load(world: World, folder: str, layout: str) -> dict[str, Any]:
    """Whether this rank got exactly its part of what was saved, in its own layout."""
    store = CheckpointStore(Path(folder), group=world.control)
    newest = store.newest_good()
    assert newest is not None
    blank = {name: torch.zeros_like(tensor) for name, tensor in values(0).items()}
    loaded = local_pieces(layout, blank)
    state = store.load(newest, loaded)
    expected = local_pieces(layout, values(state["seed"]))
    with CheckpointReader(newest) as reader:
        full_equal = all(torch.equal(reader.read(name), tensor) for name, tensor in values(state["seed"]).items())
    return {
        "seed": state["seed"],
        "equal": all(_same(loaded[name], expected[name]) for name in expected),
        "whole": full_equal,
    }


LARGE = {"model.wide": (2600, 4100), "optimizer.exp_avg.wide": (2600, 4100), "model.tall": (2_000_003, 2)}
"""Shapes of 42 and 16 MB: blocks of 16 MiB cut their rows."""


def large_values() -> dict[str, torch.Tensor]:
    return {name: torch.arange(math.prod(shape)).reshape(shape).float() for name, shape in LARGE.items()}


def save_large(world: World, folder: str, layout: str, step: int = 1) -> str:
    store = CheckpointStore(Path(folder), group=world.control)
    return str(store.save(step, local_pieces(layout, large_values()), {}, {}).path)


def load_large(world: World, folder: str, layout: str, device_exchange: bool = False) -> dict[str, Any]:
    """Load several large files; return whether this rank has them right, and the bytes that it read of each.

    With `device_exchange` the ranks exchange blocks as GPUs do, through a Gloo group.
    """
    store = CheckpointStore(Path(folder), group=world.control, device_group=world_group() if device_exchange else None)
    own_pieces = local_pieces(layout, {name: torch.zeros(shape) for name, shape in LARGE.items()})
    unused = HostExchange if device_exchange else DeviceExchange
    with counted_reads() as read, patch.object(unused, "__init__", side_effect=AssertionError("another exchange")):
        loaded = store.load_newest(own_pieces)
    expected = local_pieces(layout, large_values())
    assert loaded is not None
    return {
        "path": loaded[0].name,
        "equal": all(_same(own_pieces[name], expected[name]) for name in LARGE),
        "read": dict(read),
    }


def failing_save(
    world: World, folder: str, rank: int, failure: Exception, planning: bool = False
) -> tuple[str, int, str]:
    """A save in which one rank meets `failure` as it writes, or as it lists its tensors: the error every rank raises."""
    store = CheckpointStore(Path(folder), group=world.control)
    tensors = local_pieces("rows2", values(2))
    owner, name = (layouts, "_describe") if planning else (os, "pwrite")
    with patch.object(owner, name, side_effect=failure) if world.rank == rank else nullcontext():
        try:
            store.save(2, tensors, {"seed": 2}, {})
        except MeshwrightError as error:
            return type(error).__name__, error.exit_code, str(error)
    return "nothing", 0, ""


def unequal_state(world: World, folder: str) -> str:
    """Only the first rank's state and texts count; a bad one on it is everybody's error."""
    store = CheckpointStore(Path(folder), group=world.control)
    state = {"seed": float("nan")} if world.leads else {}
    try:
        store.save(1, local_pieces("rows2", values(1)), state, {})
    except MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def own_names(world: World, folder: str) -> bool:
    """Ranks hold different tensors, as pipeline stages do; together they are the checkpoint."""
    store = CheckpointStore(Path(folder), group=world.control)
    own_tensors = {f"layer.{world.rank}": torch.full((3, 2), float(world.rank))}
    path = store.save(1, own_tensors, {}, {}).path
    loaded = {f"layer.{world.rank}": torch.zeros(3, 2)}
    store.load(path, loaded)
    dist.barrier()
    swapped = {f"layer.{1 - world.rank}": torch.zeros(3, 2)}
    store.load(path, swapped)
    return bool(
        (loaded[f"layer.{world.rank}"] == world.rank).all()
        and (swapped[f"layer.{1 - world.rank}"] == 1 - world.rank).all()
    )


def one_row(world: World, folder: str) -> list[str]:
    """Only the first rank holds a row: the files written."""
    store = CheckpointStore(Path(folder), group=world.control)
    path = store.save(1, local_pieces("rows4", {"x": torch.randn(1, 3)}), {}, {}).path
    return sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))


def newest(world: World, folder: str) -> str | None:
    checkpoint = CheckpointStore(Path(folder), group=world.control).newest_good()
    return checkpoint and checkpoint.name


def load_error(world: World, folder: str, step: str) -> str:
    try:
        CheckpointStore(Path(folder), group=world.control).load(Path(folder) / step, local_pieces("rows2", values(0)))
    except MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def unseen(world: World, folder: str) -> str:
    """Rank 1's host has a disk of its own under the same name."""
    path = Path(folder) / str(world.rank)
    try:
        CheckpointStore(path, group=world.control).newest_good()
    except MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def deleted_checkpoints(world: World, folder: str) -> list[str]:
    store = CheckpointStore(Path(folder), group=world.control)
    tensors = local_pieces("rows2", values(1))
    for step in (1, 2, 3):
        store.save(step, tensors, {"seed": 1}, {})
    return [path.name for path in store.retain(1)]


def fsdp(world: World, folder: str, hidden: int) -> bool:
    """FSDP2 parameters and moments of a real optimizer step, saved, changed, and restored bit for bit."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, hidden), torch.nn.Linear(hidden, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (world.ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    store = CheckpointStore(Path(folder), group=world.control)

    def step() -> None:
        model(torch.ones(2, 5) + world.rank).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def tensors() -> dict[str, torch.Tensor]:
        moments = {
            f"optimizer.{moment}.{name}": optimizer.state[parameter][moment]
            for moment in ("exp_avg", "exp_avg_sq")
            for name, parameter in model.named_parameters()
        }
        return {f"model.{name}": parameter for name, parameter in model.named_parameters()} | moments

    step()
    saved = {name: tensor.detach().clone() for name, tensor in tensors().items()}
    path = store.save(1, tensors(), {}, {}).path
    step()
    changed = all(not _same(saved[name], tensor) for name, tensor in tensors().items() if _part(tensor).numel())
    store.load(path, tensors())
    return changed and all(_same(saved[name], tensor) for name, tensor in tensors().items())


def _part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(_part(first.detach()), _part(second.detach()))


ENOSPC, EIO = errno.ENOSPC, errno.EIO
