"""Reads files that others wrote or a disk may have damaged: JSON with limits, and files of Hugging Face folders.

Links that lead out of a folder are not followed, and sizes are limited.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any, NoReturn

from meshwright.spec.errors import BadInput, Damaged, MeshwrightError

MiB = 1 << 20
JSON_BYTES = 64 * MiB
"""Maximum number of bytes of a JSON file; the largest known one has 10 MiB."""
TOKENIZER_BYTES = 256 * MiB
"""Maximum number of bytes of a tokenizer's file; the largest known one has 35 MiB."""
TEMPLATE_BYTES = 4 * MiB
"""Maximum number of bytes of a chat template; the largest known one has 0.1 MiB."""

MOST_LEVELS = 64
"""Deepest nesting of lists and objects in JSON."""
MOST_DIGITS = 300
"""Maximum number of characters of a whole number in JSON, so that it fits in a double.

Tokenizers have a `model_max_length` of 10^30.
"""
_LONG_NUMBER = re.compile(rf"\d{{{MOST_DIGITS}}}")
_LARGE_EXPONENT = re.compile(rf"[eE]\+?\d{{3}}|\d{{{MOST_DIGITS}}}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(
    data: bytes | str, where: object, error_class: type[MeshwrightError] = Damaged, *, own: bool = False, hint: str = ""
) -> Any:
    """Return the value of JSON text that meshwright did not just write itself.

    Raises `error_class`, whose message begins with `where` and ends with `hint`, for:

    - bytes that are not UTF-8, and text that is not JSON;
    - numbers that are not finite, and whole numbers with more than `MOST_DIGITS` digits;
    - half of a surrogate pair, which is no character;
    - more than `MOST_LEVELS` levels of lists and objects.

    `own` is true for a record of this project. It may have half of a surrogate pair (the name of a file that is not
    UTF-8) and numbers that are not finite (a loss of NaN).
    """
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        value = json.loads(
            text,
            parse_constant=None if own else _refuse_constant,
            parse_int=_integer if _LONG_NUMBER.search(text) else None,
            parse_float=_finite if _LARGE_EXPONENT.search(text) else None,
        )
        if text.count("[") + text.count("{") > MOST_LEVELS:
            _check_levels(value)
        if not own and _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        problem = f"nested more than {MOST_LEVELS} levels deep"
    except UnicodeEncodeError:
        problem = "has half of a surrogate pair, which is no character"
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        problem = f"not JSON: {error}"
    except ValueError as error:
        problem = str(error)
    else:
        return value
    raise error_class(f"{where}: {problem}{hint}")


def _check_levels(value: Any) -> None:
    """Raise RecursionError for a value with more than `MOST_LEVELS` levels."""
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        containers = [each for each in level if isinstance(each, (dict, list))]
        if not containers:
            return
        level = [
            child
            for each in containers
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, (dict, list))
        ]
    raise RecursionError


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"a number of {len(text):,} digits; expected at most {MOST_DIGITS}")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def read_folder_json(
    file: Path, limit: int = JSON_BYTES, error_class: type[MeshwrightError] = Damaged, *, hint: str = ""
) -> Any:
    """Return the value in a JSON file of a folder. Raises errors as `read_folder_file` and `parse_json` do."""
    return parse_json(read_folder_file(file, limit), file, error_class, hint=hint)


def read_folder_file(file: Path, limit: int, folder: Path | None = None) -> bytes:
    """Return the bytes of a file of `folder`, by default of the folder in which it is.

    Before anything is read, raises BadInput if the file is larger than `limit` bytes, is no regular file, or is a link
    that leads out of the folder.
    """
    check_inside(file, folder)
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise BadInput(f"{file}: cannot be read: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BadInput(f"{file}: is a directory, pipe or device; expected a file")
        if status.st_size > limit:
            raise BadInput(
                f"{file}: has {status.st_size:,} bytes, expected at most {limit:,}; is it another file under this name?"
            )
        return opened.read()


def read_folder_text(file: Path, limit: int, folder: Path | None = None) -> str:
    """Return the text of such a file. Raises BadInput as `read_folder_file` does, and also if it is not UTF-8."""
    try:
        return read_folder_file(file, limit, folder).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{file}: cannot be read: {error}") from None


def check_inside(file: Path, folder: Path | None = None) -> None:
    """Raise BadInput if a file of `folder`, by default of the folder in which it is, is a link to a file outside.

    In the Hugging Face cache, a folder `snapshots/REVISION` has links to the folder `blobs`, which is next to
    `snapshots`. These links count as inside.
    """
    folder = folder or file.parent
    real = Path(os.path.realpath(file))
    root = Path(os.path.realpath(folder))
    roots = [root, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]
    if not any(real.is_relative_to(each) for each in roots):
        raise BadInput(f"{file}: is a link to {real}, outside {folder}; copy the file into the folder")
