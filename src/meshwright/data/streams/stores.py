"""Lists and reads the files of a source, on a local disk or in an object store.

The client library of object stores, `obstore`, has threads. A process that has used it must not be forked, so only the
program of a loader process (`data.streams.process`) opens an object store.

Every read checks that the file still has the size and tag that it had when it was listed; otherwise it raises BadInput.
A failed request is repeated after growing pauses. After `patience` seconds it raises CommunicationFailure, which names
the file. An answer with fewer bytes than requested counts as a failed request.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

from meshwright.data.streams.patterns import check_url, is_url, matcher, split_pattern
from meshwright.spec.errors import BadInput, CommunicationFailure, Damaged, nearest

PATIENCE = 120.0
"""Seconds after which a request that keeps failing is given up."""
READ_SECONDS = 5
"""Seconds to wait for bytes of an answer before the request counts as failed."""
CONNECT_SECONDS = 5
"""Seconds to wait for a connection before the request counts as failed."""
LONGEST_PAUSE = 15.0
"""Longest pause between two attempts, in seconds."""
REQUEST_BYTES = 8 << 20
"""Maximum number of bytes of one request. A larger read is divided into several requests, which run at the same time."""
REQUESTS_AT_ONCE = 8
"""Maximum number of requests of one read that run at the same time."""
_QUERY = re.compile(r"\?[^\s\"')]*")
"""The query of a URL, which may contain a signature. Messages do not show it."""
log = logging.getLogger("meshwright")
T = TypeVar("T")


@dataclass(frozen=True)
class StoredFile:
    """A file as it was listed."""

    name: str
    """Its path or URL."""
    size: int
    """Its size in bytes."""
    tag: str
    """Identifies the contents: the ETag of an object, the modification time of a local file in ns."""


class Store(Protocol):
    """Something that lists and reads files: the local file systems or a bucket."""

    def list(self, files: str) -> list[StoredFile]:
        """List the files that a path, folder or pattern names, sorted by name. Raises BadInput if there is no such path."""
        ...

    def read(self, file: StoredFile, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of a file."""
        ...

    def check(self, file: StoredFile) -> None:
        """Raise BadInput if the file has changed since it was listed."""
        ...


def open_store(files: str, patience: float = PATIENCE) -> Store:
    """Return the store of a path or URL. Raises BadInput if the URL is not that of a store, or if the client library is not installed."""
    return ObjectStore(files, patience) if is_url(files) else LocalFiles()


class LocalFiles:
    """The files of this host's file systems."""

    def list(self, files: str) -> list[StoredFile]:
        """As in Store. Hidden files, and files in hidden folders, are left out."""
        path = Path(files)
        if path.is_file():
            return [_local_file(path)]
        folder, pattern = (files, "**") if path.is_dir() else split_pattern(files)
        if not Path(folder).is_dir():
            siblings = os.listdir(Path(folder).parent) if Path(folder).parent.is_dir() else []
            near = nearest(Path(folder).name, siblings)
            hint = f" (nearest: {Path(folder).parent / near})" if near else ""
            raise BadInput(f"{files}: no such file or folder{hint}")
        match = matcher(pattern).fullmatch
        return sorted(
            (_local_file(path) for name, path in _below(Path(folder)) if match(name)), key=lambda file: file.name
        )

    def read(self, file: StoredFile, start: int, stop: int) -> bytes:
        """As in Store. Raises BadInput if the file has changed or is gone, and Damaged if it cannot be read."""
        try:
            with open(file.name, "rb", buffering=0) as opened:
                status = os.fstat(opened.fileno())
                _check_same(file, status.st_size, str(status.st_mtime_ns))
                content = bytearray()
                while len(content) < stop - start:
                    piece = os.pread(opened.fileno(), stop - start - len(content), start + len(content))
                    if not piece:
                        raise Damaged(
                            f"{file.name}: ends at byte {start + len(content):,}, expected {file.size:,} bytes"
                        )
                    content += piece
                return bytes(content)
        except FileNotFoundError:
            raise BadInput(f"{file.name}: is gone since the run has listed it") from None
        except OSError as error:
            raise Damaged(f"{file.name}: cannot be read: {error.strerror or error}") from error

    def check(self, file: StoredFile) -> None:
        try:
            status = os.stat(file.name)
        except OSError:
            raise BadInput(f"{file.name}: is gone since the run has listed it") from None
        _check_same(file, status.st_size, str(status.st_mtime_ns))


