"""What a run needs of its host is asked before anything starts."""

from __future__ import annotations

import pytest

from meshwright.launch import prepare
from meshwright.spec.errors import OutOfResources
from meshwright.spec.load import load_run
from meshwright.spec.plan import BatchPlan, LayerStrategy, MeshAxis, Plan


def test_an_optimizer_that_host_memory_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run(None, ["model=llama3-8b", "cluster.gpu=H200", "cluster.gpus_per_node=4", "train.global_batch=8"])
    axes = (MeshAxis(axis="replicate", size=2), MeshAxis(axis="shard", size=2))
    batch = BatchPlan(global_batch=8, micro_batch=1, accumulate=2)
    plan = Plan(mesh=axes, batch=batch, layers=(LayerStrategy(offload="optimizer"),))
    monkeypatch.setattr(prepare, "host_memory_bytes", lambda: 200 * 10**9)
    prepare.check_host_memory(run, plan)  # two copies of 8.03e9 parameters, 12 bytes each
    monkeypatch.setattr(prepare, "host_memory_bytes", lambda: 190 * 10**9)
    with pytest.raises(
        OutOfResources, match=r"optimizer 192.7 GB of host memory, and this host has 190.0 GB.*plan.layers"
    ):
        prepare.check_host_memory(run, plan)
