"""What containers really use of their cards, as an agent says it: annotation `gputile.io/use` on the Lease of its node.

    {"version":1,"cards":{"GPU-0a1b...":{"<pod UID>":{"main":[3000,40]}}}}

By card, pod and container: MiB, and percent of the card's cores; null is what the driver does not say. A card with
nobody in it is one of which the driver said so; a card that is not named did not answer. A container "" is that part of
a pod of which it is not known whose it is. A container that is not named is not known to use anything.
"""

from collections.abc import Iterable
from typing import Annotated

import msgspec

from gputile.model.units import ALL
from gputile.model.usage import CardUsage, Usage

USE = "gputile.io/use"
VERSION = 1
MOST = 32 * 1024
"""Bytes. A Lease is written every few seconds: what does not fit is left out, the smallest users first."""

_Memory = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Cores = Annotated[int, msgspec.Meta(ge=0, le=ALL)]


class _Used(msgspec.Struct, array_like=True):
    memory: _Memory | None = None
    cores: _Cores | None = None


class _Use(msgspec.Struct, omit_defaults=True):
    """Version 1. Keys, and numbers at the end of the lists, are only ever added."""

    version: int
    cards: dict[str, dict[str, dict[str, _Used]]]
    left_out: int = 0  # how many containers (each card counted) did not find room


_USES = msgspec.json.Decoder(_Use)
_Line = tuple[str, str, str, CardUsage]  # card, pod, container


class ReportedUsage(msgspec.Struct, frozen=True):
    """What an agent says."""

    pods: Usage
    cards: frozenset[str]  # UUIDs of those of which all is known that runs there, as far as it is anybody's


def write_usage(usage: Usage, cards: Iterable[str]) -> str:
    """The value of the annotation. `cards`: those that answered."""
    lines = [
        (card, pod, container, used)
        for pod, containers in usage.items()
        for container, cards in containers.items()
        for card, used in cards.items()
    ]
    lines.sort(key=lambda line: (-(line[3].memory or 0), line[:3]))
    kept, asked = len(lines), list(cards)
    while len(said := _written(asked, lines, kept)) > MOST and kept:
        kept = kept * 3 // 4
    return said.decode()


def _written(asked: list[str], lines: list[_Line], kept: int) -> bytes:
    cards: dict[str, dict[str, dict[str, _Used]]] = {card: {} for card in asked}
    for card, pod, container, used in lines[:kept]:
        cards.setdefault(card, {}).setdefault(pod, {})[container] = _Used(used.memory, used.cores)
    return msgspec.json.encode(_Use(VERSION, cards, len(lines) - kept))


def read_usage(said: str) -> ReportedUsage | None:
    """None when it cannot be read: then nothing is known."""
    try:
        found = _USES.decode(said)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
    usage: Usage = {}
    for card, pods in found.cards.items():
        for pod, containers in pods.items():
            for container, used in containers.items():
                usage.setdefault(pod, {}).setdefault(container, {})[card] = CardUsage(used.memory, used.cores)
    return ReportedUsage(usage, frozenset() if found.left_out else frozenset(found.cards))
