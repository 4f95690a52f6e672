"""A bounded buffer of the newest events, for recorders that run for months."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Ring(Generic[T]):
    """Keeps the newest `capacity` items, oldest first; `dropped` counts the items removed."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a ring holds at least 1 item, got capacity {capacity}")
        self._items: deque[T] = deque(maxlen=capacity)
        self.dropped = 0

    def append(self, item: T) -> None:
        self.dropped += len(self._items) == self._items.maxlen
        self._items.append(item)

    def __iter__(self) -> Iterator[T]:
        return iter(tuple(self._items))

    def __len__(self) -> int:
        return len(self._items)
