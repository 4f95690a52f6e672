"""GPUs read by NVML, from a fake of its package; names and constants of the fake are those of the real one."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from meshwright.chaos.health_faults import FOLDER
from meshwright.launch.gpu_readings import (
    _MEMBERS,
    LINKS_EVERY,
    WARNINGS_EVERY,
    GpuReader,
    NoGpus,
    visible_indices,
)
from meshwright.policies.host_health import READING_SECONDS, HealthReading, HealthWatch

FAKE = FOLDER / "pynvml.py"


class FakeNvml:
    """The file of a fake NVML."""

    def __init__(self, file: Path, module: ModuleType) -> None:
        self.file, self.module = file, module
        self.write([{}])

    def write(self, gpus: list[dict[str, Any]], **more: Any) -> None:
        self.file.write_text(json.dumps({"gpus": gpus, **more}))


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    spec = importlib.util.spec_from_file_location("pynvml", FAKE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "nvml.json"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield FakeNvml(tmp_path / "nvml.json", module)


def read(reader: GpuReader, gpu: int = 0) -> HealthReading:
    return reader.read({}, os.getpid())[gpu]


def test_a_healthy_gpu_has_all_quantities_of_the_rules_and_no_finding(nvml: FakeNvml) -> None:
    nvml.write([{}, {}])
    reader, watch = GpuReader(), HealthWatch()
    assert reader.count == 2 and not reader.events_hidden
    for number in range(30):
        readings = reader.read({}, os.getpid())
        assert watch.update(3.0 * number, readings) == ()
    first = GpuReader().read({}, os.getpid())[0]
    assert first.part == "GPU 0" and first.values == {
        "lost": 0,
        "temperature": 61,
        "uncorrected_errors": 0,
        "corrected_errors": 12,
        "memory_of_others": 0,
        "pcie_lanes_missing": 0,
        "remap_pending": 0,
        "remap_failed": 0,
        "thermal_slowdown": 0,
        "software_thermal_slowdown": 0,
        "power_brake": 0,
        "recovery_action": 0,
        "pcie_replays": 5,
        "nvlink_recoveries": 36,  # of 18 links
        "nvlink_crc_errors": 720,
        "nvlinks_down": 0,
    }


@pytest.mark.parametrize(
    ("change", "quantity", "value"),
    [
        ({"uncorrected": 2}, "uncorrected_errors", 2),
        ({"remapped": [0, 1, 1, 0]}, "remap_pending", 1),
        ({"remapped": [0, 1, 0, 1]}, "remap_failed", 1),
        ({"reasons": 0x40}, "thermal_slowdown", 1),
        ({"reasons": 0x20}, "software_thermal_slowdown", 1),
        ({"reasons": 0x80}, "power_brake", 1),
        ({"lanes": 8}, "pcie_lanes_missing", 8),
        ({"links": [1] * 16 + [0] * 2}, "nvlinks_down", 2),
        ({"fields": {"230": 4}}, "recovery_action", 4),
        ({"error": 15}, "lost", 1),
        ({"error": 16}, "lost", 1),
    ],
)
def test_defects_show_in_the_values(nvml: FakeNvml, change: dict[str, Any], quantity: str, value: float) -> None:
    reader = GpuReader()
    assert read(reader).values[quantity] == 0
    nvml.write([change])
    readings = [read(reader).values for _ in range(WARNINGS_EVERY)]
    assert [values[quantity] for values in readings if quantity in values][-1] == value


@pytest.mark.parametrize("lost", [{"error": 15}, {"error": 16, "handle_error": 15}])
def test_a_gpu_that_was_lost_before_the_start_is_lost_and_the_others_are_read(
    nvml: FakeNvml, lost: dict[str, Any]
) -> None:
    nvml.write([lost, {}], events=[[1, 31]])
    reader = GpuReader()
    readings = reader.read(reader.wait(5.0), os.getpid())
    assert readings[0].values == {"lost": 1.0} and readings[1].values["lost"] == 0 and readings[1].xids == (31,)
    assert not reader.events_hidden


def test_links_that_other_gpus_of_the_host_have_are_down(nvml: FakeNvml) -> None:
    nvml.write([{}, {"links": [1] * 17 + [0]}])
    readings = GpuReader().read({}, os.getpid())
    assert [reading.values["nvlinks_down"] for reading in readings] == [0, 1]


def test_totals_of_older_gpus_count_instead_of_links(nvml: FakeNvml) -> None:
    nvml.write([{"fields": {"59": 4, "38": 9}}])
    values = read(GpuReader()).values
    assert (values["nvlink_recoveries"], values["nvlink_crc_errors"]) == (4, 9) and "pcie_replays" not in values


def test_what_a_gpu_does_not_offer_is_left_out_and_not_asked_for_again(nvml: FakeNvml) -> None:
    nvml.write([{"links": []}], refused=["nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows"])
    reader = GpuReader()
    assert not {"uncorrected_errors", "remap_pending", "nvlinks_down"} & read(reader).values.keys()
    nvml.write([{"links": []}])
    values = read(reader).values
    assert "uncorrected_errors" not in values and "thermal_slowdown" in values


@pytest.mark.parametrize("gpus", [1, 2, 8])
@pytest.mark.parametrize("earlier", range(2 * LINKS_EVERY))
def test_a_link_that_goes_down_is_found_within_ten_seconds_and_until_it_is_up(
    nvml: FakeNvml, gpus: int, earlier: int
) -> None:
    nvml.write([{}] * gpus)
    reader, watch, now = GpuReader(), HealthWatch(), 0.0

    def found() -> set[str]:
        nonlocal now
        now += READING_SECONDS
        return {f"{finding.rule} {finding.part}" for finding in watch.update(now, reader.read({}, os.getpid()))}

    assert [found() for _ in range(1 + earlier)] == [set()] * (1 + earlier)
    nvml.write([{}] * (gpus - 1) + [{"links": [1] * 17 + [0]}])
    down = {f"nvlink-down GPU {gpus - 1}"}
    named = [found() for _ in range(8)]
    assert READING_SECONDS * (named.index(down) + 1) < 10.0
    assert all(each == down for each in named[named.index(down) :]), "it stays between two readings of links"
    nvml.write([{}] * gpus)
    assert [found() for _ in range(1 + LINKS_EVERY)][-1] == set()


def test_an_event_of_a_gpu_lets_its_driver_fields_be_read_at_once(nvml: FakeNvml) -> None:
    reader = GpuReader()
    read(reader)
    assert "recovery_action" not in read(reader).values
    assert "recovery_action" in reader.read({0: [154]}, os.getpid())[0].values  # its turn
    assert "recovery_action" in reader.read({0: [154]}, os.getpid())[0].values


@pytest.mark.parametrize(("gpus", "links", "calls"), [(2, 180, 278), (8, 720, 1112)])
def test_ten_readings_make_as_many_calls_as_the_docstring_says(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, gpus: int, links: int, calls: int
) -> None:
    nvml.write([{}] * gpus)
    reader = GpuReader()
    reader.read({}, os.getpid())  # the first reads all
    made: list[str] = []
    answer = nvml.module._gpu
    monkeypatch.setattr(nvml.module, "_gpu", lambda gpu, name: made.append(name) or answer(gpu, name))
    by_reading = []
    for _ in range(WARNINGS_EVERY):
        reader.read({}, os.getpid())
        by_reading.append(len(made) - sum(by_reading))
    assert (made.count("nvmlDeviceGetNvLinkState"), len(made)) == (links, calls)
    assert max(by_reading) - min(by_reading) <= 4, "the calls are spread"


def test_an_xid_ends_the_wait_and_a_storm_of_them_does_not_end_every_wait(nvml: FakeNvml) -> None:
    nvml.write([{}, {}], events=[[1, 79], [1, 45], [0, 31]])
    reader = GpuReader()
    xids = reader.wait(20.0)
    assert xids == {1: [79, 45], 0: [31]}
    assert [reading.xids for reading in reader.read(xids, os.getpid())] == [(31,), (79, 45)]
    assert reader.wait(0.05) == {}


@pytest.mark.parametrize("hides", ["nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents"])
def test_hidden_events_are_said(nvml: FakeNvml, hides: str) -> None:
    nvml.write([{}], refused=[hides])
    reader = GpuReader()
    assert reader.events_hidden and reader.wait(0.01) == {}


def test_memory_of_other_processes_counts_and_that_of_descendants_does_not(nvml: FakeNvml) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        nvml.write(
            [{"processes": [[child.pid, 500], [os.getpid(), 30], [4_000_000, 7]]}]
        )  # the last is not of this host
        reader = GpuReader()
        assert reader.read({}, os.getpid())[0].values["memory_of_others"] == 0
        assert GpuReader().read({}, child.pid)[0].values["memory_of_others"] == 30
    finally:
        child.kill()
        child.wait()


def test_visible_devices_choose_the_gpus() -> None:
    identities = ["GPU-aa-1", "GPU-ab-2", "GPU-cc-3"]
    assert visible_indices(identities, None) == [0, 1, 2]
    assert visible_indices(identities, "2,0") == [2, 0]
    assert visible_indices(identities, "GPU-cc,1") == [2, 1]
    assert visible_indices(identities, "1,7,0") == [1]
    assert visible_indices(identities, "GPU-a,0") == []  # two GPUs begin so
    assert visible_indices(identities, "") == []


def test_without_the_package_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NoGpus, match=r"nvidia-ml-py is not installed \(pip install 'meshwright\[health\]'\)"):
        GpuReader()


def test_the_fake_has_names_and_constants_of_the_real_package(nvml: FakeNvml) -> None:
    real = _real()
    for name in vars(nvml.module):
        if name.startswith(("nvmlDevice", "nvmlEventSet")) or name in ("nvmlInit", "nvmlShutdown"):
            assert callable(getattr(real, name)), name
        elif re.match(r"NVML_|nvmlEventType|nvmlClocksEventReason", name):
            assert getattr(real, name) == getattr(nvml.module, name), name
    members = [name for name, _ in real.c_nvmlValue_t._fields_]
    types = (
        "DOUBLE",
        "UNSIGNED_INT",
        "UNSIGNED_LONG",
        "UNSIGNED_LONG_LONG",
        "SIGNED_LONG_LONG",
        "SIGNED_INT",
        "UNSIGNED_SHORT",
    )
    assert [getattr(real, f"NVML_VALUE_TYPE_{kind}") for kind in types] == list(range(7))
    assert members[:7] == list(_MEMBERS)
    assert real.NVMLError(real.NVML_ERROR_TIMEOUT).value == real.NVML_ERROR_TIMEOUT


def _real() -> ModuleType:
    """The installed package, which is not the fake."""
    for folder in sys.path:
        file = Path(folder) / "pynvml.py"
        if file.is_file() and file != FAKE:
            spec = importlib.util.spec_from_file_location("real_pynvml", file)
            assert spec is not None and spec.loader is not None
            module = sys.modules["real_pynvml"] = importlib.util.module_from_spec(spec)  # where it looks for itself
            spec.loader.exec_module(module)
            return module
    pytest.skip("nvidia-ml-py is not installed")
