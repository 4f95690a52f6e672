"""The writers of several ranks inside the test's process: their calls to the disk can be counted, recorded and cut off."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.format.contents import TensorChunk, TensorRecord, plain_contents
from meshwright.checkpoint.format.header import TensorHeader
from meshwright.checkpoint.format.plain_files import encode_plain
from meshwright.checkpoint.memory.snapshot_buffer import SnapshotBuffer
from meshwright.checkpoint.write.source_checksum import host_checksum
from meshwright.checkpoint.write.writer import Save, Writer, WriterSetup
from meshwright.spec.run import Lease
from tests.checkpoint.toy import SIZES, value

NAMES = sorted(f"{kind}.{name}" for kind in ("model", "optimizer.exp_avg") for name in SIZES)


@dataclass
class Replies:
    """Replies of a writer."""

    events: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    def last(self, event: str) -> dict[str, Any] | None:
        return next((reply for reply in reversed(self.events) if reply["event"] == event), None)


class Writers:
    """One writer a rank, under a lease of `run`. Rank r writes every tensor whose number is r modulo `ranks`.

    With `replicas` the snapshot buffer of rank r also has what rank `replicas[r]` writes.
    """

    def __init__(
        self,
        run: Path,
        lease: Lease,
        ranks: int = 1,
        *,
        keep: int = 2,
        peer_seconds: float = 20.0,
        replicas: Sequence[int] = (),
    ) -> None:
        self.lease, self.ranks, self.saves = lease, ranks, 0
        self.replies = [Replies() for _ in range(ranks)]
        written = [NAMES[rank::ranks] for rank in range(ranks)]
        headers = [[TensorHeader(name, "F32", SIZES[name.rpartition(".")[2]]) for name in names] for names in written]
        of_replicas = [headers[replica] for replica in replicas] or [[] for _ in range(ranks)]
        staged = [own + more for own, more in zip(headers, of_replicas, strict=True)]
        self.names = [[header.key for header in rank_headers] for rank_headers in staged]
        contents = {
            header.key: TensorRecord(
                header.shape,
                "F32",
                (TensorChunk((0,) * len(header.shape), header.shape, f"tensors-{rank:05d}.safetensors", header.key),),
            )
            for rank, rank_headers in enumerate(headers)
            for header in rank_headers
        }
        self.checksums: list[list[list[int]]] = []
        """Of each rank's tensors, as staged last."""
        self.buffers = [SnapshotBuffer.create(sum(header.bytes for header in rank_headers)) for rank_headers in staged]
        self.writers = [Writer(buffer, reply) for buffer, reply in zip(self.buffers, self.replies, strict=True)]
        entries = [
            [[header.key, header.dtype, list(header.shape)] for header in rank_headers] for rank_headers in headers
        ]
        for rank, writer in enumerate(self.writers):
            replica = replicas[rank] if replicas else None
            setup = WriterSetup(
                str(run / "checkpoints"),
                rank,
                ranks,
                entries[rank],
                plain_contents(contents) if 0 in (rank, replica) else {},
                asdict(lease),
                keep,
                1,
                "2.0",
                peer_seconds=peer_seconds,
                folder_seconds=1.0,
                replica=replica,
                replica_headers=[] if replica is None else entries[replica],
            )
            writer.do(setup)

    def stage(self, step: int) -> Save:
        """Bring the values of `step` into the snapshot buffers; returns the command that saves them."""
        self.saves += 1
        self.checksums = []
        for buffer, names in zip(self.buffers, self.names, strict=True):
            buffer.begin_snapshot()
            tensors = [value(name, step, torch.Size(SIZES[name.rpartition(".")[2]])).view(-1) for name in names]
            data = torch.cat(tensors).view(torch.uint8).numpy().tobytes()
            buffer.data[: len(data)] = data
            self.checksums.append([list(host_checksum(tensor.view(torch.uint8))) for tensor in tensors])
            buffer.complete_snapshot()
        texts = {name: text.decode() for name, text in encode_plain({"step": step}, {}).items()}
        return Save(
            step, f"{self.lease.epoch}-{self.saves:08x}", self.buffers[0].generation, 0.0, finite=True, plain=texts
        )

    def save(self, step: int) -> dict[str, Any]:
        """Save the values of `step`; returns the first rank's last reply about it."""
        return self.carry_out(self.stage(step))

    def carry_out(self, save: Save) -> dict[str, Any]:
        threads = [
            threading.Thread(target=_quietly, args=(lambda rank=rank: self.do(rank, save),))
            for rank in range(1, self.ranks)
        ]
        for thread in threads:
            thread.start()
        try:
            self.do(0, save)
        finally:
            for thread in threads:
                thread.join()
        replies = [reply for reply in self.replies[0].events if reply["event"] in ("committed", "failed")]
        return replies[-1]

    def close(self) -> None:
        """Free the snapshot buffers; no writer may work any more."""
        for buffer in self.buffers:
            buffer.close()

    def do(self, rank: int, save: Save) -> None:
        """Have one rank's writer carry out its part of a save of what is staged."""
        self.writers[rank].do(replace(save, checksums=self.checksums[rank]))


class Crash(BaseException):
    """The process is gone."""


def _quietly(work: Callable[[], object]) -> None:
    try:
        work()
    except Crash:
        return
