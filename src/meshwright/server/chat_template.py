"""The template of chats: what it expects of messages, and its errors as answers to a request."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from meshwright.data import chat_template
from meshwright.server.errors import RequestError
from meshwright.server.fields import checked_text

_DEVELOPER = re.compile("""(['"])developer\\1""")
_ID_LENGTH = 9
"""Characters of a call's id in templates of Mistral's models."""


class _Habits(NamedTuple):
    """Form of messages that a template expects."""

    developer: bool = False
    """Whether the template knows the role developer. If not, such messages get the role system."""
    arguments_as_text: bool = False
    """Whether the arguments of calls are a JSON text instead of an object."""
    content_beside_calls: str | None = ""
    """Content of a message that has only calls."""
    short_ids: bool = False
    """Whether ids of calls have nine letters or digits."""
    late_system: bool = True
    """Whether messages of the role system are written where they stand, also within the conversation."""
    alternates: bool = False
    """Whether two messages of the user must not follow one another."""


class ServedChatTemplate(chat_template.ChatTemplate):
    """A chat template that receives messages as it expects them, and refuses some by RequestError."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        """`tool_source` is the template of chats with tools, if it is another. Raises BadInput if a source is no template."""
        super().__init__(source, special_tokens, tool_source=tool_source)
        self._source = source
        self._tool_source = tool_source

    def knows(self, variable: str) -> bool:
        """Whether the template names a variable."""
        return variable in self._source or variable in (self._tool_source or "")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the prompt of a chat. Raises RequestError if the template refuses the messages.

        With `add_generation_prompt` the prompt ends with the beginning of the model's answer.
        """
        habits = self._habits_with_tools if tools else self._habits
        fitted = _all_fitted(messages, habits)
        try:
            text = super().render(fitted, tools, variables, add_generation_prompt=add_generation_prompt)
        except chat_template.TemplateRefusal as error:
            raise RequestError(422, f"messages: the chat template refuses them: {error}", param="messages") from None
        return checked_text(text, "messages")

    def continued(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """A prompt that ends within the last message, an answer, so that the model continues it. Raises RequestError as `render` does."""
        last = messages[-1]
        if last["role"] != "assistant" or "tool_calls" in last:
            raise RequestError(
                400,
                "continue_final_message: expected a last message of the assistant without tool calls",
                param="continue_final_message",
            )
        mark = f"{chat_template.START}{secrets.token_hex(8)}{chat_template.END}"
        marked = [*messages[:-1], {**last, "content": last["content"] + mark}]
        before, *after = self.render(marked, tools, variables, add_generation_prompt=False).split(mark)
        if len(after) != 1:
            raise RequestError(
                422,
                "continue_final_message: the chat template does not write the last message once",
                param="continue_final_message",
            )
        return before

    @cached_property
    def _habits(self) -> _Habits:
        """The habits of the template of chats without tools; they are found at the first chat, within its time limit."""
        return self._find_habits(self._source, None if self._tool_source else [_TOOL])

    @cached_property
    def _habits_with_tools(self) -> _Habits:
        """The habits of the template of chats with tools."""
        return self._find_habits(self._tool_source, [_TOOL]) if self._tool_source else self._habits

    def _find_habits(self, source: str, tools: list[dict[str, Any]] | None) -> _Habits:
        """The habits with which the template writes a small chat in full; OpenAI's form if there are none."""

        def shows(messages: Sequence[Mapping[str, Any]], habits: _Habits, *texts: str) -> bool:
            """Whether the template writes these texts, in this order."""
            fitted = [_fitted(message, habits) for message in messages]
            try:
                text = chat_template.ChatTemplate.render(self, fitted, tools, add_generation_prompt=False)
            except chat_template.TemplateRefusal:
                return False
            places = [text.find(part) for part in texts]
            return places == sorted(places) and places[:1] != [-1]

        developer = _DEVELOPER.search(source) is not None and shows(
            [{"role": "developer", "content": "instruction"}, _QUESTION], _Habits(developer=True), "instruction"
        )
        late = shows(_LATE, _Habits(), *(message["content"] for message in _LATE))
        alternates = not shows(_TWO, _Habits(), *(message["content"] for message in _TWO))
        forms = itertools.product((False, True), ("", None), (False, True))
        for habits in (_Habits(developer, *form, late, alternates) for form in forms):
            if shows(_CALLED, habits, "called_function", "argument_value"):
                return habits
        return _Habits(developer, late_system=late, alternates=alternates)


_QUESTION = {"role": "user", "content": "question"}
_TWO = (_QUESTION, {"role": "user", "content": "second"})
_LATE = (
    {"role": "system", "content": "first"},
    {"role": "user", "content": "question"},
    {"role": "system", "content": "instruction"},
    {"role": "assistant", "content": "reply"},
    {"role": "user", "content": "thanks"},
)
_TOOL = {"type": "function", "function": {"name": "tool", "description": "", "parameters": {"type": "object"}}}
_CALL = {
    "id": "call_0123456789",
    "type": "function",
    "function": {"name": "called_function", "arguments": {"first": "argument_value"}},
}
_CALLED = (
    _QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "result", "tool_call_id": _CALL["id"]},
)


def _all_fitted(messages: Sequence[Mapping[str, Any]], habits: _Habits) -> list[Mapping[str, Any]]:
    """The messages in the form that a template with these habits expects. System messages keep their places."""
    fitted: list[Mapping[str, Any]] = []
    begun = False
    for message in messages:
        message = _fitted(message, habits)
        system = message["role"] in ("system", "developer")
        begun = begun or not system
        if not (system and begun) or habits.late_system:
            fitted.append(message)
            continue
        reminder = f"<system-reminder>\n{message['content']}\n</system-reminder>"
        fitted.append({"role": "user", "content": reminder})
    return _without_pairs(fitted) if habits.alternates and not habits.late_system else fitted


def _without_pairs(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, with consecutive messages of the user joined."""
    joined: list[Mapping[str, Any]] = []
    for message in messages:
        if joined and message["role"] == joined[-1]["role"] == "user":
            joined[-1] = {**joined[-1], "content": f"{joined[-1]['content']}\n\n{message['content']}"}
        else:
            joined.append(message)
    return joined


def _fitted(message: Mapping[str, Any], habits: _Habits) -> Mapping[str, Any]:
    """A message in the form that a template with these habits expects."""
    if message["role"] == "developer":
        return message if habits.developer else {**message, "role": "system"}
    if "tool_calls" in message:
        calls = [_fitted_call(call, habits) for call in message["tool_calls"]]
        return {**message, "content": message["content"] or habits.content_beside_calls, "tool_calls": calls}
    if habits.short_ids and "tool_call_id" in message:
        return {**message, "tool_call_id": _short_id(message["tool_call_id"])}
    return message


def _fitted_call(call: Mapping[str, Any], habits: _Habits) -> Mapping[str, Any]:
    fitted = dict(call)
    if habits.short_ids and "id" in call:
        fitted["id"] = _short_id(call["id"])
    arguments = call["function"]["arguments"]
    if habits.arguments_as_text and not isinstance(arguments, str):
        fitted["function"] = {**call["function"], "arguments": json.dumps(arguments, ensure_ascii=False)}
    return fitted


def _short_id(id: str) -> str:
    """The id if it has nine letters and digits; else such an id computed from it."""
    if len(id) == _ID_LENGTH and id.isascii() and id.isalnum():
        return id
    return hashlib.sha256(id.encode("utf-8", "surrogatepass")).hexdigest()[:_ID_LENGTH]
