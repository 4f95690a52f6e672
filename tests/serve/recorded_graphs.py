"""Graphs on a CPU: the operators of a capture are recorded, and repeated on the tensors of then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class RecordedGraphs:
    """Makes recorded graphs, which are replayed in the order in which they were made."""

    def __init__(self) -> None:
        self.made: list[RecordedGraph] = []

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self._values: dict[int, Any] = {}
        try:
            yield
        except BaseException:
            self.made[-1].end()
            raise

    def begin(self) -> RecordedGraph:
        graph = RecordedGraph(self._values)
        self.made.append(graph)
        graph.__enter__()
        return graph


class RecordedGraph(TorchDispatchMode):
    """Operators between `begin` and `end`. `values` has what stands for each tensor that a capture has made, by its identity."""

    def __init__(self, values: dict[int, Any]) -> None:
        super().__init__()
        self.replays = 0
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._values = values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a capture cannot read a number"
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, out))
        return out

    def end(self) -> None:
        self.__exit__(None, None, None)

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self._calls:
            args, kwargs = tree_map(lambda value: self._values.get(id(value), value), (args, kwargs))
            new = func(*args, **kwargs)
            self._values.update(zip(map(id, tree_leaves(out)), tree_leaves(new), strict=True))
