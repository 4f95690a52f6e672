"""A run on preferences, on one rank: the log-probabilities of the reference, the objective of each step, and held-out answers.

The reference needs no second model in memory. Before a run resumes or loads its first weights, the reference's weights are loaded into the
trainer's own model. In the run's layout it computes the reference's log-probabilities of the answers that the run reads. They are stored
next to the corpus.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from meshwright.checkpoint.ranks import RankGroup
from meshwright.data.loader import DataSource, MicroBatch, SampleBatch
from meshwright.data.preference_windows import PreferenceWindows
from meshwright.data.prepared_source import CorpusSource
from meshwright.data.source import MISMATCHED
from meshwright.events.span import NullRecorder
from meshwright.models.decoder import Decoder
from meshwright.parallel.objective import StepObjective
from meshwright.preferences.objective import PreferenceObjective, answers_of
from meshwright.preferences.reference import (
    place_of,
    read_reference,
    reference_key,
    reference_path,
    weights_identity,
    write_reference,
)
from meshwright.spec.preference import START, PreferenceSpec
from meshwright.training.evaluate import Evaluation, HeldOut, window_passes
from meshwright.training.run_state import load_adapters, load_base, load_initial
from meshwright.training.train_step import counted_once

if TYPE_CHECKING:
    from meshwright.training.session import TrainingSession


class PreferenceRun:
    """The objective of a run with `preference`, and what must be computed around each step."""

    def __init__(self, session: TrainingSession, spec: PreferenceSpec) -> None:
        self._session = session
        self._spec = spec
        device = session.world.device
        self.objective = PreferenceObjective(spec, session.data.order.names, device)
        self._held_out = None
        if session.held_out is not None:
            names = session.held_out.source.order.names
            self._held_out = PreferenceObjective(spec, names, device, calibrates=True)
        self.note: str | None = None
        """A sentence about the log-probabilities of the reference that this start has computed; None if it computed none."""

    @classmethod
    def open(cls, session: TrainingSession, on_action: Callable[[int], None]) -> PreferenceRun:
        """Open it for a session whose frozen weights are loaded and whose other weights are not loaded yet. Collective.

        If log-probabilities of the reference are missing, they are computed and written. The model then has the reference's weights.
        `on_action` is called at each action of these forwards.
        """
        spec = session.run.preference
        assert spec is not None
        opened = cls(session, spec)
        sources = [session.data, *([] if session.held_out is None else [session.held_out.source])]
        for source in sources:
            source.mismatched = not spec.paired
        if spec.has_reference:
            opened._add_references(sources, on_action)
        return opened

    def begin_step(self, batches: Sequence[MicroBatch], objective: PreferenceObjective | None = None) -> None:
        """For kto, compute how likely the model finds answers to other prompts: the zero point of the step's rewards. Collective.

        Does nothing for losses of pairs.
        """
        if self._spec.paired:
            return
        objective = objective or self.objective
        sums = torch.zeros(2, dtype=torch.float64, device=objective.sums.device)
        for batch, values in _log_probabilities(self._session, [_mismatched(batch) for batch in batches]):
            found = answers_of(values, batch)
            known = found.tokens > 0
            sums[0] += torch.where(known, found.totals - batch.columns["mismatched_reference"], 0.0).sum()
            sums[1] += known.sum()
        mesh = self._session.mesh
        total, count = mesh.sum_over_all(counted_once(sums, mesh))
        objective.shift = self._spec.scale * (total / count.clamp(min=1)).clamp(min=0)

    def evaluate(self) -> Evaluation | None:
        """Return the loss and figures of held-out answers; None if there are none. Collective."""
        session = self._session
        objective = self._held_out
        if session.held_out is None or objective is None:
            return None
        device = session.world.device
        mesh = session.mesh
        step = StepObjective(objective, torch.ones((), dtype=torch.float64, device=device))
        loss = torch.zeros((), dtype=torch.float64, device=device)
        for indices in session.held_out.samples.values():
            for batches in _passes(session, _Drawn(session.held_out, indices), len(indices)):
                self.begin_step(batches, objective)
                schedule = session.engine.evaluation_schedule(len(batches))
                loss += session.engine.executor.play(schedule, batches, NullRecorder(), objective=step)
        sums = mesh.sum_over_all(torch.cat([loss[None], counted_once(objective.take(), mesh)])).tolist()
        figures = objective.figures(sums[1:])
        counts = objective.counts(sums[1:])
        if not counts.judged:
            return None
        return Evaluation(sums[0] / counts.judged, round(counts.tokens), None, preferences=figures)

    def _add_references(self, sources: Sequence[DataSource], on_action: Callable[[int], None]) -> None:
        """Give each source the reference's log-probabilities of its answers. Missing ones are computed. Collective."""
        session = self._session
        began = time.monotonic()
        ranks = RankGroup(session.world.control)
        weights = ranks.run_on_first("reading the reference", lambda: weights_identity(session.run))
        wanted = [
            _Wanted(data, source, self._needed(data, source)) for data in sources for source in data.sources.values()
        ]
        stored = [
            ranks.run_on_first("reading log-probabilities", lambda each=each: self._stored(each, weights))
            for each in wanted
        ]
        missing = [each.missing(found) for each, found in zip(wanted, stored, strict=True)]
        if any(len(windows) for windows in missing):
            self._load()
            tokens = session.plan.batch.micro_batch * session.run.train.seq_len * session.mesh.data_ranks
            rate = PassRate(tokens)
            with self._acting(on_action):
                for each, found, windows in zip(wanted, stored, missing, strict=True):
                    self._compute(each, found, windows, rate)
            ranks.run_on_first("writing log-probabilities", lambda: self._write(wanted, stored, weights))
            self._restore()
            count = sum(len(each.layout.answers_of(windows)) for each, windows in zip(wanted, missing, strict=True))
            self.note = f"reference log-probabilities of {count:,} answers computed in {time.monotonic() - began:.1f} s{rate.words}"
        for each, found in zip(wanted, stored, strict=True):
            each.source.reference = found["answers"]
            each.source.mismatched_reference = found.get("mismatched")

    def _needed(self, data: DataSource, source: CorpusSource) -> np.ndarray:
        """Return the numbers of a source's windows that the run reads.

        For training data these are the windows of the run's steps, and of some more steps if the run may skip samples. For validation data
        these are all windows.
        """
        session = self._session
        if data is not session.data:
            return np.arange(source.windows)
        train = session.run.train
        spare = sum(end - first for first, end in session.numerics.skip_samples)
        if "rollback_skip" in (train.on_nonfinite, train.on_spike):
            spare += SPARE_STEPS * train.global_batch
        draws = data.order.draws(np.arange(train.batches.samples_before(train.steps) + spare, dtype=np.int64))
        return np.unique(draws.window[draws.source == data.order.names.index(source.name)])

    def _stored(self, wanted: _Wanted, weights: str) -> dict[str, np.ndarray]:
        """Return the stored log-probabilities; NaN for answers without a stored one."""
        documents = wanted.documents
        found = {}
        for name in self._names:
            values = np.full(documents, np.nan)
            for path in self._paths(wanted, weights, name):
                if (stored := read_reference(path, documents)) is not None:
                    values = np.where(np.isnan(values), stored, values)
            found[name] = values
        return found

    def _write(self, wanted: Sequence[_Wanted], stored: Sequence[Mapping[str, np.ndarray]], weights: str) -> None:
        for each, found in zip(wanted, stored, strict=True):
            for name in self._names:
                write_reference(self._paths(each, weights, name)[0], found[name])

    @property
    def _names(self) -> tuple[str, ...]:
        return ("answers",) if self._spec.paired else ("answers", "mismatched")

    def _paths(self, wanted: _Wanted, weights: str, name: str) -> list[Any]:
        """Return the files that may have these log-probabilities; the first is the one to write."""
        session = self._session
        directory = wanted.source.directory
        more = "" if name == "answers" else f"mismatched {session.run.train.seq_len} {self._spec.too_long}"
        key = reference_key(session.run, session.plan, weights, directory.content_digest, more)
        places = dict.fromkeys([place_of(directory.path, session.folder), directory.path, session.folder])
        return [reference_path(place, key) for place in places]

    def _load(self) -> None:
        """Load the reference's weights. Collective."""
        session = self._session
        init = self._spec.reference
        run = session.run
        engine = session.engine
        if run.model.adapter is None:
            load_initial(engine.weights, run.model, run.model.init if init == START else init)
        elif init == START:
            assert session.base is not None
            load_adapters(engine.weights, run.model, session.base)
        else:
            load_base(engine, run.model, init, run.seed)  # the adapters have their initial values, which change nothing

    def _restore(self) -> None:
        """Load the run's frozen weights again if the reference's weights have replaced them. Collective."""
        session = self._session
        if session.run.model.adapter is not None and self._spec.reference != START:
            session.base = load_base(session.engine, session.run.model, session.run.model.init, session.run.seed)

    def _compute(self, wanted: _Wanted, found: Mapping[str, np.ndarray], windows: np.ndarray, rate: PassRate) -> None:
        """Compute the log-probabilities of the answers in these `windows` and store them in `found`. Collective."""
        session = self._session
        device = self._session.world.device
        sums = {name: torch.zeros(wanted.documents, dtype=torch.float64, device=device) for name in self._names}
        for batches in _passes(session, _OfSource(wanted.data, wanted.source, windows), len(windows)):
            for name, total in sums.items():
                given = batches if name == "answers" else [_mismatched(batch) for batch in batches]
                for batch, values in _log_probabilities(session, given):
                    present = batch.columns["signs"] != 0
                    total.index_add_(0, batch.columns["answers"][present], answers_of(values, batch).totals[present])
            rate.end_pass(len(batches))
        numbers = wanted.layout.answers_of(windows)
        for name, total in sums.items():
            whole = session.mesh.sum_over_all(counted_once(total, session.mesh)).cpu().numpy()
            found[name][numbers] = whole[numbers]

    @contextmanager
    def _acting(self, on_action: Callable[[int], None]) -> Iterator[None]:
        executor = self._session.engine.executor
        before = executor.on_action
        executor.on_action = on_action
        try:
            yield
        finally:
            executor.on_action = before


