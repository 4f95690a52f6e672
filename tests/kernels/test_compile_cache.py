"""Compiled code of another release's operators is not used."""

from __future__ import annotations

from pathlib import Path

import torch
import torch._inductor.codecache as codecache

import meshwright
from meshwright.kernels.compile_cache import FOLDERS, PACKAGE, key_tag, operator_files


def test_torch_has_the_tag_in_its_key() -> None:
    tag = key_tag(operator_files())
    assert tag in torch.compiler.config.cache_key_tag
    details = codecache.FxGraphHashDetails(torch.fx.symbolic_trace(lambda x: x + 1), [], {}, [])
    assert tag in details.cache_key_tag


def test_a_changed_operator_has_another_tag(tmp_path: Path) -> None:
    file = tmp_path / "operators.py"
    file.write_text("def swiglu(x): ...")
    before = key_tag([file])
    assert key_tag([file]) == before
    file.write_text("def swiglu(x, activation): ...")
    assert key_tag([file]) != before


def test_every_file_that_registers_operators_counts() -> None:
    package = Path(meshwright.__file__).parent
    registering = {
        file for file in package.rglob("*.py") if any(word in file.read_text() for word in ("custom_op(", "triton_op("))
    }
    assert package == PACKAGE and registering
    assert registering - {package / "kernels" / "compile_cache.py"} <= set(operator_files())
    assert {file.parent.name for file in registering} <= set(FOLDERS)
