"""Opens the tokenizer of a folder: the only way to one, for every command."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.spec.errors import BadInput, shorten
from meshwright.spec.folder_files import TOKENIZER_BYTES, read_folder_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_TOKENS = 1 << 24
"""Ids of a tokenizer are below: tables of tokens have a row for each. The largest known vocabularies have a million."""


def open_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer in a `tokenizer.json`, which neither cuts nor fills texts.

    Raises BadInput if it is none, larger than `TOKENIZER_BYTES`, no regular file, a link out of its folder, or as `tokenizer_in` does.
    """
    return tokenizer_in(read_folder_file(file, TOKENIZER_BYTES), file)


def tokenizer_in(content: bytes, where: object) -> Tokenizer:
    """The tokenizer in the bytes of a `tokenizer.json`, which neither cuts nor fills texts.

    `where` is the file's name in messages. Raises BadInput if it is something else, or has ids of at least `MOST_TOKENS`.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer: Tokenizer = Tokenizer.from_str(content.decode("utf-8"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    except (
        BaseException
    ) as error:  # the library raises bare Exception for mistakes in a file, and BaseException where it panics
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise BadInput(f"{where}: not a tokenizer.json: {error}") from None
    if not vocabulary:
        raise BadInput(f"{where}: the tokenizer has no tokens")
    check_ids(vocabulary.values(), where)
    return tokenizer


def check_ids(ids: Iterable[Any], where: object) -> None:
    """Raise BadInput unless these are ids of tokens."""
    for number in ids:
        if type(number) is not int or not 0 <= number < MOST_TOKENS:
            expected = f"expected ids of tokens from 0 to {MOST_TOKENS - 1:,}, got {shorten(repr(number))}"
            raise BadInput(f"{where}: {expected}")
