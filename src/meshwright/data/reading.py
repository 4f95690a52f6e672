"""The first steps of a preparation: reads the documents of files and filters them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from meshwright.data.cleaning import Cleaner
from meshwright.data.corpus import CorpusDocument, FromFile
from meshwright.data.input_stream import Contents
from meshwright.data.inputs import InputFile, NotRead
from meshwright.data.left_out import LeftOut
from meshwright.data.removed import Removed

Read = Callable[[InputFile], Iterable[FromFile]]
"""Yields the documents of a file in order, and what was left out."""


class DocumentReading:
    """One pass over the documents of `files`.

    `left_out`, `removed` and `digests` are complete after `documents` has ended.

    `not_read` are files that were left out already when the inputs were listed. `read` reads one file.
    """

    def __init__(
        self, files: Sequence[InputFile], not_read: Iterable[NotRead], read: Read, cleaner: Cleaner | None = None
    ) -> None:
        self.files = files
        self._read = read
        self._cleaner = cleaner
        self.left_out = LeftOut()
        self.removed = Removed()
        self.digests: dict[str, str] = {}
        """Digest of the bytes of each file, by its name."""
        for item in not_read:
            self.left_out.add(item)

    def documents(self) -> Iterator[CorpusDocument]:
        """Yield the documents that no filter removes, in order."""
        for file in self.files:
            for item in self._read(file):
                if isinstance(item, CorpusDocument):
                    if self._cleaner is None or not self._cleaner.removes(item, self.removed):
                        yield item
                elif isinstance(item, Contents):
                    self.digests[item.file.name] = item.digest
                else:
                    self.left_out.add(item)
