"""Constants fitted to a profile equal the constants that generated it; constants that it does not cover are unchanged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.config.profile_file import to_json
from meshwright.costs.constants import NAMES, constants
from meshwright.costs.machine_rates import chip_of, is_guessed, machine_of, unpredicted_message, with_measurements
from meshwright.costs.measured import correction, fits, with_profile
from meshwright.costs.offload_costs import HOST_SHARE
from meshwright.costs.plan_costs import as_nodes
from meshwright.costs.sources import sources
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput
from meshwright.spec.network import NetworkSpec
from meshwright.spec.profile import Correction, MachineProfile, MatmulTime
from tests.profile.made import NODES, TRUE, made_profile, number

FITTED = constants("hopper", "torchtitan")


def write_profile(profile: MachineProfile, folder: Path) -> str:
    file = folder / "machine.json"
    file.write_text(to_json(profile), encoding="utf-8")
    return str(file)


def test_fit_recovers_the_constants_that_generated_the_profile() -> None:
    k, machine, source_by_name = with_profile(FITTED, machine_of(NODES), made_profile())
    assert {name: number(getattr(k, name)) for name in TRUE} == pytest.approx(TRUE, rel=1e-4)
    assert machine.host * HOST_SHARE == pytest.approx(21e9)
    assert set(source_by_name) == {*TRUE, "host"} and all(
        text.startswith("measured") for text in source_by_name.values()
    )
    untouched = set(NAMES) - set(TRUE)
    assert all(getattr(k, name) == getattr(FITTED, name) for name in untouched)


def test_noise_appears_as_residual_and_changes_the_fit_little() -> None:
    profile = made_profile()
    matmul_times = [
        replace(matmul_time, seconds=matmul_time.seconds * (1.04 if i % 2 else 0.96))
        for i, matmul_time in enumerate(profile.products[::2])
    ]
    fit = fits(FITTED, replace(profile, products=tuple(matmul_times)))["matmuls"]
    assert fit.residual == pytest.approx(0.04, rel=0.3)
    assert fit.values["gemm"] == pytest.approx(TRUE["gemm"], rel=0.06)


def test_constants_without_measurement_are_unchanged() -> None:
    empty_profile = replace(
        made_profile(), products=(), attention=(), pass_bytes_per_s=None, collectives=(), host_links=(), interference=()
    )
    k, machine, source_by_name = with_profile(FITTED, machine_of(NODES), empty_profile)
    assert (k, machine, source_by_name) == (FITTED, machine_of(NODES), {})


def test_groups_of_one_size_keep_the_ratio_of_latencies() -> None:
    profile = made_profile()
    pair_collectives = tuple(
        collective for collective in profile.collectives if collective.ranks == 2 and collective.nodes == 1
    )
    fitted = fits(FITTED, replace(profile, collectives=pair_collectives))["links inside a node"].values
    assert fitted["link"] == pytest.approx(TRUE["link"], rel=1e-3)
    assert fitted["start_us"] + fitted["link_us"] == pytest.approx(TRUE["start_us"] + TRUE["link_us"], rel=1e-3)
    assert fitted["start_us"] / fitted["link_us"] == pytest.approx(number(FITTED.start_us) / number(FITTED.link_us))


def test_the_measured_share_applies_to_a_stated_bandwidth(tmp_path: Path) -> None:
    cluster = replace(NODES, profile=write_profile(made_profile(), tmp_path))
    assert cluster.network is not None
    double_bandwidth = replace(cluster, network=replace(cluster.network, port_gb_per_s=25.0, port_us=1.5))
    speeds = []
    for stated_cluster in (cluster, double_bandwidth):
        k, machine = with_measurements(FITTED, machine_of(stated_cluster), stated_cluster)
        speeds.append(number(machine.nic * k.net))
    assert speeds == pytest.approx([12.5e9 * TRUE["net"], 25e9 * TRUE["net"]], rel=1e-4)
    assert number(k.net_us) == 1.5, "a stated latency replaces a measured one"


def test_emulated_nodes_have_the_bandwidth_that_was_measured_between_them(tmp_path: Path) -> None:
    """The default loopback bandwidth has no effect on it."""
    profile = replace(made_profile(), nodes=2, devices=4)
    cluster = ClusterSpec(gpu="H200", gpus_per_node=8, emulate_nodes=2, profile=write_profile(profile, tmp_path))
    nodes = as_nodes(cluster)
    k, machine = with_measurements(FITTED, machine_of(nodes), nodes)
    assert number(machine.nic * k.net) == pytest.approx(12.5e9 * TRUE["net"], rel=1e-4)
    single_node = replace(cluster, profile=write_profile(replace(profile, nodes=1), tmp_path))
    assert number(machine_of(as_nodes(single_node)).nic) == number(
        machine_of(as_nodes(replace(single_node, profile=None))).nic
    )


def test_corrections_scale_device_time_and_nothing_else() -> None:
    corrections = tuple(
        Correction(run=name, date="2026", predicted_seconds=1.0, measured_seconds=factor, factor=factor)
        for name, factor in (("a", 1.1), ("b", 1.3), ("c", 1.2))
    )
    profile = replace(made_profile(), corrections=corrections)
    assert correction(profile) == 1.2
    k, _, source_by_name = with_profile(FITTED, machine_of(NODES), profile)
    assert number(k.slow) == 1.2 and source_by_name["slow"] == "corrected by 3 runs"
    assert number(k.gemm) == pytest.approx(TRUE["gemm"], rel=1e-4)
    without_matmuls = replace(profile, products=())
    assert number(with_profile(FITTED, machine_of(NODES), without_matmuls)[0].slow) == pytest.approx(
        1.2 * number(FITTED.slow)
    )


def processor_cluster(folder: Path) -> ClusterSpec:
    """Two ranks of 2 cores that reach 100 GFLOP/s each."""
    matmul_times = tuple(
        MatmulTime(format="fp32", m=m, k=m, n=m, seconds=2 * m**3 / 100e9, burst_seconds=2 * m**3 / 90e9)
        for m in (256, 512)
    )
    profile = MachineProfile(
        date="2026-01-02T03:04:05Z",
        gpu="cpu",
        device="a processor",
        devices=2,
        nodes=1,
        cores=4,
        memory_bytes=32 << 30,
        products=matmul_times,
        pass_bytes_per_s=8e9,
    )
    return ClusterSpec(gpu="cpu", gpus_per_node=2, profile=write_profile(profile, folder))


def test_rates_of_a_device_outside_the_chip_table_come_from_its_profile(tmp_path: Path) -> None:
    cluster = processor_cluster(tmp_path)
    chip = chip_of(cluster)
    assert chip is not None and chip.peak_flops["fp32"] == pytest.approx(100e9, rel=1e-5)
    assert chip.memory_bytes == 16 << 30
    k, machine = with_measurements(FITTED, machine_of(cluster, "fp32"), cluster, "fp32")
    assert number(machine.peak * k.gemm) == pytest.approx(100e9, rel=1e-5)
    assert number(machine.hbm * k.hbm) == pytest.approx(8e9, rel=1e-5)
    assert cluster.peak_flops("fp32") is None, "no MFU rather than a wrong one"


def test_an_unmeasured_device_is_guessed_and_refused_if_its_memory_is_unknown() -> None:
    cluster = ClusterSpec(gpu="cpu", gpus_per_node=2)
    assert machine_of(cluster, "fp32").peak > 0 and cluster.memory_bytes() is None
    unknown = ClusterSpec(gpu="X1", memory_gib=10)
    assert is_guessed(cluster) and is_guessed(unknown) and "X1" in unpredicted_message(unknown)
    assert machine_of(unknown).memory == 10 << 30
    assert chip_of(ClusterSpec(gpu="X1")) is None
    with pytest.raises(BadInput, match="meshwright profile"):
        machine_of(ClusterSpec(gpu="X1"))


def test_sources_distinguish_measured_fitted_and_guessed_numbers(tmp_path: Path) -> None:
    guessed = sources(ClusterSpec(gpu="cpu", gpus_per_node=2), "fp32")
    assert all(text.startswith("guess") for group, text in guessed.items() if group != "software")
    processor_sources = sources(processor_cluster(tmp_path), "fp32")
    assert processor_sources["matmuls"].startswith("measured") and processor_sources["matmuls"].endswith("2026-01-02")
    assert processor_sources["links inside a node"].startswith("guess") and "network" not in processor_sources
    datasheet_sources = sources(NODES)
    assert datasheet_sources["matmuls"].startswith("datasheet, share fitted on")
    assert datasheet_sources["network"].startswith("12.5 GB/s as cluster.network states")
    measured_sources = sources(replace(NODES, network=NetworkSpec(), profile=write_profile(made_profile(), tmp_path)))
    assert all(text.startswith("measured") for group, text in measured_sources.items() if group != "software")
    single_gpu_sources = sources(ClusterSpec(gpu="H200"))
    assert not {"links inside a node", "network", "overlap"} & set(single_gpu_sources)
