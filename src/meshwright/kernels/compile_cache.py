"""Which compiled code of earlier processes may be used again.

torch keeps compiled graphs on disk. Their key has the names of the operators that a graph calls. It has not how an operator's gradients
and shapes are registered. After an update of meshwright a cached graph could therefore call an operator with its old arguments, or compute
its old gradients. So the key gets a digest of the files that register operators.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch.compiler.config

PACKAGE = Path(__file__).parent.parent
FOLDERS = ("kernels", "parallel")
"""Packages that register operators."""


def operator_files() -> list[Path]:
    """The files of meshwright that register operators with torch, in a fixed order."""
    files = (file for folder in FOLDERS for file in sorted((PACKAGE / folder).glob("*.py")))
    return [file for file in files if b"torch.library" in file.read_bytes()]


def key_tag(files: Iterable[Path]) -> str:
    """The part of the key that stands for `files`, by their contents."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return f"meshwright {digest.hexdigest()[:16]}"


def tag_compiled_code() -> None:
    """Have torch use compiled graphs only if today's operators are those that the graphs were compiled with.

    A tag that the user sets (`TORCH_COMPILE_CACHE_KEY_TAG`) stays a part of the key.
    """
    parts = [torch.compiler.config.cache_key_tag, key_tag(operator_files())]
    torch.compiler.config.cache_key_tag = " ".join(filter(None, parts))
