"""Parser of `--what-if`: changes to a cluster in a short notation, for capacity planning.

+4:L40S:8x48Gi        add four nodes, each with eight L40S of 48 GiB
-node-17              remove this node
policy=spread         another policy
"""

import re
from collections.abc import Sequence

import msgspec

from gputile.model.cards import Card, Node
from gputile.model.errors import InputError
from gputile.model.units import host_mebibytes
from gputile.sim.replay import ReplayPlan, average_card
from gputile.sim.traces import THOUSANDTHS

_MORE = re.compile(r"\+(?P<nodes>\d{1,5}):(?P<model>[^:]+):(?P<cards>\d{1,3})x(?P<size>\w+)")


def change(text: str, nodes: Sequence[Node], plan: ReplayPlan) -> tuple[tuple[Node, ...], ReplayPlan]:
    """The cluster and plan after the changes in `text`, which are separated by commas."""
    changed = tuple(nodes)
    for part in filter(None, (part.strip() for part in text.split(","))):
        if part.startswith("policy="):
            plan = msgspec.structs.replace(plan, policy=part.removeprefix("policy="))
        elif part.startswith("-"):
            changed = _without(part[1:], changed)
        else:
            changed += _more(part, nodes, len(changed))
    return changed, plan


def _without(name: str, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    left = tuple(node for node in nodes if node.name != name)
    if len(left) == len(nodes):
        raise InputError(f"--what-if -{name}: there is no node {name!r} in the list")
    return left


def _more(part: str, nodes: Sequence[Node], first: int) -> tuple[Node, ...]:
    """New nodes, with the average CPU and host memory per card of the cluster."""
    match = _MORE.fullmatch(part)
    size = host_mebibytes(match["size"]) if match else None
    if match is None or not size:
        raise InputError(f"--what-if {part}: write +NODES:MODEL:CARDSxMEMORY (+4:L40S:8x48Gi), -NODE or policy=NAME")
    cards = int(match["cards"])
    all_cards = max(1, sum(len(node.cards) for node in nodes))
    if average_card(nodes) == THOUSANDTHS:
        size = THOUSANDTHS  # a list in thousandths of a card has no MiB
    return tuple(
        Node(
            name=f"what-if-{n}",
            cards=tuple(
                Card(index=c, uuid=f"what-if-{n}#{c}", memory=size, model=match["model"]) for c in range(cards)
            ),
            cpu=sum(node.cpu for node in nodes) * cards // all_cards,
            memory=sum(node.memory for node in nodes) * cards // all_cards,
        )
        for n in range(first, first + int(match["nodes"]))
    )
