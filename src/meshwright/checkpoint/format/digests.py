"""Computes the xxh3_64 digest of file blocks without holding Python's GIL, so that several threads run at once.

The functions of the Python module `xxhash` hold the GIL (measured with 4.1: two threads are no faster than one). But its
compiled module exports the C functions of libxxhash, and `ctypes` releases the GIL around a call.

This module does not import torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

import xxhash


def block_digest(data: memoryview) -> str:
    """Return the xxh3_64 digest of a writable, contiguous view, in hexadecimal."""
    functions = _c_functions()
    if functions is None or not len(data):
        return xxhash.xxh3_64(data).hexdigest()
    return f"{functions.digest(_address(data), len(data)):016x}"


def digest_while_filling(data: memoryview, part_bytes: int, fill: Callable[[int, int], object]) -> str:
    """Fill a writable, contiguous view part by part, and return its xxh3_64 digest in hexadecimal.

    `fill(start, end)` writes the bytes [start, end) of the view; a part has `part_bytes` bytes. Each part is digested
    before the next one is written, while it is still in the processor's cache.
    """
    parts = [(start, min(start + part_bytes, len(data))) for start in range(0, len(data), part_bytes)]
    functions = _c_functions()
    if functions is None or not parts:
        digest = xxhash.xxh3_64()
        for start, end in parts:
            fill(start, end)
            digest.update(data[start:end])
        return digest.hexdigest()
    address = _address(data)
    state = functions.create_state()
    try:
        functions.reset(state)
        for start, end in parts:
            fill(start, end)
            functions.update(state, address + start, end - start)
        return f"{functions.result(state):016x}"
    finally:
        functions.free_state(state)


def _address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


class _XXHash:
    """The C functions of libxxhash.

    Functions that take long release the GIL. Short ones keep it, because releasing it would take longer than the call.
    """

    def __init__(self, path: str) -> None:
        long = ctypes.CDLL(path)
        short = ctypes.PyDLL(path)
        pointer = ctypes.c_void_p
        size = ctypes.c_size_t
        number = ctypes.c_uint64
        # On x86 the plain functions use only instructions that every processor has. The `_dispatch` ones are twice as fast.
        self.digest = _typed(getattr(long, "XXH3_64bits_dispatch", long.XXH3_64bits), number, pointer, size)
        update = getattr(long, "XXH3_64bits_update_dispatch", long.XXH3_64bits_update)
        self.update = _typed(update, ctypes.c_int, pointer, pointer, size)
        self.create_state = _typed(short.XXH3_createState, pointer)
        self.free_state = _typed(short.XXH3_freeState, ctypes.c_int, pointer)
        self.reset = _typed(short.XXH3_64bits_reset, ctypes.c_int, pointer)
        self.result = _typed(short.XXH3_64bits_digest, number, pointer)


def _typed(function: Any, result: Any, *arguments: Any) -> Any:
    function.argtypes = arguments
    function.restype = result
    return function


@lru_cache(maxsize=1)
def _c_functions() -> _XXHash | None:
    """Return the functions of `xxhash`'s compiled module, or None if the module does not export them."""
    try:
        return _XXHash(str(import_module("xxhash._xxhash").__file__))
    except (ImportError, OSError, AttributeError):
        return None
