"""The writers of several ranks inside the test's process: their calls to the disk can be counted, recorded and cut off."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.arena import Arena
from meshwright.checkpoint.contents import Chunk, TensorRecord
from meshwright.checkpoint.header import TensorHeader
from meshwright.checkpoint.state import encode_plain
from meshwright.checkpoint.writer import Save, Setup, Writer, encoded_contents
from meshwright.spec.run import Lease
from tests.checkpoint.toy import SIZES, value

NAMES = sorted(f"{kind}.{name}" for kind in ("model", "optimizer.exp_avg") for name in SIZES)


@dataclass
class Replies:
    """What a writer answered."""

    events: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    def last(self, event: str) -> dict[str, Any] | None:
        return next((each for each in reversed(self.events) if each["event"] == event), None)


class Writers:
    """One writer a rank, under a lease of `run`. Rank r writes every tensor whose number is r modulo `ranks`."""

    def __init__(self, run: Path, lease: Lease, ranks: int = 1, *, keep: int = 2, peer_seconds: float = 20.0) -> None:
        self.lease, self.ranks, self.saves = lease, ranks, 0
        self.replies = [Replies() for _ in range(ranks)]
        self.names = [NAMES[rank::ranks] for rank in range(ranks)]
        headers = [
            [TensorHeader(name, "F32", SIZES[name.rpartition(".")[2]]) for name in names] for names in self.names
        ]
        contents = {
            row.key: TensorRecord(
                row.shape, "F32", (Chunk((0,) * len(row.shape), row.shape, f"tensors-{rank:05d}.safetensors", row.key),)
            )
            for rank, own in enumerate(headers)
            for row in own
        }
        self.arenas = [Arena.create(sum(row.bytes for row in own)) for own in headers]
        self.writers = [Writer(arena, reply) for arena, reply in zip(self.arenas, self.replies, strict=True)]
        for rank, (each, own) in enumerate(zip(self.writers, headers, strict=True)):
            plain = [[row.key, row.dtype, list(row.shape)] for row in own]
            setup = Setup(
                str(run / "checkpoints"), rank, ranks, plain, {} if rank else encoded_contents(contents), asdict(lease),
                keep, 1, "2.0", peer_seconds=peer_seconds, folder_seconds=1.0,
            )  # fmt: skip
            each.do(setup)

    def stage(self, step: int) -> Save:
        """Bring the values of `step` into the arenas; returns the command that saves them."""
        self.saves += 1
        for arena, names in zip(self.arenas, self.names, strict=True):
            arena.begin_snapshot()
            parts = [value(name, step, torch.Size(SIZES[name.rpartition(".")[2]])).view(-1) for name in names]
            data = torch.cat(parts).view(torch.uint8).numpy().tobytes()
            arena.data[: len(data)] = data
            arena.complete_snapshot()
        plain = {name: text.decode() for name, text in encode_plain({"step": step}, {}).items()}
        return Save(
            step, f"{self.lease.epoch}-{self.saves:08x}", self.arenas[0].generation, 0.0, finite=True, plain=plain
        )

    def save(self, step: int) -> dict[str, Any]:
        """Save the values of `step`; returns the first rank's last reply about it."""
        return self.carry_out(self.stage(step))

    def carry_out(self, save: Save) -> dict[str, Any]:
        threads = [
            threading.Thread(target=_quietly, args=(lambda each=each: each.do(save),)) for each in self.writers[1:]
        ]
        for thread in threads:
            thread.start()
        try:
            self.writers[0].do(save)
        finally:
            for thread in threads:
                thread.join()
        replies = [each for each in self.replies[0].events if each["event"] in ("committed", "failed")]
        return replies[-1]


class Crash(BaseException):
    """The process is gone."""


def _quietly(work: Callable[[], object]) -> None:
    try:
        work()
    except Crash:
        return
