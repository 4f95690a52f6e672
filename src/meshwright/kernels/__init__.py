"""Operations on tensors. Each has a fast path and a plain reference implementation. Layer 1: imports `spec` only."""

from meshwright.kernels.assembler import use_torch_ptxas
from meshwright.kernels.compile_cache import tag_compiled_code

use_torch_ptxas()
tag_compiled_code()
