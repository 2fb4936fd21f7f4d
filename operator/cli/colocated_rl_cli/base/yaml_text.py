"""Read YAML as the API server does, with the position of each value, and write YAML that the server reads as meant.

The server decodes with Go's YAML 1.1 and then JSON. It resolves plain scalars differently from PyYAML (`1e-4` is a
number, `1:30` is not, `0o17` is 15), so they are resolved here. As in the server, a tab between words is a space, and a
tab that indents is an error. Like the server's strict validation, this refuses a key that comes twice, text that is not
YAML, and a number that JSON cannot express.

ruamel.yaml would replace the positions alone: it resolves scalars differently from the server, too (docs/design.md).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

MAX_BYTES = 3 * 1024 * 1024  # of a request body at the API server
MAX_NODES = 50_000  # with aliases written out
MAX_DEPTH = 100

Path = tuple[str | int, ...]

_TRUE = {"y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"}
_FALSE = {"n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"}
_NULL = {"", "~", "null", "Null", "NULL"}
_NO_NUMBER = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INTEGERS = (
    (re.compile(r"([-+]?)0[xX]([0-9a-fA-F]+)"), 16),
    (re.compile(r"([-+]?)0[bB]([01]+)"), 2),
    (re.compile(r"([-+]?)0[oO]?([0-7]+)"), 8),
    (re.compile(r"([-+]?)(0|[1-9][0-9]*)"), 10),
)
_PLAIN = "!plain"
_TAG = "tag:yaml.org,2002:"


class Unreadable(Exception):
    """The API server could not decode the text at `place`."""

    def __init__(self, message: str, place: Position) -> None:
        super().__init__(message)
        self.place = place


@dataclass(frozen=True, order=True)
class Position:
    """Names a place in a file; line and column count from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class Document:
    """Holds one document of a file. places: path of each value to its position, or to its key's where it has a key."""

    value: Any
    places: dict[Path, Position] = field(default_factory=dict)

    def place(self, path: Path) -> Position:
        """Return the position of a path, or of its longest prefix that exists."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places[path]

    def parts(self, key: str) -> Iterator[Document]:
        """Yield each item of the list under a key as a document of its own."""
        places: list[dict[Path, Position]] = [{} for _ in self.value[key]]
        for path, place in self.places.items():
            if path[:1] == (key,) and len(path) > 1:
                places[int(path[1])][path[2:]] = place
        return map(Document, self.value[key], places)


class _Loader(yaml.SafeLoader):
    """Load plain scalars with a mark instead of resolving them."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - the base declares it of instances

    def scan_to_next_token(self) -> None:
        super().scan_to_next_token()
        while self.peek() == "\t" and (self.flow_level or not self.allow_simple_key):
            self.forward()
            super().scan_to_next_token()

    def scan_plain_spaces(self, indent: int, start_mark: yaml.Mark) -> list[str] | None:
        length = 0
        while self.peek(length) in " \t":
            length += 1
        blanks = self.prefix(length)
        if "\t" not in blanks:
            return super().scan_plain_spaces(indent, start_mark)
        self.forward(length)
        spaces = super().scan_plain_spaces(indent, start_mark)
        return [blanks] if spaces == [] else spaces


_Loader.add_implicit_resolver(_PLAIN, re.compile(r".*", re.DOTALL), None)


class _QuotingDumper(yaml.SafeDumper):
    """Quote strings that would be read as another type without quotes."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if isinstance(plain(text), str) else "'"
    return dumper.represent_scalar(f"{_TAG}str", text, style=style)


_QuotingDumper.add_representer(str, _text)


def written(value: Any, *, width: int = 80) -> str:
    """Return plain data as YAML, its keys in their order."""
    return yaml.dump(value, Dumper=_QuotingDumper, sort_keys=False, width=width)


def read(text: str) -> Iterator[Document]:
    """Yield the documents of a file, without empty ones. Raises Unreadable."""
    if len(text.encode()) > MAX_BYTES:
        raise Unreadable(f"larger than {MAX_BYTES} bytes, which no API server takes at once: split it", Position(1, 1))
    try:
        for node in yaml.compose_all(text, _Loader):
            if node is not None:
                document = _NodeReader().document(node)
                if document.value is not None:
                    yield document
    except yaml.MarkedYAMLError as error:
        words = " ".join(word for word in (error.context, error.problem) if word)
        if "'\\t'" in words:
            words = "a tab where YAML wants spaces"
        raise Unreadable(words, _place(error.problem_mark or error.context_mark)) from error
    except yaml.reader.ReaderError as error:
        raise Unreadable(f"{error.reason} at byte {error.position}", Position(1, 1)) from error
    except RecursionError as error:
        raise Unreadable("nested too deep", Position(1, 1)) from error


class _NodeReader:
    """Turn the nodes of one document into values."""

    def __init__(self) -> None:
        self._places: dict[Path, Position] = {}
        self._nodes = 0

    def document(self, node: yaml.Node) -> Document:
        self._places[()] = _place(node.start_mark)
        return Document(self._value(node, ()), self._places)

    def _value(self, node: yaml.Node, path: Path) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES or len(path) > MAX_DEPTH:
            raise Unreadable("too large or too deep when its aliases are written out", _place(node.start_mark))
        self._places.setdefault(path, _place(node.start_mark))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*path, place)) for place, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return _scalar(node)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _PLAIN and key_node.value == "<<":
                merged = self._merged(value_node, path) | merged
                continue
            key = _key(key_node)
            if key in own:
                raise Unreadable(f'key "{key}" already set in map', _place(key_node.start_mark))
            self._places[(*path, key)] = _place(key_node.start_mark)
            own[key] = self._value(value_node, (*path, key))
        return merged | own

    def _merged(self, node: yaml.Node, path: Path) -> dict[str, Any]:
        """Return the merged mappings of a `<<` key; of several mappings, an earlier one wins."""
        parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
        found: dict[str, Any] = {}
        for part in parts:
            if not isinstance(part, yaml.MappingNode):
                raise Unreadable("map merge requires map or sequence of maps as the value", _place(part.start_mark))
            found = self._mapping(part, path) | found
        return found


def _key(node: yaml.Node) -> str:
    value = _scalar(node) if isinstance(node, yaml.ScalarNode) else None
    if value is None:
        raise Unreadable("a key should be a text", _place(node.start_mark))
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _scalar(node: yaml.ScalarNode) -> object:
    text, tag = str(node.value), node.tag
    if tag == _PLAIN or tag in {_TAG + name for name in ("null", "bool", "int", "float")}:
        if _NO_NUMBER.fullmatch(text):
            raise Unreadable(f"{text} is no number in JSON", _place(node.start_mark))
        return plain(text)
    return text


def plain(text: str) -> object:
    """Return the value of a plain scalar; what looks like a date stays a string."""
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if text[0] not in "0123456789+-.":
        return text
    digits = text.replace("_", "")
    for pattern, base in _INTEGERS:
        if (match := pattern.fullmatch(digits)) and text[0] != ".":
            number = int(match[1] + match[2], base)
            return number if -(2**63) <= number < 2**64 else float(number)
    if _FLOAT.fullmatch(digits if text[0] != "." else text):
        value = float(digits)
        return value if math.isfinite(value) else text
    return text


def _place(mark: yaml.Mark | None) -> Position:
    return Position(mark.line + 1, mark.column + 1) if mark else Position(1, 1)
