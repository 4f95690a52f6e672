"""Decides from the ending of a file's name in which format it is read, and decompresses files.

    posts.jsonl.gz      lines of JSON, compressed with gzip
    notes.TXT           text; upper and lower case mean the same
    README              text, because its ending is unknown or missing
    photos.zip          not read; an error tells the user what to do

The standard library, `zstandard` and `lz4` decompress. If a file ends in the middle of its compressed data, or if other
bytes follow the data, an error is raised: no byte of a file is silently ignored.
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import BinaryIO, Literal, Protocol

Layout = Literal["text", "lines", "json", "csv", "tsv", "parquet"]
"""How the decompressed content of a file is arranged."""
LAYOUTS: dict[str, Layout] = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".jsonlines": "lines",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
"""Layout of the files of records, by ending. Files with other endings are text."""
RECORDS = ", ".join(LAYOUTS)
"""These endings, for messages."""
READ_BYTES = 1 << 20
"""Bytes of decompressed data in the buffer of a reader."""
WINDOW_BYTES = 1 << 31
"""Largest window of zstd, in bytes: what its option `--long=31` uses."""


class Decompressor(Protocol):
    """Decompresses one frame. The decompressor objects of bz2 and lzma are of this kind."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes | None: ...

    def decompress(self, data: bytes, /) -> bytes: ...


@dataclass(frozen=True)
class Compression:
    """A method of compression."""

    name: str
    """Its name in messages."""
    decompressor: Callable[[], Decompressor]
    """Makes the decompressor of one frame."""
    package: str | None = None
    """Python package that must be installed; None if the standard library suffices."""
    piece: int = 1 << 16
    """Bytes of compressed data that are decompressed in one call."""


def _zstd() -> Decompressor:
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES).decompressobj()


def _lz4() -> Decompressor:
    import lz4.frame

    return lz4.frame.LZ4FrameDecompressor()


ZSTD = Compression("zstd", _zstd, "zstandard")
COMPRESSIONS = {
    ".gz": Compression("gzip", lambda: zlib.decompressobj(wbits=31)),
    ".bz2": Compression("bzip2", bz2.BZ2Decompressor, piece=1 << 12),
    ".xz": Compression("xz", lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), piece=1 << 12),
    ".zst": ZSTD,
    ".zstd": ZSTD,
    ".lz4": Compression("lz4", _lz4, "lz4"),
}
"""The methods of compression, by the ending of names."""


def _refusals() -> dict[str, str]:
    """Return the table `REFUSED`: endings of files that are not read, each with what the user should do."""
    archive = "an archive; unpack it"
    packed = "a compression that is not read; decompress it"
    table = "convert it"
    groups = {
        archive: ".zip .tar .tgz .tbz .tbz2 .txz .tzst .7z .rar .jar .whl .egg",
        packed: ".z .lzma .lz .lzo .br .sz .snappy .gzip .bz",
        f"a table that is not read; {table} to .parquet or .jsonl": (
            ".arrow .feather .ipc .avro .orc .tfrecord .tfrecords .mds .msgpack .h5 .hdf5 .db .sqlite .sqlite3 .xls .xlsx .ods"
        ),
        f"pickled or numeric data; {table} to .jsonl": ".pkl .pickle .npy .npz .pt .pth .safetensors .gguf",
        f"a document that is not plain text; {table} to .txt": ".pdf .doc .docx .odt .rtf .ppt .pptx .epub .mobi",
    }
    return {ending: why for why, endings in groups.items() for ending in endings.split()}


REFUSED = _refusals()
"""Endings of files that are not read, with what the user should do instead."""


@dataclass(frozen=True)
class FileFormat:
    """How a file is read: layout and compression. If the file is not read, `refused` is the reason."""

    layout: Layout
    compression: Compression | None = None
    refused: str = ""

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages outside the standard library that are needed to read this format."""
        named = (
            self.compression.package if self.compression else None,
            "pyarrow" if self.layout == "parquet" else None,
        )
        return tuple(package for package in named if package)


def format_of(name: str) -> FileFormat:
    """Return the format that the ending of a file's name means."""
    stem, ending = _split(name)
    return _format_of_ending(_split(stem)[1], ending) if ending in COMPRESSIONS else _format_of_ending(ending)


@lru_cache(maxsize=1024)
def _format_of_ending(ending: str, compressed: str | None = None) -> FileFormat:
    """Return the format of names with this ending. `compressed` is the ending of a compression that follows it, such as `.gz`."""
    compression = None if compressed is None else COMPRESSIONS[compressed]
    layout = LAYOUTS.get(ending, "text")
    if layout == "parquet" and compression is not None:
        return FileFormat(layout, compression, "parquet in another compression; decompress it")
    return FileFormat(layout, compression, REFUSED.get(ending, ""))


def _split(name: str) -> tuple[str, str]:
    """Split a name into (name without its last ending, this ending in lower case). A leading dot does not begin an ending."""
    base = name[name.rfind("/") + 1 :]
    dot = base.rfind(".")
    return (base[:dot], base[dot:].lower()) if dot > 0 else (base, "")


class DamagedData(Exception):
    """The compressed data of a file ends too early, or contains other bytes."""


class DecompressedFile(io.RawIOBase):
    """The decompressed content of a file, which may have several compressed frames in a row. A read raises DamagedData."""

    def __init__(self, raw: BinaryIO, compression: Compression) -> None:
        self._raw = raw
        self._compression = compression
        self._frame: Decompressor | None = None
        self._input = self._output = b""
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # pyrefly: ignore[bad-override]
        while self._at == len(self._output):
            if not self._decompress_more():
                return 0
        piece = self._output[self._at : self._at + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def _decompress_more(self) -> bool:
        """Decompress the next part of the file into `_output`, which may stay empty. Returns False at the end of the file."""
        if self._frame is None or self._frame.eof:
            self._input = self._input.lstrip(b"\0")  # Zero bytes are padding, which gzip and xz allow between frames.
        self._input = self._input or self._raw.read(self._compression.piece)
        if not self._input:
            if self._frame is not None and not self._frame.eof:
                raise DamagedData(f"the file ends inside its {self._compression.name} data")
            return False
        if self._frame is None or self._frame.eof:
            self._input = self._input.lstrip(b"\0")
            if not self._input:
                return True
            self._frame = self._compression.decompressor()
        try:
            self._output = self._frame.decompress(self._input)
            self._at = 0
        except Exception as error:  # Each library raises its own error classes.
            raise DamagedData(f"no {self._compression.name} data: {error}") from error
        self._input = (self._frame.unused_data or b"") if self._frame.eof else b""
        return True
