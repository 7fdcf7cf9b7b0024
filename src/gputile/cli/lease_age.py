"""Whether whoever holds a Lease is alive, from one look at it."""

from datetime import datetime

from gputile.kube.api import AgentLease
from gputile.scheduler.state.agent_liveness import DEFAULT_DURATION

CLOCKS_DIFFER = 10.0  # seconds that two machines' clocks may be apart


def seconds_expired(lease: AgentLease, now: float) -> float | None:
    """Seconds since the agent was last heard; None while it counts as alive."""
    beat = lease.beat
    try:
        age = now - datetime.fromisoformat(beat.renew_time or "").timestamp()
    except ValueError:
        age = 0.0
    lasts = beat.lease_duration_seconds or DEFAULT_DURATION
    return max(age, 0.0) if not beat.holder_identity or age > lasts + CLOCKS_DIFFER else None
