"""Runs a function on all ranks or on one rank, and gives all ranks the results, or the same error.

Saving and loading use it so that a failure on one rank becomes the same error on all ranks. Otherwise the other ranks would wait for the
failed rank in a collective. Messages are sent by the object collectives of `torch.distributed`; on GPU jobs pass a Gloo group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch.distributed as dist

from meshwright.spec.errors import ERROR_CLASS_BY_EXIT_CODE, CommunicationFailure, MeshwrightError
from meshwright.spec.failures import as_meshwright_error

T = TypeVar("T")
R = TypeVar("R")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Failure:
    """An error of one rank, in the form in which it is sent to the others. `exit_code` identifies the class of the error."""

    exit_code: int
    message: str


class _Failures(dict[int, _Failure]):
    """The errors of the ranks that failed, by rank. A class of its own, so that a result can be told from failures."""


def _failures(outcomes: Sequence[Any]) -> _Failures:
    return _Failures({rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, _Failure)})


class RankGroup:
    """The ranks of `group`; of the default group if it is None; only this process if `torch.distributed` is not initialised.

    In the methods, `activity` is a phrase such as "saving step 100", with which an error's message begins.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self.group = group
        self.rank = dist.get_rank(group) if joined else 0
        self.size = dist.get_world_size(group) if joined else 1

    @property
    def is_single(self) -> bool:
        """Whether there is only this rank."""
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0 of the group."""
        return self.rank == 0

    def run_on_all(self, activity: str, function: Callable[[], T]) -> list[T]:
        """Call `function` on every rank and return the results of all ranks, in rank order. `function` must not communicate.

        If it fails on some ranks, all ranks raise the same error. The error has the class and the message of the lowest failing rank's
        error, and says how many other ranks failed.
        """
        outcome, cause = self._call(activity, function)
        outcomes = self._gather(activity, outcome) if not self.is_single else [outcome]
        if failures := _failures(outcomes):
            raise self._error(failures) from cause
        return outcomes

    def run_on_first(self, activity: str, function: Callable[[], T]) -> T:
        """Call `function` on the first rank. All ranks return its result or raise its error."""
        return self.run_on(0, activity, function)

    def run_on(self, rank: int, activity: str, function: Callable[[], T]) -> T:
        """Call `function` on `rank`. All ranks return its result or raise its error."""
        outcome, cause = self._call(activity, function) if self.rank == rank else (None, None)
        outcome = self._broadcast(activity, outcome, rank) if not self.is_single else outcome
        if isinstance(outcome, _Failure):
            raise self._error({rank: outcome}) from cause
        return cast(T, outcome)

    def assign(self, activity: str, describe: Callable[[], T], assign: Callable[[list[T]], list[R]]) -> R:
        """Call `describe` on every rank, then call `assign` on the first rank with the results of all ranks, in rank order.

        `assign` returns a list with an entry for each rank, and each rank returns its entry. A failure is raised on all ranks, as by
        `run_on_all`.
        """
        outcome, cause = self._call(activity, describe)
        outcomes = [outcome] if self.is_single else self._gather_on_first(activity, outcome)
        answers: list[Any] = []
        if self.is_first:
            failures = _failures(outcomes)
            if not failures:
                answers, cause = self._call(activity, lambda: assign(outcomes))
                failures = _failures([answers])
            answers = [failures] * self.size if failures else answers
        answer = answers[0] if self.is_single else self._scatter(activity, answers)
        if isinstance(answer, _Failures):
            raise self._error(answer) from cause
        return cast(R, answer)

    def run_communication(self, activity: str, function: Callable[[], T]) -> T:
        """Call `function`, which communicates with other ranks, and convert its RuntimeError.

        torch reports a lost peer as a RuntimeError; it becomes a CommunicationFailure. Any other RuntimeError becomes the class that
        `as_meshwright_error` selects. The error is raised on this rank only.
        """
        try:
            return function()
        except RuntimeError as error:
            failure = _failure_of(error, activity)
            if failure.exit_code == CommunicationFailure.exit_code:
                failure = replace(failure, message=f"lost the others: {failure.message}")
            raise self._error({self.rank: failure}) from error

    def _call(self, activity: str, function: Callable[[], T]) -> tuple[Any, BaseException | None]:
        """Return (result of `function`, None), or (_Failure, exception) if `function` raises."""
        try:
            return function(), None
        except Exception as error:
            return _failure_of(error, activity), error

    def _error(self, failures: dict[int, _Failure]) -> MeshwrightError:
        """Return the error that all ranks raise for the `failures` of some ranks."""
        rank, failure = next(iter(failures.items()))
        message = failure.message
        if not self.is_single:
            others = f" (so did {len(failures) - 1} more ranks)" if len(failures) > 1 else ""
            message = f"rank {rank} of {self.size}{others}: {message}"
        return ERROR_CLASS_BY_EXIT_CODE[failure.exit_code](message)

    def _gather(self, activity: str, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        self.run_communication(activity, lambda: dist.all_gather_object(values, value, group=self.group))
        return values

    def _gather_on_first(self, activity: str, value: Any) -> list[Any]:
        values = [None] * self.size if self.is_first else None
        self.run_communication(activity, lambda: dist.gather_object(value, values, group=self.group, group_dst=0))
        return values or []

    def _scatter(self, activity: str, values: list[Any]) -> Any:
        """Return this rank's entry of the `values` that the first rank passes."""
        own: list[Any] = [None]
        self.run_communication(
            activity, lambda: dist.scatter_object_list(own, values or None, group=self.group, group_src=0)
        )
        return own[0]

    def _broadcast(self, activity: str, value: Any, rank: int) -> Any:
        values = [value]
        self.run_communication(activity, lambda: dist.broadcast_object_list(values, group=self.group, group_src=rank))
        return values[0]


def _failure_of(error: BaseException, activity: str) -> _Failure:
    """Convert an exception into its exit code and message. Logs the traceback of an internal error."""
    converted = as_meshwright_error(error, activity)
    if converted.exit_code == MeshwrightError.exit_code:
        log.error("%s failed", activity, exc_info=error)
    return _Failure(converted.exit_code, str(converted))
