"""Files with changed bytes, and what reads them: each change is read as before or refused with a documented code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from meshwright.spec.errors import EXIT_INTERNAL
from meshwright.spec.failures import as_meshwright_error

Case = tuple[Path, Callable[[], object]]
"""A file, and what reads it."""
FEW = 8
PLACES = [
    pytest.param(FEW, id="few"),
    pytest.param(150, id="many", marks=[pytest.mark.slow, pytest.mark.attack]),
]
"""Changed bytes of a file, about: few in `make test`, many in `make test-attack`."""
BITS = (0x01, 0x04, 0x80)
"""Changed bits, in turn: to the next digit, to another letter, and to a byte that is no ASCII."""


def assert_no_internal_error(cases: Iterable[Case], places: int) -> None:
    """Assert that every file is readable, and with changed bytes ends no reader as a defect of meshwright."""
    wrong, tried = list[str](), 0
    for file, read in cases:
        content = file.read_bytes()
        read()
        for number, place in enumerate(range(0, len(content), max(1, len(content) // places))):
            bit = BITS[number % len(BITS)]
            file.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
            tried += 1
            try:
                read()
            except Exception as error:
                if as_meshwright_error(error).exit_code == EXIT_INTERNAL:
                    wrong.append(f"{file.name}: byte {place} ^ {bit}: {error!r:.200}")
        file.write_bytes(content)
    assert not wrong, f"{len(wrong)} of {tried}:\n" + "\n".join(wrong[:20])
    assert tried >= FEW
