"""What stops a run beyond the mistakes in its file: packages, data, an earlier run of its name, weights, plan, disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from meshwright.data.corpus import STDLIB
from meshwright.launch import prepare
from meshwright.launch.folder import continues
from meshwright.observe.sinks import check_sinks
from meshwright.spec.errors import MeshwrightError, Refusal
from meshwright.spec.failures import failure_of
from meshwright.spec.reading import Reading
from meshwright.spec.run import RunSpec

T = TypeVar("T")
MODEL_AND_PLAN = ("model", "train", "cluster", "plan")


class Refusals:
    """Tries what a run needs, as far as the keys that say so are sound, and keeps every error at the position of its key.

    `known` is an error that a start of the run has met already: a plan that was searched in vain is not searched again. A `fresh` run
    takes another name where its own is taken.
    """

    def __init__(
        self,
        reading: Reading,
        runs: Path,
        note: Callable[[str], None],
        known: MeshwrightError | None = None,
        *,
        fresh: bool = False,
    ) -> None:
        self.found: list[Refusal] = []
        self.exit_code = 0
        self._reading, self._note, self._known, self._fresh = reading, note, known, fresh
        run = reading.sound_part()
        if run is not None:
            self._try_all(run, runs)

    def _try_all(self, run: RunSpec, runs: Path) -> None:
        if self._sound("observe"):
            self._try("observe", "packages that are installed", lambda: check_sinks(run.observe))
        if self._sound("data", "train.seq_len"):
            run = self._with_data(run)
        complete, folder = prepare.with_vocabulary(run), runs / run.name
        # Without a vocabulary every earlier run would seem to differ in it.
        resumes = False
        if not self._fresh and run.model.vocab_size and self._sound("name", "seed", "model", "data", "train"):
            named = "a new name, or a run with the same configuration"
            resumes = self._try("name", named, lambda: continues(run, folder)) or False
        if not resumes and self._sound("model"):
            self._try("model.init", "weights of this model", lambda: prepare.check_init(complete))
        if self._sound(*MODEL_AND_PLAN):
            self._try("plan", "a plan that fits the cluster", lambda: self._plan(complete))
        if self._sound("model", "checkpoint", "name"):
            self._try("checkpoint", "room for one checkpoint", lambda: prepare.check_disk(complete, folder))

    def _with_data(self, run: RunSpec) -> RunSpec:
        """The run with the vocabulary of its data, whose sources are opened one by one first."""
        known = run if self._sound("model") else replace(run, model=replace(run.model, vocab_size=0))
        before = len(self.found)
        missing = {STDLIB} if prepare.lacks_stdlib(run) else set()  # made on first use
        for name, weight in run.data.mix.items():
            if name in missing:
                continue
            alone = replace(known, data=replace(run.data, mix={name: weight}, validation=None))
            self._try(f"data.mix.{name}", "prepared data", lambda alone=alone: prepare.open_run_data(alone))
        if run.data.validation:
            self._try("data.validation", "prepared data", lambda: prepare.check_validation(known))
        if missing or len(self.found) > before or not self._sound("model"):
            return run
        expected = "prepared data with a tokenizer the model fits"
        return self._try("data.mix", expected, lambda: prepare.resolve_data(run, _quiet)) or run

    def _plan(self, run: RunSpec) -> None:
        if self._known is not None and self._known.key == "plan":
            raise self._known
        prepare.training_plan(run, self._note)

    def _sound(self, *keys: str) -> bool:
        return self._reading.is_sound(*keys)

    def _try(self, key: str, expected: str, work: Callable[[], T]) -> T | None:
        try:
            return work()
        except (MeshwrightError, OSError) as error:
            failure = failure_of(error)
            self.found.append(self._reading.refusal(failure, key, expected))
            self.exit_code = max(self.exit_code, failure.exit_code)
            return None


def _quiet(text: str) -> None:
    del text
