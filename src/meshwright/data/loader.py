"""Micro-batches of one rank as torch tensors, prefetched by a thread.

The content of a step depends only on its first sample. The state of a loader is therefore one integer, the first sample of the next step,
and is valid for any number of ranks.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Protocol

import numpy as np
import torch

from meshwright.data.packing import document_sizes
from meshwright.data.slots import CommonNumber, SampleSlot
from meshwright.data.source import DataSource, SampleBatch, has_validation, open_data
from meshwright.policies.sample_order import rank_samples
from meshwright.policies.skipped_samples import SampleRange, skip_forward
from meshwright.spec.batch_sizes import BatchSizes, BatchStage
from meshwright.spec.errors import BadInput

__all__ = ["DataSource", "Loader", "MicroBatch", "SampleBatch", "has_validation", "open_data"]


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch on a rank. Tensors are int64 of shape `(micro_batch, seq)` unless stated otherwise.

    - `targets`: -1 at positions that are not trained on. None if only logits are needed.
    - `positions`, `documents`: None without `data.document_mask`. Then each sequence is one document with positions from 0.
    - `valid_tokens`: number of targets other than -1, counted on the host so that the device need not be waited for.
    - `document_sizes`: number of documents, and tokens of the longest; None if not counted.
    - `attention_work`: sum of the squared lengths of documents; None if not counted.
    - `slot`: what the tokens belong to, if samples differ in length; else None.
    - `real`, bool: False for padding, which the routers of experts do not count. None if no sequence of the run can have padding.
    - `weights`, float32: factors of the targets' losses, which may be negative. The sum of the losses is divided by the number of targets
      other than -1; a target of weight 0 must be -1. None if all weights are 1.
    - `columns`: further values for an objective (`parallel.objective`). Their first dimension is that of `tokens`.
    """

    tokens: torch.Tensor
    targets: torch.Tensor | None
    positions: torch.Tensor | None
    documents: torch.Tensor | None
    valid_tokens: int
    attention_work: int | None = None
    slot: SampleSlot | None = None
    real: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    document_sizes: tuple[int, int] | None = None
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def common(self) -> CommonNumber | None:
        """Number of the micro-batch in the order that all ranks have in common; None if each rank counts its own."""
        return None if self.slot is None else self.slot.common

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        """A copy with `change` applied to each tensor."""
        names = ("tokens", "targets", "positions", "documents", "real", "weights")
        tensors = {name: getattr(self, name) for name in names}
        columns = {name: change(column) for name, column in self.columns.items()}
        changed = {name: change(tensor) for name, tensor in tensors.items() if tensor is not None}
        return replace(self, columns=columns, **changed)


@dataclass(frozen=True)
class LoadedStep:
    """A rank's part of a step, and some figures of the whole step."""

    micro_batches: list[MicroBatch]
    samples: SampleRange
    """The samples of the step, over all ranks."""
    tokens: int
    """Tokens of this rank, without padding."""
    lengths: np.ndarray | None = None
    """Number of inputs of each sample, over all ranks; None if all samples have the same length."""
    padding: float = 0.0
    """Share of all ranks' tokens that are padding."""


def scheduled_micro_batches(micro_batches: Sequence[MicroBatch]) -> int:
    """Number of micro-batches in the schedule of a rank, including numbers that only other ranks use."""
    common = micro_batches[0].common
    return len(micro_batches) if common is None else common.count


class StepReader(Protocol):
    """Reads the step that begins at a given sample."""

    def read(self, sample: int, skipped: Sequence[SampleRange]) -> LoadedStep: ...


@dataclass(frozen=True)
class _Copied:
    """A prefetched step, and an event that marks the end of its copies to the device, if there are any."""

    step: LoadedStep
    copy_done: torch.cuda.Event | None


class Samples(Protocol):
    """The source of a loader, such as a `DataSource`."""

    document_mask: bool

    def begin_step(self, indices: Sequence[int] | np.ndarray) -> None: ...

    def samples(self, indices: Sequence[int] | np.ndarray) -> SampleBatch: ...


