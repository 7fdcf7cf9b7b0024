"""Measured usage of cards by container, as the agent reports it: annotation `gputile.io/use` on the Lease of its node.

    {"version":1,"cards":{"GPU-0a1b...":{"<pod UID>":{"main":[3000,40]}}}}

By card, pod and container: MiB, and percent of the card's cores; null means that the driver does not report the value.
A card with an empty object is idle according to the driver; an absent card did not answer. The container "" is usage of
the pod that no container could be found for. The usage of an absent container is unknown.
"""

from collections.abc import Iterable
from typing import Annotated

import msgspec

from gputile.model.units import ALL
from gputile.model.usage import CardUsage, Usage

USE = "gputile.io/use"
VERSION = 1
LARGEST_ANNOTATION = 32 * 1024
"""Bytes. A Lease is written every few seconds; what does not fit is left out, the smallest users first."""

_Memory = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Cores = Annotated[int, msgspec.Meta(ge=0, le=ALL)]


class _Used(msgspec.Struct, array_like=True):
    """The usage of one card by one container."""

    memory: _Memory | None = None
    cores: _Cores | None = None


class _Use(msgspec.Struct, omit_defaults=True):
    """`gputile.io/use`, version 1. Keys, and numbers at the end of the lists, are only ever added."""

    version: int
    cards: dict[str, dict[str, dict[str, _Used]]]
    left_out: int = 0  # containers (counted per card) that did not fit


_USES = msgspec.json.Decoder(_Use)
_Line = tuple[str, str, str, CardUsage]  # card, pod, container


class ReportedUsage(msgspec.Struct, frozen=True):
    """The usage that an agent reports for its node."""

    pods: Usage
    cards: frozenset[str]  # UUIDs of the cards whose report is complete


def write_usage(usage: Usage, cards: Iterable[str]) -> str:
    """The value of the annotation. `cards`: the cards that answered."""
    lines = [
        (card, pod, container, used)
        for pod, containers in usage.items()
        for container, cards in containers.items()
        for card, used in cards.items()
    ]
    lines.sort(key=lambda line: (-(line[3].memory or 0), line[:3]))
    kept, answered = len(lines), list(cards)
    while len(value := _encode(answered, lines, kept)) > LARGEST_ANNOTATION and kept:
        kept = kept * 3 // 4
    return value.decode()


def _encode(answered: list[str], lines: list[_Line], kept: int) -> bytes:
    cards: dict[str, dict[str, dict[str, _Used]]] = {card: {} for card in answered}
    for card, pod, container, used in lines[:kept]:
        cards.setdefault(card, {}).setdefault(pod, {})[container] = _Used(used.memory, used.cores)
    return msgspec.json.encode(_Use(VERSION, cards, len(lines) - kept))


def read_usage(value: str) -> ReportedUsage | None:
    """None when the annotation is unreadable: then the usage is unknown."""
    try:
        record = _USES.decode(value)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
    usage: Usage = {}
    for card, pods in record.cards.items():
        for pod, containers in pods.items():
            for container, used in containers.items():
                usage.setdefault(pod, {}).setdefault(container, {})[card] = CardUsage(used.memory, used.cores)
    return ReportedUsage(usage, frozenset() if record.left_out else frozenset(record.cards))
