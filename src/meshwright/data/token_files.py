"""Implements `meshwright data import`: turns token files of other programs into prepared data.

    a.ds, a.ds.index   datatrove: tokens as uint16 or uint32; the index has the end of each document, counted in tokens, as uint64
    a.bin, a.idx       Megatron (data/indexed.py)

Every document is checked: its ids must exist in the tokenizer, and it must end with the tokenizer's end token. The
second check finds a frequent mistake, because datatrove writes `<|endoftext|>` by default, whichever tokenizer is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from meshwright.data.checked import CheckedFile
from meshwright.data.chunk_stream import Numbered
from meshwright.data.corpus import CorpusDocument
from meshwright.data.disk_space import check_space, full_disk_named
from meshwright.data.encode import EncodedDocument, token_dtype
from meshwright.data.indexed import IndexedFile
from meshwright.data.input_record import input_record
from meshwright.data.inputs import InputFile
from meshwright.data.left_out import LeftOut
from meshwright.data.manifest import TRAIN
from meshwright.data.prepare import (
    PreparedCorpus,
    check_splits,
    split_writers,
    tokenizer_of,
    write_corpus,
    write_shards,
)
from meshwright.data.removed import Removed
from meshwright.data.request import SHARD_TOKENS, Preparation, begin, check_same, finished_manifests, forget
from meshwright.data.shards import JOURNAL
from meshwright.data.token_bytes import TokenBytes
from meshwright.data.tokenizer import LoadedTokenizer, parse_train_request
from meshwright.durable.lock import locked
from meshwright.spec.errors import BadInput, Damaged, MeshwrightError, nearest

DATATROVE = ".ds"
"""Ending of the token files of datatrove."""
INDEX = ".index"
"""Ending that is added for the index of a datatrove file."""
LOSS = ".loss"
"""Ending that is added for the loss mask of a datatrove file."""
MEGATRON = ".bin"
"""Ending of the token files of Megatron."""
ENDS_AT_ONCE = 1 << 16
"""Document ends that are read at once."""
TOKEN_TYPES = (np.dtype("<u2"), np.dtype("<u4"))
"""Types in which datatrove stores tokens."""


class DatatroveFile:
    """A `.ds` file and its index, opened for reading. Raises BadInput if a file is missing, Damaged if the files' sizes disagree."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index_path = path.with_name(path.name + INDEX)
        if path.with_name(path.name + LOSS).exists():
            raise BadInput(f"{path.name + LOSS}: loss masks are not read; remove the file to train on every token")
        for file in (path, self.index_path):
            if not file.is_file():
                raise BadInput(f"{file}: no such file; {DATATROVE} and {DATATROVE}{INDEX} must lie side by side")
        self._tokens = CheckedFile(path)
        self._index = CheckedFile(self.index_path)
        if not self._index.size or self._index.size % 8:
            raise Damaged(f"{self.index_path}: expected a multiple of 8 bytes, found {self._index.size}")
        self.documents = self._index.size // 8
        last = int(self._ends(self.documents - 1, self.documents)[0])
        dtype = next((each for each in TOKEN_TYPES if each.itemsize * last == self._tokens.size), None)
        if dtype is None or not last:
            raise Damaged(
                f"{path}: expected 2 or 4 bytes for each of {last:,} tokens (by its index), found {self._tokens.size:,} bytes"
            )
        self._dtype = dtype

    def read(self) -> Iterator[np.ndarray]:
        """Yield the tokens of each document, `(tokens,)`. Raises Damaged if the ends of documents do not ascend."""
        start = 0
        for first in range(0, self.documents, ENDS_AT_ONCE):
            for end in self._ends(first, min(first + ENDS_AT_ONCE, self.documents)).tolist():
                if end < start:
                    raise Damaged(f"{self.index_path}: a document ends at token {end}, before it starts at {start}")
                width = self._dtype.itemsize
                yield np.frombuffer(self._tokens.read(start * width, (end - start) * width), self._dtype)
                start = end

    def _ends(self, first: int, stop: int) -> np.ndarray:
        return np.frombuffer(self._index.read(8 * first, 8 * (stop - first)), dtype="<u8")


