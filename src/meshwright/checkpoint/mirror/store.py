"""Stores and reads whole objects below a URL, in any store that fsspec supports. Failed requests are repeated.

Callers must know the names of the objects. The listings of some stores lag behind, so `names` proves only that there is
something.

This module does not import torch.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from meshwright.spec.errors import BadInput, CommunicationFailure

log = logging.getLogger(__name__)
T = TypeVar("T")

PART_BYTES = 64 << 20
"""Bytes of each part of a multipart upload."""
ANSWER_SECONDS = 30.0
"""Seconds after which a request without an answer has failed. It is then repeated."""
LONGEST_PAUSE = 30.0
"""Longest pause before a request is repeated, in seconds."""
_PERMANENT_ERRORS = (PermissionError, ImportError, TypeError, ValueError, NotImplementedError)
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]*"
_URL = re.compile(rf"(?:{_SCHEME}::)*({_SCHEME})://[^/@?:]*(?::[0-9]*)?(?:/(?:(?!::)[^?])*)?", re.DOTALL)
"""A URL without credentials and without a query. Chained file systems, as in `simplecache::s3://…`, have neither, too."""


class MirrorStore:
    """The objects below `url`, such as `s3://bucket/prefix`. Thread-safe.

    Credentials come from the environment, where the store's own tools look for them. A failed request is repeated after
    growing pauses. After `patience` seconds CommunicationFailure is raised. A request fails if it has no answer after
    `answer_seconds`. Large files are uploaded in parts of `part_bytes`.
    """

    def __init__(
        self, url: str, *, patience: float, answer_seconds: float = ANSWER_SECONDS, part_bytes: int = PART_BYTES
    ) -> None:
        self.url = url.rstrip("/")
        self._patience = patience
        self._part_bytes = part_bytes
        self._s3 = check_url(url) in ("s3", "s3a")
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if self._s3:
            limits = {"connect_timeout": answer_seconds, "read_timeout": answer_seconds, "retries": {"max_attempts": 1}}
            options["config_kwargs"] = limits
        try:
            import fsspec

            self._files, self._root = fsspec.core.url_to_fs(self.url, **options)
        except ImportError as error:
            raise BadInput(f"{url}: {error}; pip install 'meshwright[storage]'", key="checkpoint.mirror") from error

    def put(self, path: Path, name: str) -> None:
        """Store the file at `path` as object `name`, in parts if it is large. On return the object is complete."""
        size = path.stat().st_size
        options = {"chunksize": self._part_bytes} if self._s3 else {}

        def upload() -> None:
            self._make_parent(name)
            self._files.put_file(str(path), self._key(name), **options)
            stored = self._files.info(self._key(name), **({"refresh": True} if self._s3 else {}))["size"]
            if stored != size:
                raise OSError(f"{name} has {stored} bytes in the store, {size} were sent")

        self._retry(f"storing {name}", upload)

    def put_bytes(self, data: bytes, name: str) -> None:
        """Store a small object."""

        def upload() -> None:
            self._make_parent(name)
            self._files.pipe_file(self._key(name), data)

        self._retry(f"storing {name}", upload)

    def get(self, name: str, path: Path) -> None:
        """Write object `name` to the file at `path`."""
        self._retry(f"reading {name}", lambda: self._files.get_file(self._key(name), str(path)))

    def get_bytes(self, name: str) -> bytes | None:
        """Return the bytes of a small object, or None if there is no such object."""
        try:
            return self._retry(f"reading {name}", lambda: self._files.cat_file(self._key(name)))
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        """Return the first parts of the names of the objects below the URL.

        Objects that were stored recently may be missing, and objects that were deleted recently may still be listed.
        """
        try:
            keys = self._retry("listing", lambda: self._files.ls(self._root, detail=False))
        except FileNotFoundError:
            return []
        return sorted(str(key).rstrip("/").rpartition("/")[2] for key in keys)

    def delete(self, name: str) -> None:
        """Delete an object. A missing object counts as deleted."""
        try:
            self._retry(f"deleting {name}", lambda: self._files.rm_file(self._key(name)))
        except FileNotFoundError:
            return

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_parent(self, name: str) -> None:
        if not self._s3:  # object stores have no folders
            self._files.makedirs(self._key(name).rpartition("/")[0], exist_ok=True)

    def _retry(self, activity: str, work: Callable[[], T]) -> T:
        """Call `work` until it succeeds, or `patience` seconds have passed. `activity` begins error messages.

        Raises BadInput for errors that no repetition can remove. FileNotFoundError passes through.
        """
        deadline = time.monotonic() + self._patience
        pause = 0.5
        while True:
            try:
                return work()
            except FileNotFoundError:
                raise  # the store's answer that there is no such object; callers handle it
            except Exception as error:
                reason = f"{self.url}: {activity}: {type(error).__name__}: {str(error)[:300]}"
                if isinstance(error, _PERMANENT_ERRORS):
                    raise BadInput(reason, key="checkpoint.mirror") from error
                if time.monotonic() + pause > deadline:
                    raise CommunicationFailure(f"{reason}; tried for {self._patience:.0f} s") from error
                log.info("%s; trying again in %.1f s", reason, pause)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


def check_url(url: str) -> str:
    """Return the protocol of a store's URL, such as "s3". Raises BadInput for no such URL, and for one with credentials."""
    if (match := _URL.fullmatch(url)) is not None:
        return match[1].lower()
    if "://" in url:
        shown = f"{url.partition('://')[0].rpartition('::')[2]}://…"
        what = "credentials do not belong into a URL; set them in the environment"
    else:
        shown = "…" if "@" in url or "?" in url else url
        what = "no protocol"
    raise BadInput(
        f"checkpoint.mirror {shown}: {what}; expected a URL such as s3://bucket/prefix", key="checkpoint.mirror"
    )


def check_mirror(url: str | None) -> None:
    """Raise BadInput if `checkpoint.mirror` is not a store's URL, or if the package for its protocol is not installed."""
    package = None if url is None else _PACKAGES.get(check_url(url))
    if package is not None and find_spec(package) is None:
        raise BadInput(
            f"checkpoint.mirror {url}: needs {package}; pip install 'meshwright[storage]'", key="checkpoint.mirror"
        )
