"""Converts frozen dataclasses to and from plain data, for files, ranks and checkpoints.

A spec class is a frozen dataclass. Its fields are int, float, str, bool, None, Literal, tuples, dicts, unions with
None, other spec classes, and unions of spec classes that differ in the Literal of their field `name`. The string below
a field is its documentation. `Annotated[int, Bound(...)]` limits a number.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import json
import math
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar, Union

from meshwright.spec.errors import nearest

T = TypeVar("T")


@dataclass(frozen=True)
class Bound:
    """Limits of a number; None is no limit."""

    at_least: float | None = None
    more_than: float | None = None
    at_most: float | None = None
    less_than: float | None = None


@dataclass(frozen=True)
class Name:
    """Marks a text that must be a name in a registry which `spec` does not know, such as `family`.

    The code that reads files checks the name and lists the valid names (`config.schema`).
    """

    of: str
    """What is named: "family"."""


LARGEST_COUNT = 10**9
"""Largest count in a run file, so that a product of a few counts fits in a double and in 64 bits."""
Positive = Annotated[int, Bound(at_least=1, at_most=LARGEST_COUNT)]
"""A count of at least 1."""
NotNegative = Annotated[int, Bound(at_least=0, at_most=LARGEST_COUNT)]
"""A count of at least 0."""


def to_plain(value: Any) -> Any:
    """Return a spec object as dicts, lists and scalars, which JSON can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    return value


def from_plain(cls: type[T], data: Any) -> T:
    """Return the spec object of its plain form.

    The data must have been validated (`config.load`) or written by `to_plain`. Raises TypeError for a key that the
    class does not have.
    """
    return _builder(cls)(data)


def from_checked_plain(cls: type[T], data: Any) -> T:
    """Return the spec object of its plain form, which a disk may have damaged.

    Raises ValueError, with the place of the first value that has another type.
    """
    _check_plain(cls, data, "")
    return from_plain(cls, data)


def _check_plain(annotation: Any, data: Any, where: str) -> None:
    """Raise ValueError unless `data` is the plain form of a value of this type; `where` is its place for the message."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is Annotated:
        _check_plain(arguments[0], data, where)
        if not within(arguments[1], data):
            raise ValueError(f"{where}: expected {describe_type(annotation)}, got {_shown(data)}")
        return
    if origin in (Union, types.UnionType):
        if not any(_is_plain(option, data) for option in arguments):
            raise ValueError(f"{where}: expected {describe_type(annotation)}, got {_shown(data)}")
        return
    if dataclasses.is_dataclass(annotation) and isinstance(data, Mapping):
        hints = hints_of(typing.cast(type, annotation))
        required = {
            field.name
            for field in dataclasses.fields(annotation)
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        }
        for name in sorted(required - data.keys()):
            raise ValueError(f"{_inside(where, name)}: missing")
        for name, value in data.items():
            if name not in hints:
                raise ValueError(f"{_inside(where, name)}: no such key")
            _check_plain(hints[name], value, _inside(where, name))
    elif origin is tuple and isinstance(data, (list, tuple)):
        each = [arguments[0]] * len(data) if arguments[-1] is Ellipsis else list(arguments)
        if len(each) != len(data):
            raise ValueError(f"{where}: expected {len(each)} values, got {len(data)}")
        for index, (inner, value) in enumerate(zip(each, data, strict=True)):
            _check_plain(inner, value, f"{where}[{index}]")
    elif origin is dict and isinstance(data, Mapping):
        for key, value in data.items():
            _check_plain(arguments[1], value, _inside(where, str(key)))
    elif not _is_scalar(annotation, origin, arguments, data):
        raise ValueError(f"{where or 'the value'}: expected {describe_type(annotation)}, got {_shown(data)}")


def _is_scalar(annotation: Any, origin: Any, arguments: tuple[Any, ...], data: Any) -> bool:
    """Return whether `data` is a value of a type that is not made of others."""
    if origin is Literal:
        return type(data) in {type(option) for option in arguments} and data in arguments
    if annotation is float:
        return isinstance(data, (int, float)) and not isinstance(data, bool)
    return annotation is Any or (annotation in (int, str, bool) and type(data) is annotation)


def _is_plain(annotation: Any, data: Any) -> bool:
    """Return whether `data` is the plain form of a value of this type."""
    if annotation is type(None):
        return data is None
    try:
        _check_plain(annotation, data, "")
    except ValueError:
        return False
    return True


def within(bound: Any, value: Any) -> bool:
    """Return whether a number is finite and within a Bound."""
    if not isinstance(bound, Bound) or isinstance(value, bool) or not isinstance(value, (int, float)):
        return True
    return (
        (isinstance(value, int) or math.isfinite(value))
        and (bound.at_least is None or value >= bound.at_least)
        and (bound.more_than is None or value > bound.more_than)
        and (bound.at_most is None or value <= bound.at_most)
        and (bound.less_than is None or value < bound.less_than)
    )


def _inside(where: str, name: str) -> str:
    """Return the place of a key inside a place, for messages."""
    return f"{where}.{name[:40]}" if where else name[:40]


def _shown(value: Any) -> str:
    """Return a short text of the value, for messages."""
    if isinstance(value, (Mapping, list, tuple)):
        return "a section" if isinstance(value, Mapping) else "a list"
    return repr(value)[:60]


def to_sealed_json(value: Any) -> str:
    """Return one line of JSON of a spec object or of a dict, with a digest of its values."""
    plain = to_plain(value)
    return json.dumps({**plain, "digest": _digest(plain)})


def from_sealed_json(text: str) -> dict[str, Any]:
    """Return the values of a line that `to_sealed_json` wrote. Raises ValueError if the line is damaged."""
    try:
        data = json.loads(text)
    except RecursionError as error:
        raise ValueError("too many brackets") from error
    if not isinstance(data, dict):
        raise ValueError("expected a JSON object")
    if data.pop("digest", None) != _digest(data):
        raise ValueError("its digest does not match")
    return data


def _digest(plain: dict[str, Any]) -> str:
    """Return the digest of plain data, 16 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(plain).encode(), digest_size=8).hexdigest()


