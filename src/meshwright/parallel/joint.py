"""Several sharded units in one place of the schedule: a block's weights that lie on different ranks, gathered and reduced together."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.parallel.fsdp import LinearShard, ShardedUnit

Around = AbstractContextManager[None] | None


class JointUnit:
    """The verbs of `ShardedUnit` for all `parts`, of which the last has the most ranks."""

    def __init__(self, parts: Sequence[ShardedUnit]) -> None:
        self.parts = tuple(parts)
        self._talking = [part for part in parts if part.talks]

    def unshard(self, around: Around = None) -> None:
        spans = self._spans(around)
        for part in self.parts:
            part.unshard(spans.get(part))

    def wait(self) -> None:
        for part in self.parts:
            part.wait()

    def reshard(self) -> None:
        for part in self.parts:
            part.reshard()

    def accumulate(self) -> None:
        for part in self.parts:
            part.accumulate()

    def add_product(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, alone: bool) -> None:
        next(part for part in self.parts if part.holds(weight)).add_product(weight, a, b, alone=alone)

    def reduce(self, around: Around = None, *, place: Hashable = None, last: bool = True) -> bool:
        spans = self._spans(around)
        started = [part.reduce(spans.get(part), place=place, last=last) for part in self.parts]
        return all(started)

    def finish(self) -> None:
        for part in self.parts:
            part.finish()

    @property
    def places(self) -> int:
        return self.parts[-1].places

    @property
    def reduced(self) -> Any:
        """That of the last part, whose reduction begins behind the others': on their stream, or on one that has waited for compute."""
        return self.parts[-1].reduced

    @property
    def gathered(self) -> list[torch.Tensor]:
        return [tensor for part in self.parts for tensor in part.gathered]

    @property
    def whole_parameters(self) -> list[nn.Parameter]:
        return [parameter for part in self.parts for parameter in part.whole_parameters]

    def linears(self) -> list[LinearShard]:
        return [linear for part in self.parts for linear in part.linears()]

    @property
    def gradient_shards(self) -> list[torch.Tensor]:
        return [shard for part in self.parts for shard in part.gradient_shards]

    def _spans(self, around: Around) -> dict[ShardedUnit, AbstractContextManager[None]]:
        """What each part's collective runs in, so that `around` is entered before the first and left behind the last."""
        if around is None or not self._talking:
            return {}
        if len(self._talking) == 1:
            return {self._talking[0]: around}
        opened = ExitStack()
        return {self._talking[0]: _entering(around, opened), self._talking[-1]: _leaving(opened)}


@contextmanager
def _entering(context: AbstractContextManager[None], opened: ExitStack) -> Iterator[None]:
    opened.enter_context(context)
    yield


@contextmanager
def _leaving(opened: ExitStack) -> Iterator[None]:
    yield
    opened.close()
