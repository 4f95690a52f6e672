"""Optional receivers of metrics in addition to metrics.jsonl: TensorBoard and Weights & Biases.

One background thread serves all of them from one queue of limited length. A slow receiver misses lines, but never
delays training. A receiver that fails is switched off with one warning. metrics.jsonl is written separately and is
complete.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from meshwright.spec.errors import BadInput
from meshwright.spec.job import ObserveSpec, WandbSpec

Record = Mapping[str, Any]


HPARAM_METRICS = ("train/loss", "validation/loss", "train/tokens_per_second")
"""Scalars that TensorBoard shows next to the hyperparameters."""
HPARAM_SECTIONS = ("seed", "model", "data", "train", "plan", "cluster")
"""Sections of the configuration whose keys are shown as hyperparameters."""


class Sink(Protocol):
    """A receiver of metrics lines (`observe.metrics`). Only the background thread calls it."""

    name: str

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class SinkThread:
    """Passes records to sinks in a background thread.

    `dropped` counts the records that were lost because the queue was full. `warn` receives warnings. `capacity` is the
    length of the queue.
    """

    def __init__(self, sinks: Sequence[Sink], warn: Callable[[str], None], capacity: int = 1000) -> None:
        self.dropped = 0
        self._sinks = list(sinks)
        self._warn = warn
        self._queue: queue.Queue[Record | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._serve, name="metrics-sinks", daemon=True)
        if self._sinks:
            self._thread.start()

    def put(self, record: Record) -> None:
        """Queue a record. This never waits."""
        if not self._thread.is_alive():
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                self._warn("metrics sinks are too slow: some steps will be missing there (metrics.jsonl has them all)")

    def close(self, timeout: float = 15.0) -> None:
        """Deliver the queued records and close the sinks. Sinks that need more than `timeout` seconds are abandoned."""
        if not self._thread.is_alive():
            return
        deadline = time.monotonic() + timeout
        try:
            self._queue.put(None, timeout=timeout)
        except queue.Full:
            self.dropped += self._queue.qsize()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            names = ", ".join(sink.name for sink in self._sinks)
            self._warn(f"{names} did not finish in {timeout:g} s and was abandoned (metrics.jsonl is complete)")
        elif self.dropped:
            self._warn(f"metrics sinks missed {self.dropped} records (metrics.jsonl has them all)")

    def _serve(self) -> None:
        while (record := self._queue.get()) is not None:
            for sink in tuple(self._sinks):
                self._guard(sink, lambda sink=sink, record=record: sink.write(record))
        for sink in tuple(self._sinks):
            self._guard(sink, sink.close)

    def _guard(self, sink: Sink, call: Callable[[], None]) -> None:
        """Call a sink. If third-party code raises an exception, the sink is switched off, and the run continues."""
        try:
            call()
        except Exception as error:
            self._sinks.remove(sink)
            self._warn(f"{sink.name} is switched off: {type(error).__name__}: {error}")


def open_sinks(
    spec: ObserveSpec, folder: Path, config: Mapping[str, Any], warn: Callable[[str], None], resume_from: int = 0
) -> SinkThread:
    """Open the sinks of a run, and serve them in the background.

    `folder` is the run's folder, whose name is the run's name. `config` is the resolved configuration. `resume_from` is
    the step after which the run continues. Raises BadInput if a package is missing.
    """
    check_sinks(spec)
    sinks: list[Sink] = []
    if spec.tensorboard:
        sinks.append(TensorBoardSink(folder / "tensorboard", resume_from, config))
    if spec.wandb:
        sinks.append(WandbSink(spec.wandb, folder, config))
    return SinkThread(sinks, warn)


def check_sinks(spec: ObserveSpec) -> None:
    """Raise BadInput if the package of a configured sink is not installed."""
    for package, enabled in (("tensorboard", spec.tensorboard), ("wandb", spec.wandb)):
        if enabled and find_spec(package) is None:
            raise BadInput(
                f"observe.{package}: the package {package} is not installed; `pip install {package}`, or leave the key out"
            )


class TensorBoardSink:
    """Writes TensorBoard's event files in `folder`.

    On a resume, TensorBoard hides records of earlier attempts after step `resume_from`. The keys of `config` are shown
    as hyperparameters on the page HPARAMS, with `HPARAM_METRICS`.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, resume_from: int = 0, config: Mapping[str, Any] | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self._writer = SummaryWriter(str(folder), purge_step=resume_from + 1 if resume_from else None)
        if values := dict(hyperparameters(config or {})):
            # Write them into the same files. The method `add_hparams` would create a second run.
            files: Any = self._writer._get_file_writer()
            for summary in hparams(values, dict.fromkeys(HPARAM_METRICS, 0.0)):
                files.add_summary(summary)

    def write(self, record: Record) -> None:
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Creates a W&B run for each attempt.

    The runs are grouped under the name of the run. `WANDB_MODE=offline` keeps them on disk.
    """

    name = "Weights & Biases"

    def __init__(self, spec: WandbSpec, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb  # pyrefly: ignore[missing-import]  (an extra, absent from the test environment)

        try:
            self._run = wandb.init(
                project=spec.project,
                entity=spec.entity,
                name=spec.name or folder.name,
                tags=list(spec.tags),
                notes=spec.notes,
                group=spec.group or folder.name,
                job_type=spec.job_type,
                dir=str(folder),
                config=dict(config),
                resume="never",
            )
        except wandb.Error as error:
            raise BadInput(
                f"observe.wandb: {error}; run `wandb login`, or set WANDB_MODE=offline to keep the run on disk"
            ) from error
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        self._run.log({"step": record["step"], **dict(scalars(record))})

    def close(self) -> None:
        self._run.finish()


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """Yield (`kind/key`, value) for each number of a line. Nested keys are joined with `/`. `step` and texts are left out."""
    section = {"step": "train"}.get(record.get("kind", "step"), record.get("kind"))
    for key, value in record.items():
        entries = value.items() if isinstance(value, Mapping) else [("", value)]
        for sub_key, number in entries:
            if key not in ("step", "kind") and isinstance(number, (int, float)) and not isinstance(number, bool):
                name = "val" if key == "by_source" else f"{section}/{key}"
                yield f"{name}/{sub_key}" if sub_key else name, float(number)


def hyperparameters(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float | str | bool]]:
    """Yield (dotted key, value) for each key of a configuration with a number, text or boolean. Other keys are left out."""
    for key, value in config.items():
        name = f"{prefix}{key}"
        if not prefix and key not in HPARAM_SECTIONS:
            continue
        if isinstance(value, Mapping):
            yield from hyperparameters(value, f"{name}.")
        elif isinstance(value, (bool, int, float, str)):
            yield name, value
