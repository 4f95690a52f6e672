"""The one table from exceptions to exit codes and messages. Torch-free: torch's exceptions are known by the names of their classes."""

from __future__ import annotations

import errno
import re

from meshwright.spec.errors import (
    ERROR_CLASS_BY_EXIT_CODE,
    BadConfig,
    BadInput,
    CommunicationFailure,
    Damaged,
    Interrupted,
    MeshwrightError,
    OutOfResources,
)

MEMORY_HINT = "lower plan.micro_batch, set plan.recompute=selective or full, or add ranks"
_OUT_OF_MEMORY = {"OutOfMemoryError", "MemoryError"}
_COMMUNICATION = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_HOST_MEMORY = re.compile(
    r"DefaultCPUAllocator: can't allocate memory|CUDA error: out of memory|can't start new thread"
)
"""How torch and Python word plain RuntimeErrors about host memory: pageable, pinned, a thread's stack."""
_GLOO = re.compile(r"^\[[^\]]*gloo/[^\]]*:\d+\] ")
"""How Gloo begins the text of the RuntimeErrors that it raises: with the place in its own sources."""
_BY_NUMBER: dict[type[MeshwrightError], tuple[set[int], str]] = {
    OutOfResources: (
        {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM},
        "free some there, lower checkpoint.keep, or place the run elsewhere with --runs",
    ),
    BadInput: (
        {errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENAMETOOLONG},
        "the place must be readable and writable by this user",
    ),
    Damaged: ({errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN}, "the device that holds it failed"),
    CommunicationFailure: (
        {
            errno.ECONNREFUSED,
            errno.ECONNRESET,
            errno.ECONNABORTED,
            errno.ETIMEDOUT,
            errno.EHOSTUNREACH,
            errno.ENETUNREACH,
            errno.EADDRNOTAVAIL,
        },
        "check that the hosts of the job reach one another",
    ),
}


MISSING_PATH_ERRNOS = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTCONN}
"""How the system reports a file of a folder that was deleted, or whose disk or server went away."""


def missing_path_error(path: object) -> OutOfResources:
    """The error for a file or folder of a run that is no longer where the run made it."""
    return OutOfResources(f"{path} is gone: it was deleted or moved in mid-run, or its disk was unmounted")


def as_meshwright_error(error: BaseException, doing: str = "") -> MeshwrightError:
    """The error to report for `error`: its class gives the exit code, its text is the message.

    `doing` says what was attempted, such as "saving step 100"; it begins the message. What the table does not know is an internal error.
    """
    prefix = f"{doing}: " if doing else ""
    if isinstance(error, MeshwrightError):
        if not doing or isinstance(error, BadConfig):
            return error
        return ERROR_CLASS_BY_EXIT_CODE[error.exit_code](f"{prefix}{error}")
    if isinstance(error, KeyboardInterrupt):
        return Interrupted(f"{prefix}interrupted")
    names = {kind.__name__ for kind in type(error).__mro__}
    first = next(iter(str(error).splitlines()), "")
    if names & _OUT_OF_MEMORY or (isinstance(error, RuntimeError) and _HOST_MEMORY.search(str(error))):
        return OutOfResources(f"{prefix}out of memory: {first or 'host'}; {MEMORY_HINT}")
    if names & _COMMUNICATION or (isinstance(error, RuntimeError) and _GLOO.match(str(error))):
        return CommunicationFailure(f"{prefix}communication failed: {_GLOO.sub('', first)}")
    if isinstance(error, OSError):
        return _of_system(error, prefix)
    return MeshwrightError(f"{prefix}internal error: {type(error).__name__}: {error}")


def _of_system(error: OSError, prefix: str) -> MeshwrightError:
    """The error for what the operating system refused; an unknown number is an internal error."""
    what = f"{prefix}{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return OutOfResources(f"{what}; raise the limit of open files (ulimit -n) for this process")
    if error.errno == errno.ENOTDIR:
        return BadInput(f"{what}; a file stands where this path needs a folder, so choose another path")
    for kind, (numbers, remedy) in _BY_NUMBER.items():
        if error.errno in numbers:
            return kind(f"{what}; {remedy}")
    if isinstance(error, FileNotFoundError):
        return BadInput(f"{what}; check the path, and that no one moved or deleted it")
    return MeshwrightError(f"{prefix}internal error: {type(error).__name__}: {error}")
