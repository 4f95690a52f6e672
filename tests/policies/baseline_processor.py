"""Runs a test module's digest where numpy may use no vector instructions beyond its baseline, as on an older processor."""

from __future__ import annotations

import os
import subprocess
import sys


def digest_on_baseline(module: str) -> str:
    """Return the result of `digest()` of a module in a process without vector instructions beyond the baseline."""
    probe = "import numpy; print(*(numpy._core._multiarray_umath.__cpu_dispatch__))"
    features = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"from {module} import digest; print(digest())"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "NPY_DISABLE_CPU_FEATURES": features.strip(), "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return answer.stdout.strip()
