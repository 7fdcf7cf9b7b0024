"""Leadership: only the replica that holds the Lease may write. `kube.leader_election` runs the election itself.

This module does what follows from it: it prepares a new leader, moves the leader label, and answers `may_write`, which
is called right before each write.

A replica is ready when its ledger is synced, leader or not. The Service selects the leader by its label, so a rolling
update never waits for a readiness that only a leader could have. A replica that takes over from a vanished leader first
waits until the binds of that leader have ended, and lists all pods, before it reserves anything itself. It also removes
the label of the vanished leader: if that replica is alive but cut off from the API server, it cannot remove the label
itself, and would still receive kube-scheduler's requests.
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
ROUND = 0.5  # seconds between two checks of the leader label

SetLabel = Callable[[bool], Awaitable[None]]
"""Sets the leader label on our own pod, or removes it."""

RemoveLabel = Callable[[str], Awaitable[None]]
"""Removes the leader label from another replica, named by its identity in the Lease."""


async def _keep_labels(identity: str) -> None:
    return None


class Leadership(Protocol):
    """Whether this replica may write, and the loop that keeps the answer up to date."""

    def may_write(self) -> bool: ...

    async def run(self) -> None: ...

    async def step_down(self, *, release: bool) -> None: ...


class SingleReplica:
    """A scheduler without leader election: always the leader."""

    def may_write(self) -> bool:
        return True

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def step_down(self, *, release: bool) -> None:
        return None


class ElectedReplica:
    """One of several replicas: the leader while it holds the Lease and its ledger is complete."""

    def __init__(
        self,
        metrics: Metrics,
        elector: Elector,
        *,
        resync: Callable[[], Awaitable[None]],
        wait_out: float,
        set_label: SetLabel,
        remove_label: RemoveLabel = _keep_labels,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`resync` lists all pods into the ledger; `wait_out` is the longest duration of a bind, in seconds."""
        self._metrics, self._elector, self._resync, self._wait_out = metrics, elector, resync, wait_out
        self._set_label, self._remove_label, self._pause = set_label, remove_label, pause
        self._isolation = FailureIsolation(metrics, time.monotonic)
        self._ready_for: Term | None = None  # the term for which the ledger is complete
        self._labelled: bool | None = None  # whether our pod has the leader label; None: unknown
        self._vanished = ""  # the former leader whose label must still be removed

    def may_write(self) -> bool:
        """Whether this replica is the leader, is prepared for it, and holds an unexpired Lease at this moment."""
        term = self._elector.term
        return term is not None and self._ready_for is term

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._elector.run())
            tasks.create_task(self._run_rounds())

    async def _run_rounds(self) -> None:
        while True:
            try:
                await self._isolation.attempt("leadership", "", self.round, always=True)
            except (ApiRejected, OutcomeUnknown) as error:
                log.warning("leadership change is incomplete; retrying", extra=fields(why=str(error)))
            await self._pause(ROUND)

    async def round(self) -> None:
        """Prepare for a new term, and correct the leader labels."""
        term = self._elector.term
        if term is not None and self._ready_for is not term:
            if term.inherited:
                self._vanished = self._elector.predecessor
                await self._pause(self._wait_out)
            await self._resync()
            self._ready_for = term
        is_leader = self.may_write()
        self._metrics.leads.set(int(is_leader))
        if self._labelled is not is_leader:
            await self._set_label(is_leader)
            self._labelled = is_leader
        if is_leader and self._vanished:
            await self._remove_label(self._vanished)
        self._vanished = "" if is_leader else self._vanished

    async def step_down(self, *, release: bool) -> None:
        """On a graceful stop, after `run` has ended: let another replica become the leader at once.

        Without `release` the Lease expires by itself, and the next leader waits for binds that we may have sent.
        """
        self._ready_for = None
        if release:
            await self._elector.release()
        if self._labelled:
            await self._set_label(False)


async def log_leadership(term: Term | None) -> None:
    """`on_change` of the `Elector`; `ElectedReplica` itself reads the term."""
    if term is not None:
        log.info("acquired the leader lease", extra=fields(inherited=term.inherited))
    else:
        log.info("lost leadership", extra=fields(inherited=None))