PAIRS = PreferenceSpec(loss="simpo", too_long="leave_out")
"""Settings to read pairs whose answers are compared by likelihood, without a reference."""
SCORED_PAIRS = PreferenceSpec(loss="reward", too_long="leave_out")
"""Settings to read pairs whose answers are compared by the scores of a reward model."""


@torch.no_grad()
def evaluate_pairs(model: Decoder, held_out: HeldOut, *, micro_batch: int, device: torch.device) -> Evaluation:
    """Evaluate a whole model on pairs of a chosen and a rejected answer.

    For a language model: how often it finds the chosen answer likelier per token, and as the loss the nats per token of chosen answers. For
    a reward model: how often the chosen answer has the higher score, the loss of pairs, and how well its probabilities are calibrated.
    `held_out` must have been opened with `PAIRS`, for a reward model with `SCORED_PAIRS`.
    """
    spec = SCORED_PAIRS if model.spec.head == "score" else PAIRS
    objective = PreferenceObjective(spec, held_out.source.order.names, device, calibrates=True)
    tied = model.embed.weight if model.spec.tied else None
    loss = torch.zeros((), dtype=torch.float64, device=device)
    for indices in held_out.samples.values():
        size = {"micro_batch": micro_batch, "at_once": 1}
        for batches in window_passes(_Drawn(held_out, indices), len(indices), device, rank=0, ranks=1, **size):
            for batch in batches:
                assert batch.targets is not None
                hidden = model.hidden(batch.tokens, batch.positions, batch.documents)
                loss += objective.loss(model.head.log_probabilities(hidden, batch.targets, tied), batch)
    sums = objective.take().tolist()
    found = objective.figures(sums)
    counts = objective.counts(sums)
    if spec.scores:
        return Evaluation(loss.item() / max(counts.judged, 1), round(counts.tokens), None, preferences=found)
    means = {f"{name}_logprob": float(found[f"{name}_reward"]) / PAIRS.scale for name in ("chosen", "rejected")}
    shown = {name: found[name] for name in ("pairs", "likelier", "chosen_tokens", "rejected_tokens")}
    return Evaluation(-means["chosen_logprob"], round(counts.tokens), None, preferences=shown | means)


