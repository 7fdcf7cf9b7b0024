"""Label and field selectors, as kubectl and client-go write them.

Room:  text in, a question about an object out. What cannot be understood is `BadSelector`, with what to write instead.
Door:  `labels(text)`, `fields(text)`; each gives a predicate on an object's JSON. `only_name(text)`.
"""

import re
from collections.abc import Callable
from typing import Any

Json = dict[str, Any]
Match = Callable[[Json], bool]


LONGEST, MOST = 4096, 100  # characters and terms of a selector
CUTS = re.compile(r"([,()])")


class BadSelector(Exception):
    """A selector that nobody can understand."""


def anything(body: Json) -> bool:
    return True


def _terms(text: str) -> list[str]:
    """What stands between the commas, those in parentheses aside. In one pass: strangers write this."""
    if len(text) > LONGEST:
        raise BadSelector(f"a selector has {len(text)} characters; write at most {LONGEST}")
    found, depth = [""], 0
    for part in CUTS.split(text):
        depth += (part == "(") - (part == ")")
        if part == "," and depth == 0:
            found.append("")
        else:
            found[-1] += part
    if len(found) > MOST:
        raise BadSelector(f"a selector has {len(found)} terms; write at most {MOST}")
    return [term.strip() for term in found if term.strip()]


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
    if found := SET.fullmatch(term):
        values = {value.strip() for value in found["values"].split(",")}
        return _among(found["key"], values, wanted=found["how"] == "in")
    if found := PAIR.fullmatch(term):
        return _among(found["key"], {found["value"]}, wanted=found["how"] != "!=")
    if found := ORDER.fullmatch(term):
        return _beyond(found["key"], found["value"], above=found["how"] == ">")
    if found := NAME.fullmatch(term):
        key, absent = found["key"], bool(found["not"])
        return lambda body: (key in _labels(body)) is not absent
    raise BadSelector(f"the label selector {term!r} cannot be understood; write such as `pool=a100` or `pool in (a,b)`")


def _among(key: str, values: set[str], *, wanted: bool) -> Match:
    """An object without the label is not among them."""
    return lambda body: (_labels(body).get(key) in values) is wanted


def _beyond(key: str, said: str, *, above: bool) -> Match:
    """An object without the label, or with one that is no number, is on neither side."""
    limit = _number(said)
    if limit is None:
        raise BadSelector(
            f"the label {key!r} is compared with {said[:50]!r}; compare with a whole number, as in `size>4`"
        )

    def is_beyond(body: Json) -> bool:
        value = _number(_labels(body).get(key, ""))
        return value is not None and (value > limit if above else value < limit)

    return is_beyond


def _number(said: str) -> int | None:
    """As Kubernetes reads one: decimal, 64 bits."""
    value = int(said) if NUMBER.fullmatch(said) else None
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
    """The one name that a field selector lets through, if it names one: RBAC may allow just that."""
    found = (PAIR.fullmatch(term) for term in _terms(text))
    named = (one["value"] for one in found if one and one["key"] == "metadata.name" and one["how"] != "!=")
    return next(named, "")


def _field(term: str) -> Match:
    found = PAIR.fullmatch(term)
    if found is None or found["key"] not in FIELDS:
        raise BadSelector(f"the field selector {term!r} cannot be used here; known are {', '.join(FIELDS)}")
    read, value, wanted = FIELDS[found["key"]], found["value"], found["how"] != "!="
    return lambda body: (read(body) == value) is wanted
