import json
import platform
import socket
import subprocess
import sys

import numpy
import torch

import meshwright
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


def test_importing_it_leaves_torch_alone():
    code = "import sys, meshwright.observe.environment; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
