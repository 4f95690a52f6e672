"""The answers of a step, and the micro-batches that train on them."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from meshwright.data.conversations import best_fit
from meshwright.data.loader import MicroBatch
from meshwright.data.packing import document_sizes
from meshwright.rl.advantages import advantages, alike, without_verdict
from meshwright.rl.rewards import WITHOUT_REWARD, Outcome
from meshwright.spec.rl import RlSpec

COLUMNS = ("sampled", "advantages", "factors", "counts")


@dataclass
class SampledAnswer:
    """One answer to a prompt: its tokens, their log-probabilities, whether it was cut at the limit of new tokens, and its reward."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    truncated: bool
    reward: float | None = None
    outcome: Outcome = "no verdict"


def to_plain(groups: Sequence[Sequence[SampledAnswer]]) -> list[dict[str, Any]]:
    """The answers to each prompt as values for JSON. `from_plain` is the inverse."""
    return [
        {
            "prompt": group[0].prompt,
            "answers": [
                {
                    "tokens": _text(answer.tokens, "<i4"),
                    "logprobs": _text(answer.logprobs, "<f4"),
                    "truncated": answer.truncated,
                    "reward": answer.reward,
                    "outcome": answer.outcome,
                }
                for answer in group
            ],
        }
        for group in groups
    ]


def from_plain(groups: Sequence[Mapping[str, Any]]) -> list[list[SampledAnswer]]:
    """The inverse of `to_plain`."""
    return [
        [
            SampledAnswer(
                group["prompt"],
                _numbers(answer["tokens"], "<i4"),
                _numbers(answer["logprobs"], "<f4"),
                answer["truncated"],
                answer["reward"],
                answer["outcome"],
            )
            for answer in group["answers"]
        ]
        for group in groups
    ]


def _text(values: Sequence[float], dtype: str) -> str:
    """Numbers as base64 text. Written as digits, a long batch would be several times as long."""
    return base64.b64encode(np.asarray(values, dtype=dtype).tobytes()).decode()


def _numbers(text: str, dtype: str) -> list[Any]:
    """The inverse of `_text`."""
    return np.frombuffer(base64.b64decode(text), dtype=dtype).tolist()


