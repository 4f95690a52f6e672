"""A profile's file: written, read, refused with what was expected where; and how a run names one."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from tests.profile.made import made_profile

from meshwright.config.load import load_cluster, load_resolved, load_run, resolved_yaml
from meshwright.config.profile_file import load_profile, to_json
from meshwright.spec.errors import BadConfig, BadInput


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "h200.json"
    path.write_text(to_json(made_profile()), encoding="utf-8")
    return path


def plain(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def test_it_comes_back_as_written_to_six_digits(file: Path) -> None:
    once = load_profile(file)
    file.write_text(to_json(once), encoding="utf-8")
    assert load_profile(file) == once
    assert once.products[0].seconds == pytest.approx(made_profile().products[0].seconds, rel=1e-5)
    assert [collective.crosses for collective in once.collectives if collective.ranks == 16][:1] == ["node"]


def test_a_file_that_changed_is_read_again(file: Path) -> None:
    before = load_profile(file)
    file.write_text(to_json(before).replace("NVIDIA H200", "another"), encoding="utf-8")
    os.utime(file, ns=(1, 1))
    assert load_profile(file).device == "another"


@pytest.mark.parametrize(
    ("change", "output"),
    [
        ({"version": 2}, "version: expected integer (≥ 1, ≤ 1), got 2"),
        ({"devices": "8"}, "devices: expected integer (≥ 1), got the text '8'"),
        ({"speed": 1}, "speed: expected a key of a profile (version, date"),
        ({"gpu": None}, "gpu: expected text"),
        ({"copy_bytes_per_s": -1.0}, "copy_bytes_per_s: expected number (> 0), or none, got -1.0"),
        ({"products": [{"format": "bf17"}]}, "products.0.format: expected bf16 | fp16"),
        ({"products": [{"format": "bf16"}]}, "products.0.seconds: expected number (> 0), got nothing"),
        ({"host_links": [{"devices": 1, "to_host": 1.0, "to_device": 1.0, "x": 1}]}, "host_links.0.x: expected a key"),
    ],
)
def test_mistakes_in_a_profile_name_their_key(file: Path, change: dict[str, Any], output: str) -> None:
    file.write_text(json.dumps({**plain(file), **change}), encoding="utf-8")
    with pytest.raises(BadInput, match=re.escape(f"{file}: {output}")):
        load_profile(file)


@pytest.mark.parametrize("text", ["", "[1]", "{", "\x00"])
def test_a_file_that_is_not_a_profile_is_refused(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(BadInput, match="meshwright profile --out FILE"):
        load_profile(file)
    with pytest.raises(BadInput, match=r"nothing\.json: expected a profile"):
        load_profile(file.with_name("nothing.json"))


RUN = "model: llama-nano\ntrain: {steps: 1, global_batch: 8}\n"


def test_a_run_finds_it_beside_the_file_that_names_it(file: Path, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(RUN + "cluster: {gpu: H200, profile: h200.json}\n")
    run = load_run(tmp_path / "own.yaml")
    assert run.cluster.profile == str(file)
    resolved = tmp_path / "elsewhere" / "config.yaml"
    resolved.parent.mkdir()
    resolved.write_text(resolved_yaml(run))
    assert load_resolved(resolved) == run
    (tmp_path / "rack").mkdir()
    (tmp_path / "rack" / "cluster.yaml").write_text("gpu: H200\nprofile: ../h200.json\n")
    (tmp_path / "run.yaml").write_text(RUN + "cluster: rack/cluster.yaml\n")
    assert load_run(tmp_path / "run.yaml").cluster.profile == str(file)


def mistake(path: Path, *overrides: str) -> str:
    with pytest.raises(BadConfig) as caught:
        load_run(path, overrides)
    return str(caught.value)


def test_mistakes_name_the_place_in_the_run(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(RUN + "cluster:\n  gpu: H200\n  profile: h20.json\n")
    assert f"{path}:5:12: cluster.profile: expected a file that" in mistake(path)
    assert "h20.json: no such file (nearest: h200.json)" in mistake(path)
    path.write_text(RUN + "cluster: {gpu: H100, profile: h200.json}\n")
    assert ":3:31: cluster.profile: expected a profile of H100, got one of H200" in mistake(path)
    path.write_text(RUN)
    assert "command line: cluster.profile: expected a profile of cpu, got one of H200" in mistake(
        path, "cluster.profile=h200.json"
    )
    file.write_text(json.dumps({**plain(file), "nodes": 0}))
    assert "got h200.json: nodes: expected integer (≥ 1), got 0" in mistake(path, "cluster.profile=h200.json")


def test_the_cluster_alone_is_loaded_without_its_profile(tmp_path: Path) -> None:
    cluster = load_cluster(None, ["cluster=auto", "cluster.profile=not-there.json"], detect=lambda: {"gpu": "H200"})
    assert cluster.gpu == "H200" and str(cluster.profile).endswith("not-there.json")
    path = tmp_path / "run.yaml"
    path.write_text("model: none-such\ncluster: {gpu: cpu, gpus_per_node: 3}\n")
    assert load_cluster(path).gpus_per_node == 3
    with pytest.raises(BadConfig, match=r"cluster\.gpus_per_node"):
        load_cluster(path, ["cluster.gpus_per_node=0"])