class Windows:
    """Reads steps whose samples have equal length.

    A step that begins at sample n has the samples [n, n + B), and data rank d gets the d-th of equal consecutive parts. B is
    `global_batch`, or at the beginning of the data the batch size of a stage of `ramp`. Raises BadInput if any of these cannot be divided
    evenly.
    """

    def __init__(
        self,
        source: Samples,
        *,
        global_batch: int,
        data_rank: int,
        data_ranks: int,
        micro_batch: int,
        ramp: Sequence[BatchStage] = (),
    ) -> None:
        for key, batch in (("global_batch", global_batch), *(("batch_ramp: batch", stage.batch) for stage in ramp)):
            _check_division(key, batch, data_ranks, micro_batch)
        self._source = source
        self._sizes = BatchSizes(global_batch, ramp)
        self._micro_batch = micro_batch
        self._data_rank = data_rank
        self._data_ranks = data_ranks

    def read(self, sample: int, skipped: Sequence[SampleRange] = ()) -> LoadedStep:
        """This rank's micro-batches of the step. Only whole steps can be skipped."""
        del skipped
        size = self._sizes.at(sample)
        end = sample + size
        self._source.begin_step(range(sample, end))
        starts = rank_samples(sample, size, self._data_rank, self._data_ranks)[:: self._micro_batch]
        batches = [self._source.samples(range(start, start + self._micro_batch)) for start in starts]
        return LoadedStep(
            [self._tensors(batch) for batch in batches], (sample, end), sum(b.tokens.size for b in batches)
        )

    def _tensors(self, batch: SampleBatch) -> MicroBatch:
        masked = self._source.document_mask
        return MicroBatch(
            tokens=torch.from_numpy(batch.tokens),
            targets=torch.from_numpy(batch.targets),
            positions=torch.from_numpy(batch.positions) if masked else None,
            documents=torch.from_numpy(batch.documents) if masked else None,
            document_sizes=document_sizes(batch.documents) if masked else None,
            valid_tokens=int(np.count_nonzero(batch.targets >= 0)),
            attention_work=sum(int((np.bincount(sequence) ** 2).sum()) for sequence in batch.documents),
            real=None if batch.real is None else torch.from_numpy(batch.real),
            weights=None if batch.weights is None else torch.from_numpy(batch.weights),
            columns={name: torch.from_numpy(column) for name, column in batch.columns.items()},
        )


class Loader:
    """An endless iterator over steps. Each item is the list of this data rank's micro-batches for one step.

    A thread prefetches `prefetch` steps; with 0 there is no thread, and `next` reads. For a CUDA device, the thread also copies steps to
    the device, on a separate stream. `next` then returns device tensors: the current stream waits for the copy, but the host does not.
    Samples in `skipped` are left out. Close the loader, or use it in a `with` block. Errors of the thread are raised by `next`.
    """

    def __init__(
        self,
        reader: StepReader,
        *,
        start_sample: int = 0,
        skipped: Sequence[SampleRange] = (),
        prefetch: int = 2,
        device: torch.device | str | None = None,
    ) -> None:
        self._reader = reader
        self._skipped = tuple(skipped)
        self.device = _with_index(torch.device(device or "cpu"))
        self.consumed = start_sample
        """Index after the last sample of the latest step, over all ranks. This is the complete state of the data."""
        self.step: LoadedStep | None = None
        """The latest step."""
        self.wait_seconds = 0.0
        """How long the last `next` waited for the thread, in seconds."""
        self._copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._ready: queue.Queue[_Copied | BaseException] = queue.Queue(maxsize=max(prefetch, 1))
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if prefetch:
            self._thread = threading.Thread(target=self._read_ahead, args=(start_sample,), name="data", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self

    def __next__(self) -> list[MicroBatch]:
        if self._stop.is_set():
            raise StopIteration
        started = time.perf_counter()
        item = self._read(self.consumed) if self._thread is None else self._ready.get()
        self.wait_seconds = time.perf_counter() - started
        if isinstance(item, BaseException):
            self.close()
            raise item
        self.step = item.step
        self.consumed = item.step.samples[1]
        return self._on_current_stream(item)

    def close(self) -> None:
        """End the thread. Further calls do nothing."""
        self._stop.set()
        while not self._ready.empty():
            self._ready.get_nowait()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_ahead(self, sample: int) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # otherwise pinning memory would open a context on device 0, too
            item = self._read(sample)
            while self._offer(item):
                item = self._read(item.step.samples[1])
        except BaseException as error:  # `next` raises it
            self._offer(error)

    def _read(self, sample: int) -> _Copied:
        """Read the step that begins at `sample`, or the next one that is not skipped, and start its copies to the device."""
        return self._copy_to_device(self._reader.read(skip_forward(sample, self._skipped), self._skipped))

    def _offer(self, item: _Copied | BaseException) -> bool:
        """Put an item into the queue as soon as there is space. Returns False if the loader was closed in the meantime."""
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def _copy_to_device(self, step: LoadedStep) -> _Copied:
        """Start the copies of a step to the device."""
        if self._copies is None:
            return _Copied(step, None)
        with torch.cuda.stream(self._copies):
            copied = [
                micro.map(lambda tensor: tensor.pin_memory().to(self.device, non_blocking=True))
                for micro in step.micro_batches
            ]
        copy_done = torch.cuda.Event()
        copy_done.record(self._copies)
        return _Copied(replace(step, micro_batches=copied), copy_done)

    def _on_current_stream(self, ahead: _Copied) -> list[MicroBatch]:
        """The micro-batches, for use on the current stream, which waits for the copies. Memory is not reused before this stream is done."""
        if ahead.copy_done is None:
            return ahead.step.micro_batches
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(ahead.copy_done)

        def record_use(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(stream)
            return tensor

        return [micro.map(record_use) for micro in ahead.step.micro_batches]


def _with_index(device: torch.device) -> torch.device:
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def _check_division(key: str, batch: int, data_ranks: int, micro_batch: int) -> None:
    if batch % (data_ranks * micro_batch):
        cut = f"{data_ranks} data ranks x micro-batch {micro_batch}"
        near = max(round(batch / (data_ranks * micro_batch)), 1) * data_ranks * micro_batch
        raise BadInput(f"train.{key} {batch}: expected a multiple of {cut} (nearest: {near})")
