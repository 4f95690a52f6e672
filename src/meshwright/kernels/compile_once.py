"""Compiles each function once per process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def compile_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` compiled by torch. Repeated calls with the same function return the same compiled function."""
    return torch.compile(function, dynamic=False)
