"""Micro-batches of one rank as torch tensors, prefetched by a thread.

Step t of a run reads global samples [t * global_batch, (t + 1) * global_batch); data rank d takes the d-th contiguous
part. The state is one integer, the number of global samples consumed, and is valid for any number of ranks.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol

import numpy as np
import torch

from meshwright.data.slots import SamplePart
from meshwright.data.source import Batch, DataSource, has_validation, open_data
from meshwright.policies.sample_order import rank_samples
from meshwright.policies.skipped_samples import SampleRange, skip_forward
from meshwright.spec.errors import BadInput

__all__ = ["Batch", "DataSource", "Loader", "MicroBatch", "has_validation", "open_data"]


@dataclass(frozen=True)
class MicroBatch:
    """int64 tensors of shape `(micro_batch, seq)`; `targets` is -1 for ignored positions, None if only logits are needed.

    `positions` and `documents` are None without `data.document_mask`: each sequence is then one document, counted from
    0. `valid_tokens` is the number of targets other than -1, counted on the host to avoid synchronisation.
    `attention_work` is the sum of the squared lengths of the documents, None if it is not counted.
    """

    tokens: torch.Tensor
    targets: torch.Tensor | None
    positions: torch.Tensor | None
    documents: torch.Tensor | None
    valid_tokens: int
    attention_work: int | None = None
    divided: SamplePart | None = None
    """The part of a sample of several hybrid ranks that a slot begins with (`data.slots`)."""

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        """A copy with `change` applied to each tensor."""
        tensors = {name: getattr(self, name) for name in ("tokens", "targets", "positions", "documents")}
        return replace(self, **{name: change(tensor) for name, tensor in tensors.items() if tensor is not None})


@dataclass(frozen=True)
class _ReadStep:
    """A prefetched step, and the event after its copies to the device, if there are any."""

    step: list[MicroBatch]
    copy_done: torch.cuda.Event | None


class Samples(Protocol):
    """The source of a loader: a `DataSource`, or a part of it."""

    document_mask: bool

    def begin_step(self, indices: Sequence[int] | np.ndarray) -> None: ...

    def samples(self, indices: Sequence[int] | np.ndarray) -> Batch: ...


class Loader:
    """Endless iterator over steps; each item is this data rank's list of micro-batches for one step.

    A thread prefetches `prefetch` steps. For a CUDA device it also copies them there on its own stream, so that `next`
    returns device tensors: the current stream waits for the copy, the host does not. The samples of `skipped` are left
    out. Close it, or use it in a `with` block. Raises BadInput if `global_batch` does not divide evenly; `next` raises
    the errors of the thread.
    """

    def __init__(
        self,
        source: Samples,
        *,
        global_batch: int,
        data_rank: int,
        data_ranks: int,
        micro_batch: int,
        start_sample: int = 0,
        skipped: Sequence[SampleRange] = (),
        prefetch: int = 2,
        device: torch.device | str | None = None,
    ) -> None:
        _check_division(global_batch, data_ranks, micro_batch)
        self.source, self.global_batch, self.micro_batch = source, global_batch, micro_batch
        self.data_rank, self.data_ranks = data_rank, data_ranks
        self._skipped = tuple(skipped)
        self.device = _with_index(torch.device(device or "cpu"))
        self.consumed = start_sample
        """Global samples consumed by all ranks; the complete state of the data."""
        self.wait_seconds = 0.0
        """Seconds that the last `next` waited for the thread."""
        self._copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._ready: queue.Queue[_ReadStep | BaseException] = queue.Queue(maxsize=max(prefetch, 1))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read_ahead, args=(start_sample,), name="data", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self

    def __next__(self) -> list[MicroBatch]:
        if self._stop.is_set():
            raise StopIteration
        started = time.perf_counter()
        item = self._ready.get()
        self.wait_seconds = time.perf_counter() - started
        if isinstance(item, BaseException):
            self.close()
            raise item
        self.consumed += self.global_batch
        return self._on_current_stream(item)

    def close(self) -> None:
        """End the thread; a second call does nothing."""
        self._stop.set()
        while not self._ready.empty():
            self._ready.get_nowait()
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
                torch.cuda.set_device(self.device)  # otherwise pinning memory would also open a context on device 0
            while self._offer(self._copy_to_device(self._read_step(sample))):
                sample = skip_forward(sample + self.global_batch, self._skipped)
        except BaseException as error:  # the consumer raises it
            self._offer(error)

    def _offer(self, item: _ReadStep | BaseException) -> bool:
        """Wait for space in the queue; False if the loader was closed meanwhile."""
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def _read_step(self, sample: int) -> list[MicroBatch]:
        self.source.begin_step(range(sample, sample + self.global_batch))
        rank_indices = rank_samples(sample, self.global_batch, self.data_rank, self.data_ranks)
        starts = rank_indices[:: self.micro_batch]
        return [self._micro_batch(self.source.samples(range(start, start + self.micro_batch))) for start in starts]

    def _micro_batch(self, batch: Batch) -> MicroBatch:
        masked = self.source.document_mask
        micro = MicroBatch(
            tokens=torch.from_numpy(batch.tokens),
            targets=torch.from_numpy(batch.targets),
            positions=torch.from_numpy(batch.positions) if masked else None,
            documents=torch.from_numpy(batch.documents) if masked else None,
            valid_tokens=int(np.count_nonzero(batch.targets >= 0)),
            attention_work=sum(int((np.bincount(sequence) ** 2).sum()) for sequence in batch.documents),
        )
        return micro.map(torch.Tensor.pin_memory) if self.device.type == "cuda" else micro

    def _copy_to_device(self, step: list[MicroBatch]) -> _ReadStep:
        """Start the copies of a step to the device."""
        if self._copies is None:
            return _ReadStep(step, None)
        with torch.cuda.stream(self._copies):
            copied = [micro.map(lambda tensor: tensor.to(self.device, non_blocking=True)) for micro in step]
        copy_done = torch.cuda.Event()
        copy_done.record(self._copies)
        return _ReadStep(copied, copy_done)

    def _on_current_stream(self, ahead: _ReadStep) -> list[MicroBatch]:
        """The step for the current stream, which waits for the copies; their memory is kept until the stream has used it."""
        if ahead.copy_done is None:
            return ahead.step
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(ahead.copy_done)

        def record_use(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(stream)
            return tensor

        return [micro.map(record_use) for micro in ahead.step]


def _with_index(device: torch.device) -> torch.device:
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def _check_division(global_batch: int, data_ranks: int, micro_batch: int) -> None:
    if global_batch % (data_ranks * micro_batch):
        cut = f"{data_ranks} data ranks x micro-batch {micro_batch}"
        near = max(round(global_batch / (data_ranks * micro_batch)), 1) * data_ranks * micro_batch
        raise BadInput(f"train.global_batch {global_batch}: expected a multiple of {cut} (nearest: {near})")
