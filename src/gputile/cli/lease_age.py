"""Whether the holder of a Lease is alive, decided from a single read of the Lease."""

from gputile.kube.api import AgentLease
from gputile.model.units import unix_seconds
from gputile.scheduler.state.agent_liveness import DEFAULT_DURATION

CLOCKS_DIFFER = 10.0  # seconds that two machines' clocks may be apart


def seconds_expired(lease: AgentLease, now: float) -> float | None:
    """Seconds since the last renewal; None while the Lease is valid."""
    beat = lease.beat
    renewed = unix_seconds(beat.renew_time)
    age = 0.0 if renewed is None else now - renewed
    duration = beat.lease_duration_seconds or DEFAULT_DURATION
    return max(age, 0.0) if not beat.holder_identity or age > duration + CLOCKS_DIFFER else None
