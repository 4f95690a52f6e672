"""metrics.jsonl, a file with one JSON object per line. All other views of a run are made from it.

A line has a `kind`: "step", "validation", "event", "prediction_check", "start" or "answers". Steps count from 1. A
number that is not finite is written as null, and its key is listed under `nonfinite`, so that every line is valid JSON.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.durable.lease import check_lease
from meshwright.durable.writes import sync_open_file, write_durable
from meshwright.spec.errors import Damaged
from meshwright.spec.failures import MISSING_PATH_ERRNOS, as_meshwright_error, missing_path_error
from meshwright.spec.run import Lease

log = logging.getLogger("meshwright")

KEPT_BYTES = 64 << 20
"""Most bytes of lines that are kept in memory while the disk rejects them. That is enough for 100,000 steps."""

STEP_KEYS: dict[str, str] = {
    "step": "optimizer steps done, this one included",
    "loss": "mean loss of the step's valid tokens, nat",
    "tokens": "valid tokens trained on since the run began, this step included",
    "tokens_per_second": "all ranks together",
    "mfu": "model FLOPs utilisation, attention counted without its masked half; null when the chip's peak is not known",
    "grad_norm": "before clipping",
    "lr": "learning rate of the step",
    "memory_peak_bytes": "most memory rank 0 has held so far: reserved by torch on a GPU, resident on a CPU",
    "step_seconds": "from the step's begin to its end",
}
"""Keys that every step line has, with their meanings."""

OPTIONAL_STEP_KEYS: dict[str, str] = {
    "mfu_full": "the same with the full attention square (torchtitan's convention)",
    "tokens_per_second_per_gpu": "tokens_per_second over ranks",
    "token_sum": "sum of all token ids of the step: equal for two runs exactly when they read the same samples",
    "memory_allocated_peak_bytes": "the part of memory_peak_bytes that tensors took, on a GPU",
    "counted_wire_bytes": "bytes that one host's emulated nodes sent one another, as its kernel counts them",
    "predicted_wire_bytes": "the same as predicted from the plan (costs.traffic)",
    "prediction_loss": "loss of the modules that predict further tokens before its weight, mean over modules, nat",
    "balance_loss": "MoE models: balance loss before its weight, mean over sequences and layers; 1 is even",
    "expert_load": "MoE models: tokens of the busiest expert over the mean of its layer, where that is most; 1 is even",
    "z_loss": "with train.z_loss: mean squared log-sum-exp of the logits, before its weight",
    "router_z_loss": "with train.router_z_loss: the same of router logits, mean over tokens and layers",
    "expert_loads": "MoE models: tokens of each expert by layer, every step, or every tenth if these are over 1,024 numbers",
    "samples": "with data.packing none: samples of the step",
    "sample_lengths": "with data.packing none: lengths of the step's samples, in the first step and every 50th after it",
    "padding": "with data.packing none: share of all ranks' tokens that is padding; tokens_per_second and MFU leave it out",
    "epochs": "passes over each source of data.mix until now, samples that were left out included",
    "data_wait_seconds": "time the loop waited for its batch",
    "phases": "seconds by phase (events.span.Phase)",
    "reward": "with rl: mean reward of the step's answers, prompts without a verdict left out",
    "reward_deviation": "with rl: deviation of the rewards of one prompt's answers, mean over prompts",
    "answer_tokens": "with rl: mean length of the answers",
    "longest_answer": "with rl: length of the longest answer",
    "truncated": "with rl: share of answers without an end within rl.new_tokens",
    "equal_prompts": "with rl: share of prompts whose answers all have the same reward, which have no gradient",
    "left_out_prompts": "with rl: prompts of which an answer got no verdict",
    "rewards_no_verdict": "with rl: answers for which the reward function returned None; absent if there are none",
    "rewards_error": "with rl: answers for which it raised, or returned no number; absent if there are none",
    "rewards_timeout": "with rl: answers for which it took too long, or its process ended; absent if there are none",
    "entropy": "with rl: mean of -log p of the sampled tokens, nat",
    "unequal_logprobs": "with rl: share of the trained tokens whose log-probability is not the engine's, bit for bit",
    "logprob_difference": "with rl: mean difference of the two log-probabilities, nat",
    "largest_logprob_difference": "with rl: the largest difference, nat",
    "engine_kl": "with rl: estimated divergence of the trainer's probabilities from the engine's, nat per token",
    "clipped": "with rl: share of the trained tokens whose gradient the clip has removed, with cispo limited",
    "handover_seconds": "with rl: from the last update to the engine's first step",
    "rollout_seconds": "with rl: sampling the answers, on the slowest rank",
    "rewards_seconds": "with rl: waiting for rewards after the last answer",
    "pairs": "with preference: pairs of the step",
    "answers": "with preference.loss kto: answers of the step",
    "margin": "with preference: mean reward of chosen answers less that of rejected ones; rewards of a reward model are its scores",
    "accuracy": "with preference: share of pairs whose chosen answer has the higher reward, equal ones half; with kto of right answers",
    "likelier": "with preference: share of pairs whose chosen answer has the higher log-probability per token",
    "chosen_reward": "with preference: mean reward of chosen answers; docs/how-to/preferences.md has that of each loss",
    "rejected_reward": "with preference: the same of rejected answers",
    "chosen_tokens": "with preference: mean length of chosen answers",
    "rejected_tokens": "with preference: mean length of rejected answers",
    "reference_distance": "with preference: mean difference of answers' log-probabilities from the reference's, nat per token",
    "reference_kl": "with preference.loss kto: estimated divergence from the reference, nat per answer",
    "preferences_by_source": "with preference and several sources: the same figures of each",
    "update_skipped": "true if the update was left out (train.on_nonfinite, train.on_spike); absent otherwise",
    "skipping_replicas": "replicas of the model that left the update out, beside update_skipped",
}
"""Keys that a step line may have, with their meanings."""


class MetricsWriter:
    """Appends lines to metrics.jsonl, each at once.

    A resume first removes lines of earlier attempts after step `resume_from`.

    A power cut loses the lines since the last `sync`. It may leave bytes of 0 in their place, which readers skip.

    If the disk rejects a line, it is kept in memory and written as soon as possible; the log says so once. If more than
    `KEPT_BYTES` are kept, every `write_` method raises the error of `as_meshwright_error`. The methods also raise an
    error if the file was deleted.

    `lease` is the lease of the run's folder. With it, the methods raise BadInput if another start has taken over the
    folder and replaced the file.
    """

    def __init__(self, path: Path, resume_from: int = 0, lease: Lease | None = None) -> None:
        self._path = path
        self._lease = lease
        if path.exists():
            _truncate(path, resume_from)
        self._file = path.open("ab", buffering=0)
        self._unwritten: deque[bytes] = deque()
        self._unwritten_bytes = 0

    def write_step(self, record: Mapping[str, Any]) -> None:
        """Write a training step. Raises ValueError if a key of `STEP_KEYS` is missing."""
        missing = [key for key in STEP_KEYS if key not in record]
        if missing:
            raise ValueError(f"a step line needs {', '.join(missing)}")
        self._append({"kind": "step", **record})

    def write_validation(self, step: int, loss: float, **details: Any) -> None:
        """Write the mean validation loss after `step`, in nats per token.

        For a mixture, `by_source` has the loss of each source.
        """
        self._append({"kind": "validation", "step": step, "loss": loss, **details})

    def write_event(self, step: int, text: str) -> None:
        """Write an event for the report, for example that the run has resumed or a checkpoint was written."""
        self._append({"kind": "event", "step": step, "text": text})

    def write_start(self, step: int, phases: Mapping[str, float], compiler: Mapping[str, float]) -> None:
        """Write how a start went that continued after `step`: seconds by phase (`events.start`), and the compiler's work."""
        seconds = sum(phases.values())
        self._append({"kind": "start", "step": step, "seconds": seconds, "phases": phases, "compiler": compiler})

    def write_check(self, step: int, figures: Mapping[str, Any]) -> None:
        """Write measured and predicted figures (`observe.prediction_check`) after `step`."""
        self._append({"kind": "prediction_check", "step": step, **figures})

    def write_answers(self, step: int, details: Mapping[str, Any]) -> None:
        """Write, for RL, the lengths of a step's answers and the answers to one question with `answer`, `reward` and
        `outcome`.
        """
        self._append({"kind": "answers", "step": step, **details})

    def sync(self, *, waits: bool = False) -> None:
        """Flush all lines to the disk, so that a resume from this step's checkpoint has them.

        With `waits` it is done at return.
        """
        descriptor = os.dup(self._file.fileno())
        if waits:
            _sync(descriptor, self._path)
            return
        threading.Thread(target=_sync, args=(descriptor, self._path), name="metrics", daemon=True).start()

    def rewind(self, step: int) -> None:
        """Remove the lines after `step`, because the run continues from that step again."""
        self._file.close()
        _truncate(self._path, step)
        self._file = self._path.open("ab", buffering=0)
        unwritten = self._unwritten
        self._unwritten = deque()
        self._unwritten_bytes = 0
        for line in unwritten:
            if json.loads(line)["step"] <= step:
                self._keep(line)

    def close(self) -> None:
        """Write the lines that are still in memory, and close the file. The log says if lines are lost."""
        with suppress(OSError):
            self._write_kept()
        if self._unwritten:
            log.warning("%s: the last %d lines could not be written", self._path, len(self._unwritten))
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, record: Mapping[str, Any]) -> None:
        """Write a line, after the lines that could not be written before. If the disk rejects it, keep it in memory."""
        unwritten = len(self._unwritten)
        self._keep(to_line(record).encode())
        try:
            if not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                if self._lease is not None:
                    check_lease(self._path.parent, self._lease)
                raise missing_path_error(self._path)
            self._write_kept()
        except OSError as error:
            error.filename = str(self._path)
            if error.errno in MISSING_PATH_ERRNOS:
                raise missing_path_error(self._path) from error
            if self._unwritten_bytes > KEPT_BYTES:
                raise as_meshwright_error(error, f"adding a line after {KEPT_BYTES >> 20} MiB of others") from error
            if not unwritten:
                log.warning("%s: %s; lines are kept in memory until it can be written", self._path, error.strerror)
            return
        if unwritten:
            log.warning("%s can be written again, with the %d lines that were kept", self._path, unwritten)

    def _write_kept(self) -> None:
        """Write the kept lines, the oldest first.

        If that raises OSError, the file ends with the last line that fitted completely.
        """
        while self._unwritten:
            end = os.fstat(self._file.fileno()).st_size
            content = self._unwritten[0]
            try:
                while content:
                    content = content[self._file.write(content) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._file.fileno(), end)
                raise
            self._unwritten_bytes -= len(self._unwritten.popleft())

    def _keep(self, line: bytes) -> None:
        self._unwritten.append(line)
        self._unwritten_bytes += len(line)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all lines, the oldest first.

    Damaged lines at the end are left out, with a warning; a crash may leave such lines.

    Raises Damaged if a damaged line is followed by a good one.
    """
    records, damaged = scan_metrics(path)
    if damaged and damaged[0] > len(records):
        log.warning("%s: damaged from line %d on, as after a power cut; the lines before are used", path, damaged[0])
    elif damaged:
        raise Damaged(f"{path}:{damaged[0]}: expected a JSON object; remove the line, or restore the file")
    return records


def scan_metrics(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Return (valid records, numbers of damaged lines, from 1).

    A last line without a line break, as a crash leaves it, is in neither list. It counts as damaged if it has bytes of
    0.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    damaged = []
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is not None:
            records.append(record)
        elif line.strip() and (number < len(lines) or "\0" in line):
            damaged.append(number)
    return records, damaged


def to_line(record: Mapping[str, Any]) -> str:
    """Return a record as a line of valid JSON. Numbers that are not finite become null and are listed under `nonfinite`."""
    nonfinite: dict[str, str] = {}
    finite = _finite(record, "", nonfinite)
    if nonfinite:
        finite["nonfinite"] = nonfinite
    return json.dumps(finite, allow_nan=False, separators=(", ", ": ")) + "\n"


def _finite(value: Any, key_path: str, nonfinite: dict[str, str]) -> Any:
    """Return `value` with None in place of numbers that are not finite, whose texts are added to `nonfinite` by dotted
    key.

    Example: {"a": {"b": NaN}} becomes {"a": {"b": None}}, and `nonfinite` gets {"a.b": "nan"}.
    """
    if isinstance(value, Mapping):
        return {
            key: _finite(item, f"{key_path}.{key}" if key_path else str(key), nonfinite) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_finite(item, f"{key_path}.{index}", nonfinite) for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite[key_path] = str(value)
        return None
    return value


def _parse(line: str) -> dict[str, Any] | None:
    """Return the record of a line; None unless it is a JSON object with a whole number `step`."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    complete = isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if complete else None


def _truncate(path: Path, resume_from: int) -> None:
    """Keep the lines of the first `resume_from` steps; none if it is 0. The file is replaced atomically."""
    records, damaged = scan_metrics(path)
    if damaged:
        log.warning("%s: %d damaged lines were removed, the first was line %d", path, len(damaged), damaged[0])
    unwritten = [record for record in records if resume_from and record["step"] <= resume_from]
    _replace(path, map(to_line, unwritten))


def _sync(descriptor: int, path: Path) -> None:
    """Flush and close a file. A failure is only logged; later lines that cannot be written are reported."""
    try:
        sync_open_file(descriptor, path)
    except OSError as error:
        log.warning("%s is not flushed to the disk: %s", path, error)
    finally:
        os.close(descriptor)


def _replace(path: Path, lines: Iterable[str]) -> None:
    write_durable(path, lines)
