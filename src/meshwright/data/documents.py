"""Makes samples of any length up to `seq_len` from documents, without packing.

A document with at most `seq_len` inputs is one sample. A longer one is cut into several samples. A sample with s inputs
has s + 1 tokens, because the target of the last input is the next token. So consecutive samples of a document share one
token, and every token except the document's first is the target of exactly one input. Example: with `seq_len` 4, a
document of 7 tokens gives the samples [0, 1, 2, 3, 4] and [4, 5, 6]. A document of one token gives none.

The lengths come from the index of the prepared data, so no tokens are read for them.
"""

from __future__ import annotations

import numpy as np

from meshwright.data.indexed import IndexedFile
from meshwright.data.packing import DocumentPart, TokenStream, WindowTokens


class DocumentSamples:
    """The documents of a stream without masks as samples, in the order of the stream. A sample has at most `seq_len` inputs."""

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
        """Number of inputs of all samples together."""
        return int(self._inputs.sum())

    def lengths(self, samples: np.ndarray) -> np.ndarray:
        """Return the number of inputs of each sample, int64. `samples` `(n,)` are numbers of samples; the result is `(n,)`."""
        document, begin = self._origins(samples)
        return np.minimum(self._inputs[document] - begin, self._seq_len)

    def read(self, sample: int, with_documents: bool) -> WindowTokens:
        """Read the tokens of a sample. It lies in one document, which begins at token 0 of the sample."""
        del with_documents
        (length,) = self.lengths(np.array([sample])).tolist()
        return WindowTokens(self.read_range(sample, 0, length + 1), np.zeros(1, dtype=np.int64), None)

    def read_range(self, sample: int, start: int, stop: int) -> np.ndarray:
        """Read tokens [start, stop) of a sample, int64."""
        offset = self._offset(sample)
        return self._stream.read(offset + start, offset + stop)

    def parts(self, sample: int) -> list[DocumentPart]:
        """Return the document from which a sample comes, and which of its tokens are the sample's inputs."""
        offset, (length,) = self._offset(sample), self.lengths(np.array([sample])).tolist()
        return self._stream.parts(offset, offset + length)

    def files_of(self, samples: np.ndarray) -> set[int]:
        """Return the numbers of the files that contain these samples. A document is never divided between files."""
        document, _ = self._origins(samples)
        return self._stream.files_at(self._starts[document])

    def locate(self, sample: int, at: int) -> tuple[IndexedFile, int]:
        """Return where token number `at` of a sample is stored: the file, and the token's number in that file."""
        return self._stream.locate(self._offset(sample) + at)

    def _origins(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of each sample's document, and the number of the document's input at which the sample begins; `(n,)` each."""
        document = np.searchsorted(self._first_samples, samples, side="right") - 1
        return document, (samples - self._first_samples[document]) * self._seq_len

    def _offset(self, sample: int) -> int:
        """Return the position of a sample's first token in the stream."""
        document, begin = self._origins(np.array([sample]))
        return int(self._starts[document[0]] + begin[0])
