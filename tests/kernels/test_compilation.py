"""Every Triton kernel that CI runs in the interpreter also compiles for an H100 and a B200."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
FOLDER = Path(__file__).parent
KERNELS = {
    "test_token_exchange.py": {"_read_rows", "_route", "_signal", "_targets", "_wait", "_write_rows"},
    "test_triton.py": {
        "_adamw",
        "_add_copies_rms_norm",
        "_add_rms_norm",
        "_add_wide",
        "_backward",
        "_forward",
        "_round_transposed",
        "_spread",
        "_sum",
        "_weighted_backward",
    },
    "test_paged_triton.py": {"_decode", "_prefill", "_rotate_write", "combine_splits"},
    "../optim/test_packing.py": {"_adamw", "_packed_adamw"},
    "test_expert_decode.py": {"_copies_matmul", "_route"},
    "test_int8_matmuls.py": {
        "_grouped_matmul",
        "_matmul",
        "_round_add_copies_rms_norm",
        "_round_add_rms_norm",
        "_round_rows",
        "_round_gated",
    },
    "test_block_matmuls.py": {"_matmul", "_round_add_rms_norm", "_round_gated", "_round_rows"},
    "test_range_copies.py": {"_copy_ranges"},
    "test_router.py": {"_choose", "_choose_backward", "_count", "_order", "_scan"},
    "test_latent_attention.py": {"_chunks", "_decode", "_rotate_write", "combine_splits"},
}
"""Some of each file's kernels."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("file", KERNELS)
def test_kernels_compile(file: str, capability: int, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "COMPILED_KERNELS_FILE": str(tmp_path / "kernels.json"),
        "COMPILED_KERNELS_CAPABILITY": str(capability),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    arguments = ["-q", "-n", "0", "-p", "tests.kernels.compile_only", str(FOLDER / file)]
    subprocess.run([sys.executable, "-m", "pytest", *arguments], env=environment, cwd=FOLDER.parents[1], check=True)
    compiled = json.loads((tmp_path / "kernels.json").read_text())
    assert {name: error for name, error in compiled.items() if error is not None} == {}
    assert set(compiled) >= KERNELS[file]
