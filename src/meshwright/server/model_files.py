"""What the HTTP process reads of a model's folder: tokenizer, end tokens and chat template; no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.spec.errors import BadInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class ModelFiles:
    """A model's tokenizer and what belongs to it."""

    tokenizer: Tokenizer
    tokenizer_file: Path
    stop_ids: tuple[int, ...]
    """Tokens that end a text, ascending."""
    chat_template: str | None
    """Jinja source of the template of chats."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Variables of the template such as `bos_token`."""


def read_model_files(folder: Path, chat_template: Path | None = None) -> ModelFiles:
    """The files in a run's folder, a checkpoint's or a Hugging Face folder; `chat_template` replaces the folder's template.

    Raises BadInput without a tokenizer.json, or if one of the files cannot be used.
    """
    from tokenizers import Tokenizer

    file = tokenizer_file(folder)
    if file is None:
        raise BadInput(
            f"{folder} has no tokenizer.json; expected the folder of a run, a checkpoint of one, or a Hugging Face folder"
        )
    home = file.parent
    try:
        tokenizer: Tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        raise BadInput(f"{file} is no tokenizer: {error}") from None
    config = _json_object(home / "tokenizer_config.json")
    special = {
        name: text for name in config if name.endswith("_token") and (text := _token_text(config[name])) is not None
    }
    template = _read(chat_template) if chat_template is not None else _folder_template(home, config)
    return ModelFiles(tokenizer, file, _stop_ids(home, tokenizer, special), template, special)


def tokenizer_file(folder: Path) -> Path | None:
    """The tokenizer.json of a model's folder; that of the run, for a checkpoint."""
    candidates = [parent / "tokenizer.json" for parent in (folder, folder.parent.parent)]
    return next((path for path in candidates if path.is_file()), None)


def _folder_template(home: Path, config: Mapping[str, Any]) -> str | None:
    if (home / "chat_template.jinja").is_file():
        return _read(home / "chat_template.jinja")
    template = config.get("chat_template")
    if isinstance(template, list):  # several templates by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _stop_ids(home: Path, tokenizer: Tokenizer, special: Mapping[str, str]) -> tuple[int, ...]:
    """End tokens by generation_config.json and config.json, by the tokenizer's `eos_token`, or the end of text."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _json_object(home / name).get("eos_token_id")
        ids.update(id for id in (value if isinstance(value, list) else [value]) if isinstance(id, int))
    for text in (special.get("eos_token"), None if ids else END_OF_TEXT):
        id = None if text is None else tokenizer.token_to_id(text)
        if id is not None:
            ids.add(id)
    return tuple(sorted(ids))


def _token_text(value: Any) -> str | None:
    """The text of a token in tokenizer_config.json, where it is text or an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _json_object(file: Path) -> dict[str, Any]:
    """The object in a file; empty without the file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read(file))
    except ValueError as error:
        raise BadInput(f"{file}: not JSON: {error}") from None
    return value if isinstance(value, dict) else {}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{file}: cannot be read: {error}") from None
