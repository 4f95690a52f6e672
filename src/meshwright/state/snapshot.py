"""Interfaces between an optimizer that updates its state, and the copies of a snapshot that run at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor


class SnapshotCopies(Protocol):
    """Asynchronous copies of the state of parameters, group by group."""

    @property
    def groups(self) -> Sequence[Sequence[str]]:
        """Names of the parameters in each group, in the order of the copies. Every parameter of the optimizer is in one."""
        ...

    def wait(self, parameters: Iterable[str], *, host: bool = True) -> None:
        """Wait until the state of these parameters has been copied.

        The current stream waits for copies from the device. The host waits for copies from host memory, unless `host` is
        False.
        """
        ...


class HostState(Protocol):
    """Optimizer state in host memory, including all updates that were launched so far."""

    def wait(self) -> None:
        """Wait until the results of these updates are in host memory."""
        ...

    def current(self, memory: Tensor) -> Tensor:
        """Return the bytes of the state that `memory` (uint8) identifies.

        This is `memory` itself, or a copy if the state is encoded (`state.parts.EncodedState`).
        """
        ...
