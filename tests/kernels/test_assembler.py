"""Triton's kernels are assembled by torch's ptxas where torch brings one, unless the user says otherwise; wrong bytes are noticed."""

from __future__ import annotations

import importlib.machinery
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.kernels import assembler, gated
from meshwright.kernels.fp8_products import Fp8Matrix


@pytest.mark.parametrize(
    ("there", "mode", "said", "expected"),
    [
        (True, 0o755, None, "torch's"),
        (True, 0o755, "/mine", "/mine"),
        (True, 0o644, None, None),
        (False, 0o755, None, None),
    ],
)
def test_which_is_taken(
    there: bool, mode: int, said: str | None, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "ptxas"
    if there:
        program.parent.mkdir()
        program.touch(mode=mode)
    found = importlib.machinery.ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(assembler, "find_spec", lambda name: found)
    monkeypatch.setattr(assembler.os, "environ", {} if said is None else {assembler.VARIABLE: said})
    assembler.use_torch_ptxas()
    assert assembler.os.environ.get(assembler.VARIABLE) == (str(program) if expected == "torch's" else expected)


def test_wrong_bytes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.device("cpu")
    assert gated.find_miscompiled_kernel(here) is None
    right = gated._activation_gradient

    def wrong(*given: Any) -> tuple[Fp8Matrix, Fp8Matrix]:
        straight, transposed = right(*given)
        transposed.values.view(torch.uint8)[5, 7] ^= 1
        return straight, transposed

    monkeypatch.setattr(gated, "_activation_gradient", wrong)
    assert gated.find_miscompiled_kernel(here) == "fp8_swiglu_gradient"
