"""Selects the assembler (ptxas) of Triton kernels: that of torch's CUDA, if torch comes with one.

Triton has one of its own, for Hopper of CUDA 12, which gets kernels wrong that a later one gets right (Triton issues
11111 and 11581). torch's compiler sets torch's for the rest of a process, but only once it compiles something itself:
where all graphs come from its cache, or nothing is compiled, the same kernel would be another program.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

VARIABLE = "TRITON_PTXAS_PATH"
"""Read by Triton whenever it assembles a kernel; what a user set stays."""


def assemble_as_torch() -> None:
    """Let Triton take torch's ptxas from here on, in this process and those it starts."""
    torch = find_spec("torch")
    if VARIABLE in os.environ or torch is None or torch.origin is None:
        return
    program = Path(torch.origin).parent / "bin" / "ptxas"
    if os.access(program, os.X_OK) and program.is_file():
        os.environ[VARIABLE] = str(program)
