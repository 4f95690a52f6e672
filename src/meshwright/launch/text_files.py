"""Files about text in a run's folder: tokenizer, chat template, special tokens, and the record of the text format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshwright.checkpoint.format.inventory import newest_checkpoint
from meshwright.data.chat_template import PROCESSOR_TEMPLATE, TEMPLATE, TOOL_TEMPLATE, copy_chat_files
from meshwright.data.source import DataSource
from meshwright.data.text_format import TOKENIZER, TextFormat, read_text_format, tokenizer_file
from meshwright.durable.writes import write_durable
from meshwright.families.folder import folder_nesting
from meshwright.families.text_part import TOWERS
from meshwright.spec.folder_files import TOKENIZER_BYTES, read_folder_file
from meshwright.spec.run import RunSpec

TEMPLATES = (TEMPLATE, TOOL_TEMPLATE, PROCESSOR_TEMPLATE)
"""Names of files with chat templates."""


def write_text_files(run: RunSpec, source: DataSource, folder: Path) -> TextFormat | None:
    """Write the files about text into a run's folder, and return the text format; None if the corpus has no tokenizer.

    The corpus determines which tokens begin and end a text. The folder of the initial weights adds further end tokens,
    its special tokens and its sampling values. The chat template comes from the corpus if the corpus has chats, else
    from the weights.
    """
    corpus = source.tokenizer_file
    text = source.text_format
    if corpus is None or text is None:
        return None
    write_durable(folder / TOKENIZER, read_folder_file(corpus, TOKENIZER_BYTES))
    initial = initial_folder(run.model.init)
    # `copy_chat_files` does not replace files, so a file comes from the first folder that has it.
    if source.has_chats:
        copy_chat_files(corpus.parent, folder)
    if initial is not None and (file := tokenizer_file(initial)) is not None:
        text = _continued(text, read_text_format(initial), corpus.parent, initial)
        copy_chat_files(file.parent, folder, leave_out=TEMPLATES if source.has_chats else ())
    copy_chat_files(corpus.parent, folder)
    text.write(folder)
    return text


def initial_folder(init: str) -> Path | None:
    """Return the folder of the initial weights; for a run, its newest checkpoint. None if the model starts from scratch."""
    source, _, folder = init.partition(":")
    if not folder:
        return None
    return newest_checkpoint(Path(folder), contents=False) if source == "checkpoint" else Path(folder)


def keep_towers_of(init: str, folder: Path) -> None:
    """Copy the parts of the initial model other than its text model, such as vision towers, into the run's folder.

    Exports of the run contain these parts again. Raises OutOfResources if the disk is full.
    """
    source, _, initial = init.partition(":")
    if (folder / TOWERS).exists() or not initial:
        return
    if source == "hf" and folder_nesting(Path(initial)) is not None:
        from meshwright.checkpoint.models.hf import import_hf  # needs torch
        from meshwright.checkpoint.models.towers import keep_towers

        _, weights = import_hf(Path(initial))
        keep_towers(Path(initial), weights.others, weights.other, folder)
    elif source == "checkpoint" and (found := initial_folder(init)) is not None:
        from meshwright.checkpoint.models.towers import copy_towers

        copy_towers(found, folder)


def _continued(text: TextFormat, initial: TextFormat, corpus: Path, weights: Path) -> TextFormat:
    """Return the text format of a run that trains weights further: the corpus's format with additions of the weights'
    format.

    `text` is the format of `corpus`, `initial` that of the folder `weights`. The weights add their end tokens and pad
    token. Their notes, and the difference between both formats, become notes. If the tokenizers differ, nothing is
    added; the check of the data reports that difference.
    """
    if text.tokenizer != initial.tokenizer:
        return text
    difference = text.difference(initial, str(corpus), str(weights))
    more = [token for token in initial.stops if token not in text.stops]
    notes = [note for note in (*initial.notes, difference) if note and note not in text.notes]
    return replace(text, stops=(*text.stops, *more), pad=text.pad or initial.pad, notes=(*text.notes, *notes))
