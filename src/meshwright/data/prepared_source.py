"""A prepared directory, divided into the windows that a run reads."""

from __future__ import annotations

import mmap
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.content_order import ContentOrder
from meshwright.data.conversations import ConversationWindows, PackingCounts
from meshwright.data.documents import DocumentSamples
from meshwright.data.manifest import OpenShard, PreparedDirectory, documents_path
from meshwright.data.packing import StreamWindows, TokenStream
from meshwright.data.preference_windows import PreferenceWindows, TooLong
from meshwright.data.single_conversations import SingleConversations
from meshwright.spec.errors import BadInput, Damaged
from meshwright.spec.folder_files import parse_json
from meshwright.spec.job import Packing
from meshwright.spec.preference import PreferenceSpec


class CorpusSource:
    """A prepared directory as windows: whole conversations for chats, parts of a stream for text, or documents with `packing` none.

    Documents are in the order of the shards or, with `by_content`, in that of `ContentOrder`. Raises BadInput if there is no window, and
    for chats with `packing` none.
    """

    def __init__(
        self,
        name: str,
        directory: PreparedDirectory,
        seq_len: int,
        packing: Packing = "stream",
        *,
        by_content: bool = False,
        conversations: bool = False,
        preference: PreferenceSpec | None = None,
    ) -> None:
        self.name = name
        self.directory = directory
        self.seq_len = seq_len
        _check_kind(directory, preference)
        files = [shard.file for shard in directory.shards]
        weights = [shard.weights for shard in directory.shards]
        self.stream = (ContentOrder if by_content else TokenStream)(files, weights)
        if conversations:
            self.layout = SingleConversations(self.stream)
        elif preference is None:
            self.layout = self._layout(packing)
        else:
            self.layout = self._answers(preference)
        self.reference: np.ndarray | None = None
        """For preferences: log-probability of each answer under the reference model, `(documents,)` float64; NaN if it is not known."""
        self.mismatched_reference: np.ndarray | None = None
        """The same for the answer that `PreferenceWindows.mismatched` puts in place of the document's answer."""
        self.scores = self._scores() if preference is not None and preference.score_margin else None
        """For a reward model that reads scores from the data: the score of each answer, `(documents,)` float64; 0 without a score."""
        self.windows = self.layout.count
        if isinstance(self.layout, SingleConversations):
            if self.windows == 0:
                raise BadInput(f"{directory.path}: has no chats, whose questions rl needs; prepare chats with answers")
            if (longest := self.layout.longest_question) >= seq_len:
                raise BadInput(
                    f"{directory.path}: has a question of {longest} tokens, train.seq_len is {seq_len}; raise it, as it has the answer too",
                    key="train.seq_len",
                )
        if self.windows == 0:
            if preference is not None:
                raise BadInput(
                    f"{directory.path}: no pair or answer fits in train.seq_len {seq_len}; raise it",
                    key="train.seq_len",
                )
            if self.packing is not None:
                few = f"no chat has a token to train on in its first train.seq_len {seq_len}"
                raise BadInput(f"{directory.path}: {few}; raise it or add chats")
            if packing == "none":
                raise BadInput(f"{directory.path}: no document has two tokens or more, which a sample needs; add text")
            need = f"train.seq_len {seq_len} needs {seq_len + 1}"
            raise BadInput(f"{directory.path}: has {len(self.stream)} tokens, {need}; shorten it or add text")
        self._names = lru_cache(maxsize=16)(_DocumentNames)

    def _layout(self, packing: Packing) -> StreamWindows | ConversationWindows | DocumentSamples:
        if self.stream.masked:
            if packing == "none":
                raise BadInput(
                    f"{self.directory.path}: has chats, which data.packing none does not train on; leave data.packing out"
                )
            assert self.directory.manifest is not None, "a manifest names the masks"
            return ConversationWindows(self.stream, self.seq_len, self.directory.manifest.tokenizer.eos)
        return (DocumentSamples if packing == "none" else StreamWindows)(self.stream, self.seq_len)

    def _answers(self, preference: PreferenceSpec) -> PreferenceWindows:
        manifest = self.directory.manifest
        assert manifest is not None, "a manifest tells preferences"
        together = 2 if preference.paired else 1
        leaves_out = preference.too_long == "leave_out"
        try:
            return PreferenceWindows(
                self.stream,
                self.seq_len,
                manifest.tokenizer.eos,
                together,
                leaves_out=leaves_out,
                whole=preference.scores,
            )
        except TooLong as error:
            what = "pair" if together == 2 else "answer"
            file, identity = self._name_of_document(error.first)
            raise BadInput(
                f"{file} [{identity}]: a {what} of {error.tokens:,} tokens, its prompt included, and train.seq_len is {self.seq_len:,}; "
                f"{error.count:,} {what}s of {self.directory.path} are longer than that: raise train.seq_len, or leave them out with "
                "preference.too_long: leave_out",
                key="train.seq_len",
            ) from None

    def _scores(self) -> np.ndarray:
        """The scores of all answers in the data, in the order of the shards; 0 for an answer without a score."""
        files = (
            (shard.file.documents, _DocumentNames(documents_path(shard.file.stem))) for shard in self.directory.shards
        )
        return np.array([names.score(number) or 0.0 for count, names in files for number in range(count)])

    def _name_of_document(self, number: int) -> tuple[str, int | str]:
        """Source file and id of a document. `number` counts documents of the stream in the order of the shards."""
        for shard in self.directory.shards:
            if number < shard.file.documents:
                return _DocumentNames(documents_path(shard.file.stem))[number]
            number -= shard.file.documents
        raise IndexError(number)

    @property
    def tokens(self) -> int:
        return len(self.stream)

    @property
    def packing(self) -> PackingCounts | None:
        """How conversations of chats were packed; None for text."""
        return self.layout.counts if isinstance(self.layout, ConversationWindows) else None

    @property
    def packed(self) -> str:
        """What windows contain as a whole, for the record in a checkpoint."""
        if not isinstance(self.layout, PreferenceWindows):
            return "whole conversations"
        return "whole pairs" if self.layout.together == 2 else "whole answers"

    def check_sizes(self) -> None:
        """Raise Damaged if the size of a file differs from its size at opening and in the manifest."""
        for shard in self.directory.shards:
            shard.file.check_sizes()
            if shard.weights is not None:
                shard.weights.check_size()

    def describe(self, window: int) -> list[dict[str, Any]]:
        """The documents in a window's inputs: source file, id, and the range [start, end) of the document's tokens in the window."""
        parts = self.layout.parts(window)
        named = [(part, self._name_of(self.directory.shards[part.shard], part.document)) for part in parts]
        return [{"file": file, "id": ident, "start": part.start, "end": part.stop} for part, (file, ident) in named]

    def _name_of(self, shard: OpenShard, document: int) -> tuple[str, int | str]:
        if shard.record is None:
            return str(shard.file.bin_path), document
        return self._names(documents_path(shard.file.stem))[document]


