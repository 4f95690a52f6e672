"""Decides what happens after a step whose loss or gradient norm is not finite, or much larger than before (a spike)."""

from __future__ import annotations

import math
import os
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshwright.parallel.token_exchange import check_received_rows
from meshwright.policies.numerics import (
    LAG_STEPS,
    MOST_ROLLBACKS,
    MOST_SKIPS,
    WINDOW_STEPS,
    GoodStep,
    SpikeLimits,
    Verdict,
    judge,
    spike_limits,
)
from meshwright.policies.skipped_samples import SampleRange, merge_skips
from meshwright.spec.errors import MeshwrightError, NumericalFailure
from meshwright.spec.job import TrainSpec


class Rollback(Exception):
    """The run must return to the newest good checkpoint before `step`. If there is none, it ends with the error class `failure`.

    `cause` says why. With `skips_samples` the run leaves out the samples of the step from then on.
    """

    def __init__(
        self,
        step: int,
        cause: str,
        *,
        skips_samples: bool,
        failure: type[MeshwrightError] = NumericalFailure,
    ) -> None:
        super().__init__(cause)
        self.step = step
        self.cause = cause
        self.skips_samples = skips_samples
        self.failure = failure


class NumericalPolicy:
    """The history of good steps, and the steps and samples that were skipped so far. It is equal on all ranks."""

    def __init__(
        self,
        train: TrainSpec,
        folder: Path,
        skip_samples: tuple[SampleRange, ...] = (),
        replicas: int = 1,
        newest_checkpoint: Callable[[], int] = lambda: 0,
    ) -> None:
        """`folder` is the run's folder, and `replicas` the number of copies of the model (ranks along the axis `replicate`).

        `newest_checkpoint` returns the step of the run's newest checkpoint, 0 if there is none. The message of a failure names it.
        """
        self._train = train
        self._folder = min(os.path.relpath(folder), str(folder), key=len)
        self._newest_checkpoint = newest_checkpoint
        self._replicas = replicas
        self.skip_samples = skip_samples
        """Ranges of global sample numbers that the run leaves out (`policies.skipped_samples`)."""
        self.skipped_steps: list[int] = []
        """Steps whose update was skipped, in ascending order."""
        self._history: deque[GoodStep] = deque(maxlen=WINDOW_STEPS + LAG_STEPS)
        self._rollbacks: Counter[int] = Counter()

    def state(self, step: int) -> dict[str, Any]:
        """Return the state for a checkpoint of `step`. It is empty if nothing was skipped and spikes are ignored."""
        skipped = [each for each in self.skipped_steps if each <= step]
        state: dict[str, Any] = {"skipped_steps": skipped} if skipped else {}
        if self.skip_samples:
            state["skip_samples"] = [list(span) for span in self.skip_samples]
        if self._train.on_spike != "ignore":
            state["history"] = [list(asdict(good).values()) for good in self._history if good.step <= step]
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint. The samples that this start leaves out are added to those of the checkpoint."""
        self.skipped_steps = list(state.get("skipped_steps", []))
        self.skip_samples = merge_skips(
            self.skip_samples, [(first, end) for first, end in state.get("skip_samples", [])]
        )
        self._history.clear()
        self._history.extend(GoodStep(step, loss, norm) for step, loss, norm in state.get("history", []))

    def updates(self, step: int) -> int:
        """Return the number of updates that the weights contain after `step`."""
        return step - sum(skipped <= step for skipped in self.skipped_steps)

    def norm_limit(self, step: int) -> float:
        """Return the gradient norm above which the device skips the update of `step`; infinite unless spikes are to be skipped."""
        return self._limits(step).norm if self._train.on_spike == "skip" else math.inf

    def check(self, record: Mapping[str, Any]) -> str | None:
        """Decide about a step whose record was read. Returns a sentence if its update was skipped, and None if the step is good.

        All ranks have the same record. Raises Rollback, or NumericalFailure if the run must end. If only some replicas of the model skipped
        the update, their weights differ now; then a rollback replaces the skip.
        """
        step = record["step"]
        loss = record["loss"]
        norm = record["grad_norm"]
        skips = record.get("skipping_replicas", 0)
        verdict = judge(loss, norm, self._limits(step))
        if verdict == "nonfinite":
            check_received_rows()  # raises if rows beyond an exchange's bound caused this, because that has its own remedy
        if verdict == "good":
            self._history.append(GoodStep(step, loss, norm))
            return None
        action = self._action(verdict)
        cause = _cause(record, verdict)
        differ = 0 < skips < self._replicas
        if differ:
            cause += f"; {skips} of {self._replicas} replicas of the model skipped the update"
        if action in ("rollback", "rollback_skip") or (action == "skip" and differ):
            raise Rollback(step, cause, skips_samples=action == "rollback_skip")
        if action == "skip" and (skips or verdict == "spike"):
            return self._skip(step, cause) if skips else None
        applied = "was not applied" if skips else "was applied"
        applied = "differs between replicas" if differ else applied
        raise NumericalFailure(
            f"{cause}; the update {applied}. `meshwright data show {self._folder} --step {step}` names what the step "
            "read. A run that is started again reads the same samples, and this step fails again. To avoid it, "
            f"{_remedy(verdict, self._newest_checkpoint(), self._folder)}"
        )

    def count_rollback(self, target: int, cause: str) -> None:
        """Count a rollback to step `target`. Raises NumericalFailure after `MOST_ROLLBACKS` rollbacks to the same step."""
        self._rollbacks[target] += 1
        if self._rollbacks[target] > MOST_ROLLBACKS:
            raise NumericalFailure(f"{cause}; {MOST_ROLLBACKS} rollbacks to step {target} did not help")

    def skip(self, samples: SampleRange) -> None:
        """Leave out these samples from now on."""
        self.skip_samples = merge_skips(self.skip_samples, (samples,))

    def _limits(self, step: int) -> SpikeLimits:
        if self._train.on_spike == "ignore":
            return SpikeLimits()
        return spike_limits(self._history, step, self._train.spike_factor)

    def _action(self, verdict: Verdict) -> str:
        return self._train.on_nonfinite if verdict == "nonfinite" else self._train.on_spike

    def _skip(self, step: int, cause: str) -> str:
        self.skipped_steps.append(step)
        if self.skipped_steps[-MOST_SKIPS:] == list(range(step - MOST_SKIPS + 1, step + 1)):
            raise NumericalFailure(f"{cause}; the updates of {MOST_SKIPS} steps in a row were skipped")
        return f"{cause}; the update was skipped"


def _remedy(verdict: Verdict, newest_checkpoint: int, folder: str) -> str:
    """What to change after a failure. Without a checkpoint there is nothing to go back to, and the run starts anew."""
    slower = "with a lower train.learning_rate or a longer train.warmup_steps"
    if not newest_checkpoint:
        return f"begin again (--fresh) {slower}; there is no checkpoint yet, and checkpoint.every=N writes some to go back to"
    return (
        f"set train.on_{verdict}=rollback_skip to leave out these samples, or start another run from the checkpoint of step "
        f"{newest_checkpoint} (name=… model.init=checkpoint:{folder}) {slower}"
    )


def _cause(record: Mapping[str, Any], verdict: Verdict) -> str:
    values = f"loss {record['loss']:.6g}, gradient norm {record['grad_norm']:.6g}"
    if verdict == "spike":
        return f"step {record['step']}: spike ({values})"
    bad = [key for key in ("loss", "grad_norm") if not math.isfinite(record[key])]
    return f"step {record['step']}: {' and '.join(bad)} not finite ({values})"
