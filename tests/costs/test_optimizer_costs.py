"""Muon's time follows from its FLOPs and bytes; other optimizers take the time of their memory traffic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.config.load import load_run
from meshwright.costs.optimizer_costs import matrix_seconds, update_seconds
from meshwright.simulator.step_simulation import simulate_plan
from meshwright.spec.chips import CHIPS
from meshwright.spec.optimizers import MuonSpec
from meshwright.spec.plan import BatchPlan, MeshAxis, Plan
from meshwright.workload.optimizer_work import optimizer_work
from tests.costs.test_offload_costs import MACHINE, ON_DEVICE, K


def test_iterations_are_shared_by_the_ranks_until_each_has_one_matrix() -> None:
    fast_links = replace(MACHINE, link=1e18, nic=1e18)
    k = replace(K, start_us=0.0, net_us=0.0, link_us=0.0)
    muon = replace(ON_DEVICE, muon_flops=8e12, muon_largest_flops=1e12, muon_elements=1e6)
    rate = MACHINE.half_peak * K.gemm / K.slow

    def seconds(shards: float, layers: float) -> float:
        return float(matrix_seconds(replace(muon, shards=shards), fast_links, k, layers))

    assert seconds(1.0, 16.0) == pytest.approx(16 * 8e12 / rate, rel=1e-6)
    assert seconds(8.0, 16.0) == pytest.approx(16 * 1e12 / rate, rel=1e-3)
    assert seconds(64.0, 16.0) == pytest.approx(2 * 1e12 / rate, rel=1e-3)
    assert seconds(1024.0, 1.0) == pytest.approx(1e12 / rate, rel=1e-3)


def test_a_slow_link_adds_two_exchanges_of_the_shard() -> None:
    """Bytes of bf16: 7/8 of a rank's shard of 1e9 elements leaves it, to the owners and back."""
    muon = replace(ON_DEVICE, muon_flops=1.0, muon_largest_flops=0.0, muon_elements=1e9)
    slow = replace(MACHINE, link=1e9)
    k = replace(K, start_us=0.0, link=0.5)
    expected = 2 * (7 / 8) * (1e9 / 8) * 2 / 0.5e9
    assert float(matrix_seconds(muon, slow, k, 1.0)) == pytest.approx(expected, rel=1e-3)


def test_other_updates_take_the_time_of_their_bytes() -> None:
    adamw, lamb = (
        float(update_seconds(replace(ON_DEVICE, update_bytes=size), MACHINE, K, 1e9)) for size in (28.0, 148.0)
    )
    assert lamb / adamw == pytest.approx(148 / 28)
    assert float(matrix_seconds(ON_DEVICE, MACHINE, K, 8.0)) == 0


def test_the_simulated_step_has_the_optimizer_s_time() -> None:
    plan = Plan(mesh=(MeshAxis(axis="shard", size=8),), batch=BatchPlan(global_batch=8, micro_batch=1, accumulate=1))
    seconds = {}
    for name in ("adamw", "muon"):
        run = load_run(
            None,
            [
                "model=llama3-1b",
                "model.vocab_size=128256",
                "train.global_batch=8",
                "cluster={gpu: H100, gpus_per_node: 8}",
                f"train.optimizer.name={name}",
            ],
        )
        seconds[name] = simulate_plan(run.model, run.train, plan, run.cluster).step_seconds
    work = optimizer_work(run.model, MuonSpec())
    iterations = work.flops * run.model.layers / 8 / CHIPS["H100"].peak_flops["bf16"]
    # Other terms are the gradient's and momentum's traffic and the exchanges; matmuls run below their peak.
    assert 1 < (seconds["muon"] - seconds["adamw"]) / iterations < 3