class PassRate:
    """Measures the rate of forward passes. The first pass is left out, because kernels may be compiled in it.

    `tokens` is the number of tokens of a micro-batch on all ranks together.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._counted = 0
        self._first = 0.0
        self._last = 0.0

    def end_pass(self, micro_batches: int) -> None:
        """Count a pass of so many micro-batches. The host must have waited for its results."""
        self._last = time.monotonic()
        if self._first:
            self._counted += micro_batches
        else:
            self._first = self._last

    @property
    def words(self) -> str:
        """The rate in words; empty if there was only one pass."""
        if not self._counted:
            return ""
        return f", {self._counted * self._tokens / (self._last - self._first):,.0f} tokens/s after the first pass"


SPARE_STEPS = 16
"""Number of further steps whose samples get log-probabilities of the reference model, if a run may skip samples."""


@dataclass(frozen=True)
class _Wanted:
    """A source, and the numbers of the windows of it that the run reads."""

    data: DataSource
    source: CorpusSource
    windows: np.ndarray

    @property
    def layout(self) -> PreferenceWindows:
        assert isinstance(self.source.layout, PreferenceWindows)
        return self.source.layout

    @property
    def documents(self) -> int:
        """Number of documents of the source."""
        return sum(file.documents for file in self.source.stream.files)

    def missing(self, found: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the windows with at least one answer whose log-probability is not known."""
        unknown = np.isnan(sum(found.values()))
        return np.array(
            [w for w in self.windows.tolist() if unknown[self.layout.answers_of(np.array([w]))].any()], dtype=np.int64
        )


