"""Chips by name, and the message for a chip that is not in the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.config.load import load_run
from meshwright.config.presets import cluster_names
from meshwright.spec.cluster import CHIPS, ClusterSpec, chip_from_device_name
from meshwright.spec.errors import BadConfig
from meshwright.spec.network import NodeGroup


@pytest.mark.parametrize(
    ("device", "chip"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA B200", "B200"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 3090", "RTX3090"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA GeForce RTX 5090", "RTX5090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000-Ada"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("Quadro RTX 6000", None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
        ("", None),
    ],
)
def test_driver_names_map_to_chips(device: str, chip: str | None) -> None:
    assert chip_from_device_name(device) == chip


@pytest.mark.parametrize(("spelling", "chip"), [("h100", "H100"), ("rtx 4090", "RTX4090"), ("A100 40GB", "A100-40GB")])
def test_common_spellings_of_a_chip_are_accepted(spelling: str, chip: str) -> None:
    overrides = ["model=llama3-1b", f"cluster.gpu={spelling}", "train.global_batch=8"]
    assert load_run(None, overrides).cluster.gpu == chip


def test_an_unknown_chip_has_no_peak_and_only_the_memory_it_is_given() -> None:
    unknown = ClusterSpec(gpu="X1", memory_gib=2)
    assert unknown.peak_flops("bf16") is None
    assert unknown.memory_bytes() == 2 << 30
    assert ClusterSpec(gpu="X1").memory_bytes() is None
    assert ClusterSpec(gpu="A100").peak_flops("fp8") is None
    assert ClusterSpec(gpu="H100", nodes=2, gpus_per_node=8).ranks == 16
    assert ClusterSpec(gpu="H100").memory_bytes() == 80 << 30


def test_every_chip_is_found_under_its_own_name() -> None:
    for name in CHIPS:
        assert ClusterSpec(gpu=name).memory_bytes()
        assert chip_from_device_name(name) == name


@pytest.mark.parametrize("name", cluster_names())
def test_built_in_clusters_load_by_name(name: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"model: llama-nano\ncluster: {name}\n")
    cluster = load_run(file, ["train.global_batch=49152", "train.steps=10"]).cluster
    assert cluster.network is not None
    assert cluster.ranks > 8


def test_an_unknown_cluster_names_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: llama-nano\ncluster: dgx-h100-61\ntrain: {steps: 10, global_batch: 8}\n")
    with pytest.raises(BadConfig, match="dgx-h100-16"):
        load_run(file)


def test_a_smaller_group_limits_memory_and_leaves_no_common_peak() -> None:
    mixed = ClusterSpec(gpu="H100", nodes=4, gpus_per_node=8, groups=(NodeGroup(nodes=1, gpu="A100-40GB"),))
    assert mixed.memory_bytes() == CHIPS["A100-40GB"].memory_bytes
    assert mixed.peak_flops("bf16") is None
    slower_port = ClusterSpec(gpu="H100", nodes=4, gpus_per_node=8, groups=(NodeGroup(nodes=1, port_gb_per_s=5.0),))
    assert slower_port.memory_bytes() == CHIPS["H100"].memory_bytes
    assert slower_port.peak_flops("bf16") == CHIPS["H100"].peak_flops["bf16"]
