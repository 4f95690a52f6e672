"""Says which exit code and which message an exception gets.

Without torch: torch's exceptions are recognised by the names of their classes.
"""

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
"""What a user can do if ranks do not get enough memory."""
COMMAND_MEMORY_HINT = (
    "give the command more memory (ulimit -v, the container's or the job's limit), or end what else uses it"
)
"""What a user can do if a command does not get enough memory."""
_OUT_OF_MEMORY = {"OutOfMemoryError", "MemoryError"}
"""Names of exception classes that mean too little memory."""
_COMMUNICATION = {"DistBackendError", "DistNetworkError", "DistStoreError"}
"""Names of exception classes that mean failed communication."""
_HOST_MEMORY = re.compile(
    r"DefaultCPUAllocator: can't allocate memory|CUDA error: out of memory|can't start new thread|std::bad_alloc|"
    r"failed to map segment from shared object|cannot allocate memory|Cannot allocate memory"
)
"""Texts of RuntimeErrors and ImportErrors that mean too little host memory.

They are about pageable memory, pinned memory, the stack of a thread, and the code of a library.
"""
_GLOO = re.compile(r"^\[[^\]]*gloo/[^\]]*:\d+\] ")
"""Prefix of the RuntimeErrors that Gloo raises: the position in its own source code."""
_BY_NUMBER: dict[type[MeshwrightError], tuple[set[int], str]] = {
    OutOfResources: (
        {errno.ENOSPC, errno.EDQUOT, errno.EFBIG},
        "free some space or choose another folder",
    ),
    BadInput: (
        {errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENAMETOOLONG},
        "this user must be able to read and write the path",
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
            errno.EPIPE,
        },
        "check that the hosts of the job reach one another",
    ),
}
"""Class of the error → (error numbers of the operating system, what a user can do)."""


MISSING_PATH_ERRNOS = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTCONN}
"""Error numbers for a file whose folder was deleted, or whose disk or server is gone."""


def missing_path_error(path: object) -> OutOfResources:
    """Return the error for a file or folder of a run that no longer exists at its path."""
    return OutOfResources(f"{path} no longer exists: it was deleted or moved during the run, or its disk was unmounted")


def as_meshwright_error(error: BaseException, doing: str = "", *, memory_hint: str = MEMORY_HINT) -> MeshwrightError:
    """Return the error that is reported for `error`: its class has the exit code, its text is the message.

    `doing` is the operation, such as "saving step 100"; the message begins with it. `memory_hint` ends the message if
    memory is short. An exception that is not known here becomes an internal error.
    """
    prefix = f"{doing}: " if doing else ""
    if isinstance(error, MeshwrightError):
        if not doing or isinstance(error, BadConfig):
            return error
        return ERROR_CLASS_BY_EXIT_CODE[error.exit_code](f"{prefix}{error}")
    if isinstance(error, KeyboardInterrupt):
        return Interrupted(f"{prefix}interrupted")
    names = {cls.__name__ for cls in type(error).__mro__}
    first = next(iter(str(error).splitlines()), "")
    if names & _OUT_OF_MEMORY or _is_host_memory(error):
        return OutOfResources(f"{prefix}out of memory: {first or 'host'}; {memory_hint}")
    if names & _COMMUNICATION or (isinstance(error, RuntimeError) and _GLOO.match(str(error))):
        return CommunicationFailure(f"{prefix}communication failed: {_GLOO.sub('', first)}")
    if isinstance(error, OSError):
        return _of_system(error, prefix)
    return MeshwrightError(f"{prefix}internal error: {type(error).__name__}: {error}")


def _is_host_memory(error: BaseException) -> bool:
    """Return whether an exception of a general class means too little host memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, (RuntimeError, ImportError)) and _HOST_MEMORY.search(str(error)) is not None


def _of_system(error: OSError, prefix: str) -> MeshwrightError:
    """Return the error for an OSError of the operating system.

    An error number that is not known here becomes an internal error.
    """
    message = f"{prefix}{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return OutOfResources(f"{message}; raise the limit of open files (ulimit -n) for this process")
    if error.errno == errno.ENOTDIR:
        return BadInput(f"{message}; the path contains a file where a folder is needed; choose another path")
    for error_class, (numbers, remedy) in _BY_NUMBER.items():
        if error.errno in numbers:
            return error_class(f"{message}; {remedy}")
    if isinstance(error, FileNotFoundError):
        return BadInput(f"{message}; check the path; the file may have been moved or deleted")
    return MeshwrightError(f"{prefix}internal error: {type(error).__name__}: {error}")
