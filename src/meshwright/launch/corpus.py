"""Compares a run's corpus with the tokenizer of its initial weights and with the data of its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.checkpoint.inventory import newest_checkpoint
from meshwright.checkpoint.manifest import STATE, read_manifest
from meshwright.checkpoint.state import decode_state
from meshwright.checkpoint.verify import list_checkpoints, read_verified
from meshwright.data.source import DataSource
from meshwright.data.vocabulary import Vocabulary, read_vocabulary
from meshwright.policies.skipped_samples import SampleRange, merge_skips
from meshwright.spec.errors import BadInput, Damaged
from meshwright.spec.run import Assignment, RunSpec

STATE_BYTES = 256 << 20
"""Largest state file of a checkpoint that is read."""
Note = Callable[[str], None]


def check_tokenizer(run: RunSpec, source: DataSource, note: Note) -> None:
    """Raise BadInput if the initial weights were trained with another tokenizer than the corpus.

    `data.tokenizer_mismatch=accept` reports it instead.
    """
    init = run.model.init
    initial_vocabulary = _vocabulary_of(init)
    corpus_vocabulary = read_vocabulary(source.tokenizer_file.parent) if source.tokenizer_file else None
    if initial_vocabulary is None or corpus_vocabulary is None:
        owner = f"model.init {init}" if initial_vocabulary is None else f"the corpus {', '.join(run.data.mix)}"
        note(f"{owner} has no tokenizer.json, so the tokenizers of weights and corpus are not compared")
        return
    if initial_vocabulary.digest == corpus_vocabulary.digest:
        return
    difference = (
        f"model.init {init}: tokenizer {initial_vocabulary.file} (digest {initial_vocabulary.digest}) and the corpus' "
        f"{corpus_vocabulary.file} (digest {corpus_vocabulary.digest}) differ: {initial_vocabulary.difference(corpus_vocabulary)}"
    )
    if run.data.tokenizer_mismatch == "refuse":
        raise BadInput(
            f"{difference}; prepare the corpus with --tokenizer {initial_vocabulary.file.parent}, or set data.tokenizer_mismatch=accept"
        )
    note(f"{difference}; data.tokenizer_mismatch is accept")


def check_unchanged(run: RunSpec, folder: Path, source: DataSource, note: Note) -> None:
    """Raise BadInput if the corpus differs from the data of the run's newest checkpoint.

    `data.changed=accept` reports it instead.
    """
    checkpoint, recorded = recorded_corpus(folder)
    if checkpoint is None:
        return
    if recorded is None:
        note(
            f"{checkpoint} has no record of its corpus, so a change since then is not found; the next checkpoint has one"
        )
        return
    for name, now in source.record().items():
        recorded_digest = recorded.get(name) or _moved(recorded, now)
        changed = [key for key in ("content", "tokenizer", "packing") if now.get(key) != recorded_digest.get(key)]
        if not changed:
            continue
        digests = ", ".join(f"{key} (digest {recorded_digest.get(key)} then, {now.get(key)} now)" for key in changed)
        difference = f"data.mix: {name}: changed since {checkpoint}: {digests}"
        if run.data.changed == "refuse":
            raise BadInput(
                f"{difference}; put the earlier corpus back, or set data.changed=accept to go on with this one"
            )
        note(f"{difference}; data.changed is accept")


def _moved(recorded: dict[str, Any], now: dict[str, str | None]) -> dict[str, Any]:
    """The record of the same content under another path; empty if none has it, or if the order followed from the path."""
    return next((entry for entry in recorded.values() if "order" in entry and entry["content"] == now["content"]), {})


def _vocabulary_of(init: str) -> Vocabulary | None:
    """The vocabulary of the weights that `model.init` names; None if their folder has no tokenizer."""
    source, _, folder = init.partition(":")
    if source == "checkpoint":
        return read_vocabulary(newest_checkpoint(Path(folder), contents=False).parent.parent)
    return read_vocabulary(Path(folder))


def recorded_corpus(folder: Path) -> tuple[Path | None, dict[str, Any] | None]:
    """The newest checkpoint of a run's folder with a readable state, and its record of the corpus."""
    path, state = _newest_state(folder)
    return path, state.get("data")


def skipped_samples(folder: Path) -> tuple[SampleRange, ...]:
    """The samples that the run in `folder` leaves out, from its assignment and its newest checkpoint."""
    file = folder / "assignment.json"
    assigned = Assignment.read(file).skip_samples if file.is_file() else ()
    return merge_skips(assigned, recorded_skips(folder))


def recorded_skips(folder: Path) -> tuple[SampleRange, ...]:
    """The samples that the run's newest checkpoint leaves out."""
    return merge_skips(_newest_state(folder)[1].get("skip_samples", ()), ())


def _newest_state(folder: Path) -> tuple[Path | None, dict[str, Any]]:
    """The newest checkpoint with a readable state, and this state; None and no values without any."""
    for entry in reversed(list_checkpoints(folder, contents=False)):
        if not entry["ok"]:
            continue
        path = Path(entry["path"])
        try:
            state = read_verified(path, read_manifest(path), STATE, STATE_BYTES)
            return path, decode_state(state, path / STATE)
        except Damaged:  # the ranks report it and load an older checkpoint
            continue
    return None, {}
