"""Stores for the coordinator's lease: a folder that all hosts share, or an object store.

A store holds one value with a version. A writer replaces the version that it has seen by the next one; if another writer was first, nothing
is written. A folder ensures this by file names: `os.link` creates a name on only one host. An object store ensures it by conditional
writes.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from meshwright.data.streams.stores import open_object_store
from meshwright.durable.writes import PARTIAL, sync_folder, write_durable
from meshwright.policies.coordinator_lease import CoordinatorLease
from meshwright.spec.errors import BadInput
from meshwright.spec.fields import from_checked_plain, to_plain

KEY = "supervision.lease"
KEPT_VERSIONS = 8
"""Number of newest versions whose files a folder keeps.

A writer that has seen an older version may create a name again that was deleted. It notices this because newer files exist.
"""
LEASE_FOLDER = "coordinator"
LEASE_OBJECT = "coordinator.json"
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class LeaseStore(Protocol):
    """A store for a lease. Methods raise OSError if the store cannot be reached, and BadInput if it cannot hold a lease."""

    def read(self) -> CoordinatorLease | None:
        """The newest lease; None if there is none."""
        ...

    def replace(self, seen: CoordinatorLease | None, new: CoordinatorLease) -> bool:
        """Replace `seen`, the lease as it was read, by its next version `new`. Returns False if the store has another lease by now.

        After an OSError, the lease may or may not have been replaced.
        """
        ...


class FolderLeases:
    """A folder with the files `1`, `2`, …, one for each version. A renewal only adds another name to the last file: it needs no space."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self) -> CoordinatorLease | None:
        for version in reversed(self._versions()):
            try:
                text = (self._folder / str(version)).read_text(encoding="utf-8")
            except FileNotFoundError:  # a newer version has replaced it since, and it was deleted
                return self.read()
            with suppress(ValueError, TypeError):
                return from_checked_plain(CoordinatorLease, {**json.loads(text), "version": version})
        return None

    def replace(self, seen: CoordinatorLease | None, new: CoordinatorLease) -> bool:
        if seen is None:
            self._folder.mkdir(parents=True, exist_ok=True)
        if seen is not None and new == replace(seen, version=new.version):
            won = self._link(self._folder / str(seen.version), new.version)
        else:
            source = self._folder / f"{new.version}.{new.holder}{PARTIAL}"
            write_durable(source, json.dumps(to_plain(new)) + "\n")
            try:
                won = self._link(source, new.version)
                sync_folder(self._folder)
            finally:
                source.unlink(missing_ok=True)
        versions = self._versions()
        for version in versions[:-KEPT_VERSIONS]:
            (self._folder / str(version)).unlink(missing_ok=True)
        return won and versions[-1] == new.version

    def _link(self, source: Path, version: int) -> bool:
        try:
            os.link(source, self._folder / str(version))
        except (FileExistsError, FileNotFoundError):  # another writer was first
            return False
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise BadInput(
                    f"{self._folder}: its file system has no hard links ({error.strerror}), so it cannot hold the lease of the "
                    f"coordinator; expected a folder with hard links, or an object store with conditional writes, in {KEY}",
                    key=KEY,
                ) from None
            raise
        return True

    def _versions(self) -> list[int]:
        """The versions for which a file exists, ascending."""
        with suppress(FileNotFoundError):
            return sorted(int(name) for name in os.listdir(self._folder) if name.isdecimal())
        return []


class ObjectLeases:
    """One object. It is written only if its tag is still that of the content that was read."""

    def __init__(self, url: str) -> None:
        """`url` is the address of the object, such as `s3://bucket/prefix/run/coordinator.json`."""
        self._url = url
        self._calls, self._store, root = open_object_store(url)
        self._path = url.removeprefix(root).strip("/")
        self._tag: dict[str, Any] = {}
        """Tag of the version that was read or written last."""
        self._version = 0
        self._checked = False

    def read(self) -> CoordinatorLease | None:
        answer = self._call(lambda: self._calls.get(self._store, self._path))
        if answer is None:
            return None
        content = bytes(answer.bytes())
        try:
            lease = from_checked_plain(CoordinatorLease, json.loads(content))
        except (ValueError, TypeError):
            raise BadInput(f"{self._url}: this object is no lease of a coordinator; delete it", key=KEY) from None
        self._tag = _tag_of(answer.meta)
        self._version = lease.version
        return lease

    def replace(self, seen: CoordinatorLease | None, new: CoordinatorLease) -> bool:
        if seen is None and not self._checked:
            self._check()
        if seen is not None and seen.version != self._version:
            return False
        answer = self._put(self._path, json.dumps(to_plain(new)), "create" if seen is None else self._tag)
        if answer is None:
            return False
        self._tag = _tag_of(answer)
        self._version = new.version
        return True

    def _check(self) -> None:
        """Raise BadInput unless the store refuses a write whose condition is false. Some stores accept conditions and ignore them."""
        path = f"{self._path}.{secrets.token_hex(4)}"
        try:
            created, again = (self._put(path, text, "create") for text in "12")
            changed = None if created is None else self._put(path, "3", _tag_of(created))
            stale = None if created is None else self._put(path, "4", _tag_of(created))
        finally:
            self._call(lambda: self._calls.delete(self._store, path))
        if created is None or again is not None or changed is None or stale is not None:
            raise self._refusal("it ignores the conditions of writes")
        self._checked = True

    def _put(self, path: str, text: str, mode: Any) -> Any:
        """Write the object. Returns the tags of the new content; None if the condition is false."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            return self._call(lambda: self._calls.put(self._store, path, text.encode(), mode=mode))
        except (AlreadyExistsError, PreconditionError):
            return None

    def _call(self, work: Any) -> Any:
        """The result of a request; None if the object does not exist."""
        from obstore import exceptions

        try:
            return work()
        except (exceptions.NotFoundError, FileNotFoundError):
            return None
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            raise
        except (exceptions.NotSupportedError, NotImplementedError) as error:
            raise self._refusal(_first_line(error)) from None
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise BadInput(f"{self._url}: {_first_line(error)}", key=KEY) from None
        except exceptions.BaseError as error:
            raise OSError(f"{self._url}: {_first_line(error)}") from None

    def _refusal(self, reason: str) -> BadInput:
        return BadInput(
            f"{self._url}: this store has no conditional writes ({reason}), so it cannot hold the lease of the coordinator; "
            f"expected one that has, or a folder with hard links, in {KEY}",
            key=KEY,
        )


def _tag_of(meta: Any) -> dict[str, Any]:
    """Tag and version of an object, to be used as the condition of a write."""
    return {name: meta[name] for name in ("e_tag", "version") if meta.get(name) is not None}


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def lease_store(place: str | None, name: str, folder: Path) -> LeaseStore:
    """The lease store of the run `name` in `folder`. `place` is its setting `supervision.lease`.

    Raises BadInput if `place` is neither a folder nor an object store.
    """
    if place is None:
        return FolderLeases(folder / LEASE_FOLDER)
    place = place.removeprefix("file://")
    if "://" in place:
        return ObjectLeases(f"{place.rstrip('/')}/{name}/{LEASE_OBJECT}")
    if not os.path.isdir(place):
        raise BadInput(f"{KEY} {place}: there is no such folder; all hosts need it", key=KEY)
    return FolderLeases(Path(place) / name / LEASE_FOLDER)
