"""The program of a loader process: it reads and tokenises groups of files for a rank, or makes the index of a source.

It is torch-free.

    python -m meshwright.data.streams.process

The first line of standard input is the Settings as JSON. Each further line is a request as JSON. The process writes one
line of JSON for each request: its result, or `{"error": text, "code": exit code}`. It ends when standard input ends or
when its parent process has ended.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from meshwright.data.corpus import CorpusDocument
from meshwright.data.encode import encode_documents, token_dtype
from meshwright.data.fast_encoder import EncodersDiffer, FastEncoder
from meshwright.data.records import BadDocument
from meshwright.data.streams.group_documents import group_documents
from meshwright.data.streams.group_file import Cache, GroupRecord, VerifiedGroups, group_name, texts_digest, write_group
from meshwright.data.streams.index import SourceIndex, build_index, index_path
from meshwright.data.streams.stores import Store, StoredFile, open_store
from meshwright.data.tokenizer import LoadedTokenizer, load_tokenizer
from meshwright.durable.lock import locked
from meshwright.durable.writes import write_durable
from meshwright.spec.errors import BadInput, MeshwrightError
from meshwright.spec.failures import COMMAND_MEMORY_HINT, as_meshwright_error

PARENT_SECONDS = 2.0
"""Seconds between two checks whether the parent process still runs."""
SAMPLED_DOCUMENTS = 256
"""Documents of a source on which the tokens per byte are measured."""
log = logging.getLogger("meshwright")


@dataclass(frozen=True)
class Settings:
    """The settings of a loader process."""

    tokenizer: str
    """Path of the tokenizer.json or of its folder."""
    end: str | None
    """Token that ends a document; None for the tokenizer's own."""
    cache: str
    """Folder of the cache."""
    cache_bytes: int
    """Limit on the size of the cache, in bytes."""
    patience: float
    """Seconds for which a failing request to a store is repeated."""


