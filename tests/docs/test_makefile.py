"""What `make` says before it installs anything."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.docs.pages import ROOT


@pytest.mark.parametrize("target", ["quickstart", "test"])
def test_an_old_python_is_refused_in_one_line(tmp_path: Path, target: str) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    python = tmp_path / "python3.10"
    python.write_text("#!/bin/sh\nexit 1\n")  # as `sys.exit(sys.version_info < (3, 11))` does there
    python.chmod(0o755)
    command = ["make", "--silent", "-C", str(tmp_path), target, f"PYTHON={python}"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 2 and not (tmp_path / ".venv").exists()
    assert (
        answer.stdout.strip()
        == f"Python 3.11 or later is needed, and {python} is none: make PYTHON=/path/to/python3.11 …"
    )
