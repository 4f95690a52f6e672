"""Structures of arrays: fields that are numbers or NumPy arrays of one length, so that one call computes one case or many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

Array = Any
"""A float or a float64 array; arrays of one call have one length."""
T = TypeVar("T")


def side_by_side(cases: Sequence[T]) -> T:
    """Return one object whose fields are float64 arrays, from objects of its class with scalar fields."""
    cls: Any = type(cases[0])
    return cls(
        **{
            field.name: np.array([getattr(case, field.name) for case in cases], dtype=np.float64)
            for field in fields(cls)
        }
    )
