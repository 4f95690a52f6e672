"""One compiled function for each plain one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def compile_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled by torch; repeated calls return the same compiled function."""
    return torch.compile(function, dynamic=False)
