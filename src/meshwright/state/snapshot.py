"""Interfaces between an optimizer that updates its state and the copies of a snapshot that run meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor


class SnapshotCopies(Protocol):
    """Asynchronous copies of the state of parameters, by groups in the order of `groups`."""

    @property
    def groups(self) -> Sequence[Sequence[str]]:
        """Names of the parameters of each group; every parameter of the optimizer is in one group."""
        ...

    def wait(self, parameters: Iterable[str], *, host: bool = True) -> None:
        """Wait for the copies of these parameters' state.

        The current stream waits for copies from the device; the host waits for copies from host memory, unless `host` is False.
        """
        ...


class HostState(Protocol):
    """State in host memory after all updates that were launched so far."""

    def wait(self) -> None:
        """Wait until the results of these updates are in host memory."""
        ...

    def current(self, memory: Tensor) -> Tensor:
        """The bytes of state that `memory` (uint8) identifies: itself, or a copy where it is encoded (`state.parts.EncodedState`)."""
        ...
