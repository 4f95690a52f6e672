"""The benchmark of the engine's formats, whole, on tiny models."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import serve_formats
from serve_formats import TINY, USUAL, Sizes, main


class ShortTraining(Sizes):
    """`Sizes` whose model is hardly trained."""

    def __init__(self, model: str, tiny: bool) -> None:
        super().__init__(model, tiny)
        self.steps, self.held_out = 2, 1


@pytest.mark.slow
@pytest.mark.parametrize("model", TINY)
def test_every_row_has_times_memory_and_differences(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "lines.jsonl"
    monkeypatch.setattr(serve_formats, "Sizes", ShortTraining)
    monkeypatch.setattr(sys, "argv", ["serve_formats.py", "--tiny", "--model", model, "--out", str(out)])
    main()
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == lines
    rows: dict[str, dict[str, Any]] = {line["format"]: line for line in lines}
    assert list(rows) == ["none", *USUAL[model]]
    for row in rows.values():
        for batch, milliseconds in row["decode_milliseconds"].items():
            assert row["new_tokens_per_second"][batch] == pytest.approx(1000 * int(batch) / milliseconds)
        assert math.isfinite(row["held_out_loss"])
    rounded = rows["int8 weights"]
    assert 0.25 < rounded["weight_gib"] / rows["none"]["weight_gib"] < 0.8, "embedding and head stay in fp32"
    assert 0 < rounded["logit_difference_mean"] < rows["fp8 weights"]["logit_difference_mean"]
    for name in set(rows) & {"no graphs", "expanded"}:
        assert rows[name]["logit_difference_max"] == 0, "only decodes change"
