"""Values that a user names in an option: one name, or several such as `H100,B200`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from meshwright.spec.errors import BadInput, nearest

Value = TypeVar("Value")


def value_named(name: str, known: Mapping[str, Value], option: str) -> Value:
    """Return the value of `known` with this name.

    Case and punctuation do not matter. Raises BadInput with the nearest name.
    """
    return known[_known_name(name, known, option)]


def values_listed(text: str, known: Mapping[str, Value], option: str) -> tuple[Value, ...]:
    """Return the values of names with commas between them, each once.

    Raises BadInput for an unknown name and for an empty list.
    """
    names = [name.strip() for name in text.split(",")]
    found = dict.fromkeys(_known_name(name, known, option) for name in names if name)
    if not found:
        example = ",".join(list(known)[:2])
        raise BadInput(f"{option}: expected names such as {option} {example}; known: {', '.join(known)}")
    return tuple(known[name] for name in found)


def _known_name(name: str, known: Iterable[str], option: str) -> str:
    """Return the name as `known` spells it."""
    names = {_plain(each): each for each in known}
    wanted = _plain(name)
    if wanted in names:
        return names[wanted]
    near = nearest(wanted, names, cutoff=0.5)
    hint = f" (nearest: {names[near]})" if near else ""
    raise BadInput(f"{option} {name}: expected one of {', '.join(known)}{hint}")


def _plain(name: str) -> str:
    """Return a name without case and punctuation."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
