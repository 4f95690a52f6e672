"""The few things ranks say to each other while they save or load: one word from the first rank, one word from
everybody.

A failure on any rank becomes the same error on all of them, so nobody waits for a rank that has given up. Messages go
through the group's object collectives: pass a CPU (Gloo) group on GPU jobs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from meshwright.spec.errors import ERROR_CLASS_BY_EXIT_CODE, CommunicationFailure, MeshwrightError
from meshwright.spec.failures import as_meshwright_error

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Failure:
    exit_code: int
    message: str


class Ranks:
    """The ranks of `group`, of the default group when that is None, or this process alone when no job was joined."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self.group = group
        self.rank = dist.get_rank(group) if joined else 0
        self.size = dist.get_world_size(group) if joined else 1

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def together(self, doing: str, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return every rank's result, in rank order.

        When it fails anywhere, all ranks raise the same error: the class of the lowest failing rank's, its message, and
        who else failed. `doing` is the phrase before the message, such as "saving step 100".
        """
        outcome, cause = self._attempt(doing, work)
        outcomes = self._gather(doing, outcome) if not self.alone else [outcome]
        failures = {rank: each for rank, each in enumerate(outcomes) if isinstance(each, _Failure)}
        if failures:
            raise self._error(failures) from cause
        return outcomes

    def from_first(self, doing: str, work: Callable[[], T]) -> T:
        """Run `work` on the first rank and return its result on all; its failure is raised on all."""
        outcome, cause = self._attempt(doing, work) if self.first else (None, None)
        outcome = self._broadcast(doing, outcome) if not self.alone else outcome
        if isinstance(outcome, _Failure):
            raise self._error({0: outcome}) from cause
        return cast(T, outcome)

    def common(self, doing: str, work: Callable[[], T]) -> T:
        """Run `work`, which holds collectives of its own and fails on all ranks alike, as DCP's calls do."""
        try:
            return self._collective(doing, work)
        except CheckpointException as error:
            failures = {rank: _failure(each[0], doing) for rank, each in sorted(error.failures.items())}
            raise self._error(failures) from error

    def communicate(self, doing: str, work: Callable[[], T]) -> T:
        """Run `work`, which sends to other ranks and receives from them; a lost rank is a CommunicationFailure."""
        return self._collective(doing, work)

    def _collective(self, doing: str, work: Callable[[], T]) -> T:
        """Run `work`, which communicates. `as_meshwright_error` turns a RuntimeError into lost peers or this rank's own failure."""
        try:
            return work()
        except RuntimeError as error:
            failure = _failure(error, doing)
            if failure.exit_code == CommunicationFailure.exit_code:
                failure = replace(failure, message=f"lost the others: {failure.message}")
            raise self._error({self.rank: failure}) from error

    def _attempt(self, doing: str, work: Callable[[], T]) -> tuple[Any, BaseException | None]:
        try:
            return work(), None
        except Exception as error:
            return _failure(error, doing), error

    def _error(self, failures: dict[int, _Failure]) -> MeshwrightError:
        rank, failure = next(iter(failures.items()))
        message = failure.message
        if not self.alone:
            others = f" (so did {len(failures) - 1} more ranks)" if len(failures) > 1 else ""
            message = f"rank {rank} of {self.size}{others}: {message}"
        return ERROR_CLASS_BY_EXIT_CODE[failure.exit_code](message)

    def _gather(self, doing: str, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        self._collective(doing, lambda: dist.all_gather_object(values, value, group=self.group))
        return values

    def _broadcast(self, doing: str, value: Any) -> Any:
        values = [value]
        self._collective(doing, lambda: dist.broadcast_object_list(values, group=self.group, group_src=0))
        return values[0]


def _failure(error: BaseException, doing: str) -> _Failure:
    """Whatever went wrong, in a form that travels: the message, and the exit code that names the error's class."""
    found = as_meshwright_error(error, doing)
    if found.exit_code == MeshwrightError.exit_code:
        log.error("%s failed", doing, exc_info=error)
    return _Failure(found.exit_code, str(found))