def _below(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files below a folder that are not hidden: (name relative to the folder, path)."""
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            if not name.startswith("."):
                path = Path(parent) / name
                if path.is_file():
                    yield path.relative_to(folder).as_posix(), path


def _local_file(path: Path) -> StoredFile:
    status = path.stat()
    return StoredFile(str(path), status.st_size, str(status.st_mtime_ns))


def _check_same(file: StoredFile, size: int, tag: str | None) -> None:
    if (size, tag) != (file.size, file.tag):
        raise BadInput(
            f"{file.name}: changed since the run has listed it ({file.size:,} bytes with tag {file.tag} then, {size:,} with {tag} now); "
            "put it back, or begin another run"
        )


def open_object_store(url: str) -> tuple[Any, Any, str]:
    """Returns the client library of object stores, its store for the bucket of `url`, and the URL of that bucket.

    Raises BadInput if the library is not installed or does not know the store.
    """
    check_url(url)
    try:
        import obstore
        from obstore.store import from_url
    except ImportError as error:
        raise BadInput(f"{url}: {error}; pip install 'meshwright[stream]'") from error
    root = "/".join(url.split("/", 3)[:3])
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
        "read_timeout": timedelta(seconds=READ_SECONDS),
        "allow_http": os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"),
    }
    try:
        return obstore, from_url(root, client_options=client, retry_config={"max_retries": 2}), root
    except Exception as error:  # The library raises its own error classes.
        raise BadInput(f"{root}: {_words(error)}") from None


class ObjectStore:
    """The objects of one bucket. Credentials come from the environment variables that the store's own tools read."""

    def __init__(self, url: str, patience: float = PATIENCE) -> None:
        self._calls, self._store, self._root = open_object_store(url)
        self._patience = patience

    def list(self, files: str) -> list[StoredFile]:
        """As in Store. Objects without content are left out."""
        folder, pattern = split_pattern(files)
        if not pattern and self._key(files):
            single = self._try(files, lambda: self._calls.head(self._store, self._key(files)), missing=True)
            if single is not None:
                return [self._file(single)]
        pattern = pattern or "**"
        prefix = self._key(folder)
        found = self._try(files, lambda: self._calls.list(self._store, prefix or None).collect())
        match = matcher(pattern).fullmatch
        cut = len(prefix) + 1 if prefix else 0
        return sorted(
            (self._file(meta) for meta in found if meta["size"] and match(meta["path"][cut:])),
            key=lambda file: file.name,
        )

    def read(self, file: StoredFile, start: int, stop: int) -> bytes:
        """As in Store. Several requests run at the same time if there are many bytes."""
        starts = range(start, stop, REQUEST_BYTES)
        if len(starts) == 1:
            return self._read(file, start, stop)
        with ThreadPoolExecutor(min(len(starts), REQUESTS_AT_ONCE), "read") as pool:
            return b"".join(pool.map(lambda first: self._read(file, first, min(first + REQUEST_BYTES, stop)), starts))

    def check(self, file: StoredFile) -> None:
        found = self._file(self._try(file.name, lambda: self._calls.head(self._store, self._key(file.name))))
        _check_same(file, found.size, found.tag)

    def _read(self, file: StoredFile, start: int, stop: int) -> bytes:
        """Read bytes [start, stop) with one request, which is repeated if it fails."""

        def request() -> bytes:
            answer = self._calls.get(self._store, self._key(file.name), options={"range": (start, stop)})
            found = self._file(answer.meta)
            _check_same(file, found.size, found.tag)
            content = bytes(answer.bytes())
            if len(content) != stop - start:
                raise OSError(f"got {len(content):,} of the {stop - start:,} bytes from {start:,} on")
            return content

        return self._try(file.name, request) if stop > start else b""

    def _key(self, url: str) -> str:
        """Return the name of an object in its bucket."""
        return url[len(self._root) :].strip("/")

    def _file(self, meta: Any) -> StoredFile:
        """Return the file of an object's metadata. Without an ETag, the time of its last change is the tag."""
        tag = meta["e_tag"] or meta["last_modified"].isoformat()
        return StoredFile(f"{self._root}/{meta['path']}", meta["size"], tag)

    def _try(self, name: str, work: Callable[[], T], *, missing: bool = False) -> Any:
        """Call `work` until it succeeds and return its result.

        If the object does not exist, returns None with `missing`, and raises BadInput otherwise.
        """
        from obstore.exceptions import NotFoundError, PermissionDeniedError, UnauthenticatedError

        deadline = time.monotonic() + self._patience
        pause = 0.2
        while True:
            try:
                return work()
            except (BadInput, Damaged):
                raise
            except (NotFoundError, FileNotFoundError):
                if missing:
                    return None
                raise BadInput(f"{name}: no such object in the store") from None
            except (PermissionDeniedError, UnauthenticatedError, PermissionError) as error:
                raise BadInput(f"{name}: the store refuses access: {_words(error)}") from None
            except Exception as error:  # The library raises its own error classes.
                if time.monotonic() + pause > deadline:
                    failed = f"{name}: cannot be read: {_words(error)}; tried for {self._patience:.0f} s"
                    raise CommunicationFailure(failed) from None
                log.info("%s: %s; trying again in %.1f s", name, _words(error), pause)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


def _words(error: Exception) -> str:
    """Return an error in one line. The queries of URLs are removed because they may contain signatures."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {_QUERY.sub('?…', lines[0] if lines else '')[:300]}"
