"""Documents as samples of any length: a document is a sample, or several where it has more than `seq_len` inputs.

A sample of s inputs has s + 1 tokens: the last input's target is the token behind it. So consecutive samples of one document share a token,
and every token of a document but its first is the target of exactly one input. Documents of one token have no sample. Lengths come from the
index of the prepared data, without reading tokens.
"""

from __future__ import annotations

import numpy as np

from meshwright.data.indexed import IndexedFile
from meshwright.data.packing import DocumentPart, TokenStream, WindowTokens


class DocumentSamples:
    """The documents of a stream without masks as samples of at most `seq_len` inputs, in the order of the stream."""

    def __init__(self, stream: TokenStream, seq_len: int) -> None:
        self._stream = stream
        self._seq_len = seq_len
        starts, lengths = stream.document_ranges()
        used = lengths > 1
        self._starts = starts[used]
        self._inputs = lengths[used] - 1
        self._first_samples = np.cumsum(np.concatenate([[0], -(-self._inputs // seq_len)]))

    @property
    def count(self) -> int:
        """Number of samples."""
        return int(self._first_samples[-1])

    @property
    def inputs(self) -> int:
        """Inputs of all samples together."""
        return int(self._inputs.sum())

    def lengths(self, samples: np.ndarray) -> np.ndarray:
        """Inputs of each sample, int64."""
        document, begin = self._origins(samples)
        return np.minimum(self._inputs[document] - begin, self._seq_len)

    def read(self, sample: int, with_documents: bool) -> WindowTokens:
        """The tokens of a sample, which is one document or a part of one."""
        del with_documents
        (length,) = self.lengths(np.array([sample])).tolist()
        return WindowTokens(self.read_range(sample, 0, length + 1), np.zeros(1, dtype=np.int64), None)

    def read_range(self, sample: int, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of a sample, int64."""
        offset = self._offset(sample)
        return self._stream.read(offset + start, offset + stop)

    def parts(self, sample: int) -> list[DocumentPart]:
        """The document of a sample's inputs, with the part that lies inside."""
        offset, (length,) = self._offset(sample), self.lengths(np.array([sample])).tolist()
        return self._stream.parts(offset, offset + length)

    def files_of(self, samples: np.ndarray) -> set[int]:
        """The numbers of the files that hold these samples; a document is in one file."""
        document, _ = self._origins(samples)
        return self._stream.files_at(self._starts[document])

    def locate(self, sample: int, at: int) -> tuple[IndexedFile, int]:
        """The file that holds token `at` of a sample, and the token's number there."""
        return self._stream.locate(self._offset(sample) + at)

    def _origins(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The document of each sample, and the input of the document at which the sample begins."""
        document = np.searchsorted(self._first_samples, samples, side="right") - 1
        return document, (samples - self._first_samples[document]) * self._seq_len

    def _offset(self, sample: int) -> int:
        """Return the start of a sample in the stream, in tokens."""
        document, begin = self._origins(np.array([sample]))
        return int(self._starts[document[0]] + begin[0])
