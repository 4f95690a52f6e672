"""Conversion of frozen dataclasses to and from plain data, shared by files, ranks and checkpoints.

A spec class is a frozen dataclass whose fields are int, float, str, bool, None, Literal, tuples, dicts, unions with
None, other spec classes, and unions of spec classes that differ in the Literal of their field `name`. The string below
a field is its documentation; `Annotated[int, Bound(...)]` limits a number.
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
    """Limits of a number, each optional."""

    at_least: float | None = None
    more_than: float | None = None
    at_most: float | None = None
    less_than: float | None = None


@dataclass(frozen=True)
class Name:
    """Marks text that is one of the names in a registry, such as `family`, which `spec` does not know.

    Whoever reads files checks it and lists the names (`config.schema`).
    """

    of: str


LARGEST_COUNT = 10**9
"""Largest count in a run file: products of a few counts stay within a double and 64 bits."""
Positive = Annotated[int, Bound(at_least=1, at_most=LARGEST_COUNT)]
NotNegative = Annotated[int, Bound(at_least=0, at_most=LARGEST_COUNT)]


def to_plain(value: Any) -> Any:
    """JSON-ready form of a spec object (dicts, lists and scalars only)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    return value


def from_plain(cls: type[T], data: Any) -> T:
    """Rebuild a spec object from its plain form.

    The data must have been validated (`config.load`) or written by `to_plain`; a key the class lacks raises TypeError.
    """
    return _builder(cls)(data)


def from_checked_plain(cls: type[T], data: Any) -> T:
    """`from_plain` of data that a disk may have damaged: raises ValueError that names the first value of another type."""
    _check_plain(cls, data, "")
    return from_plain(cls, data)


def _check_plain(annotation: Any, data: Any, where: str) -> None:
    """Raise ValueError unless `data` is the plain form of a value of this type."""
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
    if origin is Literal:
        return type(data) in {type(option) for option in arguments} and data in arguments
    if annotation is float:
        return isinstance(data, (int, float)) and not isinstance(data, bool)
    return annotation is Any or (annotation in (int, str, bool) and type(data) is annotation)


def _is_plain(annotation: Any, data: Any) -> bool:
    if annotation is type(None):
        return data is None
    try:
        _check_plain(annotation, data, "")
    except ValueError:
        return False
    return True


def within(bound: Any, value: Any) -> bool:
    """Whether a number is finite and within a Bound."""
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
    return f"{where}.{name[:40]}" if where else name[:40]


def _shown(value: Any) -> str:
    """The value as messages show it, short."""
    if isinstance(value, (Mapping, list, tuple)):
        return "a section" if isinstance(value, Mapping) else "a list"
    return repr(value)[:60]


def to_sealed_json(value: Any) -> str:
    """One line of JSON of a spec object, or of a dict, with a digest of its other values."""
    plain = to_plain(value)
    return json.dumps({**plain, "digest": _digest(plain)})


def from_sealed_json(text: str) -> dict[str, Any]:
    """The values of a line that `to_sealed_json` wrote. Raises ValueError if damaged."""
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
    return hashlib.blake2b(json.dumps(plain).encode(), digest_size=8).hexdigest()


Build = Callable[[Any], Any]


def _builder(annotation: Any) -> Build:
    """The function that rebuilds a value of this type."""
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
    """The function that rebuilds each field of a spec class."""
    return {name: _builder(annotation) for name, annotation in hints_of(cls).items()}


def _union_builder(arguments: tuple[Any, ...]) -> Build:
    """A dict or list becomes the first spec class or container that it can be; an integer a float if only that is possible."""
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
    """The spec classes among the members of a union."""
    return tuple(part for part in arguments if isinstance(part, type) and dataclasses.is_dataclass(part))


def variant_of(sections: Sequence[type], data: Any) -> type:
    """The one of several spec classes whose `name` the data has, or a similar one; the first if it has none."""
    by_name = {typing.get_args(hints_of(section)["name"])[0]: section for section in sections}
    name = str(data.get("name", "")).lower() if isinstance(data, Mapping) else ""
    return by_name.get(name) or by_name.get(nearest(name, by_name) or "", sections[0])


@cache
def hints_of(cls: type) -> dict[str, Any]:
    """The resolved annotations of a spec class's fields, `Annotated` kept."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


@cache
def field_docs(cls: type) -> dict[str, str]:
    """The documentation string below each field in the class's source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    docs: dict[str, str] = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            docs[field.target.id] = inspect.cleandoc(str(ast.literal_eval(text.value)))
    return docs


@cache
def docs_of(cls: type) -> dict[str, str]:
    """The documentation of every field, inherited ones included."""
    bases = [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)]
    return {name: " ".join(text.split()) for base in bases for name, text in field_docs(base).items()}


def describe_type(annotation: Any) -> str:
    """A field's type in words, for help, error messages and the reference; LARGEST_COUNT is not mentioned."""
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
    if not isinstance(bound, Bound):
        return ""
    parts = [("≥", bound.at_least), (">", bound.more_than), ("≤", bound.at_most), ("<", bound.less_than)]
    limits = [f"{sign} {limit:g}" for sign, limit in parts if limit not in (None, LARGEST_COUNT)]
    return f" ({', '.join(limits)})" if limits else ""
