"""GPU: checks of the state change no loss and find nothing in clean steps; a flipped bit is found and the run goes back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.gpu.runs import LLAMA, RUNS_LIMIT, Record, needs, steps, trained

from meshwright.chaos.code_faults import CODE, VARIABLE

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(RUNS_LIMIT)]

CHECKED = ["supervision.check_state_every=1", "checkpoint.every=4"]


def losses(records: Sequence[Record]) -> list[float]:
    return [record["loss"] for record in steps(records)]


@pytest.mark.parametrize(("gpus", "mode"), [(1, "sync"), (1, "async"), (2, "async")])
def test_a_flip_is_found_and_clean_steps_are_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, mode: str
) -> None:
    """Two GPUs are replicas."""
    needs(gpus)
    words = [
        f"plan.replicate={gpus}",
        "plan.shard=1",
        f"checkpoint.mode={mode}",
        "train.steps=40",
        "train.deterministic=true",
    ]
    plain = trained(tmp_path, LLAMA, "plain", gpus, words)
    clean = trained(tmp_path, LLAMA, "clean", gpus, [*words, *CHECKED])
    assert not any("corruption" in record["text"] for record in clean if record["kind"] == "event")
    assert losses(clean) == losses(plain)
    (tmp_path / "sitecustomize.py").write_text(CODE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv(VARIABLE, f"bit:{gpus - 1}:30")
    flipped = trained(tmp_path, LLAMA, "flipped", gpus, [*words, *CHECKED])
    lines = [record["text"] for record in flipped if record["kind"] == "event" and "corruption" in record["text"]]
    assert len(lines) == 1 and lines[0].startswith(f"step 30: silent corruption: on rank {gpus - 1} (host ")
    assert "changed between two updates; back to step " in lines[0]
    assert losses(flipped) == losses(plain)
