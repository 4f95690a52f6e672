"""One rank or several measure a complete profile that loads and can be used for pricing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from roofline import seconds_needed

from meshwright.config.presets import MODEL_PRESETS
from meshwright.config.profile_file import load_profile, to_json
from meshwright.costs.constants import constants
from meshwright.costs.measured import chip_of_profile, fits
from meshwright.profile.collective_times import group_layouts
from meshwright.profile.measure import cases_of
from meshwright.profile.team import Team
from meshwright.spec.fields import from_plain
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import BatchPlan, MeshAxis, Plan, Precision
from meshwright.spec.profile import MachineProfile
from meshwright.workload.device_work import step_work
from tests.profile.cases import measured, tiny


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for inner in value.values() for number in numbers(inner)]
    if isinstance(value, list):
        return [number for inner in value for number in numbers(inner)]
    return [value] if isinstance(value, (int, float)) else []


def loaded(profile: MachineProfile, folder: Path) -> MachineProfile:
    file = folder / "machine.json"
    file.write_text(to_json(profile), encoding="utf-8")
    return load_profile(file)


def test_one_rank_measures_all_but_what_takes_two(tmp_path: Path) -> None:
    profile = tiny(Team(torch.device("cpu")))
    assert (profile.gpu, profile.devices, profile.nodes, profile.versions) == ("cpu", 1, 1, {"torch": "some"})
    assert [(entry.m, entry.k, entry.n, entry.format) for entry in profile.products] == [
        (32, 16, 64, "fp32"),
        (64, 64, 64, "fp32"),
    ]
    assert (
        len(profile.attention) == 1 and not profile.collectives and not profile.interference and not profile.host_links
    )
    assert (
        profile.copy_bytes_per_s
        and profile.pass_bytes_per_s
        and profile.adamw_parameters_per_s
        and profile.launch_seconds
    )
    again = loaded(profile, tmp_path)
    assert set(fits(constants("cpu", "torchtitan"), again, "fp32")) == {
        "matmuls",
        "attention",
        "device memory",
        "optimizer",
    }
    assert chip_of_profile(again).peak_flops["fp64"] == chip_of_profile(again).peak_flops["fp32"] / 2


@pytest.mark.parametrize(("per_node", "groups"), [(2, {(2, 1)}), (1, {(2, 2)})])
def test_two_ranks_agree_on_every_figure(
    pool: Any, tmp_path: Path, per_node: int, groups: set[tuple[int, int]]
) -> None:
    first, second = pool.run(measured, 2, per_node)
    keys = ("collectives", "products", "attention", "interference", "copy_bytes_per_s", "adamw_parameters_per_s")
    assert {key: first[key] for key in keys} == {key: second[key] for key in keys}
    assert all(math.isfinite(number) and number > 0 for number in numbers(first))
    profile = loaded(from_plain(MachineProfile, first), tmp_path)
    assert {(entry.ranks, entry.nodes) for entry in profile.collectives} == groups
    ops = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "p2p"}
    assert {(entry.op, entry.bytes) for entry in profile.collectives} == {
        (op, size) for op in ops for size in (1024, 4096)
    }
    assert [entry.op for entry in profile.interference] == ["all_gather", "reduce_scatter"]
    network = "network" if per_node == 1 else "links inside a node"
    assert network in fits(constants("cpu", "torchtitan"), profile, "fp32")


def test_groups_grow_to_a_node_and_then_cross_it() -> None:
    divisions = [(layout.ranks, layout.nodes, len(layout.groups)) for layout in group_layouts(16, 8)]
    assert divisions == [(2, 1, 8), (4, 1, 4), (8, 1, 2), (2, 2, 8), (16, 2, 1)]
    assert [(layout.ranks, layout.nodes) for layout in group_layouts(6, 6)] == [(2, 1), (6, 1)]
    assert [(layout.ranks, layout.nodes) for layout in group_layouts(3, 1)] == [(3, 3)]
    assert group_layouts(1, 1) == []


@pytest.mark.parametrize(("ranks", "per_node"), [(16, 8), (12, 6), (4, 1), (8, 8)])
def test_every_kind_holds_every_rank_once_and_spans_what_it_says(ranks: int, per_node: int) -> None:
    for layout in group_layouts(ranks, per_node):
        assert sorted(rank for part in layout.groups for rank in part) == list(range(ranks))
        assert {len({rank // per_node for rank in part}) for part in layout.groups} == {layout.nodes}


@pytest.mark.parametrize(("window", "seen"), [(16, None), (5, 5)])
def test_a_runs_own_shapes_are_measured_so_that_its_work_is_priced(
    tmp_path: Path, window: int, seen: int | None
) -> None:
    """A window as long as the sequence has no effect on attention."""
    sizes = {"vocab_size": 128, "layers": 1, "hidden": 64, "ffn_hidden": 96, "sliding_window": window}
    model = from_plain(ModelSpec, {**MODEL_PRESETS["llama-nano"], **sizes})
    plan = Plan(
        mesh=(MeshAxis(axis="shard", size=1),),
        batch=BatchPlan(global_batch=2, micro_batch=2, accumulate=1),
        precision=Precision(compute="fp32"),
    )
    work = step_work(model, TrainSpec(steps=1, global_batch=2, seq_len=16), plan)
    profile = loaded(tiny(Team(torch.device("cpu")), work), tmp_path)
    assert {(entry.m, entry.k, entry.n, entry.format) for entry in profile.products} == {
        (32, 64, 512, "fp32"),
        (32, 256, 64, "fp32"),
        (32, 64, 192, "fp32"),
        (32, 96, 64, "fp32"),
        (32, 64, 128, "fp32"),
    }
    assert [(entry.seq, entry.tokens, entry.heads, entry.window) for entry in profile.attention] == [(16, 32, 4, seen)]
    seconds = seconds_needed(work, profile)
    assert seconds["gemm"] == pytest.approx(3 * sum(entry.seconds for entry in profile.products), rel=1e-4)
    assert all(seconds[part] > 0 for part in ("attention", "elementwise", "loss", "optimizer", "copies"))


def test_every_matmul_of_an_fp8_layer_is_asked_for() -> None:
    model = from_plain(ModelSpec, {**MODEL_PRESETS["llama-nano"], "vocab_size": 128, "layers": 1})
    plan = Plan(
        mesh=(MeshAxis(axis="shard", size=1),),
        batch=BatchPlan(global_batch=1, micro_batch=1, accumulate=1),
        precision=Precision(linear="fp8_tensorwise"),
    )
    matmuls, attention = cases_of(step_work(model, TrainSpec(steps=1, global_batch=1, seq_len=16), plan))
    assert [shape for shape, dtype in matmuls if dtype == "fp8"][:3] == [
        (16, 256, 512),
        (16, 512, 256),
        (512, 16, 256),
    ]
    assert len(matmuls) == 3 * 4 - 1 + 1 and attention == [(16, 4, 2, 64, 16, None)], (
        "two of the square layer are alike, and there is the head"
    )
