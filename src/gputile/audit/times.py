"""Times as Kubernetes writes them."""

from datetime import UTC, datetime


def seconds(text: str) -> float:
    """Seconds since 1970; 0 when the text is not a time."""
    try:
        time = datetime.fromisoformat(text[:40])
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def timestamp(nanoseconds: int) -> str:
    """The time of a grant as Kubernetes writes it; "" when it is out of range."""
    if not 0 < nanoseconds < 10**20:
        return ""
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
