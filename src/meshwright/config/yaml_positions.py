"""Parses YAML to plain data, and records the file, line and column of every key and value.

Scalars follow the core schema of YAML 1.2: `3e-4` is a number; `no`, `on` and `12:30:45` are text; `010` is ten. In
addition, `1_000` is an integer. No tag constructs an object, and anchors can expand only to a limited size. Every error
becomes a `Mistake`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.emitter import Emitter
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.representer import SafeRepresenter
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner
from yaml.serializer import Serializer

from meshwright.spec.errors import MissingFile, Mistake, nearest_file

KeyPath = tuple[str | int, ...]
"""The path of a key: names of sections and indices in lists, from the top of the file."""
MAX_BYTES = 512 << 10
"""Maximum size of a file in bytes."""
MAX_DEPTH = 32
"""Maximum depth of nesting."""
MAX_VALUES = 5_000
"""Maximum number of values in a file.

With these three limits, parsing in Python takes at most about a second. A run file needs a hundredth of that.
"""
_CORE = "tag:yaml.org,2002:"
"""Beginning of the tags of the core schema."""


@dataclass(frozen=True)
class Position:
    """The position of a token. `line` and `column` count from 1; they are None for the command line."""

    file: str
    line: int | None = None
    column: int | None = None


@dataclass
class YamlDocument:
    """Plain data, the position of each key and value, and the mistakes found while reading."""

    data: Any
    """The value of the whole file, normally a mapping."""
    top: Position
    """Position of the whole value."""
    keys: dict[KeyPath, Position] = field(default_factory=dict)
    """Position of each key, by its path."""
    values: dict[KeyPath, Position] = field(default_factory=dict)
    """Position of each value, by its path."""
    mistakes: list[Mistake] = field(default_factory=list)
    partial: bool = False
    """Whether a part could not be read. A key that is absent here may then be in the file."""
    rejected: set[KeyPath] = field(default_factory=set)
    """Paths of the mistakes that were reported with `reject`. Later checks skip them."""

    def get(self, path: KeyPath) -> Any:
        """Return the value at `path`; None if there is none."""
        value: Any = self.data
        for step in path:
            if isinstance(value, dict):
                value = value.get(step)
            else:
                value = value[step] if isinstance(value, list) and isinstance(step, int) and step < len(value) else None
        return value

    def has(self, path: KeyPath) -> bool:
        """Return whether the file has a value at `path`."""
        parent = self.get(path[:-1]) if path else None
        if isinstance(parent, list):
            return isinstance(path[-1], int) and path[-1] < len(parent)
        return not path or (isinstance(parent, dict) and path[-1] in parent)

    def value_position(self, path: KeyPath) -> Position:
        """Return the position of the value at `path`.

        If it is absent, return the position of the key of the innermost section that exists.
        """
        if path in self.values and self.has(path):
            return self.values[path]
        return self.key_position(path)

    def key_position(self, path: KeyPath) -> Position:
        """Return the position of the last key of `path`.

        If it is absent, return the position of the key of the innermost section that exists.
        """
        while path:
            if path in self.keys and self.has(path):
                return self.keys[path]
            path = path[:-1]
        return self.top

    def complain(self, position: Position, key: str, expected: str, got: str, nearest: str | None = None) -> None:
        """Add a mistake at `position`."""
        self.mistakes.append(Mistake(position.file, position.line, position.column, key, expected, got, nearest))

    def mistake(self, path: KeyPath, expected: str, got: str, nearest: str | None = None) -> Mistake:
        """Make a Mistake of the value at `path`, with its position. It is not added to `mistakes`."""
        position = self.value_position(path)
        return Mistake(position.file, position.line, position.column, ".".join(map(str, path)), expected, got, nearest)

    def reject(self, path: KeyPath, expected: str, got: str | None = None, nearest: str | None = None) -> None:
        """Report a mistake of the value at `path`, and mark the path as rejected."""
        shown = format_value(self.get(path)) if got is None else got
        self.complain(self.value_position(path), dotted(path), expected, shown, nearest)
        self.rejected.add(path)

    def put(self, path: KeyPath, value: Any, position: Position) -> None:
        """Set the value at `path`. It gets the position of the token from which it is derived."""
        section = self.get(path[:-1])
        section[path[-1]] = value
        self.mark(path, value, position)

    def mark(self, path: KeyPath, value: Any, position: Position) -> None:
        """Give the key and value at `path`, and everything below it, this position."""
        self.keys[path] = self.values[path] = position
        items = enumerate(value) if isinstance(value, list) else ()
        for step, inner in value.items() if isinstance(value, dict) else items:
            self.mark((*path, step), inner, position)

    def graft(self, name: str, section: YamlDocument) -> None:
        """Insert another document under the top-level key `name`, with its positions and mistakes."""
        self.data[name] = section.data
        for path, position in section.keys.items():
            self.keys[name, *path] = position
        for path, position in section.values.items():
            self.values[name, *path] = position
        self.mistakes += section.mistakes
        if section.partial:
            self.rejected.add((name,))


def read_yaml(path: Path, shown: str | None = None) -> YamlDocument:
    """Read the mapping in the file at `path`. `shown` is the name of the file in mistakes. Does not raise: errors are in `mistakes`."""
    file = shown or str(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        others = [] if path.exists() else [near.name for near in path.parent.glob("*.y*ml")]
        close = nearest_file(path.name, others)
        if isinstance(error, FileNotFoundError):
            missing = MissingFile(file, None, None, "yaml", "a readable file", "no such file", close)
            return YamlDocument({}, Position(file, None, None), mistakes=[missing], partial=True)
        return _unreadable(file, None, None, "a readable file", (error.strerror or str(error)).lower(), close)
    if len(raw) > MAX_BYTES:
        return _unreadable(file, 1, 1, f"at most {MAX_BYTES >> 10} KiB of YAML", "a larger file")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode("utf-8-sig")
        line, column = _line_and_column(before, len(before))
        return _unreadable(file, line, column, "UTF-8 text", f"the byte 0x{raw[error.start]:02x}")
    document = parse_yaml(text, file)
    if not isinstance(document.data, dict):
        got = format_value(document.data)
        document = replace(document, data={}, partial=True)
        document.complain(document.top, "yaml", "a mapping of keys to values", got)
    return document


def parse_yaml(text: str, file: str) -> YamlDocument:
    """Parse a YAML text. An empty text gives an empty mapping."""
    try:
        node = _Loader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        got = ", ".join(part for part in (error.context, error.problem) if part)
        if r"'\t'" in got:
            got = "a tab; indent with spaces"
        return _unreadable(file, line, column, "valid YAML", got)
    except ReaderError as error:
        line, column = _line_and_column(text, int(error.position))
        return _unreadable(file, line, column, "printable text", f"the character U+{ord(text[error.position]):04X}")
    if node is None:
        return YamlDocument({}, Position(file, 1, 1))
    builder = _TreeBuilder(YamlDocument(None, _node_position(file, node)))
    builder.document.data = builder.value(node, ())
    return builder.document


def dump_yaml(data: Any) -> str:
    """Write data as YAML in block style. `parse_yaml` reads it back to equal data. Keys keep their order."""
    stream = StringIO()
    dumper = _Dumper(stream)
    dumper.open()
    dumper.represent(data)
    dumper.close()
    return stream.getvalue()


def format_value(value: Any) -> str:
    """Return a value as messages show it: numbers as in YAML, text in quotes, and only the type of a list or section."""
    if isinstance(value, dict):
        return "a section" if value else "an empty section"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, str):
        return f"the text '{value}'" if len(value) <= 60 else f"the text '{value[:57]}...'"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "nothing"}[value]
    return f"{value:.6g}" if isinstance(value, float) and not value.is_integer() else str(value)[:60]


class _Resolver(BaseResolver):
    """The core schema of YAML 1.2. In addition, `_` may separate the digits of a decimal number."""

    yaml_implicit_resolvers = {
        None: [
            (f"{_CORE}{tag}", re.compile(pattern))
            for tag, pattern in (
                ("null", r"(?:~|null|Null|NULL|)\Z"),
                ("bool", r"(?:true|True|TRUE|false|False|FALSE)\Z"),
                ("int", r"(?:[-+]?[0-9]+(?:_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+)\Z"),
                ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z"),
                ("float", r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"),
            )
        ]
    }

    def __init__(self) -> None:
        super().__init__()
        self.depth = self.nodes = 0


class _Loader(Reader, Scanner, Parser, Composer, _Resolver):
    """Parses one YAML text to nodes. Raises an error if it is nested too deeply or has too many values."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        _Resolver.__init__(self)

    def descend_resolver(self, current_node: Node | None, current_index: Any) -> None:
        self.depth += 1
        self.nodes += 1
        problem = f"more than {MAX_DEPTH} levels of nesting" if self.depth > MAX_DEPTH else ""
        if self.nodes > 2 * MAX_VALUES:  # Each value may have a key, which is a node too.
            problem = f"more than {MAX_VALUES} values"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.peek_event().start_mark)

    def ascend_resolver(self) -> None:
        self.depth -= 1


