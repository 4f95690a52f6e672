"""Opens an input file as a stream of its decompressed bytes, and computes the digest of the compressed bytes on the way."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import BinaryIO, cast

import xxhash

from meshwright.data.file_formats import READ_BYTES, DecompressedFile
from meshwright.data.inputs import FileRange, InputFile


@dataclass(frozen=True)
class Contents:
    """The digest of a file that was read."""

    file: InputFile
    """The file."""
    digest: str
    """xxh3_128 of all bytes of the file as stored, in hexadecimal."""


class InputStream(io.BufferedReader):
    """The decompressed bytes of a file, or of the part of it that `file.range` gives. A read raises DamagedData if they are damaged."""

    def __init__(self, file: InputFile) -> None:
        """Open the file. Raises OSError if that fails."""
        self.file = file
        self.number = 0 if file.range is None else file.range.before
        """Number of the line or record that was read last."""
        self._stored = _StoredFile(file.path.open("rb", buffering=0), file.range)
        compression = file.format.compression
        stored = cast(BinaryIO, self._stored)
        super().__init__(self._stored if compression is None else DecompressedFile(stored, compression), READ_BYTES)

    @property
    def consumed(self) -> int:
        """Position in the stored file: bytes before it have been read."""
        return self._stored.count

    def contents(self) -> Contents:
        """Read the rest of the file and return the digest of the whole file. Not allowed for a part of a file."""
        while self._stored.read(READ_BYTES):
            pass
        return Contents(self.file, self._stored.state.hexdigest())

    def __enter__(self) -> InputStream:
        return self

    def close(self) -> None:
        super().close()
        self._stored.close()


class _StoredFile(io.RawIOBase):
    """The bytes of a file, or of a part of it, as they are on the disk. It knows its position, and the digest of the bytes read."""

    def __init__(self, file: io.FileIO, part: FileRange | None = None) -> None:
        self._file = file
        self.count = 0 if part is None else file.seek(part.start)
        self._stop = None if part is None else part.stop
        self.state = xxhash.xxh3_128()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # pyrefly: ignore[bad-override]
        within = buffer if self._stop is None else buffer[: self._stop - self.count]
        count = self._file.readinto(within) or 0
        self.state.update(buffer[:count])
        self.count += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
