"""The index of a source: its files, the groups into which each file is divided, and the size of each group.

A group is what a loader process reads at once: a row group of a parquet file, about 8 MB of a file of JSON lines, or a
whole compressed file of JSON lines. To make the index, only the footers of parquet files are read, and nothing of other
files. The index is kept in the cache. A file whose size and tag are unchanged is not read again.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.file_formats import COMPRESSIONS, LAYOUTS, FileFormat, format_of
from meshwright.data.streams.files import ObjectFile
from meshwright.data.streams.patterns import is_url, split_pattern
from meshwright.data.streams.stores import Store, StoredFile
from meshwright.durable.writes import digest, write_durable
from meshwright.spec.errors import BadInput, Damaged, nearest

CHUNK_BYTES = 8 << 20
"""Bytes of a group in an uncompressed file of lines."""
COMPRESSED = 3
"""Assumed ratio of the size of the text to the size of the compressed file."""
FOOTERS_AT_ONCE = 32
"""Parquet footers that are read at the same time."""
FORMAT = 1
"""Version of the format of an index file."""
TRAIN_SPLIT = "train"
"""Name of the split that is read from a folder whose file names tell splits."""
OTHER_SPLITS = ("test", "validation", "valid", "val", "dev", "eval")
"""Words in file names that mean another split."""
READ = ", ".join(ending for ending, layout in LAYOUTS.items() if layout in ("lines", "parquet"))
"""Endings of the names of readable files, for messages."""


@dataclass(frozen=True)
class SourceIndex:
    """The files of a source and their groups. The arrays have one element for each group, of all files in order."""

    root: str
    """The beginning that all names of files have in common: a folder or URL."""
    layout: str
    """`parquet` or `lines`."""
    files: tuple[StoredFile, ...]
    """The files, sorted by name."""
    group_file: np.ndarray
    """Number of the group's file in `files`, `(groups,)` int32."""
    group_number: np.ndarray
    """Number of the group in its file, `(groups,)` int32."""
    group_bytes: np.ndarray
    """Bytes of text of the group, `(groups,)` int64. For compressed lines an estimate."""
    tokens_per_byte: float = 0.0
    """Tokens per byte of text, measured on the first documents of the source. 0 if not measured yet."""

    @property
    def groups(self) -> int:
        return len(self.group_file)

    @property
    def text_bytes(self) -> int:
        """Bytes of text of all groups. Compressed lines are estimated."""
        return int(self.group_bytes.sum())

    @property
    def tokens(self) -> int:
        """Tokens of the whole source, estimated."""
        return round(self.text_bytes * self.tokens_per_byte)

    @cached_property
    def digest(self) -> str:
        """Digest of the files' names after `root`, their sizes and their tags. If it changes, the source has changed."""
        rows = [[file.name[len(self.root) :], file.size, file.tag] for file in self.files]
        return digest(json.dumps([self.layout, rows]).encode("utf-8", "surrogateescape") + self.group_bytes.tobytes())

    def describe(self) -> str:
        """Return the size of the source in one line, for people."""
        kinds = {"parquet": "row groups", "lines": "groups of lines"}
        return (
            f"{len(self.files):,} files, {self.groups:,} {kinds[self.layout]}, {size_text(self.text_bytes)} of text, "
            f"about {self.tokens / 1e6:,.3g} M tokens"
        )

    def to_bytes(self) -> bytes:
        """Return the content of an index file, which `read` loads."""
        header = {
            "format": FORMAT,
            "root": self.root,
            "layout": self.layout,
            "tokens_per_byte": self.tokens_per_byte,
            "files": [[file.name, file.size, file.tag] for file in self.files],
        }
        buffer = io.BytesIO()
        header_bytes = np.frombuffer(json.dumps(header).encode("utf-8", "surrogateescape"), dtype=np.uint8)
        np.savez(buffer, header=header_bytes, files=self.group_file, numbers=self.group_number, sizes=self.group_bytes)
        return buffer.getvalue()

    @classmethod
    def read(cls, path: Path) -> SourceIndex | None:
        """Return the index in a file of the cache. None if the file is missing or damaged, or has another version of the format."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                header = json.loads(arrays["header"].tobytes())
                if header["format"] != FORMAT:
                    return None
                files = tuple(StoredFile(*row) for row in header["files"])
                groups = (arrays["files"], arrays["numbers"], arrays["sizes"])
                return cls(header["root"], header["layout"], files, *groups, header["tokens_per_byte"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durable(path, self.to_bytes())


def size_text(count: int) -> str:
    """Return a number of bytes as text, in GB or MB."""
    return f"{count / 1e9:,.3g} GB" if count >= 1e9 else f"{count / 1e6:,.3g} MB"


def build_index(store: Store, files: str, text: str, kept: SourceIndex | None = None) -> SourceIndex:
    """Make the index of the files that `files` names: a path, folder, URL or pattern.

    `text` is the column or key of the text.

    `kept` is the index of an earlier call; unchanged files take their groups from it. If nothing has changed, `kept`
    itself is returned. Otherwise `tokens_per_byte` of the result is 0. Raises BadInput if files are missing, have a
    format that is not read, or have no text, and Damaged if a parquet file cannot be read.
    """
    listed = _chosen(files, store.list(files))
    layout = _only_format(files, listed).layout
    root = split_pattern(files)[0] if split_pattern(files)[1] or len(listed) > 1 else listed[0].name.rpartition("/")[0]
    known = {} if kept is None or kept.layout != layout else _groups_by_file(kept)
    new = [file for file in listed if file not in known]
    with ThreadPoolExecutor(FOOTERS_AT_ONCE, "footers") as pool:
        known |= dict(zip(new, pool.map(lambda file: _groups_of(store, file, layout, text), new), strict=True))
    sizes = [known[file] for file in listed]
    index = SourceIndex(
        root,
        layout,
        tuple(listed),
        np.repeat(np.arange(len(listed), dtype=np.int32), [len(each) for each in sizes]),
        np.concatenate([np.arange(len(each), dtype=np.int32) for each in sizes]),
        np.concatenate(sizes),
    )
    if kept is not None and kept.digest == index.digest:
        return kept
    if not index.text_bytes:
        raise BadInput(f"{files}: the files have no text")
    return index


def parquet_column(names: Sequence[str], text: str, where: str) -> int:
    """Return the number of the column named `text`. If there is none, raises BadInput that names the nearest column."""
    if text not in names:
        raise BadInput(f"{where}: {no_text('column', text, names)}")
    return list(names).index(text)


def no_text(word: str, text: str, names: Sequence[str]) -> str:
    """Return a sentence for the user: the column or key `text` does not exist; which names exist. `word` is "column" or "key"."""
    near = nearest(text, names)
    shown = ", ".join(map(repr, list(names)[:20]))
    return f"no {word} {text!r}{f' (nearest: {near!r})' if near else ''}; {word}s: {shown}; `text` names another"


def _groups_by_file(index: SourceIndex) -> dict[StoredFile, np.ndarray]:
    """Return the bytes of text of each group, by file."""
    counts = np.bincount(index.group_file, minlength=len(index.files))
    return dict(zip(index.files, np.split(index.group_bytes, np.cumsum(counts)[:-1]), strict=True))


def _groups_of(store: Store, file: StoredFile, layout: str, text: str) -> np.ndarray:
    """Return the bytes of text of each group of a file, `(groups of the file,)` int64."""
    if layout == "parquet":
        return _row_groups(store, file, text)
    if format_of(file.name).compression is not None:
        return np.array([file.size * COMPRESSED], dtype=np.int64)
    starts = np.arange(0, file.size, CHUNK_BYTES)
    return np.minimum(file.size - starts, CHUNK_BYTES).astype(np.int64)


def _row_groups(store: Store, file: StoredFile, text: str) -> np.ndarray:
    """Return the bytes of text of each row group of a parquet file, int64. Raises Damaged if the file cannot be read."""
    import pyarrow
    import pyarrow.parquet

    try:
        with ObjectFile(store, file) as content:
            described = pyarrow.parquet.ParquetFile(content)
            _check_column(described.schema_arrow, text, file.name)
            metadata = described.metadata
            names = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
            column = names.index(text)
            rows = (metadata.row_group(group).column(column) for group in range(metadata.num_row_groups))
            return np.array([row.total_uncompressed_size for row in rows], dtype=np.int64)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise Damaged(f"{file.name}: cannot be read as parquet: {str(error).splitlines()[0]}") from error


def _check_column(schema: Any, text: str, where: str) -> None:
    """Raise BadInput unless a parquet file has a column `text` with text."""
    import pyarrow

    parquet_column(schema.names, text, where)
    kind = schema.field(text).type
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_string_view(kind)):
        texts = [name for name in schema.names if "string" in str(schema.field(name).type)]
        raise BadInput(
            f"{where}: column {text!r} has {kind}, expected text; columns of text: {', '.join(texts) or 'none'}"
        )


def _chosen(files: str, listed: Sequence[StoredFile]) -> list[StoredFile]:
    """Choose which of the listed files to read.

    If `files` is a pattern or names one file, all listed files are read. Of a folder only files with a readable ending
    are. If names in the folder tell splits, such as `train-00000.parquet` and `test-00000.parquet`, only files of
    `train` and files without a split are read.
    """
    _, pattern = split_pattern(files)
    if pattern or (len(listed) == 1 and listed[0].name == files):
        if not listed:
            raise BadInput(f"{files}: matches no file")
        return list(listed)
    readable = [file for file in listed if _is_read(file.name)]
    if not readable:
        found = f"; it has {len(listed):,} others, such as {listed[0].name}" if listed else ""
        raise BadInput(f"{files}: no files here to read ({READ}){found}")
    splits = [_split_of(file.name[len(files) :]) for file in readable]
    if TRAIN_SPLIT in splits and any(split not in (TRAIN_SPLIT, "") for split in splits):
        return [file for file, split in zip(readable, splits, strict=True) if split in (TRAIN_SPLIT, "")]
    return readable


def _split_of(name: str) -> str:
    """Return the split that a word in a file's name or folders tells, as in Hugging Face data sets. Empty if there is no such word."""
    words = re.findall("[a-z]+", name.lower())
    return next((word for word in words if word in (TRAIN_SPLIT, *OTHER_SPLITS)), "")


def _is_read(name: str) -> bool:
    form = format_of(name)
    return form.layout in ("lines", "parquet") and not form.refused


def _only_format(files: str, listed: Sequence[StoredFile]) -> FileFormat:
    """Return the format of all files. Raises BadInput if a file is not readable, or if files have different formats."""
    first = None
    for file in listed:
        form = format_of(file.name)
        if not _is_read(file.name):
            why = form.refused or "neither parquet nor lines of JSON"
            raise BadInput(f"{file.name}: is {why}; expected {READ}, lines also with {' '.join(COMPRESSIONS)}")
        if first is None:
            first = file, form
        elif (form.layout, form.compression) != (first[1].layout, first[1].compression):
            raise BadInput(
                f"{files}: has files of two formats, such as {first[0].name} and {file.name}; name those of one, and the others as "
                "another source"
            )
    assert first is not None
    return first[1]


def index_path(cache: Path, files: str, text: str) -> Path:
    """Return the path of the index of a source in the cache."""
    name = files if is_url(files) else str(Path(files).absolute())
    return cache / f"index-{digest(json.dumps([name, text]).encode('utf-8', 'surrogateescape'))}.npz"
