"""A replica may write not before its ledger is complete, and not a moment after it lost the Lease."""

import asyncio
import logging
from typing import Any

import pytest

from gputile.kube.api import OutcomeUnknown
from gputile.kube.leader_election import Term
from gputile.scheduler.leadership import ROUND, ElectedReplica, SingleReplica, log_leadership
from gputile.telemetry.logs import JsonLines
from gputile.telemetry.metrics import Metrics
from tests.scheduler.rig import Clock

FIRST, NEXT = Term(0, inherited=False), Term(1, inherited=True)


class Elector:
    """Holds the Lease as long as the test says."""

    def __init__(self) -> None:
        self.held = True
        self.elected: Term | None = None
        self.released = 0
        self.predecessor = "gputile-0_abcd"
        self.running = asyncio.Event()

    def holds(self) -> bool:
        return self.held

    @property
    def term(self) -> Term | None:
        return self.elected if self.held else None

    async def run(self) -> None:
        self.running.set()
        await asyncio.Event().wait()

    async def release(self) -> None:
        self.released += 1
        self.held = False


class Replica:
    """A replica in an election, and all that happens to it, in order."""

    def __init__(self) -> None:
        self.history: list[str] = []
        self.elector = Elector()
        self.clock = Clock()
        self.broken: dict[str, Exception] = {}
        self.metrics = Metrics()
        self.leader = ElectedReplica(
            self.metrics,
            self.elector,  # type: ignore[arg-type]
            resync=self._resync,
            wait_out=6.0,
            set_label=self._label,
            remove_label=self._remove_label,
            pause=self._pause,
        )

    async def turn(self, term: Term | None) -> None:
        self.elector.elected = term

    async def _resync(self) -> None:
        self._record("resync")

    async def _label(self, leads: bool) -> None:
        self._record(f"label {leads}")

    async def _remove_label(self, identity: str) -> None:
        self._record(f"take {identity}")

    async def _pause(self, seconds: float) -> None:
        assert not self.leader.may_write() or seconds == ROUND, "writes while it waits"
        self._record(f"pause {seconds:g}")
        await self.clock.pause(seconds)

    def _record(self, what: str) -> None:
        self.history.append(what)
        error = self.broken.pop(what, None)
        if error is not None:
            raise error

    def leads(self) -> float:
        value = self.metrics.registry.get_sample_value("gputile_leader")
        assert value is not None
        return value


async def test_a_term_after_a_release_resyncs_and_does_not_wait() -> None:
    r = Replica()
    await r.turn(FIRST)
    assert not r.leader.may_write(), "the ledger is not complete yet"
    await r.leader.round()
    assert r.leader.may_write()
    assert r.history == ["resync", "label True"]
    assert r.leads() == 1


async def test_an_inherited_term_waits_for_binds_that_may_be_in_flight_and_then_resyncs() -> None:
    r = Replica()
    await r.turn(NEXT)
    assert not r.leader.may_write()
    await r.leader.round()
    assert r.leader.may_write()
    assert r.history == ["pause 6", "resync", "label True", "take gputile-0_abcd"]


async def test_a_term_is_prepared_once() -> None:
    r = Replica()
    await r.turn(NEXT)
    for _ in range(3):
        await r.leader.round()
    assert r.history == ["pause 6", "resync", "label True", "take gputile-0_abcd"]
    await r.turn(None)
    await r.leader.round()
    await r.turn(Term(2, inherited=False))
    assert not r.leader.may_write()
    await r.leader.round()
    assert r.history[4:] == ["label False", "resync", "label True"]


async def test_the_removal_of_a_vanished_leaders_label_is_retried_until_it_succeeds() -> None:
    """It may be alive but cut off from the API server; kube-scheduler's requests must not be routed there."""
    r = Replica()
    r.broken["take gputile-0_abcd"] = OutcomeUnknown("reset")
    await r.turn(NEXT)
    with pytest.raises(OutcomeUnknown):
        await r.leader.round()
    assert r.leader.may_write(), "the label does not decide leadership"
    await r.leader.round()
    await r.leader.round()
    assert r.history == ["pause 6", "resync", "label True", "take gputile-0_abcd", "take gputile-0_abcd"]


