"""Reads the tokens and merge rules of a tokenizer, from any of the file layouts in use, so that tokenizers can be compared."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.data.tokenizer_file import check_ids
from meshwright.durable.writes import digest
from meshwright.spec.errors import BadInput
from meshwright.spec.folder_files import TOKENIZER_BYTES, read_folder_json, read_folder_text

if TYPE_CHECKING:
    pass

TOKENIZER = "tokenizer.json"
"""The layout of the `tokenizers` library: everything in one file."""
VOCABULARY = "vocab.json"
"""The older layout: tokens with ids."""
MERGES = "merges.txt"
"""The older layout: merge rules, one a line."""
ADDED = "added_tokens.json"
"""The older layout: tokens that were added later."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens and rules of a tokenizer."""

    file: Path
    """File from which it was read, for messages."""
    tokens: dict[int, str]
    """Tokens by id, including added tokens."""
    rules: tuple[str, ...]
    """BPE merges in their order, or `token score` for each token of a Unigram model."""

    @cached_property
    def digest(self) -> str:
        """xxh3_128 of tokens and rules. It does not depend on the layout of the files, on spaces or on the order of keys."""
        return digest(json.dumps([sorted(self.tokens.items()), self.rules]).encode())

    def difference(self, other: Vocabulary) -> str:
        """Return the first token or rule that differs from `other`, in words. Empty if there is none."""
        for number in sorted(self.tokens.keys() | other.tokens.keys()):
            ours = self.tokens.get(number)
            theirs = other.tokens.get(number)
            if ours != theirs:
                return f"token {number} is {_quoted(ours)} in the first and {_quoted(theirs)} in the second"
        for number in range(max(len(self.rules), len(other.rules))):
            ours, theirs = ((rules[number : number + 1] or (None,))[0] for rules in (self.rules, other.rules))
            if ours != theirs:
                return f"merge {number} is {_quoted(ours)} in the first and {_quoted(theirs)} in the second"
        return ""


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """Read the vocabulary in a folder: from `tokenizer.json`, otherwise from `vocab.json` and `merges.txt`.

    None without these files.

    Raises BadInput if a file does not have the expected content.
    """
    file = folder / TOKENIZER if (folder / TOKENIZER).is_file() else folder / VOCABULARY
    try:
        if file.name == TOKENIZER:
            return _from_tokenizer(file)
        if file.is_file() and (folder / MERGES).is_file():
            return _from_parts(file)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{file}: not a tokenizer ({type(error).__name__}: {error})") from error
    return None


def _from_tokenizer(file: Path) -> Vocabulary:
    """Read a vocabulary from a `tokenizer.json`."""
    content = read_folder_json(file, TOKENIZER_BYTES, BadInput)
    model = content["model"]
    if isinstance(model["vocab"], list):
        tokens = {number: token for number, (token, _) in enumerate(model["vocab"])}
        rules = [f"{token} {score}" for token, score in model["vocab"]]
    else:
        tokens = _by_id(model["vocab"])
        rules = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", [])]
    tokens |= {token["id"]: token["content"] for token in content.get("added_tokens") or []}
    return _checked(file, tokens, rules)


def _from_parts(file: Path) -> Vocabulary:
    """Read a vocabulary from a `vocab.json` and the files next to it."""
    tokens = _by_id(read_folder_json(file, TOKENIZER_BYTES, BadInput))
    added = file.with_name(ADDED)
    if added.is_file():
        tokens |= _by_id(read_folder_json(added, error_class=BadInput))
    lines = read_folder_text(file.with_name(MERGES), TOKENIZER_BYTES).split("\n")
    rules = [line for number, line in enumerate(lines) if line and not (number == 0 and line.startswith("#version"))]
    return _checked(file, tokens, rules)


def _checked(file: Path, tokens: dict[int, str], rules: list[str]) -> Vocabulary:
    check_ids(tokens, file)
    if not all(isinstance(token, str) for token in tokens.values()):
        raise TypeError("a token that is no text")
    return Vocabulary(file, tokens, tuple(rules))


def _by_id(ids: dict[str, Any]) -> dict[int, str]:
    return {number: token for token, number in ids.items()}


def _quoted(value: str | None) -> str:
    return "missing" if value is None else repr(value)
