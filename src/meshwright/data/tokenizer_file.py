"""Opens a tokenizer file. Every command opens tokenizers with these functions, so all apply the same checks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.spec.errors import BadInput, shorten
from meshwright.spec.folder_files import TOKENIZER_BYTES, read_folder_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_TOKENS = 1 << 24
"""Ids of tokens must be below this number, because tables of tokens have a row for each id.

The largest known vocabularies have a million tokens.
"""


def open_tokenizer(file: Path) -> Tokenizer:
    """Load the tokenizer of a `tokenizer.json`. Truncation and padding are switched off.

    Raises BadInput if the file is not a tokenizer, is larger than `TOKENIZER_BYTES`, is not a regular file, is a link
    that leaves its folder, or if `tokenizer_in` raises it.
    """
    return tokenizer_in(read_folder_file(file, TOKENIZER_BYTES), file)


def tokenizer_in(content: bytes, where: object) -> Tokenizer:
    """Load the tokenizer from the bytes of a `tokenizer.json`. Truncation and padding are switched off.

    `where` is the name of the file in messages. Raises BadInput if the content is not a tokenizer, or if an id is not
    below `MOST_TOKENS`.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer: Tokenizer = Tokenizer.from_str(content.decode("utf-8"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    except (
        BaseException
    ) as error:  # The library raises a plain Exception for mistakes in a file, and BaseException when it panics.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise BadInput(f"{where}: not a tokenizer.json: {error}") from None
    if not vocabulary:
        raise BadInput(f"{where}: the tokenizer has no tokens")
    check_ids(vocabulary.values(), where)
    return tokenizer


def check_ids(ids: Iterable[Any], where: object) -> None:
    """Raise BadInput unless each of `ids` is an integer from 0 to `MOST_TOKENS` - 1."""
    for number in ids:
        if type(number) is not int or not 0 <= number < MOST_TOKENS:
            expected = f"expected ids of tokens from 0 to {MOST_TOKENS - 1:,}, got {shorten(repr(number))}"
            raise BadInput(f"{where}: {expected}")
