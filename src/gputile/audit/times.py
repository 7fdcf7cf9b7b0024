"""Times as Kubernetes writes them."""

from datetime import UTC, datetime


def seconds(said: str) -> float:
    """Seconds since 1970; 0 when it is no time."""
    try:
        found = datetime.fromisoformat(said[:40])
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def written(nanoseconds: int) -> str:
    """A moment of a grant; "" when it names none that a calendar has."""
    if not 0 < nanoseconds < 10**20:
        return ""
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
