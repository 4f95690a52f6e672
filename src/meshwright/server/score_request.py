"""Reads the body of POST /score: the sequences that a reward model scores. This module needs neither HTTP nor an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from meshwright.server.errors import TOO_LONG, RequestError, wrong
from meshwright.server.fields import Fields, checked_text
from meshwright.server.text_request import WITHOUT_EFFECT, CheckedTextRequest, RequestLimits, check_model, token_ids
from meshwright.server.tools import read_tools

KEYS = ("input", "messages", "conversations")
"""Keys that give what is scored. A body must have exactly one of them."""


def read_score_request(
    fields: Fields,
    limits: RequestLimits,
    encode: Callable[[str], Sequence[int]],
    encode_chat: Callable[[object, Any, Any], Sequence[int]],
) -> CheckedTextRequest:
    """Return the sequences of a body of /score as a checked request. Raises RequestError for wrong values.

    What is scored is in one of three keys: `input` is a text, a list of token ids, or a list of texts or lists of token
    ids; `messages` is one conversation; `conversations` is a list of conversations.

    `encode(text)` returns the tokens of a text. `encode_chat(messages, tools, variables)` returns the tokens of a
    conversation, where `variables` are further variables of the chat template.
    """
    check_model(fields, limits)
    fields.ignore(*WITHOUT_EFFECT)
    given = {key: value for key in KEYS if (value := fields.take(key)) is not None}
    tools = read_tools(fields).tools
    variables = fields.take("chat_template_kwargs")
    fields.finish()
    if len(given) != 1:
        raise RequestError(400, f"{KEYS[0]}: expected one of {', '.join(KEYS)}", param=KEYS[0])
    if variables is not None and not isinstance(variables, dict):
        raise wrong("chat_template_kwargs", "an object", variables)
    ((key, value),) = given.items()
    if key == "input":
        prompts = [_ids(each, limits, encode) for each in _listed(value)]
    else:
        conversations = [value] if key == "messages" else value
        if not isinstance(conversations, list) or not conversations:
            raise wrong(key, "a list of conversations", value)
        _check_count(conversations, key, limits)
        prompts = [encode_chat(each, tools, variables) for each in conversations]
    _check_count(prompts, key, limits)
    for prompt in prompts:
        if not 0 < len(prompt) <= limits.context:
            message = f"{key}: a text has {len(prompt)} tokens: expected 1 to {limits.context}, the context"
            raise RequestError(400, message, param=key, code=TOO_LONG if prompt else None)
    return CheckedTextRequest(
        count=1,
        new_tokens=1,
        sampling={},
        logprobs=None,
        stop_ids=(),
        stop_strings=(),
        grammar=None,
        stream=False,
        include_usage=False,
        prompts=prompts,
    )


def _listed(value: object) -> list[Any]:
    """Return the value of `input` as a list, whose elements are texts or lists of token ids."""
    values = (
        [value]
        if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int))
        else value
    )
    if not isinstance(values, list) or not values:
        raise wrong("input", "text, token ids, or a list of either", value)
    return values


def _ids(value: Any, limits: RequestLimits, encode: Callable[[str], Sequence[int]]) -> Sequence[int]:
    """Return the tokens of one element of `input`. Raises RequestError for token ids outside the vocabulary."""
    if not isinstance(value, str):
        return token_ids(value, "input", limits.vocab)
    return encode(checked_text(value, "input"))


def _check_count(texts: Sequence[Any], key: str, limits: RequestLimits) -> None:
    if len(texts) > limits.spec.max_choices:
        raise wrong(key, f"at most {limits.spec.max_choices} texts", texts)
