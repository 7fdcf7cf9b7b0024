"""Label and field selectors, as kubectl and client-go write them.

Room:  text in, a question about an object out. What cannot be understood is `BadSelector`, with what to write instead.
Door:  `labels(text)`, `fields(text)`; each gives a predicate on an object's JSON. `only_name(text)`.
"""

import re
from collections.abc import Callable
from typing import Any

Json = dict[str, Any]
Match = Callable[[Json], bool]


class BadSelector(Exception):
    """A selector that nobody can understand."""


def anything(body: Json) -> bool:
    return True


# ---- labels ---------------------------------------------------------------------------------------------------------

SET = re.compile(r"(?P<key>[^\s!=,()]+)\s+(?P<how>in|notin)\s*\((?P<values>[^()]*)\)")
PAIR = re.compile(r"(?P<key>[^\s!=,()]+)\s*(?P<how>==|=|!=)\s*(?P<value>[^\s!=,()]*)")
NAME = re.compile(r"(?P<not>!?)\s*(?P<key>[^\s!=,()]+)")


def labels(text: str) -> Match:
    """`a=b`, `a!=b`, `a in (b,c)`, `a notin (b)`, `a`, `!a`; with commas between them all must hold."""
    terms = [_label(term.strip()) for term in re.split(r",(?![^()]*\))", text) if term.strip()]
    return all_of(terms)


def all_of(terms: list[Match]) -> Match:
    if not terms:
        return anything
    return terms[0] if len(terms) == 1 else lambda body: all(term(body) for term in terms)


def _label(term: str) -> Match:
    if found := SET.fullmatch(term):
        values = {value.strip() for value in found["values"].split(",")}
        return _among(found["key"], values, wanted=found["how"] == "in")
    if found := PAIR.fullmatch(term):
        return _among(found["key"], {found["value"]}, wanted=found["how"] != "!=")
    if found := NAME.fullmatch(term):
        key, absent = found["key"], bool(found["not"])
        return lambda body: (key in _labels(body)) is not absent
    raise BadSelector(f"the label selector {term!r} cannot be understood; write such as `pool=a100` or `pool in (a,b)`")


def _among(key: str, values: set[str], *, wanted: bool) -> Match:
    """An object without the label is not among them."""
    return lambda body: (_labels(body).get(key) in values) is wanted


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
    return all_of([_field(term.strip()) for term in text.split(",") if term.strip()])


def only_name(text: str) -> str:
    """The one name that a field selector lets through, if it names one: RBAC may allow just that."""
    found = (PAIR.fullmatch(term.strip()) for term in text.split(","))
    named = (one["value"] for one in found if one and one["key"] == "metadata.name" and one["how"] != "!=")
    return next(named, "")


def _field(term: str) -> Match:
    found = PAIR.fullmatch(term)
    if found is None or found["key"] not in FIELDS:
        raise BadSelector(f"the field selector {term!r} cannot be used here; known are {', '.join(FIELDS)}")
    read, value, wanted = FIELDS[found["key"]], found["value"], found["how"] != "!="
    return lambda body: (read(body) == value) is wanted
