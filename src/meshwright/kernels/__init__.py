"""Operations on tensors: each has a fast path and a plain reference implementation. Layer 1: imports `spec` only."""

from meshwright.kernels.assembler import use_torch_ptxas

use_torch_ptxas()
