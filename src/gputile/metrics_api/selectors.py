"""Parses label and field selectors, as kubectl and client-go write them, into predicates on an object's JSON.

An invalid selector is `BadSelector`, with what to write instead.
"""

import re
from collections.abc import Callable
from typing import Any

Json = dict[str, Any]
Match = Callable[[Json], bool]


LONGEST, MOST = 4096, 100  # characters and terms of a selector
CUTS = re.compile(r"([,()])")


class BadSelector(Exception):
    """An invalid selector, with a message for the user."""


def anything(body: Json) -> bool:
    return True


def _terms(text: str) -> list[str]:
    """Split at commas outside of parentheses. In one pass, because the input is untrusted."""
    if len(text) > LONGEST:
        raise BadSelector(f"selector: {len(text)} characters are too many; write at most {LONGEST}")
    terms, depth = [""], 0
    for part in CUTS.split(text):
        depth += (part == "(") - (part == ")")
        if part == "," and depth == 0:
            terms.append("")
        else:
            terms[-1] += part
    if len(terms) > MOST:
        raise BadSelector(f"selector: {len(terms)} terms are too many; write at most {MOST}")
    return [term.strip() for term in terms if term.strip()]


# ---- labels ---------------------------------------------------------------------------------------------------------

SET = re.compile(r"(?P<key>[^\s!=<>,()]+)\s+(?P<how>in|notin)\s*\((?P<values>[^()]*)\)")
PAIR = re.compile(r"(?P<key>[^\s!=<>,()]+)\s*(?P<how>==|=|!=)\s*(?P<value>[^\s!=<>,()]*)")
ORDER = re.compile(r"(?P<key>[^\s!=<>,()]+)\s*(?P<how>[<>])\s*(?P<value>[^\s!=<>,()]*)")
NAME = re.compile(r"(?P<not>!?)\s*(?P<key>[^\s!=<>,()]+)")
NUMBER = re.compile(r"[+-]?[0-9]{1,63}")


def labels(text: str) -> Match:
    """`a=b`, `a!=b`, `a in (b,c)`, `a notin (b)`, `a`, `!a`, `a>1`, `a<1`; with commas between them all must hold."""
    return all_of([_label(term) for term in _terms(text)])


def all_of(terms: list[Match]) -> Match:
    if not terms:
        return anything
    return terms[0] if len(terms) == 1 else lambda body: all(term(body) for term in terms)


def _label(term: str) -> Match:
    if parts := SET.fullmatch(term):
        values = {value.strip() for value in parts["values"].split(",")}
        return _in(parts["key"], values, wanted=parts["how"] == "in")
    if parts := PAIR.fullmatch(term):
        return _in(parts["key"], {parts["value"]}, wanted=parts["how"] != "!=")
    if parts := ORDER.fullmatch(term):
        return _compare(parts["key"], parts["value"], above=parts["how"] == ">")
    if parts := NAME.fullmatch(term):
        key, absent = parts["key"], bool(parts["not"])
        return lambda body: (key in _labels(body)) is not absent
    raise BadSelector(f"label selector {term!r}: invalid; write it as in `pool=a100` or `pool in (a,b)`")


def _in(key: str, values: set[str], *, wanted: bool) -> Match:
    """An object without the label has none of the values."""
    return lambda body: (_labels(body).get(key) in values) is wanted


def _compare(key: str, text: str, *, above: bool) -> Match:
    """An object without the label, or with a value that is not a number, never matches."""
    limit = _number(text)
    if limit is None:
        raise BadSelector(
            f"label {key!r}: invalid number {text[:50]!r}; compare with a whole number of 64 bits, as in `size>4`"
        )

    def matches(body: Json) -> bool:
        value = _number(_labels(body).get(key, ""))
        return value is not None and (value > limit if above else value < limit)

    return matches


def _number(text: str) -> int | None:
    """As Kubernetes parses it: decimal, 64 bits."""
    value = int(text) if NUMBER.fullmatch(text) else None
    return value if value is not None and -(2**63) <= value < 2**63 else None


def _labels(body: Json) -> dict[str, str]:
    return body["metadata"].get("labels") or {}


# ---- fields ---------------------------------------------------------------------------------------------------------


def _node(body: Json) -> str:
    return str(body["spec"].get("node_name") or body["spec"].get("device_node") or "")


FIELDS: dict[str, Callable[[Json], str]] = {
    "metadata.name": lambda body: str(body["metadata"]["name"]),
    "metadata.namespace": lambda body: str(body["metadata"].get("namespace", "")),
    "spec.nodeName": _node,
    "spec.node_name": _node,
    "spec.device_node": _node,
    "node": _node,
    "status.phase": lambda body: str(body["status"].get("phase", "")),
    "status.node_health": lambda body: str(body["status"].get("node_health", "")),
}


def fields(text: str) -> Match:
    """`metadata.name=a`, `spec.nodeName!=b`; with commas between them all must hold."""
    return all_of([_field(term) for term in _terms(text)])


def only_name(text: str) -> str:
    """The name that a field selector restricts a list to, or "": RBAC may allow just that name."""
    pairs = (PAIR.fullmatch(term) for term in _terms(text))
    names = (pair["value"] for pair in pairs if pair and pair["key"] == "metadata.name" and pair["how"] != "!=")
    return next(names, "")


def _field(term: str) -> Match:
    pair = PAIR.fullmatch(term)
    if pair is None or pair["key"] not in FIELDS:
        raise BadSelector(f"field selector {term!r}: not supported; supported fields are {', '.join(FIELDS)}")
    read, value, wanted = FIELDS[pair["key"]], pair["value"], pair["how"] != "!="
    return lambda body: (read(body) == value) is wanted
