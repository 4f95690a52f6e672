"""The commands `checkpoint diff`, `show` and `prune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from meshwright.checkpoint.format.manifest import COMMITTED
from meshwright.checkpoint.inspect import describe_checkpoint, prune_checkpoints
from meshwright.checkpoint.read import diff
from meshwright.checkpoint.read.diff import compare_checkpoints
from meshwright.checkpoint.store import CheckpointStore
from meshwright.cli.checkpoint import app
from meshwright.durable.lock import locked
from meshwright.spec.errors import BadInput, Damaged
from tests.checkpoint.made import save
from tests.checkpoint.test_reader import WHOLE, save_grid


def answer(*arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def saved(folder: Path, **tensors: torch.Tensor) -> Path:
    return CheckpointStore(folder).save(1, tensors, {}, {}).path


def test_diff_reports_for_each_tensor_whether_and_by_how_much_it_changed(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", same=torch.arange(6.0), moved=torch.zeros(4, 3), gone=torch.ones(1), dtype=torch.ones(2))
    change = torch.zeros(4, 3)
    change[2, 1], change[3, 0] = -0.75, 0.5
    b = saved(tmp_path / "b", same=torch.arange(6.0), moved=change, new=torch.ones(()), dtype=torch.ones(2).half())
    assert answer("diff", a, b) == {
        "equal": False,
        "tensors": [
            {"name": "dtype", "status": "changed", "max_abs": None},
            {"name": "gone", "status": "only_a", "max_abs": None},
            {"name": "moved", "status": "changed", "max_abs": 0.75},
            {"name": "new", "status": "only_b", "max_abs": None},
            {"name": "same", "status": "equal", "max_abs": 0.0},
        ],
    }
    assert answer("diff", a, a)["equal"] is True


def test_diff_is_bit_for_bit(tmp_path: Path) -> None:
    """Signed zeros differ although they compare equal; equal NaNs are equal although they do not."""
    nan = torch.tensor([float("nan"), 1.0])
    a = saved(tmp_path / "a", zero=torch.zeros(3), nan=nan, nans=nan)
    b = saved(tmp_path / "b", zero=-torch.zeros(3), nan=nan, nans=nan.flip(0))
    status_by_name = {
        difference.name: (difference.status, difference.max_abs) for difference in compare_checkpoints(a, b)
    }
    assert status_by_name == {"nan": ("equal", 0.0), "nans": ("changed", None), "zero": ("changed", 0.0)}


def test_diff_reads_differently_sharded_tensors_in_small_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diff, "SLICE_BYTES", 96)  # two rows of WHOLE
    a, b = save_grid(tmp_path / "a", [0, 3, 7], [0, 1, 6]), save_grid(tmp_path / "b", [0, 5, 6, 7], [0, 6])
    assert [difference.status for difference in compare_checkpoints(a, b)] == ["equal"]
    WHOLE[6, 5, 1] += 5
    try:
        changed = save_grid(tmp_path / "c", [0, 7], [0, 2, 6])
    finally:
        WHOLE[6, 5, 1] -= 5
    assert [(difference.status, difference.max_abs) for difference in compare_checkpoints(a, changed)] == [
        ("changed", 5.0)
    ]


def test_diff_of_a_damaged_checkpoint_is_an_error(tmp_path: Path) -> None:
    a, b = save(tmp_path / "a", 1), save(tmp_path / "b", 1)
    file = b / "tensors-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(Damaged, match=r"tensors-00000\.safetensors: digest in the 16 MiB from byte 0"):
        list(compare_checkpoints(a, b))


def test_show_of_a_step(tmp_path: Path) -> None:
    for step in (1, 2):
        path = save(tmp_path / "checkpoints", step)
    output = answer("show", tmp_path, 2)
    assert answer("show", tmp_path) == output == answer("show", path)
    assert (output["step"], output["committed"], output["plan"]) == (2, True, {"mesh": []})
    assert set(output["versions"]) == {"meshwright", "torch"}
    names = {file.name: file.stat().st_size for file in path.iterdir() if file.name not in (COMMITTED, "manifest.json")}
    assert {file["name"]: file["bytes"] for file in output["files"]} == names
    assert set(output["seconds"]) == {"staging", "writing", "commit"}
    (path / COMMITTED).unlink()
    uncommitted = describe_checkpoint(path)
    assert (uncommitted["committed"], uncommitted["plan"], uncommitted["step"]) == (False, None, 2)
    with pytest.raises(BadInput, match="no checkpoint of step 7; steps there: 1, 2"):
        CliRunner().invoke(app, ["show", str(tmp_path), "7"], catch_exceptions=False)


def test_prune_keeps_the_newest_and_the_newest_good_one(tmp_path: Path) -> None:
    paths = [save(tmp_path / "checkpoints", step) for step in (1, 2, 3, 4)]
    (tmp_path / "checkpoints" / ".step-00000005.ab.partial").mkdir()
    (paths[3] / "state.json").write_text("{}")
    assert answer("prune", tmp_path, "--keep", 1) == {
        "deleted": [str(paths[0]), str(paths[1])],
        "kept": [str(paths[2]), str(paths[3])],
    }
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000003", "step-00000004"]


def test_prune_refuses_a_run_that_a_job_works_in_and_a_single_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", 1)
    with locked(tmp_path, wait=False), pytest.raises(BadInput, match="is writing here; wait for it, or stop it first"):
        prune_checkpoints(tmp_path, 1)
    with pytest.raises(BadInput, match="expected a run's folder"):
        prune_checkpoints(path, 1)
    assert path.is_dir()