def import_tokens(
    inputs: Sequence[Path],
    tokenizer: str,
    out: Path,
    *,
    held_out: float = 0.0,
    eos: str | None = None,
    shard_tokens: int = SHARD_TOKENS,
    shown: bool = False,
) -> PreparedCorpus:
    """Write the documents of token files as prepared data into `out`.

    - `inputs`: token files, or folders of them.
    - `tokenizer`: the tokenizer.json, or its folder, with which the tokens were made.
    - `held_out`: fraction of the documents for the held-out split.
    - `eos`: the token that ends each document; None for the tokenizer's own.
    - `shard_tokens`: maximum number of tokens in a shard.
    - `shown`: whether to show progress on stderr.

    The same call continues after it was killed, and does nothing if the work is done. Raises BadInput if files are
    missing, if an id is not in the tokenizer, and if a document does not end with the end token.
    """
    if parse_train_request(tokenizer) is not None:
        raise BadInput(f"--tokenizer {tokenizer}: tokens have a tokenizer already; name its tokenizer.json or folder")
    preparation = Preparation(tuple(map(str, inputs)), tokenizer, out, held_out, eos=eos, shard_tokens=shard_tokens)
    preparation.check()
    files = _input_files(inputs)
    request = preparation.describe(files)
    with locked(out, wait=False):
        if done := finished_manifests(preparation):
            check_same(out, done[TRAIN].request, request)
            return PreparedCorpus(out, done, LeftOut(), reused=True)
        begin(preparation, files, request)
        try:
            needed = sum(file.size for file in files)
            if not (out / JOURNAL).exists():
                check_space(out, needed)
            with full_disk_named(out, needed):
                loaded = tokenizer_of(preparation, files, shown)
                writers = split_writers(preparation, loaded)
                numbered = (
                    each for each in _documents(files, loaded, preparation) if each[1] > writers[each[0]].done_through
                )
                write_shards(numbered, writers, sum(file.size for file in files), shown)
                left_out = LeftOut()
                removed = Removed()
                check_splits(preparation, writers, left_out, removed)
                digests = {file.name: CheckedFile(file.path).digest() for file in files}
                record = input_record(files, digests)
                manifests = write_corpus(preparation, writers, loaded, loaded.text, request, record, left_out, removed)
        except MeshwrightError:
            if not (out / JOURNAL).exists():
                forget(out)
            raise
    return PreparedCorpus(out, manifests, left_out, reused=False)


def _documents(files: Sequence[InputFile], tokenizer: LoadedTokenizer, preparation: Preparation) -> Iterator[Numbered]:
    """Yield the documents of the files, checked, as (split, number, document)."""
    end = tokenizer.record.eos
    size = tokenizer.record.vocab_size
    dtype = token_dtype(size)
    lengths = _text_bytes(tokenizer)
    number = 0
    for file in files:
        consumed = file.before
        for within, tokens in enumerate(_read(file.path)):
            consumed += len(tokens) * tokens.dtype.itemsize
            where = f"{file.name}: document {within}"
            if not len(tokens):
                raise BadInput(f"{where}: has no tokens")
            if (highest := int(tokens.max())) >= size or int(tokens.min()) < 0:
                raise BadInput(
                    f"{where}: has id {highest}, and {preparation.tokenizer} has {size:,} tokens; name the tokenizer that made it"
                )
            if tokens[-1] != end:
                raise BadInput(f"{where}: {_wrong_end(tokenizer, int(tokens[-1]))}")
            document = CorpusDocument(file.name, within, f"{file.key}\0{within}", "", consumed)
            encoded = EncodedDocument(document, tokens.astype(dtype), int(lengths[tokens].sum()))
            yield preparation.split_of(document.key), number, encoded
            number += 1


def _text_bytes(tokenizer: LoadedTokenizer) -> np.ndarray:
    """Return the number of bytes of text that each token stands for, `(vocabulary,)` int64."""
    plain = TokenBytes(tokenizer.tokenizer).plain
    return np.array([len(plain[token]) for token in range(tokenizer.record.vocab_size)], dtype=np.int64)


def _wrong_end(tokenizer: LoadedTokenizer, found: int) -> str:
    name = tokenizer.tokenizer.id_to_token
    added = tokenizer.tokenizer.get_added_tokens_decoder()
    hint = f"; `--eos '{name(found)}'` accepts it" if found in added else "; its program wrote no end token"
    return (
        f"ends with {name(found)!r} ({found}), expected {name(tokenizer.record.eos)!r} ({tokenizer.record.eos}){hint}"
    )


def _read(path: Path) -> Iterator[np.ndarray]:
    """Yield the tokens of each document of a token file."""
    if path.suffix == DATATROVE:
        yield from DatatroveFile(path).read()
        return
    file = IndexedFile(path.with_suffix(""))
    file.check_layout()
    bounds = file.document_bounds().tolist()
    for start, stop in pairwise(bounds):
        yield file.read(start, stop)


def _input_files(inputs: Sequence[Path]) -> list[InputFile]:
    """Return the token files that `inputs` name, those of a folder sorted by name. Raises BadInput if an input has none."""
    paths: list[Path] = []
    for path in inputs:
        if path.is_dir():
            found = sorted(file for file in path.iterdir() if file.suffix in (DATATROVE, MEGATRON))
        else:
            found = [path] if path.is_file() and path.suffix in (DATATROVE, MEGATRON) else []
        if not found:
            raise BadInput(_nothing_at(path))
        paths += found
    files: list[InputFile] = []
    before = 0
    for path in paths:
        status = path.stat()
        times = {"modified_ns": status.st_mtime_ns, "changed_ns": status.st_ctime_ns}
        files.append(InputFile(path, str(path), path.name, status.st_size, before=before, **times))
        before += status.st_size
    return files


def _nothing_at(path: Path) -> str:
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = None if path.exists() else nearest(path.name, siblings)
    hint = f" (nearest: {path.parent / near})" if near else ""
    return f"{path}: no token files here{hint}; expected files {DATATROVE} with {DATATROVE}{INDEX}, or .bin with .idx, or a folder of them"
