"""The engine's process of a reward model: computes scores for sequences that the HTTP process sends.

Sequences that wait are scored together in one forward pass, within the limits of a batch.
"""

from __future__ import annotations

import math
import traceback
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.checkpoint.format.inventory import Chosen
from meshwright.serve.failures import DEVICE_ERRORS, ENGINE_FAILED, FAILED_STEPS, EngineLost, NotFinite
from meshwright.serve.figures import EngineFigures
from meshwright.server.packed_ids import ids_of_text
from meshwright.spec.engine import EngineSettings
from meshwright.spec.errors import BadInput, MeshwrightError

if TYPE_CHECKING:
    from meshwright.serve.reward_scorer import RewardScorer
    from meshwright.server.engine_process import EngineConnection
    from meshwright.server.engine_setup import EngineSetup

USED = ("sequences", "step_tokens", "context")
"""Settings of `EngineSettings` that a reward model uses: the maximum numbers of sequences and of tokens in a batch, and the
maximum number of tokens in a sequence.
"""


def has_score(folder: Path) -> bool:
    """Whether the model in a folder is a reward model. Raises BadInput if there is no model, Damaged if it is damaged."""
    from meshwright.checkpoint.models.stored_model import open_model

    with open_model(folder, contents=False) as stored:
        return stored.spec.head == "score"


def check_settings(setup: EngineSetup) -> None:
    """Raise BadInput for a setting that has no effect on a reward model."""
    wrong = {field.name: field.default for field in fields(EngineSettings) if field.name not in USED}
    found = next((name for name, default in wrong.items() if setup.options[name] != default), None)
    others = {"speculate": setup.speculate, "draft_model": setup.draft_model, "role": setup.transfer}
    found = found or next((name for name, value in others.items() if value), None)
    if found is not None:
        raise BadInput(f"{found}: expected none with a reward model, which gives scores and writes no text", key=found)


def open_setup(setup: EngineSetup, weights: Chosen | None) -> RewardScorer:
    """Return the scorer, on a GPU if there is one.

    `weights` is the checkpoint to load; None: the model in `setup.folder`.

    Raises BadInput for settings that have no effect on a reward model.
    """
    from meshwright.checkpoint.models.single_device import device_and_dtype
    from meshwright.serve.reward_scorer import open_scorer

    check_settings(setup)
    source = Path(setup.folder) if weights is None else weights.path
    adapter = None if setup.adapter is None else Path(setup.adapter)
    return open_scorer(source, *device_and_dtype(), adapter=adapter, contents=weights is None)


class ScoreLoop:
    """Computes scores until the HTTP process closes the socket. A forward pass that fails ends only its own sequences."""

    def __init__(self, scorer: RewardScorer, connection: EngineConnection, options: dict[str, Any]) -> None:
        """`options` has the fields of `EngineSettings` that are in `USED`."""
        self._scorer = scorer
        self._connection = connection
        self._most_texts = options["sequences"]
        self._most_tokens = options["step_tokens"]
        self._waiting: dict[int, list[int]] = {}
        """The tokens of each waiting sequence by its id, the longest-waiting first."""
        self._paused = False
        self._failed_steps = 0

    def run(self) -> None:
        """Receive messages and score the waiting sequences.

        Raises EngineLost if the device cannot be used any more, or if `FAILED_STEPS` forward passes in a row fail.
        """
        with suppress(EOFError, ConnectionError):
            while True:
                for message in self._connection.receive(wait=not self._busy):
                    self._take(message)
                if self._busy:
                    self._score_some()

    @property
    def _busy(self) -> bool:
        return bool(self._waiting) and not self._paused

    def _take(self, message: dict[str, Any]) -> None:
        """Handle one message of the HTTP process."""
        for key, value in message.items():
            if key == "submit":
                self._waiting.update(dict.fromkeys(value["ids"], ids_of_text(value["tokens"])))
            elif key == "abort":
                for id in value:
                    self._waiting.pop(id, None)
            elif key == "pause":
                self._paused = value
            elif key == "load":
                self._load(value)

    def _score_some(self) -> None:
        """Score the sequences that have waited longest, as many as fit into one batch."""
        ids = list[int]()
        tokens = 0
        for id, text in self._waiting.items():
            if ids and (len(ids) == self._most_texts or tokens + len(text) > self._most_tokens):
                break
            ids.append(id)
            tokens += len(text)
        texts = [self._waiting.pop(id) for id in ids]
        try:
            entries = [_entry(id, score) for id, score in zip(ids, self._scorer.score(texts), strict=True)]
            self._failed_steps = 0
        except ValueError as error:  # a sequence cannot be scored, for example because it is too long
            entries = _failed(ids, f"{error}", "request_failed")
        except Exception as error:  # the process goes on after a failed forward pass
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"
            self._failed_steps += 1
            if self._failed_steps == FAILED_STEPS or any(text in message for text in DEVICE_ERRORS):
                raise EngineLost(f"the reward model cannot go on: {message}") from error
            entries = _failed(ids, message, ENGINE_FAILED)
        self._connection.send({"step": entries, "figures": EngineFigures(waiting=len(self._waiting))})

    def _load(self, folder: str) -> None:
        """Load newer weights, and tell the HTTP process whether that succeeded."""
        error = None
        try:
            self._scorer.load_weights(Path(folder))
        except MeshwrightError as refusal:
            error = str(refusal)
        self._connection.send({"loaded": folder, "error": error})


def _entry(id: int, score: float) -> list[Any]:
    """Return the entry of a sequence in the message `step`."""
    if math.isfinite(score):
        return [id, [], {"reason": "stop", "score": score}]
    return _failed([id], str(NotFinite()), NotFinite.code)[0]


def _failed(ids: list[int], message: str, code: str) -> list[list[Any]]:
    return [[id, [], {"reason": "failed", "error": message, "code": code}] for id in ids]


def serve_scores(setup: EngineSetup, connection: EngineConnection, weights: Chosen | None) -> None:
    """Load the reward model, tell the HTTP process that it is ready, and run until that process closes the socket."""
    scorer = open_setup(setup, weights)
    longest = scorer.spec.max_seq_len
    if (context := setup.options["context"] or longest) > longest:
        raise BadInput(f"context: expected at most {longest}, the model's context, got {context}", key="context")
    sizes = {"context": context, "vocab": scorer.spec.vocab_size, "sequences": setup.options["sequences"], "scores": 1}
    facts, warning = ({}, None) if weights is None else (weights.facts(), weights.warning)
    connection.send({"ready": sizes, "weights": facts, "warning": warning})
    ScoreLoop(scorer, connection, setup.options).run()
