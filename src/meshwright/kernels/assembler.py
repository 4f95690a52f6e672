"""Makes Triton assemble its kernels with the ptxas that comes with torch, if there is one.

The ptxas that comes with Triton (CUDA 12 for Hopper) miscompiles some kernels that later versions compile correctly
(Triton issues 11111 and 11581). torch.compile selects torch's ptxas too, but only when it compiles a graph. When all
graphs come from its cache, or nothing is compiled, Triton would use its own ptxas for the same kernels.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

VARIABLE = "TRITON_PTXAS_PATH"
"""Environment variable that Triton reads whenever it assembles a kernel. A value that the user has set stays."""


def use_torch_ptxas() -> None:
    """Make Triton use torch's ptxas in this process and in the processes that it starts."""
    torch = find_spec("torch")
    if VARIABLE in os.environ or torch is None or torch.origin is None:
        return
    program = Path(torch.origin).parent / "bin" / "ptxas"
    if os.access(program, os.X_OK) and program.is_file():
        os.environ[VARIABLE] = str(program)
