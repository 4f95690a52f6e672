"""A module in place of Ray, with what the driver of a job uses: actors answer as a test has told them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class RayError(Exception): ...


class RayTaskError(RayError): ...


class FakeRay:
    """`behave(bundle, number)` is what agent `number` of a bundle does: its exit code, or an exception; None runs on.

    A function is asked for one of them, again and again.
    """

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, behave: Callable[[int, int], Any]) -> None:
        self.behave = behave
        self.runs: list[tuple[int, str]] = []
        """Bundle and coordinator of each agent that was started."""
        self.stops: list[tuple[int, int]] = []
        self.groups: list[tuple[list[dict[str, float]], str]] = []
        self.placed: Callable[[int, int], Any] = lambda bundle, number: (f"10.0.0.{bundle}", 29400, "")
        self._counts: dict[tuple[str, int], itertools.count[int]] = {}
        self.util = SimpleNamespace(placement_group=self._group)

    def number(self, method: str, bundle: int) -> int:
        return next(self._counts.setdefault((method, bundle), itertools.count(1)))

    def _group(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        self.groups.append((bundles, strategy))
        return SimpleNamespace(wait=lambda seconds: True)

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=self._options)

    def _options(self, scheduling_strategy: Any, **resources: float) -> Any:
        bundle = scheduling_strategy.placement_group_bundle_index
        methods = SimpleNamespace(
            place=_method(lambda folder: self._answer(self.placed(bundle, self.number("place", bundle)))),
            run=_method(lambda arguments, folder, env: self._run(bundle, env)),
            stop=_method(lambda number: self.stops.append((bundle, number))),
        )
        return SimpleNamespace(remote=lambda: methods)

    def _run(self, bundle: int, env: dict[str, str]) -> Any:
        self.runs.append((bundle, env["MESHWRIGHT_COORDINATOR"]))
        return self._answer(self.behave(bundle, self.number("run", bundle)))

    def _answer(self, value: Any) -> Any:
        return _Answer(value)

    def wait(self, answers: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        done = [answer for answer in answers if answer.value is not None]
        return done, [answer for answer in answers if answer not in done]

    def get(self, answer: Any) -> Any:
        if isinstance(answer.value, Exception):
            raise answer.value
        return answer.value

    def kill(self, actor: Any) -> None: ...


class _Answer:
    def __init__(self, value: Any) -> None:
        self._value = value

    @property
    def value(self) -> Any:
        return self._value() if callable(self._value) else self._value


def _method(call: Callable[..., Any]) -> Any:
    return SimpleNamespace(remote=call)
