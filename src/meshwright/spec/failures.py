"""The table from exceptions to exit codes and messages.

Torch-free: torch's exceptions are recognised by their class names.
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
"""What to do about memory that ranks do not get."""
COMMAND_MEMORY_HINT = (
    "give the command more memory (ulimit -v, the container's or the job's limit), or end what else uses it"
)
_OUT_OF_MEMORY = {"OutOfMemoryError", "MemoryError"}
_COMMUNICATION = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_HOST_MEMORY = re.compile(
    r"DefaultCPUAllocator: can't allocate memory|CUDA error: out of memory|can't start new thread|std::bad_alloc|"
    r"failed to map segment from shared object|cannot allocate memory|Cannot allocate memory"
)
"""Texts of RuntimeErrors and ImportErrors about host memory: pageable and pinned memory, a thread's stack, a library's code."""
_GLOO = re.compile(r"^\[[^\]]*gloo/[^\]]*:\d+\] ")
"""Prefix of the RuntimeErrors that Gloo raises: the position in its own sources."""
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


MISSING_PATH_ERRNOS = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTCONN}
"""Error numbers for a file whose folder was deleted, or whose disk or server disappeared."""


def missing_path_error(path: object) -> OutOfResources:
    """The error for a file or folder of a run that no longer exists at its path."""
    return OutOfResources(f"{path} no longer exists: it was deleted or moved during the run, or its disk was unmounted")


def as_meshwright_error(error: BaseException, doing: str = "", *, memory_hint: str = MEMORY_HINT) -> MeshwrightError:
    """The error to report for `error`: its class gives the exit code, its text is the message.

    `doing` is the operation, such as "saving step 100"; it begins the message. `memory_hint` ends it when memory is
    short. An exception that the table does not know is an internal error.
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
    """Whether an error without a class of its own is about memory of the host."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, (RuntimeError, ImportError)) and _HOST_MEMORY.search(str(error)) is not None


def _of_system(error: OSError, prefix: str) -> MeshwrightError:
    """The error for an OSError of the operating system; an unknown number is an internal error."""
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
