"""The order in which a Plan is applied to a model: recompute, compile, shard, materialise, initialise.

This is the one place that fixes it. The model never learns of any of it: a block's `forward` is wrapped, its name and parameters stay.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.models.decoder import Decoder
from meshwright.models.initial import initial_values
from meshwright.parallel.fsdp import shard_model
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.recompute import recomputing
from meshwright.spec.layout import shard_rows
from meshwright.spec.model import ModelSpec, ParameterSpec, parameters
from meshwright.spec.plan import Plan, Recompute


def build_model(spec: ModelSpec, plan: Plan, mesh: Mesh, *, loss_chunk: int, seed: int, plain: bool = False) -> Decoder:
    """A decoder on the mesh with its initial values, ready to train.

    `plain` uses the kernels' plain twins (the reference of the equality tests).
    """
    with torch.device("meta"):
        model = Decoder(spec, loss_chunk=loss_chunk, plain=plain)
    if plan.precision.compute == "fp64":
        model.to(torch.float64)
    wrap_blocks(model, plan)
    shard_model(model, plan, mesh)
    model.to_empty(device=mesh.device)
    initialise_shards(model, spec, seed)
    return model


def wrap_blocks(model: Decoder, plan: Plan) -> None:
    """Give every block its recompute mode, then compile it.

    Compiling around the recompute lets the compiler see what is kept. All blocks share one compiled function.
    """
    compiled = torch.compile(_call, fullgraph=True, dynamic=False)
    for layer, block in enumerate(model.layers):
        mode = plan.strategy(layer, len(model.layers)).recompute
        if plan.compile:
            block.forward = partial(compiled, type(block).forward, mode, block)
        else:
            block.forward = recomputing(block.forward, mode)


def _call(forward: Callable[..., Any], mode: Recompute, block: nn.Module, *inputs: Any) -> Any:
    return recomputing(partial(forward, block), mode)(*inputs)


@torch.no_grad()
def initialise_shards(model: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Fill this rank's part of every parameter; the values do not depend on how the model is sharded."""
    rows = {row.name: row for row in parameters(spec)}
    for name, parameter in model.named_parameters():
        local, start = local_rows(parameter)
        _fill(local, rows[name], seed, start)


def local_rows(parameter: torch.Tensor) -> tuple[torch.Tensor, int]:
    """This rank's rows of a parameter as a plain tensor, and the number of the first one."""
    if not isinstance(parameter, DTensor):
        return parameter, 0
    mesh = parameter.device_mesh
    axis = mesh.ndim - 1
    first = shard_rows(parameter.shape[0], mesh.size(axis), mesh.get_local_rank(axis)).start
    return parameter.to_local(), first


def _fill(local: torch.Tensor, row: ParameterSpec, seed: int, first_row: int) -> None:
    if row.fill != "normal":
        local.fill_(1.0 if row.fill == "ones" else 0.0)
        return
    width = row.count // row.shape[0]
    step = max(1, (1 << 26) // width)
    for start in range(0, local.shape[0], step):
        part = local[start : start + step]
        values = initial_values(seed, row, (first_row + start) * width, part.numel(), local.device)
        part.copy_(values.view_as(part))
