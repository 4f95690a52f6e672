"""Divides the input files of a preparation into units of work. Any process can do any unit.

A unit is a few files, or a part of one large file. The prepared corpus does not depend on this division, because the results of the units
are joined in the order of their text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import xxhash

from meshwright.data.inputs import FileRange, InputFile
from meshwright.durable.writes import digest_file

UNIT_BYTES = 32 << 20
"""Approximate text in a unit. A lost worker loses at most one unit of work, which takes some seconds."""
COMPRESSION = 4
"""Approximate bytes of text for each byte of a compressed file."""
READ_BYTES = 8 << 20


@dataclass(frozen=True)
class CorpusUnit:
    """Consecutive files, or a part of one file, in the order of the corpus."""

    files: tuple[InputFile, ...]

    @property
    def size(self) -> int:
        """Bytes of the files on disk, before decompression."""
        return sum(file.size if file.range is None else file.range.size for file in self.files)

    def to_plain(self) -> list[dict[str, Any]]:
        """The unit as values for JSON."""
        return [
            {
                **{field.name: getattr(file, field.name) for field in fields(file) if field.init},
                "path": str(file.path),
                "range": None if file.range is None else asdict(file.range),
            }
            for file in self.files
        ]

    @classmethod
    def from_plain(cls, files: Iterable[dict[str, Any]]) -> CorpusUnit:
        """The unit from the values that `to_plain` returned."""
        return cls(tuple(_file(dict(file)) for file in files))


def text_bytes(file: InputFile) -> int:
    """Approximate bytes of text in a file. For compressed files it is an estimate from the size on disk."""
    packed = file.format.compression is not None or file.format.layout == "parquet"
    return file.size * COMPRESSION if packed else file.size


def divide(files: Sequence[InputFile], unit_bytes: int) -> tuple[list[CorpusUnit], dict[str, str]]:
    """Units with about `unit_bytes` of text each, and the digest of each file that was divided, by the file's name.

    Only uncompressed files of lines, and parquet files between their row groups, are divided.
    """
    units: list[CorpusUnit] = []
    digests: dict[str, str] = {}
    small: list[InputFile] = []
    for file in files:
        parts = _parts(file, unit_bytes, digests)
        if len(parts) == 1 and text_bytes(file) < unit_bytes:
            small.append(file)
            if sum(map(text_bytes, small)) >= unit_bytes:
                units.append(CorpusUnit(tuple(small)))
                small = []
            continue
        if small:
            units.append(CorpusUnit(tuple(small)))
            small = []
        units += [CorpusUnit((replace(file, range=part),)) for part in parts]
    if small:
        units.append(CorpusUnit(tuple(small)))
    return units, digests


def _parts(file: InputFile, unit_bytes: int, digests: dict[str, str]) -> list[FileRange | None]:
    """The parts in which a file is read; None is the whole file. A file with read errors is not divided: its reader reports them."""
    if file.format.refused or text_bytes(file) < 2 * unit_bytes:
        return [None]
    try:
        if file.format.layout == "lines" and file.format.compression is None:
            return [*_line_ranges(file, unit_bytes, digests)]
        if file.format.layout == "parquet":
            return [*_row_groups(file, unit_bytes, digests)]
    except OSError:
        pass
    return [None]


def _line_ranges(file: InputFile, unit_bytes: int, digests: dict[str, str]) -> list[FileRange]:
    """Parts that begin and end at line boundaries. One pass over the file finds them and puts its digest into `digests`."""
    state = xxhash.xxh3_128()
    starts = [(0, 0)]
    offset = 0
    lines = 0
    with file.path.open("rb") as stream:
        while piece := stream.read(READ_BYTES):
            state.update(piece)
            while (near := starts[-1][0] + unit_bytes - offset) < len(piece):
                end = piece.find(b"\n", max(near, 0)) + 1
                if not end:
                    break
                starts.append((offset + end, lines + piece.count(b"\n", 0, end)))
            lines += piece.count(b"\n")
            offset += len(piece)
    digests[file.name] = state.hexdigest()
    if starts[-1][0] == offset and len(starts) > 1:
        starts.pop()
    stops = [start for start, _ in starts[1:]] + [offset]
    return [FileRange(start, stop, before, stop - start) for (start, before), stop in zip(starts, stops, strict=True)]


def _row_groups(file: InputFile, unit_bytes: int, digests: dict[str, str]) -> list[FileRange | None]:
    """Parts of consecutive row groups with about `unit_bytes` of data each. Puts the file's digest into `digests`."""
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file.path).metadata
    except pyarrow.ArrowException:
        return [None]
    digests[file.name] = digest_file(file.path)
    parts: list[FileRange | None] = []
    groups = [table.row_group(number) for number in range(table.num_row_groups)]
    total = sum(group.total_byte_size for group in groups) or 1
    start = 0
    rows = 0
    before = 0
    size = 0
    for number, group in enumerate(groups):
        rows += group.num_rows
        size += group.total_byte_size
        if size >= unit_bytes or number == len(groups) - 1:
            parts.append(FileRange(start, number + 1, before, file.size * size // total))
            start = number + 1
            before = rows
            size = 0
    return parts or [None]


def _file(plain: dict[str, Any]) -> InputFile:
    path = Path(plain.pop("path"))
    part = plain.pop("range")
    return InputFile(path, **plain, range=None if part is None else FileRange(**part))
