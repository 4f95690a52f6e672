"""Files of a model's folder that the HTTP process reads: tokenizer, end tokens and chat template; no weights."""

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
"""Values of a generation_config.json that are defaults of requests."""


@dataclass(frozen=True)
class ModelFiles:
    """A model's tokenizer and what belongs to it."""

    tokenizer: Tokenizer
    tokenizer_file: Path
    text: TextFormat
    """What begins and ends a text."""
    chat_template: str | None
    """Jinja source of the template of chats."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Variables of the template such as `bos_token`."""
    reach: TokenReach | None = None
    """Most text that a token stands for; None: it has no limit."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of requests: fields of `SamplingOptions`."""
    tool_template: str | None = None
    """Jinja source of the template of chats with tools, if it is another."""
    answer_marks: str = ""
    """Texts that begin and end reasoning and calls, if the tokenizer's `response_template` says them."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, ascending."""
        return self.text.stop_ids

    def pack(self) -> tuple[dict[str, Any], bytes]:
        """Return all of it for another process: values of JSON, and the content of a tokenizer.json."""
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
        """The files that `pack` has packed."""
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
    """The files in a run's folder, a checkpoint's or a Hugging Face folder; `chat_template` replaces the folder's template.

    `defaults`: whether sampling values of the folder's generation_config.json are defaults of requests. Raises BadInput without a
    tokenizer.json, or if one of the files cannot be used.
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
    """Raise BadInput if `folder` has another tokenizer than the server, whose format is `text`, or other ends of a text.

    A folder without a tokenizer and without a record has nothing to compare.
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
    """The texts that begin and end a field of an answer, by transformers' `response_template`; patterns without their backslashes."""
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
    """The sampling values of a generation_config.json that differ from the usual defaults.

    Raises BadInput for a value out of range. As in vLLM, `do_sample` does not count.
    """
    values = read_object(file)
    if values.get("top_k") == -1:  # another spelling of 0
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
