"""Checks that readiness is true: every replica is probed all the time, and its answers are compared with known facts.

One thread per replica, and the list of false answers. The faults report what they do (`started`, `down`, `thawed`,
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
STALE = 30.0  # seconds that a replica's cached state is valid, as in docs/scheduler.md
SLACK = 5.0
EXCUSED = 20.0  # seconds to start and to list on a busy machine
AFTER_DARK = 45.0  # seconds: its back-off after a long outage of the API server is up to half a minute


class Readiness:
    """The readiness probe of one replica."""

    def __init__(self, replica: Replica, proxy: FaultProxy) -> None:
        self.replica, self._proxy = replica, proxy
        self.samples = self.ready_samples = 0
        self.false_readiness: list[str] = []
        self._now_ready = False
        self._started = time.monotonic()
        self._excused_until = self._started + EXCUSED
        self._down_since: float | None = None  # killed or frozen
        self._dark_since: float | None = None  # the API server cannot be reached
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"probe {replica.name}", daemon=True)
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

    # --- known facts

    def started(self) -> None:
        """Called right before the replica is started."""
        self._started, self._down_since, self._now_ready = time.monotonic(), None, False
        self._excused_until = self._started + EXCUSED

    def down(self) -> None:
        """Called when the replica is dead, or stopped."""
        self._down_since, self._now_ready = time.monotonic(), False

    def thawed(self) -> None:
        self._down_since, self._excused_until = None, time.monotonic() + EXCUSED

    def dark(self, since: float | None) -> None:
        self._dark_since = since
        self._excused_until = time.monotonic() + AFTER_DARK

    # --- in the thread

    def _run(self) -> None:
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
                self._report("not ready although it runs without any fault")
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
            self._report("ready although its process is stopped")
        elif began > self._started and any(listed.get(kind, 0.0) < self._started for kind in ("pods", "nodes")):
            if ended > self._started:
                self._report("ready although no list has reached it since its start")
        elif dark is not None and began > dark + STALE + SLACK:
            self._report(f"ready although the API server has been unreachable for {began - dark:.0f} s")

    def _report(self, what: str) -> None:
        self.false_readiness.append(f"{self.replica.name}: {what}")
