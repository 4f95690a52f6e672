"""Memory, plan and data of a run are checked before any process starts."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
from tests.checkpoint.crash import CALLS, FILE_OPEN, count, die_at
from tests.checkpoint.made import save
from tests.training.tiny import make_tiny, prepared

from meshwright.config.load import load_resolved, load_run
from meshwright.data.stdlib import VOCABULARY
from meshwright.durable.lease import read_lease
from meshwright.launch import prepare
from meshwright.launch.prepare import PreparedRun
from meshwright.planner.candidate import peak_bytes
from meshwright.planner.reprice import predict
from meshwright.spec.errors import OutOfResources
from meshwright.spec.plan import BatchPlan, LayerStrategy, MeshAxis, Plan, Precision
from meshwright.spec.run import RunSpec


def test_an_optimizer_that_host_memory_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run(None, ["model=llama3-8b", "cluster.gpu=H200", "cluster.gpus_per_node=4", "train.global_batch=8"])
    axes = (MeshAxis(axis="replicate", size=2), MeshAxis(axis="shard", size=2))
    batch = BatchPlan(global_batch=8, micro_batch=1, accumulate=2)
    plan = Plan(mesh=axes, batch=batch, layers=(LayerStrategy(offload="optimizer"),))
    monkeypatch.setattr(prepare, "host_memory_bytes", lambda: 170 * 10**9)
    prepare.check_host_memory(run, plan)  # two copies of 8.03e9 parameters, 10 bytes each
    monkeypatch.setattr(prepare, "host_memory_bytes", lambda: 150 * 10**9)
    with pytest.raises(
        OutOfResources, match=r"optimizer 160.6 GB of host memory, and this host has 150.0 GB.*plan.layers"
    ):
        prepare.check_host_memory(run, plan)


def file_run(folder: Path, plan: Plan, *overrides: str) -> RunSpec:
    """A run of the plan, which is written in `folder`."""
    (folder / "plan.yaml").write_text(prepare.plan_yaml(plan), encoding="utf-8")
    return load_run(None, [*overrides, f"plan={folder / 'plan.yaml'}", f"train.global_batch={plan.batch.global_batch}"])


def test_a_plan_file_that_devices_cannot_hold_is_refused(tmp_path: Path) -> None:
    overrides = ["model=llama3-8b", "model.vocab_size=128256", "cluster.gpu=H100", "cluster.gpus_per_node=8"]
    batch = BatchPlan(global_batch=8, micro_batch=1, accumulate=1)
    copies, shards = (Plan(mesh=(MeshAxis(axis=axis, size=8),), batch=batch) for axis in ("replicate", "shard"))
    assert prepare.training_plan(file_run(tmp_path, shards, *overrides), print).mesh == shards.mesh
    message = r"plan.yaml: does not fit: a rank needs [\d.]+ GB, [\d.]+ GB more than the usable 85.9 GB \(optimizer 64.2.*plan.micro_batch"
    with pytest.raises(OutOfResources, match=message):
        prepare.training_plan(file_run(tmp_path, copies, *overrides), print)
    prepare.training_plan(file_run(tmp_path, copies, *overrides, "cluster.memory_gib=192"), print)


def test_a_processor_s_plan_file_is_held_to_its_rank_s_share_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = BatchPlan(global_batch=8, micro_batch=1, accumulate=4)
    plan = Plan(mesh=(MeshAxis(axis="shard", size=2),), batch=batch, precision=Precision(compute="fp32"))
    run = file_run(tmp_path, plan, "model=llama-nano", "model.vocab_size=512", "cluster.gpus_per_node=2")
    need = peak_bytes(predict(run, plan))
    for relative_size, fits in ((1.01, True), (0.99, False)):
        monkeypatch.setattr(
            prepare, "host_memory_bytes", lambda relative_size=relative_size: int(2 * relative_size * need)
        )
        assert (prepare.misfit(run, plan) is None) == fits


def test_what_a_plan_file_lets_wait_must_fit_the_host(tmp_path: Path) -> None:
    overrides = ["model=llama3-8b", "model.vocab_size=128256", "cluster.gpu=H200", "cluster.gpus_per_node=4"]
    axes = (MeshAxis(axis="replicate", size=2), MeshAxis(axis="shard", size=2))
    batch = BatchPlan(global_batch=8, micro_batch=1, accumulate=2)
    plan = Plan(mesh=axes, batch=batch, layers=(LayerStrategy(offload="optimizer"),))
    assert prepare.misfit(file_run(tmp_path, plan, *overrides, "cluster.host_memory_gib=256"), plan) is None
    excess = prepare.misfit(file_run(tmp_path, plan, *overrides, "cluster.host_memory_gib=180"), plan)
    assert excess and "exceed host memory by 6.0 GB of 154.6" in excess  # 160.6 GB needed


def test_a_plan_is_made_for_the_vocabulary_of_the_data_once_that_is_there(tmp_path: Path) -> None:
    """As training takes it, rounded up; the built-in tokenizer's where no data says it, and what the run says before all."""
    corpus = make_tiny(tmp_path)  # 300 tokens
    run = load_run(corpus)
    assert prepare.with_vocabulary(run).model.vocab_size == 384
    assert prepare.with_vocabulary(run) == prepare.resolve_data(run, print)
    for absent in (["data.mix=nowhere"], [f"data.mix={tmp_path / 'source'}"]):
        assert prepare.with_vocabulary(load_run(corpus, absent)).model.vocab_size == VOCABULARY
    assert prepare.with_vocabulary(load_run(corpus, ["model.vocab_size=500"])).model.vocab_size == 500


@pytest.mark.slow
def test_death_at_any_call_of_a_start_leaves_a_run_that_can_be_continued(tmp_path: Path) -> None:
    """The second start asks for more steps, so that every file of the folder changes."""
    tiny, names = make_tiny(tmp_path / "tiny"), (*CALLS, FILE_OPEN)
    begun_folder = prepared(tiny, tmp_path / "begun").folder
    save(begun_folder / "checkpoints", 3)

    plan = prepared(tiny, tmp_path / "count", "train.steps=7").assignment.plan

    def start(runs: Path) -> PreparedRun:
        with (  # the choice of a plan writes nothing, and takes most of the time
            patch.object(prepare, "training_plan", return_value=plan),
            patch.object(prepare, "predict", return_value=plan),
        ):
            return prepared(tiny, runs, "train.steps=7")

    calls = count(lambda: start(tmp_path / "count"), names)
    assert calls.count("replace") == calls.count(FILE_OPEN) == 6
    for k in range(len(calls)):
        runs = tmp_path / str(k)
        shutil.copytree(tmp_path / "begun", runs)
        assert die_at(k, lambda runs=runs: start(runs), names)
        started = start(runs)
        assert started.resumes and load_resolved(started.folder / "config.yaml") == started.assignment.run
        assert started.assignment.lease == read_lease(started.folder) and started.assignment.lease.epoch in (2, 3)
        assert not list(started.folder.glob("*.partial"))
