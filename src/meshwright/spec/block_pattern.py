"""The order of the kinds of blocks in a model, as run files write it: `[5*local, global]`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from meshwright.spec.errors import WrongKey, nearest

_TERM = re.compile(r"(?:(?P<count>[0-9]{1,4})\s*\*\s*)?(?P<name>\S+)")
"""One term of a pattern: a name, or a number of times and a name."""


def expanded(terms: Iterable[str]) -> tuple[str, ...]:
    """Return the names for which the terms stand: `5*local` stands for five times `local`.

    A term of another form is a name.
    """
    return tuple(name for term in terms for name in _names(term))


def _names(term: str) -> list[str]:
    match = _TERM.fullmatch(term.strip())
    return [term] if match is None else [match["name"]] * int(match["count"] or 1)


def shortest_pattern(names: Sequence[str]) -> tuple[str, ...]:
    """Return the shortest pattern that gives these names if it is repeated and cut to their number."""
    period = next(n for n in range(1, len(names) + 1) if all(name == names[i % n] for i, name in enumerate(names)))
    runs = ((name, len(list(run))) for name, run in groupby(names[:period]))
    return tuple(name if count == 1 else f"{count}*{name}" for name, count in runs)


def pattern_mistakes(
    layers: int, kinds: Sequence[str], pattern: Sequence[str], first: Sequence[str], sequence: Sequence[str]
) -> Iterator[WrongKey]:
    """Yield what is wrong with the order of blocks.

    `kinds` are the names in `model.blocks`; the other arguments are values of keys of `model`.
    """
    orders = {"pattern": expanded(pattern), "first": expanded(first), "sequence": expanded(sequence)}
    used = dict.fromkeys((name, key) for key, names in orders.items() for name in names)
    described = (
        f"kinds of model.blocks ({', '.join(kinds)})" if kinds else "kinds that model.blocks describes; there are none"
    )
    for name, key in used:
        if name not in kinds:
            yield WrongKey(key, repr(name), described, nearest(name, kinds))
    for name in kinds:
        if name not in {used_name for used_name, _ in used}:
            yield WrongKey(
                f"blocks.{name}", "an unused kind", "its name in model.pattern, model.first or model.sequence"
            )
    beside = pattern or first
    counts = {key: len(names) for key, names in orders.items()}
    if sequence and beside:
        yield WrongKey("sequence", f"{counts['sequence']} layers", "no model.pattern and no model.first beside it")
    elif sequence and counts["sequence"] != layers:
        yield WrongKey("sequence", f"{counts['sequence']} layers", f"model.layers = {layers}")
    if counts["first"] > layers:
        yield WrongKey("first", f"{counts['first']} layers", f"at most model.layers = {layers}")
    elif first and not pattern and counts["first"] < layers:
        yield WrongKey("first", f"{counts['first']} of {layers} layers", "model.pattern for the others")
