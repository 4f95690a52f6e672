"""Reads the JSON body of a request key by key. A key that no code has read is an error that names the key."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from meshwright.server.errors import RequestError, wrong
from meshwright.spec.errors import nearest

T = TypeVar("T")
LARGEST_INTEGER = 2**63 - 1
"""Largest signed integer of 64 bits."""


class Fields:
    """The keys of one JSON object. A key whose value is null counts as absent."""

    def __init__(self, values: dict[str, Any], inside: str = "") -> None:
        """`values`: the object; `inside`: its path within the body, for error messages (empty for the body itself)."""
        self._values = {key: value for key, value in values.items() if value is not None}
        self._inside = f"{inside}." if inside else ""
        self._known: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the object has a value for the key."""
        return key in self._values

    def take(self, key: str) -> Any:
        """Return the value of a key, whatever its type; None if the key is absent."""
        self._known.add(key)
        return self._values.get(key)

    def integer(self, key: str, low: int, high: int, default: T) -> int | T:
        """Return a whole number from `low` to `high`, or `default` if the key is absent. 3.0 counts as 3."""
        value = self.take(key)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise wrong(self._inside + key, f"a whole number from {low} to {high}", value)
        return value

    def number(self, key: str, low: float, high: float, default: float) -> float:
        """Return a number from `low` to `high`, or `default` if the key is absent."""
        value = self.take(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise wrong(self._inside + key, f"a number from {low:g} to {high:g}", value)
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return true or false, or `default` if the key is absent."""
        value = self.take(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong(self._inside + key, "true or false", value)
        return value

    def text(self, key: str, default: T, choices: Sequence[str] = ()) -> str | T:
        """Return a text, or `default` if the key is absent. If `choices` are given, the text must be one of them."""
        value = self.take(key)
        if value is None:
            return default
        if not isinstance(value, str) or (choices and value not in choices):
            raise wrong(self._inside + key, f"one of {', '.join(choices)}" if choices else "text", value)
        return checked_text(value, self._inside + key)

    def section(self, key: str) -> Fields | None:
        """Return an object as Fields of its own; None if the key is absent."""
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise wrong(self._inside + key, "an object", value)
        return Fields(value, self._inside + key)

    def ignore(self, *keys: str) -> None:
        """Accept keys that have no effect."""
        self._known.update(keys)

    @property
    def unread(self) -> list[str]:
        """The keys that no method has read or ignored so far."""
        return [key for key in self._values if key not in self._known]

    def finish(self, defaults: Mapping[str, Any] = {}) -> None:
        """Raise RequestError for the first unread key.

        `defaults` are keys whose only supported value is given: such a key may be present with exactly this value.
        """
        for key in self.unread:
            value = self._values[key]
            name = self._inside + key[:60]
            if key not in defaults:
                near = nearest(key, self._known)
                hint = f"; nearest: {near}" if near else ""
                raise RequestError(400, f"{json.dumps(name)}: no such key{hint}", param=name)
            if value != defaults[key]:
                raise wrong(name, f"{json.dumps(defaults[key])}, the only value here", value)


def parse_object(body: bytes) -> Fields:
    """Return the keys of the JSON object in a request's body.

    Raises RequestError if the body is not a JSON object in UTF-8, or has NaN, infinity or a number that is too large.
    """
    try:
        values = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite)
    except UnicodeDecodeError:
        raise RequestError(400, "the body is not UTF-8") from None
    except RecursionError:
        raise RequestError(400, "the body is nested too deeply") from None
    except ValueError as error:
        message = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise RequestError(400, f"the body is not JSON: {message}") from None
    if not isinstance(values, dict):
        raise RequestError(400, "the body: expected a JSON object")
    return Fields(values)


def checked_text(text: str, key: str) -> str:
    """Return `text` if UTF-8 can encode it. Raises RequestError for half of a surrogate pair; `key` is the text's path."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(400, f"{key}: has half of a surrogate pair, which is no character", param=key) from None
    return text


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value
