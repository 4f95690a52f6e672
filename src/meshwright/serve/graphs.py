"""CUDA graphs: work of fixed shapes on the device that the host launches in one piece."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
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

    def end(self) -> None:
        """See `Graph`."""
        self._graph.capture_end()

    def replay(self) -> None:
        """See `Graph`."""
        self._graph.replay()


class Graphs:
    """CUDA graphs by key, in memory that they share.

    A tensor that exists while later graphs are captured keeps its memory; memory that was freed before is used again. So graphs that pass
    tensors on are replayed in the order of their capture, and the result of a graph is valid until another one runs. Graphs of a device
    must not run at the same time: those of all objects share a stream for captures and its workspace of cuBLAS.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, Graph] = {}
        self._pool: Any = None
        self._open: Graph | None = None
        """The graph that was begun last: it may have no end yet."""

    def capture(self, key: Hashable, call: Callable[[], None]) -> None:
        """Capture the operations of `call`, which runs twice. Capture the largest first: the others use its memory."""
        with self.capturing():
            call()  # loads and tunes kernels, which a capture cannot
            graph = self.begin()
            call()
            graph.end()
        self._graphs[key] = graph

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Context of captures and of what runs before them: a stream that is not the default one.

        If the context is left by an error, the graph that is being captured ends, so that the stream leaves its capture. Graphs that are
        captured later have other memory, because a capture that has failed may keep the old one from use.
        """
        torch.cuda.synchronize()
        with without_garbage_collection(), torch.cuda.stream(_capture_stream(torch.cuda.current_device())):
            try:
                yield
            except BaseException:
                if self._open is not None:
                    with suppress(RuntimeError):  # it had ended, or its capture has failed
                        self._open.end()
                self._pool = None
                raise
            finally:
                self._open = None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the allocator does not use memory again that was freed in another stream

    def begin(self) -> Graph:
        """Begin to capture a graph without a key, in the context of `capturing`."""
        self._open = None  # before the next capture begins: freeing a graph would break it
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._open = CudaGraph(self._pool)
        return self._open

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
        self._pool = None

    def run(self, key: Hashable, call: Callable[[], None]) -> None:
        """Run the graph of `call`, or `call` itself if there is none."""
        if not self.replay(key):
            call()


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Context in which no reference cycle is freed: freeing a graph, as of an earlier engine, breaks a capture.

    Cycles are collected once when it is entered, not in a context within it: beside an engine's modules that takes 0.2 s.
    """
    if not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return one stream for all captures: cuBLAS has a workspace for each stream."""
    return torch.cuda.Stream(device)
