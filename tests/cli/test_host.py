"""`meshwright host check`: one JSON object and an exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.chaos.health_faults import FOLDER


def check(tmp_path: Path, gpus: list[dict[str, Any]], *options: str) -> tuple[int, dict[str, Any]]:
    """Exit code and answer of a check on a host with these GPUs."""
    (tmp_path / "nvml.json").write_text(json.dumps({"gpus": gpus}))
    path = f"{FOLDER}:{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "PYTHONPATH": path, "FAKE_NVML": str(tmp_path / "nvml.json")}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, "-m", "meshwright", "host", "check", *options]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    return ended.returncode, json.loads(ended.stdout)


@pytest.mark.parametrize(
    ("gpus", "options", "rules"),
    [
        ([{}, {}], (), {}),
        ([{}, {"reasons": 0x80}], (), {"power-brake": "warn"}),
        ([{}, {"remapped": [0, 0, 0, 1]}], (), {"remap-failed": "exclude"}),
        ([{}, {"links": [1] * 17 + [0]}], (), {"nvlink-down": "drain"}),
        ([{"error": 15}, {}], (), {"gpu-lost": "exclude"}),
        ([{}, {"error": 15}], ("--gpus", "1"), {}),
    ],
)
def test_the_exit_code_is_that_of_the_worst_finding(
    tmp_path: Path, gpus: list[dict[str, Any]], options: tuple[str, ...], rules: dict[str, str]
) -> None:
    code, answer = check(tmp_path, gpus, *options)
    found = {entry["rule"]: entry["action"] for entry in answer["findings"] if entry["part"].startswith("GPU")}
    assert found == rules and all(entry["source"] for entry in answer["findings"])
    warned = any(entry["action"] == "warn" for entry in answer["findings"])  # this machine's own state may warn
    bad = bool(set(rules.values()) - {"warn"})
    assert code == (2 if bad else int(warned))
    assert answer["verdict"] == ("healthy", "warned", "bad")[code] and answer["ok"] == (not bad)
    assert "GPU 0" in answer["values"] and ("GPU 1" in answer["values"]) == (not options)
