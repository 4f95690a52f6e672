"""Reads the files of a model's folder that the HTTP process needs: tokenizer, end tokens and chat template, no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.data.chat_template import (
    GENERATION_CONFIG,
    TOKENIZER_CONFIG,
    folder_template,
    folder_tool_template,
    read_object,
    read_text,
)
from meshwright.data.text_format import (
    TextFormat,
    folder_special_tokens,
    known_text_format,
    no_tokenizer,
    read_text_format,
    tokenizer_file,
)
from meshwright.data.tokenizer_file import open_tokenizer
from meshwright.serve.sampling_options import SamplingOptions
from meshwright.server.token_reach import TokenReach, token_reach
from meshwright.spec.errors import BadInput, attach_key

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Values of generation_config.json that become defaults of requests."""


@dataclass(frozen=True)
class ModelFiles:
    """A model's tokenizer, and the texts and tokens that belong to it."""

    tokenizer: Tokenizer
    tokenizer_file: Path
    text: TextFormat
    """The tokens that begin and end a text."""
    chat_template: str | None
    """Jinja source of the chat template."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Special tokens that the template uses as variables, by variable: `{"bos_token": "<s>"}`."""
    reach: TokenReach | None = None
    """Most text that one token can stand for; None if there is no limit or it is unknown."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of requests: fields of `SamplingOptions`."""
    tool_template: str | None = None
    """Jinja source of the template for chats with tools, if there is a separate one."""
    answer_marks: str = ""
    """Marks that begin and end reasoning and calls, one per line, from the tokenizer's `response_template`; empty
    without one.
    """

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end a text, ascending."""
        return self.text.stop_ids

    def pack(self) -> tuple[dict[str, Any], bytes]:
        """Return everything as JSON values and the content of a tokenizer.json, to send it to another process."""
        values = {
            "tokenizer_file": str(self.tokenizer_file),
            "text": self.text.to_plain(),
            "chat_template": self.chat_template,
            "special_tokens": self.special_tokens,
            "reach": self.reach,
            "sampling": self.sampling,
            "tool_template": self.tool_template,
            "answer_marks": self.answer_marks,
        }
        return values, self.tokenizer.to_str().encode("utf-8")

    @classmethod
    def unpack(cls, values: Mapping[str, Any], content: bytes) -> ModelFiles:
        """Return what `pack` has packed."""
        from tokenizers import Tokenizer

        return cls(
            Tokenizer.from_str(content.decode("utf-8")),
            Path(values["tokenizer_file"]),
            TextFormat.from_plain(values["text"], "the record of the HTTP process"),
            values["chat_template"],
            values["special_tokens"],
            None if values["reach"] is None else TokenReach(*values["reach"]),
            values["sampling"],
            values["tool_template"],
            values["answer_marks"],
        )


def read_model_files(folder: Path, chat_template: Path | None = None, *, defaults: bool = True) -> ModelFiles:
    """Read the files of `folder`: a run's folder, a checkpoint, or a Hugging Face folder.

    `chat_template` is a file that replaces the folder's template. `defaults` says whether the sampling values of
    generation_config.json become defaults of requests.

    Raises BadInput if there is no tokenizer.json or a file cannot be used.
    """
    file = tokenizer_file(folder)
    if file is None:
        raise no_tokenizer(folder)
    home = file.parent
    # A prompt is never cut: one that is too long for the context is refused.
    tokenizer = open_tokenizer(file)
    config = read_object(home / TOKENIZER_CONFIG)
    if chat_template is None:
        template = folder_template(home, config)
        tool_template = folder_tool_template(home, config)
    else:
        with attach_key("chat_template"):
            template = read_text(chat_template)
            tool_template = None
    special = folder_special_tokens(home)
    reach = token_reach(tokenizer)
    sampling = _default_sampling(home / GENERATION_CONFIG) if defaults else {}
    text = read_text_format(folder, tokenizer)
    marks = _answer_marks(config.get("response_template"))
    return ModelFiles(tokenizer, file, text, template, special, reach, sampling, tool_template, marks)


def check_same_texts(folder: Path, text: TextFormat) -> None:
    """Raise BadInput if `folder` does not fit the running server, whose text format is `text`.

    It does not fit if it has another tokenizer or other tokens that end a text. A folder that records neither has
    nothing to compare, and fits.
    """
    other = known_text_format(folder)
    if other is None:
        return
    difference = text.difference(other, "the server", str(folder))
    if difference is None and other.stop_ids != text.stop_ids:
        names = [", ".join(token.text for token in tokens) or "nothing" for tokens in (other.stops, text.stops)]
        difference = f"texts of {folder} end with {names[0]}, those of the server with {names[1]}"
    if difference is not None:
        raise BadInput(f"{difference}; start the server again with this folder")


def _answer_marks(template: object) -> str:
    """Return the marks that begin and end the fields of an answer, one per line.

    They come from `response_template` in tokenizer_config.json (transformers). Patterns lose their backslashes: `\\[`
    is `[`.
    """
    fields = template.get("fields") if isinstance(template, dict) else None
    found: list[str] = []
    parts = fields.values() if isinstance(fields, dict) else ()
    for part in parts:
        for key in ("open", "open_pattern", "close", "close_pattern"):
            value = part.get(key) if isinstance(part, dict) else None
            texts = value if isinstance(value, list) else [value]
            found += [text.replace("\\", "") for text in texts if isinstance(text, str)]
    return "\n".join(found)


def _default_sampling(file: Path) -> dict[str, Any]:
    """Return the sampling values of a generation_config.json that differ from this server's defaults.

    The file's `do_sample` is ignored, as in vLLM. Raises BadInput for a value out of range.
    """
    values = read_object(file)
    if values.get("top_k") == -1:  # means no limit, as 0 does
        del values["top_k"]
    given: dict[str, Any] = {key: values[key] for key in _SAMPLING if values.get(key) is not None}
    for key, value in given.items():
        only: dict[str, Any] = {key: value}
        try:
            SamplingOptions(**only)
        except BadInput as error:
            hint = "or leave the file's values out by generation_config: none"
            raise BadInput(f"{file}: {error}; correct it, {hint}", key="generation_config") from None
    return {key: value for key, value in given.items() if value != getattr(SamplingOptions, key)}
