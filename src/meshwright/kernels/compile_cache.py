"""Decides which graphs compiled by earlier processes torch may use again.

torch keeps compiled graphs on disk. The key of a graph has the names of the operators that it calls, but not how their
gradients and shapes are registered. After an update of meshwright a cached graph could therefore call an operator with
its old arguments, or compute its old gradients. So the key gets a digest of the files that register operators.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch.compiler.config

PACKAGE = Path(__file__).parent.parent
FOLDERS = ("kernels", "parallel")
"""Packages of meshwright that register operators."""


def operator_files() -> list[Path]:
    """Return the files of meshwright that register operators with torch, in a fixed order."""
    files = (file for folder in FOLDERS for file in sorted((PACKAGE / folder).glob("*.py")))
    return [file for file in files if b"torch.library" in file.read_bytes()]


def key_tag(files: Iterable[Path]) -> str:
    """Return a digest of the contents of `files`, as the part of the key that represents them."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return f"meshwright {digest.hexdigest()[:16]}"


def tag_compiled_code() -> None:
    """Make torch use a compiled graph only if it was compiled with today's operator files.

    A tag that the user sets (`TORCH_COMPILE_CACHE_KEY_TAG`) remains a part of the key.
    """
    parts = [torch.compiler.config.cache_key_tag, key_tag(operator_files())]
    torch.compiler.config.cache_key_tag = " ".join(filter(None, parts))
