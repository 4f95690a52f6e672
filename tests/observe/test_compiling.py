"""The compiler's own counters, and that a second start with the same cache compiles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import json, sys
from meshwright.observe.compiling import compiler_work
before = compiler_work()
import torch
torch.compile(lambda x: x + 1, backend="inductor")(torch.ones(4))
print(json.dumps([before, compiler_work()]))
"""


@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    works = []
    for _ in range(2):
        output = subprocess.run(
            [sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=True
        ).stdout
        before, after = json.loads(output)
        assert before == {} and after["seconds"] > 0
        works.append((after["compiled"], after["from_cache"]))
    assert works == [(1, 0), (0, 1)]
