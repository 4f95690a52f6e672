import json
import platform
import socket
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

import meshwright
from meshwright.observe import environment as module
from meshwright.observe.environment import environment


def test_versions_are_those_imported_here():
    facts = environment()
    assert facts["python"] == platform.python_version() and facts["meshwright"] == meshwright.__version__
    assert facts["torch"].split("+")[0] == torch.__version__.split("+")[0] and facts["numpy"] == numpy.__version__
    assert facts["cpu_cores"] >= 1 and facts["memory_bytes"] > 1 << 28


def test_it_is_json_and_names_neither_host_nor_missing_things():
    facts = environment()
    assert socket.gethostname() not in {str(value) for value in facts.values()}
    assert None not in facts.values() and json.loads(json.dumps(facts)) == facts
    assert "nccl" in facts or not torch.cuda.is_available()


def test_a_git_that_hangs_does_not_stop_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "git"
    program.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(module, "GIT_SECONDS", 0.1)
    assert "commit" not in environment()


def test_importing_it_leaves_torch_alone():
    code = "import sys, meshwright.observe.environment; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
