"""Computes the xxh3_64 digest of file blocks without holding the GIL, so that several threads run at once. Torch-free.

The Python functions of `xxhash` hold the GIL (measured with 4.1: two threads are no faster than one). Its compiled
module exports the C functions of libxxhash, and `ctypes` releases the GIL around a call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module

import xxhash


def block_digest(data: memoryview) -> str:
    """The xxh3_64 digest of a writable, contiguous view, in hexadecimal."""
    function = _c_function()
    if function is None or not len(data):
        return xxhash.xxh3_64(data).hexdigest()
    return f"{function(ctypes.addressof(ctypes.c_char.from_buffer(data)), len(data)):016x}"


@lru_cache(maxsize=1)
def _c_function() -> Callable[[int, int], int] | None:
    """The function `XXH3_64bits` of `xxhash`'s compiled module; None if that does not export it."""
    try:
        library = ctypes.CDLL(str(import_module("xxhash._xxhash").__file__))
        # On x86 the plain function has the instructions of every processor only: half the rate of those for this processor.
        function = getattr(library, "XXH3_64bits_dispatch", library.XXH3_64bits)
    except (ImportError, OSError, AttributeError):
        return None
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_uint64
    return function
