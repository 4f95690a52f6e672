"""Opens the tokenizer of a folder: the only way to one outside of `data prepare`, which keeps the bytes of its file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.spec.errors import BadInput
from meshwright.spec.folder_files import TOKENIZER_BYTES, read_folder_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def open_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer in a `tokenizer.json`.

    Raises BadInput if it is none, larger than `TOKENIZER_BYTES`, no regular file, or a link out of its folder.
    """
    from tokenizers import Tokenizer

    content = read_folder_file(file, TOKENIZER_BYTES)
    try:
        return Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises Exception itself
        raise BadInput(f"{file}: not a tokenizer.json: {error}") from None
