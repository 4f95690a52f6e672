"""xxh3_64 of file blocks, computed without Python's global lock so that several threads digest at once. Torch-free.

`xxhash` keeps the lock while it digests (measured with 4.1: two threads are no faster than one). Its compiled module exports the C
functions of libxxhash; `ctypes` releases the lock around a call.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from importlib import import_module
from typing import Any

import xxhash


class BlockDigest:
    """The xxh3_64 of bytes that are given piece by piece; one thread at a time."""

    def __init__(self) -> None:
        self._library = _library()
        if self._library is None:
            self._digest = xxhash.xxh3_64()
            return
        self._state = self._library.XXH3_createState()
        self._library.XXH3_64bits_reset(self._state)

    def __del__(self) -> None:
        state = getattr(self, "_state", None)
        if state and self._library is not None:
            self._library.XXH3_freeState(state)

    def update(self, data: memoryview) -> None:
        """Add the bytes of a writable, contiguous view."""
        if self._library is None:
            self._digest.update(data)
        elif len(data):
            address = ctypes.addressof(ctypes.c_char.from_buffer(data))
            self._library.XXH3_64bits_update(self._state, address, len(data))

    def hexdigest(self) -> str:
        if self._library is None:
            return self._digest.hexdigest()
        return f"{self._library.XXH3_64bits_digest(self._state):016x}"


@lru_cache(maxsize=1)
def _library() -> Any:
    """The C functions of `xxhash`'s compiled module, or None where it does not export them or they digest otherwise."""
    try:
        library = ctypes.CDLL(str(import_module("xxhash._xxhash").__file__))
        library.XXH3_createState.restype = ctypes.c_void_p
        library.XXH3_createState.argtypes = []
        library.XXH3_freeState.argtypes = library.XXH3_64bits_reset.argtypes = [ctypes.c_void_p]
        library.XXH3_64bits_update.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        library.XXH3_64bits_digest.argtypes = [ctypes.c_void_p]
        library.XXH3_64bits_digest.restype = ctypes.c_uint64
    except (ImportError, OSError, AttributeError):
        return None
    return library
