"""How fast one operation runs: each fast path beside its plain twin. Floor 1: imports `spec` only."""

from meshwright.kernels.assembler import assemble_as_torch

assemble_as_torch()