class _Dumper(Emitter, Serializer, SafeRepresenter, _Resolver):
    """Writes plain data as YAML."""

    def __init__(self, stream: StringIO) -> None:
        Emitter.__init__(self, stream, allow_unicode=True, width=120)
        Serializer.__init__(self)
        SafeRepresenter.__init__(self, sort_keys=False)
        _Resolver.__init__(self)

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def choose_scalar_style(self) -> str:
        """Select double quotes for text that cannot be printed.

        In single quotes PyYAML loses line separators such as NEL.

        Text that a reader of YAML 1.1, such as Kubernetes, would take for another type gets quotes too: `on`, `0777`,
        `12:30`.
        """
        text: str = getattr(self.event, "value", "")
        if not text.isprintable():
            return '"'
        is_text = getattr(self.event, "implicit", None) == (True, True)
        return "'" if is_text and _is_no_text_in_yaml_1_1(text) else super().choose_scalar_style()


@lru_cache(maxsize=4096)
def _is_no_text_in_yaml_1_1(text: str) -> bool:
    tag = yaml.resolver.Resolver().resolve(ScalarNode, text, (True, False))
    return tag != f"{_CORE}str" or text in ("y", "Y", "n", "N")


class _TreeBuilder:
    """Turns the nodes of PyYAML into plain data. Positions and mistakes are stored in `document`."""

    def __init__(self, document: YamlDocument) -> None:
        self.document = document
        self.values_built = 0
        self.file = document.top.file

    def value(self, node: Node, path: KeyPath) -> Any:
        """Return the plain data of a node at `path`. Stores its position. Stops at the limits on values and depth."""
        position = _node_position(self.file, node)
        self.document.values[path] = position
        self.values_built += 1
        if self.values_built > MAX_VALUES or len(path) > MAX_DEPTH:
            if not self.document.partial:
                limit = f"at most {MAX_VALUES} values, {MAX_DEPTH} levels deep, after anchors are expanded"
                self.document.complain(position, "yaml", limit, "more (an anchor inside itself?)")
            self.document.partial = True
            return None
        if isinstance(node, MappingNode) and node.tag == f"{_CORE}map":
            return self._mapping(node, path)
        if isinstance(node, SequenceNode) and node.tag == f"{_CORE}seq":
            return self._sequence(node, path)
        return self._scalar(node, path)

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        """Return the mapping of a node. A key that occurs twice, or is not a scalar, becomes a mistake."""
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            position = _node_position(self.file, key_node)
            if not isinstance(key_node, ScalarNode):
                self.document.complain(position, dotted(path), "a plain word as key", "a list or mapping as key")
                continue
            key = key_node.value
            if key in mapping:
                first = self.document.keys[*path, key]
                expected = f"one '{key}' in this section; the first is on line {first.line}"
                self.document.complain(position, dotted((*path, key)), expected, "a second one")
                continue
            self.document.keys[*path, key] = position
            mapping[key] = self.value(value_node, (*path, key))
            if self.document.partial:
                break
        return mapping

    def _sequence(self, node: SequenceNode, path: KeyPath) -> list[Any]:
        items: list[Any] = []
        for index, item in enumerate(node.value):
            items.append(self.value(item, (*path, index)))
            if self.document.partial:
                break
        return items

    def _scalar(self, node: Node, path: KeyPath) -> Any:
        """Return the value of a scalar node. A tag becomes a mistake."""
        tag = node.tag.removeprefix(_CORE)
        if isinstance(node, ScalarNode) and tag == "str":
            return node.value
        untagged = _Resolver().resolve(ScalarNode, node.value, (True, False)) if isinstance(node, ScalarNode) else ""
        if untagged != node.tag:
            got = f"the tag {node.tag.replace(_CORE, '!!')}"
            self.document.complain(_node_position(self.file, node), dotted(path), "plain YAML without tags", got)
            return None
        return _CONSTRUCT[tag](node.value)


def _integer(text: str) -> int | str:
    try:
        return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
    except ValueError:  # The text has more digits than Python converts.
        return text


_CONSTRUCT = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": _integer,
    "float": lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
}
"""Converts the text of a scalar, by its tag."""


def dotted(path: KeyPath) -> str:
    """Return a path in the notation of messages and overrides."""
    return ".".join(map(str, path)) or "yaml"


def _node_position(file: str, node: Node) -> Position:
    return Position(file, node.start_mark.line + 1, node.start_mark.column + 1)


def _line_and_column(text: str, position: int) -> tuple[int, int]:
    return text.count("\n", 0, position) + 1, position - (text.rfind("\n", 0, position) + 1) + 1


def _unreadable(
    file: str, line: int | None, column: int | None, expected: str, got: str, close: str | None = None
) -> YamlDocument:
    document = YamlDocument({}, Position(file, line, column), partial=True)
    document.complain(document.top, "yaml", expected, got, close)
    return document
