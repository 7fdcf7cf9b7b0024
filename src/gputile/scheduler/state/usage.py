"""What pods really use of their cards, as the agents say it on their Leases.

Room:  nothing is kept here: the Leases are, in `agents`, and what is too old is not known. An agent speaks for pods of
       its own node only.
Door:  `used_on(agents, node)`.
"""

from functools import lru_cache

from gputile.dialects.usage_annotation import ReportedUsage, read_usage
from gputile.scheduler.state.agent_liveness import AgentLiveness

REMEMBERED = 256  # nodes whose word was understood lately: those who ask about one pod go on to the next one there

_understood = lru_cache(maxsize=REMEMBERED)(read_usage)


def used_on(agents: AgentLiveness, node: str) -> ReportedUsage | None:
    """None when the node's agent does not say, or nothing fresh, or nothing that can be read."""
    said = agents.use(node)
    return _understood(said) if said else None
