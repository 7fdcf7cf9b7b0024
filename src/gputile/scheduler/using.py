"""What pods really use of their cards, as the agents say it on their Leases.

Room:  nothing is kept here: the Leases are, in `agents`, and what is too old is not known. An agent speaks for pods of
       its own node only.
Door:  `used_by(mirror, uid)` for one pod, `used_on(agents, node)` for all of a node.
"""

from functools import lru_cache

from gputile.dialects.use import NodeUsage, read_use
from gputile.model.usage import PodUsage
from gputile.scheduler.agents import Agents
from gputile.scheduler.mirror import Mirror

REMEMBERED = 256  # nodes whose word was understood lately: those who ask about one pod go on to the next one there

_understood = lru_cache(maxsize=REMEMBERED)(read_use)


def used_by(mirror: Mirror, uid: str) -> PodUsage | None:
    """By container and card what the pod uses now; None when nobody says. Not to be changed.

    A container that is not named, and a figure that is None, is not known: never take it for nothing.
    """
    entry = mirror.ledger.entry(uid)
    usage = used_on(mirror.agents, entry.holding.node) if entry is not None else None
    return usage.pods.get(uid) if usage is not None else None


def used_on(agents: Agents, node: str) -> NodeUsage | None:
    """None when the node's agent does not say, or nothing fresh, or nothing that can be read."""
    said = agents.use(node)
    return _understood(said) if said else None
