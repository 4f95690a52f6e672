"""Reads the tools of a chat request: which tools the model may call, and which it must call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.server.errors import RequestError, wrong
from meshwright.server.fields import Fields

MOST_TOOLS = 128
"""Maximum number of tools in a request."""
MOST_REFERENCES = 4
"""Maximum number of nested references and alternatives of a schema that are followed to find the type of a parameter."""
_CHOICES = ("none", "auto", "required")
"""The values of `tool_choice` that are texts."""


@dataclass(frozen=True)
class Tools:
    """The tools of a request, in OpenAI's format."""

    tools: Sequence[Mapping[str, Any]] | None = None
    """Tools for the chat template; None if the model may call none."""
    forced: Sequence[Mapping[str, Any]] | None = None
    """Functions of which the answer must call at least one; None if the answer need not call any."""
    parallel: bool = True
    """Whether an answer may have several calls."""
    named: bool = False
    """Whether the request names the function to call."""


def read_tools(fields: Fields) -> Tools:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`. Raises RequestError for wrong values."""
    value = fields.take("tools")
    choice = fields.take("tool_choice")
    parallel = fields.flag("parallel_tool_calls", True)
    named = _named(choice)
    if value is None or value == []:
        if choice not in (None, "none", "auto"):
            raise RequestError(400, "tool_choice: needs tools", param="tool_choice")
        return Tools()
    if not isinstance(value, list) or len(value) > MOST_TOOLS:
        raise wrong("tools", f"a list of at most {MOST_TOOLS} tools", value)
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(value)]
    if choice == "none":
        return Tools()
    if named is not None:
        functions = [function for function in functions if function["name"] == named]
        if not functions:
            raise RequestError(400, "tool_choice: names none of the tools", param="tool_choice")
    elif choice != "required":
        return Tools(value, parallel=parallel)
    several = parallel and named is None
    return Tools(value, functions, several, named is not None)


def _named(choice: object) -> str | None:
    """Return the name of the function that `tool_choice` names; None if it names none."""
    if choice is None or (isinstance(choice, str) and choice in _CHOICES):
        return None
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        form = '{"type": "function", "function": {"name": …}}'
        raise wrong("tool_choice", f"{', '.join(_CHOICES)} or {form}", choice)
    return function["name"]


def _function(tool: object, key: str) -> Mapping[str, Any]:
    """Return the function of a tool, after checking it. `key` is the tool's path in the body, for errors."""
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong(key, '{"type": "function", "function": {"name": …}}', tool)
    if not isinstance(function.get("parameters") or {}, dict):
        raise wrong(f"{key}.function.parameters", "a JSON schema", function["parameters"])
    return function


def calls_schema(functions: Sequence[Mapping[str, Any]], *, several: bool) -> dict[str, Any]:
    """Return the JSON schema of an array of calls `{name, arguments}`: exactly one, or at least one with `several`.

    Definitions in the schemas of the parameters move to the root of the new schema, because references such as
    `#/$defs/X` start there. Raises RequestError if two functions define the same name differently.
    """
    definitions: dict[str, dict[str, Any]] = {}
    forms = []
    for function in functions:
        parameters: dict[str, Any] = {"type": "object", **(function.get("parameters") or {})}
        for key in ("$defs", "definitions"):
            found = parameters.pop(key, None)
            if not isinstance(found, dict):
                continue
            for name, definition in found.items():
                if definitions.setdefault(key, {}).setdefault(name, definition) != definition:
                    raise RequestError(400, f"tools: two of them define {key}.{name[:60]} differently", param="tools")
        properties = {"name": {"const": function["name"]}, "arguments": parameters}
        forms.append(
            {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        )
    items = forms[0] if len(forms) == 1 else {"anyOf": forms}
    most = {} if several else {"maxItems": 1}
    return {"type": "array", "items": items, "minItems": 1, **most, **definitions}


def parameter_types(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """Return the JSON types that each function's schema allows for its parameters: types by parameter by function.

    A parameter whose schema names no type has no entry.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for tool in tools:
        function = tool["function"]
        schema = function.get("parameters") or {}
        properties = schema.get("properties")
        if isinstance(properties, dict):
            of_function = {name: schema_types(value, schema) for name, value in properties.items()}
            found[function["name"]] = {name: types for name, types in of_function.items() if types}
    return found


def schema_types(schema: object, root: Mapping[str, Any], depth: int = 0) -> list[str]:
    """Return the JSON types that a schema allows. References are looked up in `root`, and alternatives are followed.

    `depth` is the number of references and alternatives that have been followed so far.
    """
    if not isinstance(schema, dict) or depth > MOST_REFERENCES:
        return []
    types = schema.get("type")
    if isinstance(types, str):
        return [types]
    if isinstance(types, list):
        return [name for name in types if isinstance(name, str)]
    if isinstance(reference := schema.get("$ref"), str):
        target: Any = root
        for step in reference.removeprefix("#/").split("/"):
            target = target.get(step) if isinstance(target, dict) else None
        return schema_types(target, root, depth + 1)
    options = [option for key in ("anyOf", "oneOf", "allOf") for option in listed(schema.get(key))]
    values = [*listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    names = [name for option in options for name in schema_types(option, root, depth + 1)]
    return [*names, *map(_type_of, values)]


def _type_of(value: object) -> str:
    """Return the JSON type of a value. Lists and objects count as numbers too: the caller only asks whether it is text."""
    if isinstance(value, str):
        return "string"
    return "null" if value is None else "number"


def listed(value: object) -> list[Any]:
    """Return the value if it is a list, else an empty list."""
    return value if isinstance(value, list) else []
