"""Checks that readiness is true: every replica is probed all the time, and its answers are compared with known facts.

One thread per replica, and the list of false answers. The faults report what they do (`born`, `dies`, `frozen`,
`dark`).

False answers: ready although it is not running; although no list of pods and nodes has reached it since its start;
although the API server has been unreachable for longer than its cached state is valid; and not ready although it runs
without any fault.
"""

import ssl
import threading
import time
from http.client import HTTPException, HTTPSConnection

from tests.e2e.chaos.proxy import FaultProxy
from tests.e2e.gputile import Replica

EVERY, PATIENCE = 0.25, 2.0  # seconds; the second is the probe's timeoutSeconds in deploy/
STALE = 30.0  # seconds that a replica may live on what it knows, as docs/scheduler.md has it
SLACK = 5.0
EXCUSED = 20.0  # seconds to start and to list on a busy machine
AFTER_DARK = 45.0  # seconds: it asks an API server that was away for long every half minute


class Readiness:
    """The readiness probe of one replica."""

    def __init__(self, replica: Replica, proxy: FaultProxy) -> None:
        self.replica, self._proxy = replica, proxy
        self.samples = self.ready_samples = 0
        self.lies: list[str] = []
        self._now_ready = False
        self._born = time.monotonic()
        self._excused_until = self._born + EXCUSED
        self._down_since: float | None = None  # killed or frozen
        self._dark_since: float | None = None  # the API server cannot be reached
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._ask, name=f"probe {replica.name}", daemon=True)
        self._trust = ssl.create_default_context(cafile=replica.plane.authority.ca)

    def __enter__(self) -> "Readiness":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(10)

    def is_ready(self) -> bool:
        """The result of the last probe."""
        return self._now_ready

    # --- what is known

    def born(self) -> None:
        """Called right before the replica is started."""
        self._born, self._down_since, self._now_ready = time.monotonic(), None, False
        self._excused_until = self._born + EXCUSED

    def down(self) -> None:
        """Called when the replica is dead, or stopped."""
        self._down_since, self._now_ready = time.monotonic(), False

    def thawed(self) -> None:
        self._down_since, self._excused_until = None, time.monotonic() + EXCUSED

    def dark(self, since: float | None) -> None:
        self._dark_since = since
        self._excused_until = time.monotonic() + AFTER_DARK

    # --- in the thread

    def _ask(self) -> None:
        while not self._done.wait(EVERY):
            began = time.monotonic()
            ready = self._probe()
            self.samples += 1
            self._now_ready = ready
            if ready:
                self.ready_samples += 1
                self._excused_until = max(self._excused_until, time.monotonic() + EXCUSED)
                self._judge(began, time.monotonic())
            elif self._down_since is None and self._dark_since is None and began > self._excused_until:
                self._lie("not ready, though it runs and nothing stands in its way")
                self._excused_until = began + EXCUSED

    def _probe(self) -> bool:
        connection = HTTPSConnection("127.0.0.1", self.replica.port, timeout=PATIENCE, context=self._trust)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def _judge(self, began: float, ended: float) -> None:
        down, dark, listed = self._down_since, self._dark_since, self._proxy.listed
        if down is not None and began > down:
            self._lie("ready, though its process is stopped")
        elif began > self._born and any(listed.get(kind, 0.0) < self._born for kind in ("pods", "nodes")):
            if ended > self._born:
                self._lie("ready, though nothing was listed since it was born")
        elif dark is not None and began > dark + STALE + SLACK:
            self._lie(f"ready, though the API server is out of reach for {began - dark:.0f} s")

    def _lie(self, what: str) -> None:
        self.lies.append(f"{self.replica.name}: {what}")
