"""CUDA graphs: sequences of kernels with fixed shapes, which the host launches with one call."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """A captured sequence of operations."""

    def end(self) -> None:
        """End the capture."""

    def replay(self) -> None:
        """Launch the captured operations."""


class CudaGraph:
    """A CUDA graph. Creating the object begins its capture in the current stream. The graph's tensors use the memory pool `pool`."""

    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # By default, a capture forbids all threads to query events. But NCCL's watchdog thread does this all the time.
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")

    def end(self) -> None:
        """See `Graph`."""
        self._graph.capture_end()

    def replay(self) -> None:
        """See `Graph`."""
        self._graph.replay()


class Graphs:
    """CUDA graphs by key. All graphs of the object share one memory pool.

    A graph may use memory that was freed before its capture began, so it may overwrite tensors of earlier graphs:

    - The result of a graph is valid until another graph runs.
    - If a graph reads tensors of an earlier graph, the tensors must still exist when the later graph is captured, and the graphs must be
      replayed in the order of their capture.

    Graphs of one device must not run at the same time, even graphs of different objects: they share the capture stream, and so its cuBLAS
    workspace.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, Graph] = {}
        self._pool: Any = None
        self._open: Graph | None = None
        """The graph whose capture was begun last. Its capture may not have ended yet."""

    def capture(self, key: Hashable, call: Callable[[], None]) -> None:
        """Capture the operations of `call` as the graph `key`. `call` runs twice: once without a capture, once during the capture.

        The largest graph should be captured first, so that the others can use its memory.
        """
        with self.capturing():
            call()  # This run loads and tunes kernels, which is not possible during a capture.
            graph = self.begin()
            call()
            graph.end()
        self._graphs[key] = graph

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Context in which graphs are captured. In the context, a capture stream is the current stream, and garbage collection is off.

        After an error in the context, the capture of the current graph is ended, so that the stream can be used again. Later graphs then
        use a new memory pool, because a failed capture may leave the old pool unusable.
        """
        torch.cuda.synchronize()
        with without_garbage_collection(), torch.cuda.stream(_capture_stream(torch.cuda.current_device())):
            try:
                yield
            except BaseException:
                if self._open is not None:
                    with suppress(RuntimeError):  # The capture may have ended already, or failed.
                        self._open.end()
                self._pool = None
                raise
            finally:
                self._open = None
        torch.cuda.synchronize()
        # Memory that was freed in the capture stream is given back, because other streams cannot use it.
        torch.cuda.empty_cache()

    def begin(self) -> Graph:
        """Begin the capture of a graph that is not stored under a key. Only in the context `capturing`."""
        self._open = None  # This may free the old graph, which must not happen during a capture.
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._open = CudaGraph(self._pool)
        return self._open

    def holds(self, key: Hashable) -> bool:
        """Return whether there is a graph `key`."""
        return key in self._graphs

    def replay(self, key: Hashable) -> bool:
        """Launch the graph `key`. Returns false if there is no such graph."""
        if (graph := self._graphs.get(key)) is None:
            return False
        graph.replay()
        return True

    def clear(self) -> None:
        """Free all graphs."""
        self._graphs.clear()
        self._pool = None

    def run(self, key: Hashable, call: Callable[[], None]) -> None:
        """Launch the graph `key`, or run `call` if there is no such graph."""
        if not self.replay(key):
            call()


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Context in which Python's garbage collection is off. It could free a graph of an earlier engine, which would break a capture.

    Garbage is collected once when the context is entered. In nested contexts, only the outermost one collects, because a collection takes
    0.2 s in the process of an engine.
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
    """Return the stream in which all graphs of a device are captured. There is only one, because cuBLAS has a workspace for each stream."""
    return torch.cuda.Stream(device)
