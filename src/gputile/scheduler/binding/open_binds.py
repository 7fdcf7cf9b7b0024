"""The binds that are not settled yet, as the binder and the reconciler both see them."""

import asyncio


class OpenBinds:
    """Binds under way, or not yet shown by the watch: `Binder` adds them, `Reconciler` settles them."""

    def __init__(self) -> None:
        self.in_flight: dict[str, tuple[str, asyncio.Task[str]]] = {}
        """By UID: the node, and the task that writes the bind."""
        self.unconfirmed: set[str] = set()
        """UIDs of pods whose bind the API server accepted and our watch has not shown yet."""
        self.unknown: set[str] = set()
        """UIDs of pods that need a live lookup, which finds out the outcome of their bind."""