async def test_a_replica_that_is_not_the_leader_removes_its_label() -> None:
    """A pod that was killed as the leader and restarted still carries the label."""
    r = Replica()
    for _ in range(3):
        await r.leader.round()
    assert r.history == ["label False"]
    assert (r.leader.may_write(), r.leads()) == (False, 0)


async def test_the_lease_is_checked_at_this_moment() -> None:
    r = Replica()
    await r.turn(FIRST)
    await r.leader.round()
    r.elector.held = False
    assert not r.leader.may_write(), "no round has passed since"
    await r.leader.round()
    assert r.history[-1] == "label False"
    r.elector.held = True
    assert r.leader.may_write(), "renewed in time after all, in the same term"


async def test_a_term_that_ends_while_it_is_prepared_does_not_count_for_the_next() -> None:
    r = Replica()

    async def resync() -> None:
        await r.turn(None)
        await r.turn(Term(5, inherited=False))

    r.leader._resync = resync
    await r.turn(FIRST)
    await r.leader.round()
    assert not r.leader.may_write()


async def test_a_failed_resync_is_retried() -> None:
    r = Replica()
    r.broken = {"resync": OutcomeUnknown("timed out")}
    await r.turn(FIRST)
    with pytest.raises(OutcomeUnknown):
        await r.leader.round()
    assert not r.leader.may_write()
    await r.leader.round()
    assert r.leader.may_write()


async def test_a_failed_label_is_retried() -> None:
    r = Replica()
    r.broken = {"label True": OutcomeUnknown("timed out")}
    await r.turn(FIRST)
    with pytest.raises(OutcomeUnknown):
        await r.leader.round()
    await r.leader.round()
    await r.leader.round()
    assert r.history == ["resync", "label True", "label True"]


async def test_the_loop_survives_failures_and_runs_beside_the_election() -> None:
    r = Replica()
    r.broken = {"resync": OutcomeUnknown("timed out")}
    await r.turn(FIRST)
    loop = asyncio.create_task(r.leader.run())
    await r.elector.running.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not loop.done()
    assert r.leader.may_write()
    loop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loop


@pytest.mark.parametrize("release", [True, False], ids=["at-once", "when-it-has-expired"])
async def test_stepping_down_releases_the_lease(release: bool) -> None:
    r = Replica()
    await r.turn(FIRST)
    await r.leader.round()
    await r.leader.step_down(release=release)
    assert not r.leader.may_write()
    assert r.elector.released == int(release)
    assert r.history[-1] == "label False"


async def test_stepping_down_without_having_been_the_leader_changes_no_label() -> None:
    r = Replica()
    await r.leader.round()
    await r.leader.step_down(release=True)
    assert r.history == ["label False"]


async def test_without_the_lease_no_replica_is_the_leader() -> None:
    r = Replica()
    r.elector.held = False
    await r.turn(FIRST)
    await r.leader.round()
    assert not r.leader.may_write()
    await r.leader.step_down(release=True)


async def test_a_single_replica_is_always_the_leader() -> None:
    alone: Any = SingleReplica()
    assert alone.may_write()
    await alone.step_down(release=True)
    running = asyncio.create_task(alone.run())
    await asyncio.sleep(0)
    assert not running.done()
    running.cancel()


@pytest.mark.parametrize(
    ("term", "line"),
    [
        pytest.param(NEXT, '"msg":"acquired the leader lease","inherited":true', id="acquired-from-another-replica"),
        pytest.param(FIRST, '"msg":"acquired the leader lease","inherited":false', id="acquired-as-the-first"),
        pytest.param(None, '"msg":"lost leadership"', id="lost"),
    ],
)
async def test_a_change_of_leadership_is_logged(term: Term | None, line: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await log_leadership(term)
    (record,) = caplog.records
    assert line in JsonLines().format(record)
