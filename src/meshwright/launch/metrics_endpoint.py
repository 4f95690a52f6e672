"""Serves a run's figures in Prometheus's text format, from the process that starts the ranks of a host.

It is off unless `observe.prometheus` names an address. On several hosts, each agent serves the figures of the whole run
and of its own ranks. A thread answers the requests, with a limited number of connections. Supervision and training
never wait for that thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshwright.events.exposition import Metric, exposition
from meshwright.events.terminal import write_line
from meshwright.launch.outcome import RankState
from meshwright.launch.run_figures import RunFigureReader, RunFigures
from meshwright.policies.host_health import HealthFinding
from meshwright.spec.errors import BadInput
from meshwright.spec.listen_address import listen_address

KEY = "observe.prometheus"
"""The setting with the address."""


@dataclass
class _RankPhase:
    """Step and phase of a rank. `since` is the monotonic time in seconds at which they were first seen."""

    step: int
    phase: str
    since: float


class MetricsEndpoint:
    """The metrics of one host. The supervising process calls `update`, and the serving thread calls `text`."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = folder.name
        self._clock = clock
        self._figures = RunFigureReader(folder)
        self._ranks: dict[int, _RankPhase] = {}
        self._findings: Sequence[HealthFinding] = ()
        self._reading = threading.Lock()

    def update(self, ranks: Sequence[RankState], findings: Sequence[HealthFinding] = ()) -> None:
        """Store the states of this host's ranks, and the findings about the host's health."""
        self._findings = findings
        known = self._ranks
        found: dict[int, _RankPhase] = {}
        for state in ranks:
            step, phase = (state.progress.step, state.progress.phase) if state.progress else (0, "start")
            last = known.get(state.rank)
            if last is None or (last.step, last.phase) != (step, phase):
                last = _RankPhase(step, phase, self._clock())
            found[state.rank] = last
        self._ranks = found

    def text(self) -> str:
        """Return the answer to a request: all metrics as text."""
        with self._reading:
            figures = self._figures.read()
        return exposition([*run_metrics(self._run, figures), *self._rank_metrics(), self._health_metric()])

    def _health_metric(self) -> Metric:
        findings = [({"run": self._run, "rule": each.rule, "part": each.part}, 1.0) for each in self._findings]
        return Metric("meshwright_host_finding", "gauge", "A rule of health that a part of this host meets.", findings)

    def _rank_metrics(self) -> list[Metric]:
        """Return metrics about the ranks of this host: their steps, and how long they have been in their phases."""
        ranks = self._ranks
        now = self._clock()
        labels = {rank: {"run": self._run, "rank": str(rank)} for rank in ranks}
        step = [(labels[rank], float(state.step)) for rank, state in ranks.items()]
        ages = [({**labels[rank], "phase": state.phase}, now - state.since) for rank, state in ranks.items()]
        return [
            Metric("meshwright_rank_step", "gauge", "Step on which a rank of this host works.", step),
            Metric(
                "meshwright_rank_phase_age_seconds",
                "gauge",
                "Time since a rank of this host began its step or phase.",
                ages,
            ),
        ]


def run_metrics(run: str, figures: RunFigures) -> list[Metric]:
    """Return the metrics of the whole run; `run` is its name."""
    values: list[tuple[str, Literal["gauge", "counter"], str, float | None]] = [
        ("step", "gauge", "Optimizer steps done.", figures.step),
        ("tokens", "gauge", "Valid tokens trained on since the run began; a rollback takes some back.", figures.tokens),
        ("tokens_per_second", "gauge", "Tokens per second of all ranks in the last step.", figures.tokens_per_second),
        ("loss", "gauge", "Mean loss of the last step, in nats per token.", figures.loss),
        ("gradient_norm", "gauge", "Gradient norm of the last step before clipping.", figures.grad_norm),
        ("mfu", "gauge", "Model FLOPs utilisation of the last step, causal attention.", figures.mfu),
        ("goodput", "gauge", "Share of the wall time in steps that count.", figures.goodput),
        ("step_seconds", "gauge", "Mean duration of the last 50 steps.", figures.step_seconds),
        ("incidents_total", "counter", "Failures of the run.", figures.incidents),
        ("restarts_total", "counter", "Restarts of all ranks after failures.", figures.restarts),
        ("checkpoint_step", "gauge", "Step of the newest committed checkpoint.", figures.checkpoint_step),
    ]
    return [
        Metric(f"meshwright_{name}", metric_type, text, [({"run": run}, None if value is None else float(value))])
        for name, metric_type, text, value in values
    ]


@contextmanager
def metrics_endpoint(address: str | None, folder: Path) -> Iterator[MetricsEndpoint]:
    """Serve the metrics of the run in `folder` during a `with` block. With the address None, nothing listens.

    Raises BadInput if the address cannot be used.
    """
    endpoint = MetricsEndpoint(folder)
    if address is None:
        yield endpoint
        return
    from meshwright.launch.metrics_server import MetricsServer

    try:
        server = MetricsServer(listen_address(address), endpoint.text)
    except (OSError, ValueError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else error
        raise BadInput(f"{KEY} = {address}: cannot listen there: {reason}; name another address", key=KEY) from error
    write_line(f"metrics at {server.url}")
    try:
        yield endpoint
    finally:
        server.end()
