"""`meshwright generate` on expert ranks of this host, in processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny import LLAMA, QWEN3_MOE
from tests.server.helpers import write_folder


def generate(folder: Path, *options: str) -> Any:
    command = [sys.executable, "-m", "meshwright", "generate", str(folder), "-p", "def", "-p", "class", *options]
    return subprocess.run([*command, "--tokens", "12", "--json"], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_texts_on_expert_ranks_are_those_of_one_device(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "experts", QWEN3_MOE)
    alone, shared = (generate(folder, "--expert", ranks, "--expert-micro-batches", ranks) for ranks in ("1", "2"))
    assert (alone.returncode, shared.returncode) == (0, 0), shared.stderr
    assert json.loads(shared.stdout) == json.loads(alone.stdout)
    rounded = generate(folder, "--expert", "2", "--expert-dispatch", "int8")
    assert [sample["prompt"] for sample in json.loads(rounded.stdout)["samples"]] == ["def", "class"]
    dense = write_folder(tmp_path / "dense", LLAMA)
    for options, message in (
        (("--expert", "2"), "--expert: expected 1, as the model has no experts, got 2"),
        (("--expert", "2", "--tensor", "2"), "--expert excludes --tensor and --plan"),
        (("--expert", "2", "--speculate", "2"), "--speculate and --draft-model are for one device: leave out --expert"),
        (("--expert-dispatch", "int8"), "tokens travel between several devices only"),
        (("--draft-model", "mtp"), "the model has 0"),
    ):
        refused = generate(dense, *options)
        assert refused.returncode == 2 and message in " ".join(refused.stderr.split()), refused.stderr
