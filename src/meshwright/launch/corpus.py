"""Compares a run's corpus with the tokenizer of its initial weights, and with the corpus that its checkpoints record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.checkpoint.format.manifest import STATE, read_manifest
from meshwright.checkpoint.format.plain_files import decode_state
from meshwright.checkpoint.format.verify import list_checkpoints, read_verified
from meshwright.data.source import DataSource
from meshwright.data.text_format import TOKENIZER, different_parts, tokenizer_file
from meshwright.data.vocabulary import Vocabulary, read_vocabulary
from meshwright.launch.text_files import initial_folder
from meshwright.policies.skipped_samples import SampleRange, merge_skips
from meshwright.spec.errors import BadInput, Damaged
from meshwright.spec.folder_files import TOKENIZER_BYTES, read_folder_file
from meshwright.spec.run import Assignment, RunSpec

STATE_BYTES = 256 << 20
"""Largest state file of a checkpoint that is read, in bytes."""
Note = Callable[[str], None]
"""Receives a line for the user."""


def check_tokenizer(
    run: RunSpec, source: DataSource, note: Note, key: str = "model.init", init: str | None = None
) -> None:
    """Raise BadInput if the initial weights were trained with another tokenizer than the corpus.

    `init` names the weights and `key` is its setting, for messages; without `init` they are `model.init`. With
    `data.tokenizer_mismatch=accept` the difference is only reported to `note`.
    """
    init = init or run.model.init
    initial_vocabulary = _vocabulary_of(init)
    corpus_vocabulary = read_vocabulary(source.tokenizer_file.parent) if source.tokenizer_file else None
    if initial_vocabulary is None or corpus_vocabulary is None:
        owner = f"{key} {init}" if initial_vocabulary is None else f"the corpus {', '.join(run.data.mix)}"
        note(f"{owner} has no tokenizer.json, so the tokenizers of weights and corpus are not compared")
        return
    same_vocabulary = initial_vocabulary.digest == corpus_vocabulary.digest
    files = (initial_vocabulary.file, corpus_vocabulary.file)
    parts = different_parts(*map(_content, files)) if all(file.name == TOKENIZER for file in files) else []
    if same_vocabulary and not parts:
        return
    words = (
        f"their tokens are the same, but not their {', '.join(parts)}"
        if same_vocabulary
        else initial_vocabulary.difference(corpus_vocabulary)
    )
    difference = (
        f"{key} {init}: tokenizer {initial_vocabulary.file} (digest {initial_vocabulary.digest}) and the corpus' "
        f"{corpus_vocabulary.file} (digest {corpus_vocabulary.digest}) differ: {words}"
    )
    if run.data.tokenizer_mismatch == "refuse":
        raise BadInput(
            f"{difference}; prepare the corpus with --tokenizer {initial_vocabulary.file.parent}, or set data.tokenizer_mismatch=accept"
        )
    note(f"{difference}; data.tokenizer_mismatch is accept")


def check_unchanged(run: RunSpec, folder: Path, source: DataSource, note: Note) -> None:
    """Raise BadInput if the corpus differs from the one that the run's newest checkpoint records.

    With `data.changed=accept` the difference is only reported to `note`.
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
        keys = ("content", "tokenizer", "packing", "text", "texts", "lanes")
        changed = [key for key in keys if now.get(key) != recorded_digest.get(key)]
        if "tokenizer" in changed and _same_tokenizer(recorded_digest, now):
            changed.remove("tokenizer")
        if not changed:
            continue
        digests = ", ".join(f"{key} (digest {recorded_digest.get(key)} then, {now.get(key)} now)" for key in changed)
        difference = f"data.mix: {name}: changed since {checkpoint}: {digests}"
        if run.data.changed == "refuse":
            raise BadInput(
                f"{difference}; put the earlier corpus back, or set data.changed=accept to go on with this one"
            )
        note(f"{difference}; data.changed is accept")


def _same_tokenizer(recorded: dict[str, Any], now: dict[str, str | None]) -> bool:
    """Whether two tokenizer files with different digests describe the same tokenizer, in another layout."""
    identity = now.get("tokenizer_identity")
    return identity is not None and identity == recorded.get("tokenizer_identity")


def _content(file: Path) -> bytes:
    return read_folder_file(file, TOKENIZER_BYTES)


def _moved(recorded: dict[str, Any], now: dict[str, str | None]) -> dict[str, Any]:
    """Return the recorded entry of a corpus with the same content, which had another path then; empty if there is none."""
    return next((entry for entry in recorded.values() if entry.get("content") == now["content"]), {})


def _vocabulary_of(init: str) -> Vocabulary | None:
    """Return the vocabulary of the weights that `init` names; None if their folder has no tokenizer."""
    folder = initial_folder(init)
    if folder is None:
        return None
    file = tokenizer_file(folder)
    return read_vocabulary(folder if file is None else file.parent)


def recorded_corpus(folder: Path) -> tuple[Path | None, dict[str, Any] | None]:
    """Return the newest checkpoint whose state can be read, and its record of the corpus. Each is None if missing."""
    path, state = _newest_state(folder)
    return path, state.get("data")


def skipped_samples(folder: Path) -> tuple[SampleRange, ...]:
    """Return the samples that the run in `folder` skips, from its assignment and its newest checkpoint."""
    file = folder / "assignment.json"
    assigned = Assignment.read(file).skip_samples if file.is_file() else ()
    return merge_skips(assigned, recorded_skips(folder))


def recorded_skips(folder: Path) -> tuple[SampleRange, ...]:
    """Return the samples that the run's newest checkpoint says to skip."""
    return merge_skips(_newest_state(folder)[1].get("skip_samples", ()), ())


def _newest_state(folder: Path) -> tuple[Path | None, dict[str, Any]]:
    """Return the newest checkpoint whose state can be read, and that state; (None, {}) if there is none."""
    for entry in reversed(list_checkpoints(folder, contents=False)):
        if not entry["ok"]:
            continue
        path = Path(entry["path"])
        try:
            state = read_verified(path, read_manifest(path), STATE, STATE_BYTES)
            return path, decode_state(state, path / STATE)
        except Damaged:  # not reported here: the ranks report it when they load an older checkpoint
            continue
    return None, {}
