"""Files about texts in a run's folder: tokenizer, chat template, special tokens, and the record of the text format."""

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


def write_text_files(run: RunSpec, source: DataSource, folder: Path) -> TextFormat | None:
    """Write the files about the texts of a run into its folder, and return their format; None if the corpus has no tokenizer.

    The corpus says what begins and ends a text. The folder of the initial weights adds further tokens that end a generated text, its
    special tokens and its sampling values. The chat template is that of the corpus if it has chats, else that of the weights.
    """
    corpus = source.tokenizer_file
    text = source.text_format
    if corpus is None or text is None:
        return None
    write_durable(folder / TOKENIZER, read_folder_file(corpus, TOKENIZER_BYTES))
    initial = initial_folder(run.model.init)
    # `copy_chat_files` leaves files that are there: the first folder that has one gives it.
    if source.has_chats:
        copy_chat_files(corpus.parent, folder)
    if initial is not None and (file := tokenizer_file(initial)) is not None:
        text = _continued(text, read_text_format(initial), corpus.parent, initial)
        copy_chat_files(file.parent, folder, leave_out=TEMPLATES if source.has_chats else ())
    copy_chat_files(corpus.parent, folder)
    text.write(folder)
    return text


def initial_folder(init: str) -> Path | None:
    """The folder of the initial weights, of a run its newest checkpoint; None for weights from scratch."""
    source, _, folder = init.partition(":")
    if not folder:
        return None
    return newest_checkpoint(Path(folder), contents=False) if source == "checkpoint" else Path(folder)


def keep_towers_of(init: str, folder: Path) -> None:
    """Keep in a run's folder what the folder of its initial weights has beside a text model, so that exports have it again.

    Raises OutOfResources if the disk is too full.
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
    """The format of a corpus for a model that goes on from weights with the format `initial`.

    Stops and the pad token of the weights are added; their notes and the difference between both formats become notes. With another
    tokenizer, which the check of the data reports, nothing of them applies.
    """
    if text.tokenizer != initial.tokenizer:
        return text
    difference = text.difference(initial, str(corpus), str(weights))
    more = [token for token in initial.stops if token not in text.stops]
    notes = [note for note in (*initial.notes, difference) if note and note not in text.notes]
    return replace(text, stops=(*text.stops, *more), pad=text.pad or initial.pad, notes=(*text.notes, *notes))
