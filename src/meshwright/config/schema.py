"""Turns the dataclasses of `spec` into pydantic models and a JSON schema.

Types, limits, defaults and documentation are read from the dataclasses, so nothing is declared twice. The models are
strict: `"12"` is not an integer, and an unknown key is an error. There are two exceptions: an integer is accepted as a
number, and the word `none` as null.
"""

from __future__ import annotations

import dataclasses
import operator
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from itertools import chain
from typing import Annotated, Any, Literal, TypeGuard, Union

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationError, create_model

from meshwright.config.yaml_positions import KeyPath
from meshwright.families.registry import FAMILIES, MODEL_PRESETS
from meshwright.spec.fields import Bound, Name, describe_type, docs_of, hints_of, to_plain, variant_of, variants
from meshwright.spec.run import RunSpec

_ANNOTATED: Any = Annotated  # These are applied to types that are made at run time. A type checker cannot follow that.
_LIST: Any = list
_DICT: Any = dict
_LITERAL: Any = Literal
# Tags that tell the members of a union apart. They are removed from the path of an error.
_SECTION = "|section|"
_TEXT = "|text|"
_NUMBER = "|number|"


@dataclass(frozen=True)
class SchemaMistake:
    """A place where plain data do not match the schema."""

    path: KeyPath
    problem: Literal["unknown", "missing", "value"]
    """`unknown`: the key does not exist. `missing`: a required key is absent. `value`: the value is invalid."""


def validate(cls: type, data: dict[str, Any]) -> tuple[dict[str, Any], list[SchemaMistake]]:
    """Check `data` against `cls`. Returns the given keys, converted to their types, and all mismatches.

    If there is any mismatch, the keys are empty.
    """
    try:
        return pydantic_model(cls).model_validate(data).model_dump(exclude_unset=True), []
    except ValidationError as error:
        return {}, [_schema_mistake(detail) for detail in error.errors(include_url=False, include_context=False)]


NAMES: dict[str, tuple[str, ...]] = {"family": tuple(FAMILIES)}
"""The names in each registry to which a spec field refers with `Name`."""


@cache
def keys_of(cls: type) -> dict[str, Any]:
    """Return the annotations of the fields of a spec class. A field that refers to a registry gets a Literal of its names."""
    return {name: _with_choices(annotation) for name, annotation in hints_of(cls).items()}


def _with_choices(annotation: Any) -> Any:
    marks = typing.get_args(annotation)[1:] if typing.get_origin(annotation) is Annotated else ()
    names = next((NAMES[mark.of] for mark in marks if isinstance(mark, Name)), None)
    return annotation if names is None else _LITERAL[names]


@cache
def pydantic_model(cls: type) -> type[BaseModel]:
    """Return the pydantic model of a spec dataclass."""
    fields: dict[str, Any] = {
        f.name: (_pydantic_type(keys_of(cls)[f.name]), _default(f)) for f in dataclasses.fields(cls)
    }
    config = ConfigDict(extra="forbid", strict=True)
    return create_model(cls.__name__, __config__=config, __doc__=_first_line(cls), **fields)


def section_of(annotation: Any) -> type | None:
    """Return the spec dataclass inside an annotation, such as of a list or a union. None if the annotation has plain values only."""
    if _is_section(annotation):
        return annotation
    inner = typing.get_args(annotation) if typing.get_origin(annotation) is not Literal else ()
    return next((section for part in inner if (section := section_of(part))), None)


def sections_of(annotation: Any) -> tuple[type, ...]:
    """Return the spec dataclasses inside an annotation. A union of sections, of which the key `name` selects one, gives several."""
    several = variants(typing.get_args(annotation))
    first = section_of(annotation)
    if len(several) > 1:
        return several
    return (first,) if first else ()


def section_at(cls: type, path: KeyPath, data: Any) -> type | None:
    """Return the spec dataclass of the section at `path`, None if there is none.

    If there are several, `data`, the section's value, selects one.
    """
    sections = sections_of(annotation_at(cls, path))
    if len(sections) > 1:
        return variant_of(sections, data)
    return sections[0] if sections else None


def annotation_at(cls: type, path: KeyPath) -> Any:
    """Return the annotation of the field, list item or mapping value at `path`. None if the schema has nothing there."""
    annotation: Any = cls
    for step in path:
        several = variants(typing.get_args(annotation))
        annotation = _container(annotation)
        if len(several) > 1:
            hints = [keys_of(section)[str(step)] for section in several if str(step) in hints_of(section)]
            hint = _joined_names(several) if step == "name" else next(iter(hints), None)
            annotation = hint if hints else None
        elif _is_section(annotation):
            annotation = keys_of(annotation).get(str(step))
        else:
            arguments = typing.get_args(annotation)
            index = -1 if typing.get_origin(annotation) is dict else 0
            annotation = arguments[index] if arguments else None
    return annotation


