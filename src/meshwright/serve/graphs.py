"""CUDA graphs: work of fixed shapes on the device that the host launches in one piece."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """A piece of captured work."""

    def end(self) -> None:
        """End its capture."""

    def replay(self) -> None:
        """Launch the work."""


class CudaGraph:
    """A CUDA graph, whose capture begins when it is created, in the current stream; `pool` is its memory."""

    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog thread queries events meanwhile, which a capture forbids to all threads by default.
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        self.end, self.replay = self._graph.capture_end, self._graph.replay


class Graphs:
    """Graphs by key. They share memory, so what is allocated in one is valid until the next one runs."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, Graph] = {}
        self._pool: Any = None

    def capture(self, key: Hashable, call: Callable[[], None]) -> None:
        """Capture the operations of `call`, which runs twice. Capture the largest first: the others use its memory."""
        call()  # loads and tunes kernels, which a capture cannot
        with self.capturing():
            graph = self.begin()
            call()
            graph.end()
        self._graphs[key] = graph

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Context of captures: they need a stream that is not the default one."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the graphs need this memory
        with torch.cuda.stream(_capture_stream(torch.cuda.current_device())):
            yield

    def begin(self) -> Graph:
        """Begin to capture a graph, which is without a key."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return CudaGraph(self._pool)

    def holds(self, key: Hashable) -> bool:
        """Whether there is such a graph."""
        return key in self._graphs

    def replay(self, key: Hashable) -> bool:
        """Run the operations of a graph; false if there is none."""
        if (graph := self._graphs.get(key)) is None:
            return False
        graph.replay()
        return True

    def clear(self) -> None:
        """Free all graphs."""
        self._graphs.clear()

    def run(self, key: Hashable, call: Callable[[], None]) -> None:
        """Run the graph of `call`, or `call` itself if there is none."""
        if not self.replay(key):
            call()


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return one stream for all captures: cuBLAS has a workspace for each stream."""
    return torch.cuda.Stream(device)
