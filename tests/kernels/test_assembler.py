"""Torch's ptxas assembles Triton's kernels unless the user names another; a miscompiled kernel is detected."""

from __future__ import annotations

import importlib.machinery
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.kernels import assembler, gated
from meshwright.kernels.fp8_matmuls import Fp8Matrix


@pytest.mark.parametrize(
    ("exists", "mode", "variable", "expected"),
    [
        (True, 0o755, None, "torch's"),
        (True, 0o755, "/mine", "/mine"),
        (True, 0o644, None, None),
        (False, 0o755, None, None),
    ],
)
def test_choice_of_ptxas(
    exists: bool, mode: int, variable: str | None, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "ptxas"
    if exists:
        program.parent.mkdir()
        program.touch(mode=mode)
    torch_spec = importlib.machinery.ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(assembler, "find_spec", lambda name: torch_spec)
    monkeypatch.setattr(assembler.os, "environ", {} if variable is None else {assembler.VARIABLE: variable})
    assembler.use_torch_ptxas()
    assert assembler.os.environ.get(assembler.VARIABLE) == (str(program) if expected == "torch's" else expected)


def test_a_miscompiled_kernel_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert gated.find_miscompiled_kernel(cpu) is None
    correct = gated._activation_gradient

    def wrong(*arguments: Any) -> tuple[Fp8Matrix, Fp8Matrix]:
        quantised, transposed = correct(*arguments)
        transposed.values.view(torch.uint8)[5, 7] ^= 1
        return quantised, transposed

    monkeypatch.setattr(gated, "_activation_gradient", wrong)
    assert gated.find_miscompiled_kernel(cpu) == "fp8_swiglu_gradient"
