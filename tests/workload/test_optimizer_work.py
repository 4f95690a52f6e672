"""Predicted memory and FLOPs of an optimizer equal those that it allocates and computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from meshwright.models.decoder import Decoder
from meshwright.optim.matrices import matrices_of
from meshwright.optim.newton_schulz import orthogonalise
from meshwright.optim.optimizer import Optimizer
from meshwright.parallel.apply import local_weights
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec, parameters
from meshwright.spec.optimizers import AdamWSpec, LambSpec, MuonSpec, OptimizerSpec, SgdSpec, uses_muon
from meshwright.spec.plan import BatchPlan, MeshAxis, Plan, Precision
from meshwright.workload.layouts import layout_of
from meshwright.workload.optimizer_work import optimizer_work
from meshwright.workload.plan_bytes import fullest_rank_memory
from tests.models.tiny import LLAMA, QWEN3_MOE

PLAN = Plan(
    mesh=(MeshAxis(axis="shard", size=1),),
    batch=BatchPlan(global_batch=1, micro_batch=1, accumulate=1),
    precision=Precision(compute="fp32", reduce="fp32"),
)


@pytest.mark.parametrize("optimizer", [AdamWSpec(), MuonSpec(), LambSpec(), SgdSpec()], ids=lambda spec: spec.name)
@pytest.mark.parametrize("model", [LLAMA, replace(QWEN3_MOE, first_dense_layers=0)], ids=["dense", "mixture"])
def test_state_takes_the_predicted_bytes(model: ModelSpec, optimizer: OptimizerSpec) -> None:
    train = TrainSpec(steps=1, global_batch=1, seq_len=16, optimizer=optimizer, ema_decay=0.9)
    module = Decoder(model)
    state = Optimizer(module, model, train, local_weights(module)).state()
    predicted = fullest_rank_memory(model, train, PLAN, cpu=True)
    for entry in ("optimizer", "ema"):
        assert predicted[entry] == sum(parts.local.nbytes for parts in state if parts.name.startswith(f"{entry}."))
    assert "ema" not in fullest_rank_memory(model, replace(train, ema_decay=None), PLAN, cpu=True)


def test_the_iterations_take_the_predicted_flops() -> None:
    work = optimizer_work(QWEN3_MOE, MuonSpec(iterations=3))
    shapes = [
        matrix.sizes[-2:]
        for parameter in parameters(QWEN3_MOE)
        if uses_muon(parameter)
        for matrix in matrices_of(parameter)
    ]
    with FlopCounterMode(display=False) as counter:
        orthogonalise([torch.ones(shape) for shape in shapes], 3)
    assert work.flops * QWEN3_MOE.layers == pytest.approx(counter.get_total_flops())
    assert work.matrices * QWEN3_MOE.layers == len(shapes)
    assert work.exchanged * QWEN3_MOE.layers == sum(rows * columns for rows, columns in shapes)


def test_only_muon_has_matrices_and_the_plan_s_layout_knows_them() -> None:
    for optimizer in (AdamWSpec(), LambSpec(), SgdSpec()):
        assert optimizer_work(LLAMA, optimizer).flops == 0
    train = TrainSpec(steps=1, global_batch=1, seq_len=16, optimizer=MuonSpec())
    assert layout_of(LLAMA, train, PLAN).muon_flops == optimizer_work(LLAMA, MuonSpec()).flops > 0