@dataclass(frozen=True)
class RolloutBatch:
    """Training rows of `seq_len` tokens with the answers of a step. Each column is `(rows, seq)`; `figures` describe the step."""

    rows: dict[str, np.ndarray]
    figures: dict[str, float]

    def micro_batches(self, size: int, rank: int, ranks: int) -> list[MicroBatch]:
        """The micro-batches of data rank `rank`, at least one. All ranks have the same number, so some may be empty."""
        count = len(self.rows["tokens"])
        each = max(-(-count // (size * ranks)), 1) * size
        rows = {
            name: _with_rows(column, each * ranks, name)[rank * each : (rank + 1) * each]
            for name, column in self.rows.items()
        }
        return [
            _micro_batch({name: column[first : first + size] for name, column in rows.items()})
            for first in range(0, each, size)
        ]


def batch_of(groups: Sequence[Sequence[SampledAnswer]], rl: RlSpec, seq_len: int) -> RolloutBatch:
    """The rows and figures of a step's answers; `groups` has the answers to each prompt.

    Three kinds of answers are left out: all answers to a prompt if one of them has no verdict; answers with advantage 0, which have no
    gradient but still count in the divisor; and, with `train_truncated: false`, truncated answers.
    """
    judged = [
        group
        for group, missing in zip(groups, without_verdict([[a.reward for a in g] for g in groups]), strict=True)
        if not missing
    ]
    rewards = np.array([[answer.reward for answer in group] for group in judged], dtype=np.float64).reshape(
        -1, rl.samples
    )
    values = advantages(rewards, rl.policy)
    pairs = [
        (answer, float(value))
        for group, row in zip(judged, values, strict=True)
        for answer, value in zip(group, row, strict=True)
        if answer.tokens and (rl.train_truncated or not answer.truncated)
    ]
    trained = [(answer, value) for answer, value in pairs if value != 0]
    uncounted = sum(_counts(answer, rl) for answer, value in pairs if value == 0)
    rows = _packed(trained, rl, seq_len)
    if len(rows["tokens"]):
        rows["counts"][0, 0] += uncounted
    answers = [answer for group in groups for answer in group]
    lengths = np.array([len(answer.tokens) for answer in answers], dtype=np.float64)
    outcomes = {name: sum(answer.outcome == name for answer in answers) for name in WITHOUT_REWARD}
    logprobs = np.array([value for answer in answers for value in answer.logprobs] or [0.0])
    figures = {
        "reward": float(rewards.mean()) if rewards.size else float("nan"),
        "reward_deviation": float(rewards.std(1).mean()) if rewards.size else float("nan"),
        "answer_tokens": float(lengths.mean()) if len(lengths) else 0.0,
        "longest_answer": float(lengths.max(initial=0)),
        "truncated": float(np.mean([answer.truncated for answer in answers])) if answers else 0.0,
        "equal_prompts": float(alike(rewards).mean()) if rewards.size else 0.0,
        "left_out_prompts": float(len(groups) - len(judged)),
        "entropy": float(-logprobs.mean()),
    }
    return RolloutBatch(
        rows, figures | {f"rewards_{name.replace(' ', '_')}": float(count) for name, count in outcomes.items() if count}
    )


def _counts(answer: SampledAnswer, rl: RlSpec) -> float:
    """What an answer adds to the divisor of the loss."""
    return {"tokens": float(len(answer.tokens)), "sequences": 1.0, "length": float(rl.new_tokens)}[rl.counted]


def _packed(trained: Sequence[tuple[SampledAnswer, float]], rl: RlSpec, seq_len: int) -> dict[str, np.ndarray]:
    """Pack prompts with their answers into as few rows as best fit finds. Each input is the token before its target."""
    lengths = np.array([len(answer.prompt) + len(answer.tokens) - 1 for answer, _ in trained], dtype=np.int64)
    row_of = best_fit(lengths, seq_len)
    count = int(row_of.max(initial=-1)) + 1
    rows = _empty(count, seq_len)
    used = np.zeros(count, dtype=np.int64)
    documents = np.zeros(count, dtype=np.int64)
    for (answer, value), length, row in zip(trained, lengths.tolist(), row_of.tolist(), strict=True):
        start = int(used[row])
        here = slice(start, start + length)
        answered = slice(start + len(answer.prompt) - 1, start + length)
        whole = np.array([*answer.prompt, *answer.tokens], dtype=np.int64)
        size = len(answer.tokens)
        rows["tokens"][row, here] = whole[:-1]
        rows["positions"][row, here] = np.arange(length)
        rows["documents"][row, here] = documents[row]
        rows["targets"][row, answered] = answer.tokens
        rows["sampled"][row, answered] = answer.logprobs
        rows["advantages"][row, answered] = value
        rows["factors"][row, answered] = 1 / size if rl.counted == "sequences" else 1.0
        rows["counts"][row, answered] = _counts(answer, rl) / size
        used[row] += length
        documents[row] += 1
    for row in range(count):  # the unused end of a row is a document of its own
        rows["documents"][row, used[row] :] = documents[row]
        rows["positions"][row, used[row] :] = np.arange(seq_len - used[row])
    return rows


def _empty(rows: int, seq_len: int) -> dict[str, np.ndarray]:
    """Rows in which no token is trained on."""
    shape = (rows, seq_len)
    integers = {name: np.zeros(shape, dtype=np.int64) for name in ("tokens", "documents")}
    integers |= {"targets": np.full(shape, -1, dtype=np.int64), "positions": np.tile(np.arange(seq_len), (rows, 1))}
    return integers | {name: np.zeros(shape, dtype=np.float64 if name == "counts" else np.float32) for name in COLUMNS}


def _with_rows(column: np.ndarray, rows: int, name: str) -> np.ndarray:
    """The column, extended to `rows` rows with empty ones."""
    return np.concatenate([column, _empty(rows - len(column), column.shape[1])[name]])


def _micro_batch(rows: dict[str, np.ndarray]) -> MicroBatch:
    tensors = {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in rows.items()}
    return MicroBatch(
        tensors["tokens"],
        tensors["targets"],
        tensors["positions"],
        tensors["documents"],
        valid_tokens=int(np.count_nonzero(rows["targets"] >= 0)),
        attention_work=sum(int((np.bincount(row) ** 2).sum()) for row in rows["documents"]),
        document_sizes=document_sizes(rows["documents"]),
        columns={name: tensors[name] for name in COLUMNS},
    )
