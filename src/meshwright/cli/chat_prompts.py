"""Writes chats as prompts for the engine in this process, with the same code as the server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.spec.errors import BadInput

if TYPE_CHECKING:
    from meshwright.server.model_files import ModelFiles

Message = Mapping[str, str]
"""A message of a chat, with `role` and `content`."""


class ChatPrompts:
    """Writes chats with the template of one model."""

    def __init__(self, folder: Path, files: ModelFiles) -> None:
        """Raises BadInput if the folder has no chat template or an unusable one, and if jinja2 is not installed."""
        if files.chat_template is None:
            raise BadInput(
                f"{folder} has no chat template (chat_template.jinja, or `chat_template` in tokenizer_config.json); write one into "
                f"{folder / 'chat_template.jinja'}, or name one by --chat-template FILE (`chat` and `serve`); without a template the "
                "model can continue a text: meshwright generate -p TEXT, without --chat"
            )
        if find_spec("jinja2") is None:
            raise BadInput("chat templates need jinja2: pip install 'meshwright[serve]'")
        from meshwright.data.spelled_tokens import SpelledTokens
        from meshwright.server.chat_template import ServedChatTemplate

        self._template = ServedChatTemplate(files.chat_template, files.special_tokens, files.tool_template)
        self._spelled = SpelledTokens(files.tokenizer, files.special_tokens.values())

    def ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the token ids of a chat up to the beginning of the next answer.

        Raises BadInput if the template refuses the chat.

        If a message contains the spelling of a special token, it is encoded as ordinary text.
        """
        with _refusals():
            return tuple(self._spelled.encode(self._spelled.write(self._template.render, list(messages))))

    def text(self, messages: Sequence[Message], *, continues: bool = False) -> str:
        """Return the text of a chat up to the beginning of the next answer.

        With `continues`, the last message is left open instead.

        Raises BadInput if the template refuses the chat.
        """
        with _refusals():
            return (self._template.continued if continues else self._template.render)(list(messages))


@contextmanager
def _refusals() -> Iterator[None]:
    """A context that turns refusals of the template into BadInput."""
    from meshwright.server.errors import RequestError

    try:
        yield
    except RequestError as error:
        raise BadInput(error.message) from None


def messages_of(system: str | None, *texts: str) -> list[Message]:
    """Return a chat with these texts as messages of the user. If there is a system prompt, it comes first."""
    head = [] if system is None else [{"role": "system", "content": system}]
    return [*head, *({"role": "user", "content": text} for text in texts)]
