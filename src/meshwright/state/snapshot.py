"""`SnapshotCopies`: interface to running copies of state, for an optimizer that updates the state in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class SnapshotCopies(Protocol):
    """Asynchronous copies of the state of parameters, by groups in the order of `groups`."""

    @property
    def groups(self) -> Sequence[Sequence[str]]:
        """Names of the parameters of each group; every parameter of the optimizer is in one group."""
        ...

    def wait(self, parameters: Iterable[str]) -> None:
        """Wait for the copies of these parameters' state.

        The current stream waits for copies from the device; the host waits for copies from host memory.
        """
        ...
