"""The template of chats, with its errors as answers to a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.data import chat_template
from meshwright.server.errors import RequestError


class ChatTemplate(chat_template.ChatTemplate):
    """A chat template that refuses messages by RequestError."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt of a chat. Raises RequestError if the template refuses the messages."""
        try:
            return super().render(messages, tools, variables, add_generation_prompt=add_generation_prompt)
        except chat_template.TemplateRefusal as error:
            raise RequestError(422, f"messages: the chat template refuses them: {error}", param="messages") from None