class Worker:
    """Does the requests of one loader process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._cache = Cache(Path(settings.cache), settings.cache_bytes)
        self._verified = VerifiedGroups()
        self._stores: dict[str, Store] = {}

    @cached_property
    def _tokenizer(self) -> LoadedTokenizer:
        return load_tokenizer(Path(self._settings.tokenizer), self._settings.end)

    @cached_property
    def _fast(self) -> FastEncoder | None:
        return _fast_encoder(self._tokenizer)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do one request and return its result. Raises MeshwrightError.

        The requests, by `op`:

            index    files, text             makes or updates the index of a source; returns its path
            group    file, group, text       makes sure that the cache has the tokens of a group; returns what is known of its bad documents
            texts    groups, text, path      writes the texts of groups as lines of JSON; returns nothing
        """
        if request["op"] == "index":
            return {"path": str(self.index(request["files"], request["text"]))}
        if request["op"] == "texts":
            groups = [(StoredFile(**file), number) for file, number in request["groups"]]
            self.write_texts(Path(request["path"]), groups, request["text"])
            return {}
        file = StoredFile(**request["file"])
        record = self.group(file, request["group"], request["text"])
        return {"bad": record.bad, "first_bad": record.first_bad}

    def index(self, files: str, text: str) -> Path:
        """Make or update the index of a source and return its path."""
        path = index_path(self._cache.folder, files, text)
        with locked(path.with_suffix(".making"), wait=True):
            kept = SourceIndex.read(path)
            index = build_index(self._store(files), files, text, kept)
            if index is not kept or not index.tokens_per_byte:
                index = replace(index, tokens_per_byte=self._tokens_per_byte(index, files, text))
                index.write(path)
        return path

    def group(self, file: StoredFile, number: int, text: str) -> GroupRecord:
        """Make sure that the tokens of a group are in the cache, and return the group's record.

        If the fast encoder disagrees with the tokenizer on a text, the whole group is encoded again with the tokenizer.
        """
        name = group_name(file, number, text, texts_digest(self._tokenizer))
        path = self._cache.path(name)
        if (record := self._verified.read(path)) is not None:
            return record
        with self._cache.making(name):
            if (record := self._verified.read(path)) is not None:
                return record
            try:
                record, size = self._write(path, file, number, text, self._fast)
            except EncodersDiffer as difference:
                log.warning(
                    "%s; tokenizers encodes group %d of %s, several times slower", difference, number, file.name
                )
                record, size = self._write(path, file, number, text, None)
        self._cache.make_room(size)
        return record

    def write_texts(self, path: Path, groups: Sequence[tuple[StoredFile, int]], text: str) -> None:
        """Write the usable documents of these groups to `path` as lines of JSON with `id` and `text`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        documents = (
            document
            for file, number in groups
            for document in _usable(group_documents(self._store(file.name), file, number, text), [])
        )
        write_durable(path, (json.dumps({"id": document.key, "text": document.text}) + "\n" for document in documents))

    def _write(
        self, path: Path, file: StoredFile, number: int, text: str, fast: FastEncoder | None
    ) -> tuple[GroupRecord, int]:
        """Write the file of a group. Return its record, and its size in bytes."""
        bad: list[str] = []
        dtype = token_dtype(self._tokenizer.record.vocab_size)
        documents = _usable(group_documents(self._store(file.name), file, number, text), bad)
        return write_group(path, encode_documents(documents, self._tokenizer, dtype, 1, fast), dtype, bad)

    def _tokens_per_byte(self, index: SourceIndex, files: str, text: str) -> float:
        """Return the tokens per byte of text, measured on the first documents of the source.

        Raises BadInput if none of them is usable.
        """
        bad: list[str] = []
        first = index.files[int(index.group_file[0])]
        documents = _usable(group_documents(self._store(files), first, int(index.group_number[0]), text), bad)
        encoded = [
            (len(document.tokens), document.text_bytes)
            for document in encode_documents(
                islice(documents, SAMPLED_DOCUMENTS), self._tokenizer, "int32", 1, self._fast
            )
        ]
        if not encoded:
            raise BadInput(bad[0] if bad else f"{first.name}: its first group has no documents")
        return sum(tokens for tokens, _ in encoded) / max(sum(size for _, size in encoded), 1)

    def _store(self, files: str) -> Store:
        """Return the store of a path or URL. URLs of the same bucket share one store object."""
        key = "/".join(files.split("/", 3)[:3]) if "://" in files else ""
        if key not in self._stores:
            self._stores[key] = open_store(files, self._settings.patience)
        return self._stores[key]


def _usable(documents: Iterator[CorpusDocument | BadDocument], bad: list[str]) -> Iterator[CorpusDocument]:
    """Yield the usable documents, and append a description of each unusable one to `bad`."""
    for document in documents:
        if isinstance(document, CorpusDocument):
            yield document
        else:
            bad.append(str(document))


def _fast_encoder(tokenizer: LoadedTokenizer) -> FastEncoder | None:
    try:
        return FastEncoder(tokenizer.content, tokenizer.tokenizer, 1)
    except EncodersDiffer as difference:
        log.warning("%s; tokenizers encodes all text, several times slower", difference)
        return None


def main() -> None:
    """Answer requests until standard input ends."""
    parent = os.getppid()
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    settings = Settings(**json.loads(sys.stdin.readline()))
    worker: Worker | None = None
    for line in sys.stdin:
        try:
            worker = worker or Worker(settings)
            answer = worker.answer(json.loads(line))
        except MeshwrightError as error:
            answer = {"error": str(error), "code": error.exit_code}
        except Exception as error:
            log.exception("a loader process failed")
            failure = as_meshwright_error(error, "a loader process failed", memory_hint=COMMAND_MEMORY_HINT)
            answer = {"error": str(failure), "code": failure.exit_code}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _end_with_parent(parent: int) -> None:
    """End this process when its parent has ended.

    The end of standard input alone does not suffice: another child of the parent may hold a copy of the pipe and keep
    it open.
    """
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    main()
