"""Checks the state of a run for silent corruption, between steps and before checkpoints.

Ranks that have copies of the same part of the state receive the same gradients and update them alike, so the copies must have the same bits
after each update. Between two updates no bit of the state may change. The result of a check is read before a save of the state can be
committed.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.ranks import RankGroup
from meshwright.kernels.checksum import digests
from meshwright.policies.silent_corruption import deviating_ranks, farthest_rank
from meshwright.spec.errors import StateCorrupted
from meshwright.training.numerics import Rollback
from meshwright.training.reporting import Reporter
from meshwright.training.saving import Saver
from meshwright.training.session import TrainingSession
from meshwright.training.state_digests import DigestExchange, StateDigests

CHUNKS = 1024
"""A piece whose copies differ is divided into this many chunks. One differing chunk is sent to all ranks for comparison."""
SHOWN = 4
"""A message names at most this many tensors."""


@dataclass(frozen=True)
class Unresolved:
    """Copies of a piece that differ, without a majority that shows which copy is wrong.

    `copies` has, by rank, the elements of one chunk as they are after `step`. `names` describes each rank. When the run has recomputed the
    step, the copies are compared with the recomputed elements.
    """

    step: int
    key: int
    label: str
    chunk: int
    copies: Mapping[int, Tensor | None]
    names: Mapping[int, str]


class StateCheck:
    """The checks of one start. Every method is collective, and all ranks get the same result."""

    def __init__(self, session: TrainingSession, reporter: Reporter, saver: Saver) -> None:
        self._session = session
        self._reporter = reporter
        self._saver = saver
        self._every = session.run.supervision.check_state_every
        self._ranks = RankGroup(session.world.control)
        self._digests = StateDigests(list(session.state().values()), session.world)
        self._pending: deque[DigestExchange] = deque()
        self._values: Tensor | None = None
        """Digests of the state after the last update, if a check before the next update compares the state with them; else None."""
        self._changed = self._none_changed()
        self._unresolved: Unresolved | None = None
        self._held: deque[Mapping[str, Any]] = deque()
        """Records of steps whose save must not be committed yet, because a bit may have flipped before the state was copied."""
        reporter.event(session.step, self._digests.coverage.text(self._every))

    @classmethod
    def open(cls, session: TrainingSession, reporter: Reporter, saver: Saver) -> StateCheck | None:
        """Return the checks of a session whose state has its final memory; None if the run does not check its state."""
        return cls(session, reporter, saver) if session.run.supervision.check_state_every else None

    def begin(self) -> None:
        """Check the state with which training begins or continues. Raises Rollback if it is corrupt."""
        self._pending.clear()
        self._held.clear()
        self._changed = self._none_changed()
        self._launch(self._session.step)
        self.read()

    def before_update(self) -> None:
        """Find the pieces that have changed since the last update, if digests were taken after that update."""
        if self._values is not None:
            self._changed = (self._digests.compute() != self._values).any(dim=1)

    def skip_comparison(self) -> None:
        """Do not compare the state with the digests after the last update, because experts have moved since then."""
        self._values = None

    def end_step(self, step: int, *, saves: bool, waits: bool, stops: bool) -> None:
        """Check the state after `step` if a check is due, if the step `saves`, or if differing copies wait for recomputed elements.

        With `waits`, and on a CPU, the result is read here; otherwise a later `read` reads it. With `stops` no further step follows. Raises
        Rollback if the state is corrupt.
        """
        unresolved = self._unresolved is not None and step == self._unresolved.step
        if step % self._every == 0 or saves or unresolved:
            self._launch(step)
        elif self._values is not None:
            self._pending.append(self._digests.exchange(step, self._values, self._changed, compare=False))
            self._values = None
        self._changed = self._none_changed()
        if waits or unresolved or self._session.world.device.type == "cpu":
            self.read()
        if unresolved:
            self._resolve()
        if stops or (self._values is None and not self._pending):
            self._release(step)

    def hold(self, record: Mapping[str, Any]) -> None:
        """Keep the record of a good step until it is known that no bit of a checked state changed; then pass it to the saver."""
        self._held.append(record)

    def read(self, step: int | None = None) -> None:
        """Read the results of the checks up to `step`; None: of all checks. Raises Rollback if the state is corrupt."""
        while self._pending and (step is None or self._pending[0].step <= step):
            exchange = self._pending.popleft()
            sums_by_rank = exchange.read_sums()
            groups = self._digests.differing_groups(sums_by_rank)
            changed = any(sums[-1][0] for sums in sums_by_rank)
            if not changed:
                self._release(exchange.step - 1)
            if groups or changed:
                self._pending.clear()
                self._values = None
                raise Rollback(
                    exchange.step, self._cause(exchange, groups), skips_samples=False, failure=StateCorrupted
                )

    def _release(self, step: int) -> None:
        """Pass the held records up to `step` to the saver."""
        while self._held and self._held[0]["step"] <= step:
            self._saver.read(self._held.popleft())

    def _launch(self, step: int) -> None:
        self._session.optimizer.complete_updates()
        self._values = self._digests.compute()
        self._pending.append(self._digests.exchange(step, self._values, self._changed, compare=True))

    def _none_changed(self) -> Tensor:
        return torch.zeros(len(self._digests.pieces), dtype=torch.bool, device=self._session.world.device)

    def _cause(self, exchange: DigestExchange, groups: Sequence[int]) -> str:
        """Return the sentence that names the rank, the host and the tensors concerned."""
        pieces = self._digests.pieces
        values = exchange.digests.tolist()
        changed = exchange.changed.tolist()
        differing = {
            pieces[index].key: (pieces[index].label, tuple(values[index]))
            for index, group in enumerate(self._digests.group_of_piece)
            if group in groups
        }
        own = [piece.label for piece, is_changed in zip(pieces, changed, strict=True) if is_changed]
        answers = self._ranks.run_on_all("comparing state", lambda: (socket.gethostname(), differing, own))
        names = {rank: f"rank {rank} (host {host})" for rank, (host, _, _) in enumerate(answers)}
        start = f"step {exchange.step}: silent corruption: "
        if any(labels for _, _, labels in answers):
            changed_by_rank = {rank: labels for rank, (_, _, labels) in enumerate(answers) if labels}
            return start + self._named(changed_by_rank, names, exchange.step, "changed between two updates")
        copies: dict[tuple[str, int], dict[int, tuple[int, ...]]] = {}
        for rank, (_, entries, _) in enumerate(answers):
            for key, (label, digest) in entries.items():
                copies.setdefault((label, key), {})[rank] = digest
        return start + self._compare(
            {name: digests for name, digests in sorted(copies.items()) if len(set(digests.values())) > 1},
            names,
            exchange.step,
        )

    def _named(self, labels_by_rank: Mapping[int, list[str]], names: Mapping[int, str], step: int, problem: str) -> str:
        """Return the sentence that names each rank with its tensors. Also reports these ranks to the launcher."""
        texts = [f"on {names[rank]} {_some(labels)} {problem}" for rank, labels in sorted(labels_by_rank.items())]
        for rank, text in zip(sorted(labels_by_rank), texts, strict=True):
            self._reporter.corruption(rank, step, f"silent corruption: {text}")
        return "; ".join(texts)

    def _compare(
        self, copies: Mapping[tuple[str, int], Mapping[int, tuple[int, ...]]], names: Mapping[int, str], step: int
    ) -> str:
        """Name the ranks whose copies differ from the majority. Without a majority, keep differing elements for `_resolve`."""
        labels_by_rank: dict[int, list[str]] = {}
        open_cases = []
        for (label, key), by_rank in copies.items():
            ranks = deviating_ranks(by_rank)
            if ranks is None:
                open_cases.append((label, key, by_rank))
            for rank in ranks or ():
                labels_by_rank.setdefault(rank, []).append(label)
        text = self._named(labels_by_rank, names, step, "differs from the copies on most ranks")
        if open_cases and not text:
            label, key, by_rank = open_cases[0]
            self._unresolved = self._differing_elements(label, key, sorted(by_rank), names)
            labels = [label for label, _, _ in open_cases]
            text = (
                f"{_some(labels)} differs between {' and '.join(names[rank] for rank in sorted(by_rank))}; the run recomputes the steps "
                f"until {self._unresolved.step} to find the wrong copy"
            )
        return text

    def _differing_elements(self, label: str, key: int, ranks: Sequence[int], names: Mapping[int, str]) -> Unresolved:
        elements = self._elements(key)
        sums = None if elements is None else digests(_chunks(elements)).tolist()
        by_rank = self._ranks.run_on_all("comparing state", lambda: sums)
        pairs = zip(*(by_rank[rank] for rank in ranks), strict=True)
        chunk = next((index for index, pair in enumerate(pairs) if any(other != pair[0] for other in pair)), 0)
        part = None if elements is None else _chunks(elements)[chunk].cpu()
        parts = self._ranks.run_on_all("comparing state", lambda: part)
        copies = {rank: parts[rank] for rank in ranks}
        return Unresolved(self._session.step, key, label, chunk, copies, names)

    def _elements(self, key: int) -> Tensor | None:
        """Return this rank's piece with this `key`, flat; None if the rank does not have the piece."""
        return next((piece.elements.reshape(-1) for piece in self._digests.pieces if piece.key == key), None)

    def _resolve(self) -> None:
        """Name the rank whose copy differs most from the recomputed elements."""
        unresolved = self._unresolved
        self._unresolved = None
        assert unresolved is not None
        elements = self._elements(unresolved.key)
        recomputed = None if elements is None else _chunks(elements)[unresolved.chunk].cpu()
        answers = self._ranks.run_on_all("comparing state", lambda: recomputed)
        right = next(answer for answer in answers if answer is not None)
        distances = {rank: _distance(copy, right) for rank, copy in unresolved.copies.items() if copy is not None}
        rank = farthest_rank(distances)
        if rank is not None:
            cause = f"silent corruption: {unresolved.names[rank]} had the wrong copy of {unresolved.label}"
            self._reporter.corruption(rank, unresolved.step, cause)
        shown = ", ".join(f"rank {rank} {distance:.3g}" for rank, distance in sorted(distances.items()))
        verdict = "the wrong copy is not known" if rank is None else f"{unresolved.names[rank]} had the wrong copy"
        self._reporter.event(
            unresolved.step,
            f"step {unresolved.step}: silent corruption: recomputed {unresolved.label}: {verdict}; distance from the recomputed "
            f"elements: {shown}",
        )


def _chunks(elements: Tensor) -> tuple[Tensor, ...]:
    return elements.split(max(1, -(-elements.numel() // CHUNKS)))


def _distance(copy: Tensor, right: Tensor) -> float:
    """Return the largest distance of an element of `copy` from the right element; infinite where the copy is NaN."""
    distance = (copy.double() - right.double()).abs().nan_to_num(nan=torch.inf)
    return float(distance.max()) if distance.numel() else 0.0


def _some(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - SHOWN} more" if len(labels) > SHOWN else ""
    return ", ".join(labels[:SHOWN]) + more