class _OfSource:
    """Given windows of one source as samples. After the last window they start again."""

    document_mask = True

    def __init__(self, data: DataSource, source: CorpusSource, windows: np.ndarray) -> None:
        self._data = data
        self._source = source
        self._windows = windows

    def begin_step(self, indices: Sequence[int] | np.ndarray) -> None:
        """Do nothing: the data are checked when a step reads them."""

    def samples(self, indices: Sequence[int] | np.ndarray) -> SampleBatch:
        """Return the windows at these indices in the list of windows."""
        count = len(self._windows)
        return self._data.batch([(self._source, int(self._windows[index % count])) for index in indices])


class _Drawn(_OfSource):
    """Held-out samples with given global indices. After the last sample they start again."""

    def __init__(self, held_out: HeldOut, indices: np.ndarray) -> None:
        self._held_out = held_out.source
        self._indices = indices

    def samples(self, indices: Sequence[int] | np.ndarray) -> SampleBatch:
        """Return the samples at these indices in the list of global indices."""
        return self._held_out.samples(self._indices[np.asarray(indices) % len(self._indices)])


def _passes(session: TrainingSession, samples: _OfSource, count: int) -> Iterator[list[MicroBatch]]:
    """Yield this data rank's micro-batches of each pass over `count` samples."""
    mesh = session.mesh
    at_once = mesh.layout.size("pipeline")
    size = {"micro_batch": session.plan.batch.micro_batch, "at_once": at_once}
    yield from window_passes(samples, count, session.world.device, rank=mesh.data_rank, ranks=mesh.data_ranks, **size)


def _log_probabilities(
    session: TrainingSession, batches: Sequence[MicroBatch]
) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
    """Yield each micro-batch with the log-probabilities of its targets, on the ranks that have these. Collective."""
    schedule = session.engine.evaluation_schedule(len(batches))
    found = session.engine.executor.log_probabilities(schedule, batches, NullRecorder())
    for number, values in found.items():
        yield batches[number], values


def _mismatched(batch: MicroBatch) -> MicroBatch:
    """Return the micro-batch in which each answer follows another prompt."""
    tokens, targets, positions, documents = (batch.columns[f"mismatched_{name}"] for name in MISMATCHED)
    return replace(batch, tokens=tokens, targets=targets, positions=positions, documents=documents)
