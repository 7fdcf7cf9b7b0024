"""The GPU usage of pods, as the agents write it on their Leases.

Nothing is stored here: `AgentLiveness` has the Leases, and a stale usage is unknown. An agent reports only pods of its
own node.
"""

from functools import lru_cache

from gputile.dialects.usage_annotation import ReportedUsage, read_usage
from gputile.scheduler.state.agent_liveness import AgentLiveness

CACHED = 256  # nodes; callers ask for one pod after another of the same node

_parsed = lru_cache(maxsize=CACHED)(read_usage)


def used_on(agents: AgentLiveness, node: str) -> ReportedUsage | None:
    """None when the node's agent reports no usage, or when the report is stale or undecodable."""
    text = agents.use(node)
    return _parsed(text) if text else None
