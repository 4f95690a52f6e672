"""Computes the xxh3_64 digest of file blocks without holding the GIL, so that several threads run at once. Torch-free.

The Python functions of `xxhash` hold the GIL (measured with 4.1: two threads are no faster than one). Its compiled
module exports the C functions of libxxhash, and `ctypes` releases the GIL around a call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import lru_cache
from importlib import import_module
from typing import Any

import xxhash


def digest_of_parts(parts: Iterable[memoryview]) -> str:
    """The xxh3_64 digest of writable, contiguous views one after the other, in hexadecimal.

    A part is digested before the next is taken, so it is still in the processor's cache if taking it read it there.
    """
    functions = _c_functions()
    if functions is None:
        digest = xxhash.xxh3_64()
        for part in parts:
            digest.update(part)
        return digest.hexdigest()
    state = functions.create()
    try:
        functions.reset(state)
        for part in parts:
            if len(part):
                functions.update(state, ctypes.addressof(ctypes.c_char.from_buffer(part)), len(part))
        return f"{functions.result(state):016x}"
    finally:
        functions.free(state)


def block_digest(data: memoryview) -> str:
    """The xxh3_64 digest of a writable, contiguous view, in hexadecimal."""
    return digest_of_parts((data,))


class _StreamFunctions:
    """The functions of libxxhash for a digest of several parts."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer = ctypes.c_void_p
        self.create = _typed(library.XXH3_createState, pointer)
        self.free = _typed(library.XXH3_freeState, ctypes.c_int, pointer)
        self.reset = _typed(library.XXH3_64bits_reset, ctypes.c_int, pointer)
        self.result = _typed(library.XXH3_64bits_digest, ctypes.c_uint64, pointer)
        # On x86 the plain function has the instructions of every processor only, a third of the rate of those for this processor.
        update = getattr(library, "XXH3_64bits_update_dispatch", library.XXH3_64bits_update)
        self.update = _typed(update, ctypes.c_int, pointer, pointer, ctypes.c_size_t)


def _typed(function: Any, result: Any, *arguments: Any) -> Any:
    function.argtypes, function.restype = arguments, result
    return function


@lru_cache(maxsize=1)
def _c_functions() -> _StreamFunctions | None:
    """The functions in `xxhash`'s compiled module; None if that does not export them."""
    try:
        return _StreamFunctions(ctypes.CDLL(str(import_module("xxhash._xxhash").__file__)))
    except (ImportError, OSError, AttributeError):
        return None
