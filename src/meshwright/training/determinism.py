"""The switch to computations that give the same bits in every run (`train.deterministic`)."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from meshwright.kernels.fixed_order_attention import INSTALLED

log = logging.getLogger("meshwright")


def compute_deterministically() -> None:
    """Make torch, its compiler and our attention compute sums in a fixed order, from now on in this process.

    torch then chooses operators with a fixed order, and raises an error for an operator that has none. Its compiler chooses kernels by
    rules and not by measuring them, because measured times differ from process to process. Call it before the first matmul.
    """
    # cuBLAS chooses the same kernels in every process if its workspaces have a fixed size.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Otherwise torch would fill each new tensor, which takes a pass over the tensor's memory.
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False
    if torch.cuda.is_available():
        if not INSTALLED:
            log.warning(
                "train.deterministic: without nvidia-cudnn-frontend (pip install 'meshwright[deterministic]') attention is flex attention; "
                "steps took 5%% longer on an H200"
            )
        from torch._inductor import config

        config.deterministic = True
