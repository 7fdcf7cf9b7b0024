"""Timestamps of Kubernetes objects. Parses text only; nothing here reads a clock."""

from datetime import datetime


def seconds_of(timestamp: str | None) -> float:
    """In seconds since 1970; 0 if it is missing or unreadable."""
    try:
        return datetime.fromisoformat(timestamp or "").timestamp()
    except ValueError:
        return 0.0
