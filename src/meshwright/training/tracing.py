"""`train --profile-steps A:B`: writes one Chrome/Perfetto trace per rank of steps A to B."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile

from meshwright.training.reporting import Reporter
from meshwright.training.session import TrainingSession


class _Trace:
    """Starts the profiler before the first step of the range, and writes the trace after the last step."""

    def __init__(self, session: TrainingSession, reporter: Reporter) -> None:
        self._session = session
        self._reporter = reporter
        self._profiler: profile | None = None
        self.end_step(session.step)

    def end_step(self, step: int) -> None:
        """Call it at the end of `step`, and once before the first step."""
        first, last = self._session.profile or (0, 0)
        if self._profiler is None and first <= step + 1 <= last:
            activities = [ProfilerActivity.CPU]
            if self._session.world.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(
                activities=activities, record_shapes=True
            )  # matmuls are identified by their shapes
            self._profiler.start()
        elif self._profiler is not None and step >= last:
            self.close()

    def close(self) -> None:
        if self._profiler is None:
            return
        if self._session.world.device.type == "cuda":
            torch.cuda.synchronize()
        self._profiler.stop()
        profiler = self._profiler
        self._profiler = None
        folder = self._session.folder / "traces"
        with self._reporter.writing():
            folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"rank-{self._session.world.rank:05d}.json.gz"))
        self._reporter.event(self._session.step, f"one trace a rank in {folder}, for https://ui.perfetto.dev")


@contextmanager
def step_trace(session: TrainingSession, reporter: Reporter) -> Iterator[_Trace]:
    """Yield the session's trace. At the end of the block it is written, if it was not written before."""
    trace = _Trace(session, reporter)
    try:
        yield trace
    finally:
        trace.close()