Build = Callable[[Any], Any]


def _builder(annotation: Any) -> Build:
    """Return the function that makes a value of this type from its plain form."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is typing.Annotated:
        return _builder(arguments[0])
    if origin in (Union, types.UnionType):
        return _union_builder(arguments)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        build = _builder(arguments[0])
        return tuple if build is _keep else lambda data: tuple([build(value) for value in data])
    if origin is tuple:
        builders = [_builder(argument) for argument in arguments]
        return lambda data: tuple([build(value) for build, value in zip(builders, data, strict=True)])
    if origin is dict:
        build_value = _builder(arguments[1])
        return lambda data: {key: build_value(value) for key, value in data.items()}
    if dataclasses.is_dataclass(annotation):
        return lambda data: _build_dataclass(annotation, data)
    return _build_float if annotation is float else _keep


def _keep(data: Any) -> Any:
    return data


def _build_float(data: Any) -> Any:
    return float(data) if isinstance(data, int) and not isinstance(data, bool) else data


def _build_dataclass(cls: Any, data: Any) -> Any:
    builders = _field_builders(cls)
    if not data.keys() <= builders.keys():
        unknown = set(data) - set(builders)
        raise TypeError(f"{cls.__name__} has no field {sorted(unknown)[0]!r}")
    return cls(**{key: builders[key](value) for key, value in data.items()})


@cache
def _field_builders(cls: type) -> dict[str, Build]:
    """Return, for each field of a spec class, the function that makes its value."""
    return {name: _builder(annotation) for name, annotation in hints_of(cls).items()}


def _union_builder(arguments: tuple[Any, ...]) -> Build:
    """Return the function that makes a value of a union.

    A dict or a list becomes the first type of the union that it can be: a spec class or a container. An integer becomes
    a float if the union has float and not int.
    """
    options: list[tuple[tuple[type, ...], Build]] = []
    if len(sections := variants(arguments)) > 1:
        return lambda data: _build_dataclass(variant_of(sections, data), data)
    for option in arguments:
        if dataclasses.is_dataclass(option):
            options.append(((dict,), _builder(option)))
        elif typing.get_origin(option) in (dict, tuple):
            options.append(((dict, list, tuple), _builder(option)))
    bare = [
        typing.get_args(option)[0] if typing.get_origin(option) is typing.Annotated else option for option in arguments
    ]
    scalar = _build_float if float in bare and int not in bare else _keep

    def build(data: Any) -> Any:
        if data is None:
            return None
        for data_types, build_option in options:
            if isinstance(data, data_types):
                return build_option(data)
        return scalar(data)

    return build


def variants(arguments: Sequence[Any]) -> tuple[type, ...]:
    """Return the spec classes among the members of a union."""
    return tuple(part for part in arguments if isinstance(part, type) and dataclasses.is_dataclass(part))


def variant_of(sections: Sequence[type], data: Any) -> type:
    """Return the spec class with the `name` that the data have, or with a similar name.

    The result is the first class if the data have no such name.
    """
    by_name = {typing.get_args(hints_of(section)["name"])[0]: section for section in sections}
    name = str(data.get("name", "")).lower() if isinstance(data, Mapping) else ""
    return by_name.get(name) or by_name.get(nearest(name, by_name) or "", sections[0])


@cache
def hints_of(cls: type) -> dict[str, Any]:
    """Return the types of a spec class's fields, with `Annotated`."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the documentation strings below the fields in the source of a class, by field."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    docs: dict[str, str] = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            docs[field.target.id] = inspect.cleandoc(str(ast.literal_eval(text.value)))
    return docs


@cache
def docs_of(cls: type) -> dict[str, str]:
    """Return the documentation of every field on one line, also of inherited fields."""
    bases = [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)]
    return {name: " ".join(text.split()) for base in bases for name, text in field_docs(base).items()}


def describe_type(annotation: Any) -> str:
    """Return a field's type as text, for help, error messages and the reference. LARGEST_COUNT is not mentioned."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is typing.Annotated:
        return describe_type(arguments[0]) + _describe_bound(arguments[1])
    if origin is Literal:
        return " | ".join(str(a) for a in arguments)
    if origin in (Union, types.UnionType):
        names = ["none" if a is type(None) else describe_type(a) for a in arguments]
        return " | ".join(dict.fromkeys(" | ".join(names).split(" | ")))
    if origin is tuple:
        return f"list of {describe_type(arguments[0])}"
    if origin is dict:
        return f"mapping of {describe_type(arguments[0])} to {describe_type(arguments[1])}"
    names = {int: "integer", float: "number", str: "text", bool: "true | false"}
    return names.get(annotation, "section" if dataclasses.is_dataclass(annotation) else str(annotation))


def _describe_bound(bound: Any) -> str:
    """Return the limits of a number as text: " (≥ 1)"."""
    if not isinstance(bound, Bound):
        return ""
    parts = [("≥", bound.at_least), (">", bound.more_than), ("≤", bound.at_most), ("<", bound.less_than)]
    limits = [f"{sign} {limit:g}" for sign, limit in parts if limit not in (None, LARGEST_COUNT)]
    return f" ({', '.join(limits)})" if limits else ""
