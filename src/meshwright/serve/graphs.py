"""CUDA graphs: work of fixed shapes on the device that the host launches in one piece."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch


class Graphs:
    """Graphs by key. They share memory, so what is allocated in one is valid until the next one runs."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def capture(self, key: Hashable, call: Callable[[], None]) -> None:
        """Capture the operations of `call`, which runs twice. Capture the largest first: the others use its memory."""
        call()  # loads and tunes kernels, which a capture cannot
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog thread queries events meanwhile, which a capture forbids to all threads by default.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            call()
        self._graphs[key] = graph

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