def _joined_names(sections: Sequence[type]) -> Any:
    """Return the Literal of the names of several sections."""
    return _LITERAL[tuple(typing.get_args(hints_of(section)["name"])[0] for section in sections)]


def all_keys(cls: type, under: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the path of every key of `cls` and of its sections. Keys inside of lists are left out."""
    for name, annotation in hints_of(cls).items():
        yield (*under, name)
        if typing.get_origin(_container(annotation)) is not tuple:
            below = (all_keys(section, (*under, name)) for section in sections_of(annotation))
            yield from dict.fromkeys(chain.from_iterable(below))


def expected_text(annotation: Any) -> str:
    """Return the values that a field accepts, in words."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if annotation == hints_of(RunSpec)["plan"]:
        return "auto, a plan file, or a section of pins"
    if len(several := variants(arguments)) > 1:
        return f"a section whose name is {describe_type(_joined_names(several))}"
    if origin in (Union, types.UnionType):
        text = " or ".join(expected_text(part) for part in arguments if part is not type(None))
        return f"{text}, or none" if type(None) in arguments and not _takes_none_as_text(annotation) else text
    if _is_section(annotation):
        keys = list(hints_of(annotation))
        return f"a section ({', '.join(keys[:4])}{', …' if len(keys) > 4 else ''})"
    if origin is tuple:
        return f"a list, each item {expected_text(arguments[0])}"
    if origin is dict:
        return f"a mapping from name to {expected_text(arguments[1])}"
    return describe_type(annotation)


def literal_options(annotation: Any) -> tuple[str, ...]:
    """Return the words that a field accepts. Empty if it is not a choice of words."""
    if typing.get_origin(annotation) is Literal:
        return tuple(map(str, typing.get_args(annotation)))
    return tuple(word for part in typing.get_args(annotation) for word in literal_options(part))


def accepts(annotation: Any, plain_type: type) -> bool:
    """Return whether a field accepts plain values of the type `plain_type`."""
    inner = typing.get_args(annotation) if typing.get_origin(annotation) in (Annotated, Union, types.UnionType) else ()
    return annotation is plain_type or any(accepts(part, plain_type) for part in inner)


def json_schema(cls: type = RunSpec) -> dict[str, Any]:
    """Return the JSON schema (2020-12) of a run file, or of the file that asks for a deployment, for use in editors.

    No key is required in the schema, because `extends` or an override may give it.
    """
    schema = pydantic_model(cls).model_json_schema()
    definitions = schema.pop("$defs")
    for section in [cls, *_sections(cls)]:
        described = schema if section is cls else definitions[section.__name__]
        described.pop("required", None)
        for name, text in docs_of(section).items():
            described["properties"][name]["description"] = text
    keys = schema["properties"]
    base = {"type": "string", "description": "Preset or run file whose keys this file builds on."}
    schema["properties"] = {"extends": base, **keys}
    _allow(keys["model"], {"enum": list(MODEL_PRESETS)})
    _allow(keys["cluster"], {"type": "string"})
    if "DataSpec" in definitions:
        _allow_streams_in_mix(definitions)
    for section_name, key, shorthand in _SHORTHANDS:
        if section_name in definitions:
            _allow(definitions[section_name]["properties"][key], shorthand)
    title = "meshwright run file" if cls is RunSpec else "meshwright deployment question"
    top = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    return {**schema, **top, "$defs": definitions}


_SHORTHANDS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("DataSpec", "mix", {"type": "string"}),
    ("ObserveSpec", "wandb", {"type": "string"}),
    ("ServeTarget", "quantisation", {"enum": ["fp8", "int8", "none"]}),
)
"""Shorthands of single keys: the section, the key, and the schema of the shorthand."""


def _sections(cls: type) -> list[type]:
    """Return the spec dataclasses of all sections of `cls` and of their sections, each once."""
    sections: dict[type, None] = {}
    for annotation in hints_of(cls).values():
        for section in sections_of(annotation):
            sections.update(dict.fromkeys([section, *_sections(section)]))
    return list(sections)


def _allow_streams_in_mix(definitions: dict[str, Any]) -> None:
    """Allow a section of `data.streams` with a weight wherever `data.mix` expects a weight."""
    mix = definitions["DataSpec"]["properties"]["mix"]
    stream = definitions["StreamSpec"]
    weight = dict(mix["additionalProperties"])
    section = {**stream, "properties": {**stream["properties"], "weight": weight}}
    mix["additionalProperties"] = {"anyOf": [weight, section]}


