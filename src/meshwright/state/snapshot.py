"""`SnapshotCopies`: what an optimizer that updates state in place knows of copies of that state that still run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class SnapshotCopies(Protocol):
    """Copies of the state of parameters, which run group by group in the order of `groups`."""

    @property
    def groups(self) -> Sequence[Sequence[str]]:
        """Names of the parameters of each group; every parameter of the optimizer is in one group."""
        ...

    def wait(self, parameters: Iterable[str]) -> None:
        """Order later work after the copies of these parameters' state.

        Work on the current stream waits for copies from the device, the caller itself for copies from host memory.
        """
        ...
