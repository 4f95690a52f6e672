"""Dataclasses whose fields are numbers or NumPy arrays of one length, so that one call computes one case or many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any, TypeVar

import numpy as np

Array = Any
"""A float or a float64 array; arrays of one call have one length."""
T = TypeVar("T")


def side_by_side(cases: Sequence[T]) -> T:
    """Return one object whose fields are float64 arrays of shape `(cases,)`, from objects of its class with numbers as
    fields.

    A text field must be equal in all cases. A field may also be a tuple of objects with fields of numbers and text.
    Then the objects of different cases with equal text become one object with arrays. If a case has no such object, its
    numbers are 0.

    Two matrices as one object:

    >>> from dataclasses import make_dataclass
    >>> Size = make_dataclass("Size", ["rows", "columns"])
    >>> side_by_side([Size(2, 3), Size(4, 5)])
    Size(rows=array([2., 4.]), columns=array([3., 5.]))
    """
    cls: Any = type(cases[0])
    return cls(**{field.name: _column([getattr(case, field.name) for case in cases]) for field in fields(cls)})


def _column(values: Sequence[Any]) -> Any:
    """Return the values of one field in all cases as one value: a text, a tuple of objects, or a float64 array."""
    if isinstance(values[0], str):
        return values[0]
    if isinstance(values[0], tuple):
        return tuple(map(side_by_side, _aligned(values)))
    return np.array(values, dtype=np.float64)


def _aligned(cases: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
    """Return rows of objects with equal text; each row has one object per case.

    Example: case 1 has the objects (a, 1) and (b, 2), and case 2 has (a, 3). The rows are [(a, 1), (a, 3)] and [(b, 2),
    (b, 0)].
    """
    example = next((item for objects in cases for item in objects), None)
    if example is None:
        return []
    texts = [field.name for field in fields(example) if isinstance(getattr(example, field.name), str)]
    by_text: dict[tuple[str, ...], list[list[Any]]] = {}
    for index, objects in enumerate(cases):
        for item in objects:
            text = tuple(getattr(item, name) for name in texts)
            if text not in by_text:
                by_text[text] = [[] for _ in cases]
            by_text[text][index].append(item)
    rows = list[list[Any]]()
    for columns in by_text.values():
        first = next(column[0] for column in columns if column)
        absent = replace(first, **{field.name: 0.0 for field in fields(first) if field.name not in texts})
        rows += [list(row) for row in zip_longest(*columns, fillvalue=absent)]
    return rows
