"""Builds values from libyaml's events, within the limits of `documents`, which imports this module lazily."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import yaml

from gputile.text.documents import DocumentLimits, NotYaml

CORE = "tag:yaml.org,2002:"
TEXTS = frozenset({"!", f"{CORE}str", f"{CORE}binary", f"{CORE}timestamp"})
COLLECTIONS = frozenset({None, "!", f"{CORE}map", f"{CORE}seq"})
NULLS = frozenset({"", "~", "null", "Null", "NULL"})
YES, NO = ("yes", "true", "on"), ("no", "false", "off")
BOOLS = {form: name in YES for name in (*YES, *NO) for form in (name, name.capitalize(), name.upper())}
INT = re.compile(r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)")
FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
LONGEST_NUMBER = 100  # characters; Python refuses to print much longer ones
MERGE = object()  # the key `<<`

SYNTAX = {
    "mapping values are not allowed": "a `: ` where no mapping can begin; quote the text, or check the indentation",
    "did not find expected key": "a key or the end of the mapping is expected; check the indentation",
    "could not find expected ':'": "a key has no `:`",
    "cannot start any token": "a tab or a reserved character begins a value; use spaces, or quote the value",
    "expected ',' or ']'": "a list in brackets lacks a comma or its `]`",
    "expected ',' or '}'": "a mapping in braces lacks a comma or its `}`",
    "unexpected end of stream": "a quoted text has no closing quote",
    "expected '-' indicator": "the items of a list have different indentations",
    "sequence entries are not allowed": "a `- ` where no list can begin; check the indentation",
    "control characters are not allowed": "it has a control character",
    "special characters are not allowed": "it has a control character",
    "expected node content": "a value is missing",
    "undefined tag handle": "unknown tag",
    "UTF-": "it is not valid UTF-8",
}
"""What libyaml and PyYAML report, by a part of their sentence, in words of our own."""


def built(text: str | bytes, limits: DocumentLimits) -> list[Any]:
    """The values of all documents."""
    builder = _Builder(limits)
    for event in _events(text):
        builder.take(event)
    return builder.documents


def _events(text: str | bytes) -> Iterator[Any]:
    try:
        yield from yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        known = (text for part, text in SYNTAX.items() if part in problem)
        raise NotYaml(next(known, "the syntax is invalid"), mark.line + 1 if mark else 0) from None
    except UnicodeError:
        raise NotYaml("it is not valid UTF-8") from None


class _Node(msgspec.Struct, frozen=True):
    """A complete value: how many values it counts for, and how many levels it has."""

    value: Any
    size: int = 1
    height: int = 0


class _Open(msgspec.Struct):
    """A list or mapping that is being read; of a mapping `items` has keys and values by turns."""

    is_mapping: bool
    anchor: str | None
    line: int
    items: list[Any] = msgspec.field(default_factory=list)
    keys: set[str] = msgspec.field(default_factory=set)  # where duplicate keys are an error
    size: int = 1
    height: int = 1

    @property
    def wants_key(self) -> bool:
        return self.is_mapping and len(self.items) % 2 == 0


class _Builder:
    """Builds documents from events."""

    def __init__(self, limits: DocumentLimits) -> None:
        self.documents: list[Any] = []
        self._limits = limits
        self._open: list[_Open] = []
        self._anchors: dict[str, _Node | None] = {}  # None: its value is still being read
        self._values = self._repeated = 0

    def take(self, event: Any) -> None:
        kind, line = type(event).__name__, event.start_mark.line + 1
        if kind == "ScalarEvent":
            self._add(self._scalar(event, line), line, event.anchor)
        elif kind in ("MappingStartEvent", "SequenceStartEvent"):
            self._begin(event, line)
        elif kind in ("MappingEndEvent", "SequenceEndEvent"):
            self._end()
        elif kind == "AliasEvent":
            self._repeat(event.anchor, line)
        elif kind == "DocumentStartEvent":
            self._anchors.clear()

    # ---- collections ------------------------------------------------------------------------------------------------

    def _begin(self, event: Any, line: int) -> None:
        if event.tag not in COLLECTIONS:
            raise NotYaml(f"unknown tag {event.tag[:60]!r}", line)
        if self._open and self._open[-1].wants_key:
            raise NotYaml("a key must be a string, not a list or mapping", line)
        if len(self._open) >= self._limits.depth:
            raise NotYaml(f"it is nested deeper than {self._limits.depth} levels", line)
        self._open.append(_Open(type(event).__name__ == "MappingStartEvent", event.anchor, line))
        if event.anchor:
            self._anchors[event.anchor] = None

    def _end(self) -> None:
        done = self._open.pop()
        value = self._mapping(done) if done.is_mapping else done.items
        self._add(_Node(value, done.size, done.height), done.line, done.anchor)

    def _mapping(self, done: _Open) -> dict[str, Any]:
        """The keys of merged mappings first, so that its own keys win; among merged mappings the first wins."""
        pairs = list(zip(done.items[::2], done.items[1::2], strict=True))
        merged: dict[str, Any] = {}
        sources = [source for key, value in pairs if key is MERGE for source in _sources(value, done.line)]
        for source in reversed(sources):
            merged.update(source)
        return merged | {key: value for key, value in pairs if key is not MERGE}

    # ---- values -----------------------------------------------------------------------------------------------------

    def _scalar(self, event: Any, line: int) -> _Node:
        if self._open and self._open[-1].wants_key:
            return _Node(self._key(event, line))
        try:
            return _Node(_value(event))
        except ValueError as error:
            raise NotYaml(str(error)[:200], line) from None

    def _key(self, event: Any, line: int) -> Any:
        known = self._open[-1].keys
        if self._limits.unique and event.value in known:
            raise NotYaml(f"duplicate key `{event.value[:60]}`", line)
        if self._limits.unique:
            known.add(event.value)
        return MERGE if event.value == "<<" and event.implicit[0] else event.value

    def _repeat(self, name: str, line: int) -> None:
        """The value of an alias, counted as if it were expanded."""
        if name not in self._anchors:
            raise NotYaml(f"alias `*{name[:60]}` has no anchor before it", line)
        node = self._anchors[name]
        if node is None:
            raise NotYaml(f"alias `*{name[:60]}` refers to itself", line)
        if not self._limits.from_aliases:
            raise NotYaml(f"alias `*{name[:60]}` is not allowed here; write its value", line)
        self._repeated += node.size
        if self._repeated > self._limits.from_aliases:
            raise NotYaml(f"its aliases repeat more than {self._limits.from_aliases} values", line)
        if len(self._open) + node.height > self._limits.depth:
            raise NotYaml(f"it is nested deeper than {self._limits.depth} levels", line)
        if self._open and self._open[-1].wants_key and not isinstance(node.value, str):
            raise NotYaml("a key must be a string, not a list or mapping", line)
        self._add(node, line, None)

    def _add(self, node: _Node, line: int, anchor: str | None) -> None:
        self._values += 1
        if self._values > self._limits.values:
            raise NotYaml(f"it has more than {self._limits.values} values", line)
        if anchor:
            self._anchors[anchor] = node
        if not self._open:
            self.documents.append(node.value)
            return
        parent = self._open[-1]
        parent.items.append(node.value)
        parent.size += node.size
        parent.height = max(parent.height, node.height + 1)


def _sources(value: Any, line: int) -> list[dict[str, Any]]:
    sources = value if isinstance(value, list) else [value]
    if not all(isinstance(source, dict) for source in sources):
        raise NotYaml("the key `<<` needs a mapping, or a list of mappings", line)
    return sources


# ---- scalars --------------------------------------------------------------------------------------------------------


def _value(event: Any) -> Any:
    """Plain scalars by their form, quoted scalars as strings, tagged scalars by their tag. Raises ValueError."""
    text, tag = event.value, event.tag
    if tag in TEXTS or (tag is None and not event.implicit[0]):
        return text
    if tag is None:
        return _plain(text)
    parse = {"int": _whole, "float": _real, "bool": _truth, "null": _nothing}.get(tag.removeprefix(CORE))
    if parse is None or not tag.startswith(CORE):
        raise ValueError(f"unknown tag {tag[:60]!r}")
    return parse(text)


def _plain(text: str) -> Any:
    if text in NULLS:
        return None
    if text[0] in "+-.0123456789":
        if INT.fullmatch(text):
            return _whole(text)
        return _real(text) if FLOAT.fullmatch(text) else text
    return BOOLS.get(text, text)


def _whole(text: str) -> int:
    if len(text) > LONGEST_NUMBER or not INT.fullmatch(text):
        raise ValueError(f"{text[:60]!r} is not a number")
    digits = text.replace("_", "")
    bare = digits.lstrip("+-")
    base = {"0b": 2, "0x": 16}.get(bare[:2], 8 if bare.startswith("0") else 10)
    try:
        return int(digits, base)
    except ValueError:  # a prefix without digits, such as `0x_`
        raise ValueError(f"{text!r} is not a number") from None


def _real(text: str) -> float:
    digits = text.replace("_", "").lower()
    if len(text) > LONGEST_NUMBER or not (FLOAT.fullmatch(text) or INT.fullmatch(text)):
        raise ValueError(f"{text[:60]!r} is not a number")
    return float(digits.replace(".inf", "inf").replace(".nan", "nan"))


def _nothing(text: str) -> None:
    return None


def _truth(text: str) -> bool:
    if text not in BOOLS:
        raise ValueError(f"{text[:60]!r} is neither true nor false")
    return BOOLS[text]