def _allow(prop: dict[str, Any], shorthand: dict[str, Any]) -> None:
    """Allow a shorthand as an alternative to the section or mapping that `prop` describes."""
    annotations = {key: prop.pop(key) for key in ("description", "default", "title") if key in prop}
    section = dict(prop)
    prop.clear()
    prop.update({"anyOf": [section, shorthand], **annotations})


def _pydantic_type(annotation: Any) -> Any:
    """Return the type that pydantic receives for the annotation of a spec field."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is Annotated:
        limits = [_limits(bound) for bound in arguments[1:] if isinstance(bound, Bound)]
        return _ANNOTATED[_pydantic_type(arguments[0]), *limits]
    if origin in (Union, types.UnionType):
        return _pydantic_union(annotation, arguments)
    if origin is tuple:
        return _LIST[_pydantic_type(arguments[0])]
    if origin is dict:
        return _DICT[str, _pydantic_type(arguments[1])]
    if _is_section(annotation):
        return pydantic_model(annotation)
    return _ANNOTATED[float, Field(allow_inf_nan=False)] if annotation is float else annotation


def _pydantic_union(annotation: Any, arguments: tuple[Any, ...]) -> Any:
    """Return the type of `X | None`, of a union of sections, or of a section or number as an alternative to text."""
    options = [part for part in arguments if part is not type(None)]
    if len(variants(options)) > 1:
        branches = [_ANNOTATED[pydantic_model(part), Tag(f"|{part.__name__}|")] for part in options]
        return _ANNOTATED[reduce(operator.or_, branches), Discriminator(lambda value: _variant_tag(options, value))]
    if len(options) == 1:
        nullable = _pydantic_type(options[0]) | None
        own_none = _takes_none_as_text(annotation)
        return nullable if own_none else _ANNOTATED[nullable, BeforeValidator(_none_word), _NONE_WORD]
    scalars = [_NUMBER if accepts(part, int) else _TEXT for part in options]
    tags = [_SECTION if _is_section(part) else scalar for part, scalar in zip(options, scalars, strict=True)]
    branches = [_ANNOTATED[_pydantic_type(part), Tag(tag)] for part, tag in zip(options, tags, strict=True)]
    return _ANNOTATED[reduce(operator.or_, branches), Discriminator(_branch_of_value)]


def _branch_of_value(value: Any) -> str:
    """Return the tag of a union's member for a value: section, number or text."""
    if isinstance(value, (dict, BaseModel)):
        return _SECTION
    return _NUMBER if isinstance(value, (int, float)) else _TEXT


def _variant_tag(sections: Sequence[type], value: Any) -> str:
    """Return the tag of the section that a value selects by its key `name`."""
    return f"|{variant_of(sections, value.model_dump() if isinstance(value, BaseModel) else value).__name__}|"


def _none_word(value: Any) -> Any:
    return None if value == "none" else value


def _add_none_word(schema: dict[str, Any]) -> None:
    schema.setdefault("anyOf", []).append({"const": "none"})


_NONE_WORD = Field(json_schema_extra=_add_none_word)


def _takes_none_as_text(annotation: Any) -> bool:
    return "none" in literal_options(annotation)


def _limits(bound: Bound) -> Any:
    return Field(ge=bound.at_least, gt=bound.more_than, le=bound.at_most, lt=bound.less_than)


def _default(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a spec field as plain data. `...` if the field is required."""
    if field.default is not dataclasses.MISSING:
        return to_plain(field.default)
    if field.default_factory is dataclasses.MISSING:
        return ...
    try:
        return to_plain(field.default_factory())
    except TypeError:  # The section has required keys.
        return ...


def _is_section(annotation: Any) -> TypeGuard[type]:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def _container(annotation: Any) -> Any:
    """Return the part of an annotation that has keys or items. Limits, None and plain text are left out."""
    if typing.get_origin(annotation) is Annotated:
        return _container(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (Union, types.UnionType):
        parts = [_container(part) for part in typing.get_args(annotation)]
        return next((part for part in parts if _is_section(part) or typing.get_args(part)), None)
    return annotation


def _schema_mistake(detail: Any) -> SchemaMistake:
    path = tuple(step for step in detail["loc"] if not str(step).startswith("|"))
    problems: dict[str, Literal["unknown", "missing"]] = {"extra_forbidden": "unknown", "missing": "missing"}
    return SchemaMistake(path, problems.get(detail["type"], "value"))


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().split("\n")[0]
