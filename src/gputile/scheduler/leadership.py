"""Who may write: one replica, by a Lease, and only while it holds it.

Room:  what this replica does when it comes to lead and when it ceases to. `kube.lease` holds the election itself.
Door:  `ElectedReplica.may_write`, asked right before each write; `ElectedReplica.run`, which ends only when cancelled.

A replica is ready when its book is synced, leader or not; the Service selects the leader's label, so that a rolling
update never waits for a readiness that only a leader could have. Who takes over from a leader that vanished waits until
the binds it may have sent are over, and lists all pods, before it books anything of its own. It takes the label off
the one that vanished: if that one lives and cannot reach the API server, it could not do so itself, and would go on
catching what kube-scheduler asks.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from gputile.background.failure_isolation import FailureIsolation
from gputile.kube.api import ApiRejected, OutcomeUnknown
from gputile.kube.leader_election import Elector, Term
from gputile.telemetry.logs import fields
from gputile.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

LABEL = "gputile.io/leader"
ROUND = 0.5  # seconds between two looks whether the label says what it should

SetLabel = Callable[[bool], Awaitable[None]]
"""Mark our own pod as the leader's, or not."""

TakeLabel = Callable[[str], Awaitable[None]]
"""Take the leader's label off another replica, named by its identity in the Lease."""


async def _leave_labels(identity: str) -> None:
    return None


class Leadership(Protocol):
    def may_write(self) -> bool: ...

    async def run(self) -> None: ...

    async def step_down(self, *, release: bool) -> None: ...


class SingleReplica:
    """The only replica there can be: always leads."""

    def may_write(self) -> bool:
        return True

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def step_down(self, *, release: bool) -> None:
        return None


class ElectedReplica:
    """One replica of several; see the module's text."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        resync: Callable[[], Awaitable[None]],
        wait_out: float,
        set_label: SetLabel,
        take_label: TakeLabel = _leave_labels,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`resync` lists all pods into the book; `wait_out` is how long a bind may be under way, in seconds."""
        self._metrics, self._take_stock, self._wait_out = metrics, resync, wait_out
        self._set_label, self._take_label, self._pause = set_label, take_label, pause
        self._isolation = FailureIsolation(metrics, time.monotonic)
        self._elector: Elector | None = None
        self._ready_for: Term | None = None  # the term for which the book is known to be right
        self._labelled: bool | None = None  # what the label says; None: not known
        self._vanished = ""  # the leader whose label is still to be taken off

    def enter(self, elector: Elector) -> None:
        """The election that this replica stands in; its changes come to `on_change`."""
        self._elector = elector

    def may_write(self) -> bool:
        """Whether we lead, are ready to, and the lease is still ours at this very moment."""
        term = self._elector.term if self._elector is not None else None
        return term is not None and self._ready_for is term

    async def on_change(self, term: Term | None) -> None:
        log.info("leads" if term else "leads no more", extra=fields(inherited=term.inherited if term else None))

    async def run(self) -> None:
        assert self._elector is not None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._elector.run())
            tasks.create_task(self._keep_up())

    async def _keep_up(self) -> None:
        while True:
            try:
                await self._isolation.attempt("leadership", "", self.round, always=True)
            except (ApiRejected, OutcomeUnknown) as wrong:
                log.warning("leadership is not complete", extra=fields(why=str(wrong)))
            await self._pause(ROUND)

    async def round(self) -> None:
        """Make ready for a new term, and let the label say what is true."""
        term = self._elector.term if self._elector is not None else None
        if term is not None and self._ready_for is not term:
            if term.inherited:
                self._vanished = self._elector.predecessor if self._elector is not None else ""
                await self._pause(self._wait_out)
            await self._take_stock()
            self._ready_for = term
        leads = self.may_write()
        self._metrics.leads.set(int(leads))
        if self._labelled is not leads:
            await self._set_label(leads)
            self._labelled = leads
        if leads and self._vanished:
            await self._take_label(self._vanished)
        self._vanished = "" if leads else self._vanished

    async def step_down(self, *, release: bool) -> None:
        """On a graceful stop, when `run` has ended: let the next one lead at once.

        Without `release` the lease expires by itself, and the next one waits out what we may have sent.
        """
        self._ready_for = None
        if self._elector is not None and release:
            await self._elector.release()
        if self._labelled:
            await self._set_label(False)