def _check_kind(directory: PreparedDirectory, preference: PreferenceSpec | None) -> None:
    """Raise BadInput if the run needs another kind of data: preferences and the directory has none, or the reverse."""
    found = None if directory.manifest is None else directory.manifest.preferences
    if preference is None and found is not None:
        raise BadInput(
            f"{directory.path}: has good and bad answers, on which a run with `preference` trains, for example preference: {{loss: dpo}}",
            key="data.mix",
        )
    if preference is None:
        return
    if found is None:
        raise BadInput(
            f"{directory.path}: has no preferences, which a run with `preference` needs; prepare good and bad answers with "
            "`meshwright data prepare --preferences`",
            key="data.mix",
        )
    if preference.paired and found.kind == "labels":
        raise BadInput(
            f"{directory.path}: has labelled answers, and preference.loss {preference.loss} compares pairs; set preference.loss to kto",
            key="preference.loss",
        )


class _DocumentNames:
    """Random access to the lines of a shard's `documents.jsonl`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file() or not path.stat().st_size:
            raise Damaged(f"{path}: missing or empty; it names the documents of its shard")
        with path.open("rb") as file:
            self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._ends = np.flatnonzero(np.frombuffer(self._content, dtype=np.uint8) == ord("\n"))

    def __getitem__(self, document: int) -> tuple[str, int | str]:
        name, identity, *_ = self._line(document)
        return name, identity

    def score(self, document: int) -> float | None:
        """The score of an answer in the data; None if it has none."""
        return next(iter(self._line(document)[2:]), None)

    def _line(self, document: int) -> list[Any]:
        try:
            start = 0 if document == 0 else int(self._ends[document - 1]) + 1
            line = self._content[start : int(self._ends[document])]
        except IndexError as error:
            raise Damaged(f"{self.path}:{document + 1}: missing; expected [file, id] of a document") from error
        value = parse_json(line, f"{self.path}:{document + 1}", own=True)
        kinds = [*map(type, value)] if isinstance(value, list) else []
        if kinds[:2] not in ([str, str], [str, int]) or kinds[2:] not in ([], [float]):
            raise Damaged(f"{self.path}:{document + 1}: expected [file, id] of a document, or [file, id, score]")
        return value
