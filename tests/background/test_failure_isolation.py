"""Failure isolation: every loop gets one poisoned object, and continues with the others.

Seen to fail, by taking `FailureIsolation` out of each loop in turn: the round, or the watch, ended with the poisoned
object.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from gputile.background import failure_isolation as module
from gputile.background.failure_isolation import LOG_INTERVAL, MAX_BACKOFF, TRACEBACKS, FailureIsolation
from gputile.dialects.kube_objects import Pod
from gputile.kube.api import AgentLease, ApiRejected, Change, Json, OutcomeUnknown, Snapshot
from gputile.kube.fake import MemoryApi
from gputile.ledger.events import Conflict, Instruction
from gputile.model.cards import Card
from gputile.model.errors import InputError
from gputile.model.refusals import NodeReason
from gputile.scheduler.state.cluster_state import UnboundPod
from gputile.telemetry.metrics import Metrics
from gputile.testing.builders import node, pod
from tests.metrics_api.rig import ProjectionRig
from tests.scheduler.preemption_helpers import HIGH, LOW, arrive, full_cluster, settle
from tests.scheduler.rig import Clock, Rig, tile
from tests.scheduler.test_app import cluster, running, value
from tests.scheduler.test_quota_watcher import WatcherRig


class Poison(RuntimeError):
    """An unexpected error."""


def poisoned(real: Callable[..., Any], is_it: Callable[..., bool]) -> Callable[..., Any]:
    """The same function, which raises for one object."""

    def call(*args: Any, **rest: Any) -> Any:
        if is_it(*args):
            raise Poison("this one")
        return real(*args, **rest)

    return call


# ---- the helper -----------------------------------------------------------------------------------------------------


class TestHelper:
    def fresh(self) -> tuple[FailureIsolation, Clock]:
        clock = Clock()
        return FailureIsolation(Metrics(), clock), clock

    def fail(self) -> None:
        raise Poison("this one")

    async def test_a_failing_object_backs_off_longer_each_time_until_it_works(self) -> None:
        made, clock = self.fresh()
        is_backing_off = []
        for _ in range(12):
            await made.attempt("loop", "a", self.failing)
            began = clock.now
            while made.is_backing_off("loop", "a"):
                clock.now += 0.5
            is_backing_off.append(clock.now - began)
        assert is_backing_off[:4] == [1.0, 2.0, 4.0, 8.0]
        assert is_backing_off[-1] == MAX_BACKOFF
        assert not made.is_backing_off("loop", "b")
        assert await made.attempt("loop", "a", self.working) == 7
        made.step("loop", "a", self.fail)
        assert made._failing["loop", "a"].failures == 1

    async def failing(self) -> None:
        raise Poison("this one")

    async def working(self) -> int:
        return 7

    async def test_nothing_is_tried_during_the_backoff(self) -> None:
        made, _ = self.fresh()
        await made.attempt("loop", "a", self.failing)
        assert await made.attempt("loop", "a", self.working) is None
        assert await made.attempt("loop", "a", self.working, always=True) == 7

    def test_a_failure_is_counted_and_logged_with_its_name_once(self, caplog: pytest.LogCaptureFixture) -> None:
        made, clock = self.fresh()
        for _ in range(5):
            made.step("loop", "default/web", self.fail)
        assert [(r.levelno, bool(r.exc_info)) for r in caplog.records] == [(logging.ERROR, True)]
        clock.now += LOG_INTERVAL
        for number in range(2 * TRACEBACKS):
            made.step("loop", f"default/web-{number}", self.fail)
        assert len(caplog.records) == 1 + TRACEBACKS
        assert made._metrics.registry.get_sample_value("gputile_internal_errors_total", {"loop": "loop"}) == 45

    @pytest.mark.parametrize(
        "rejection", [ApiRejected(403, "Forbidden", "no"), OutcomeUnknown("reset")], ids=["rejected", "outcome-unknown"]
    )
    async def test_expected_errors_are_left_to_the_loop(self, rejection: Exception) -> None:
        made, _ = self.fresh()

        async def refuse() -> None:
            raise rejection

        with pytest.raises(type(rejection)):
            await made.attempt("loop", "a", refuse)

    async def test_cancellation_is_not_an_error(self) -> None:
        made, _ = self.fresh()

        async def cancelled() -> None:
            raise asyncio.CancelledError

        with pytest.raises(asyncio.CancelledError):
            await made.attempt("loop", "a", cancelled)

    async def test_a_loop_that_fails_is_restarted_later_each_time(self) -> None:
        made, clock = self.fresh()
        starts = 0

        async def loop() -> None:
            nonlocal starts
            starts += 1
            if starts == 5:
                raise InputError("that is enough")
            raise Poison("again")

        with pytest.raises(InputError):
            await made.keep_running("loop", loop, clock.pause)
        assert clock.pauses == [1.0, 2.0, 4.0, 8.0]

    async def test_a_pod_gets_one_event_from_the_leader(self) -> None:
        made, _ = self.fresh()
        api = MemoryApi([], [])
        about = msgspec.convert(pod(tile(8), name="web"), Pod)
        for _ in range(3):
            made.step("grants", about.key, self.fail, about)
        await made.write_events(api)
        await made.write_events(api)
        assert [(note.pod, note.reason) for note in api.notes] == [("web", "InternalError")]
        assert "internal error of gputile on this pod (Poison in `grants`)" in api.notes[0].message


# ---- each loop ------------------------------------------------------------------------------------------------------


async def test_the_watch_of_pods_continues_and_a_list_applies_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = pod(tile(8), name="bad", uid="uid-bad")
    good = pod(tile(8), name="good", uid="uid-good")
    async with running(cluster(pods=(bad, good)), policy="binpack") as replica:
        process, api = replica.process, replica.api
        real = process.cluster_state._read
        monkeypatch.setattr(process.cluster_state, "_read", poisoned(real, lambda seen: seen.name.startswith("bad")))
        await replica.until(lambda: "uid-good" in process.cluster_state.pending and process.is_synced())
        for name in ("bad-2", "good-2"):
            api.add_pod(pod(tile(8), name=name, uid=f"uid-{name}"))
        await replica.until(lambda: "uid-good-2" in process.cluster_state.pending)
        assert "uid-bad-2" not in process.cluster_state.pending
        assert (await replica.ask("/readyz"))[0] == 200
        assert (value(process, "internal_errors_total", loop="watch pods") or 0) >= 1
        await replica.until(lambda: any(note.pod == "bad-2" for note in api.notes))


async def test_the_watch_of_nodes_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(cluster(node("n1").card())) as replica:
        process, api = replica.process, replica.api
        await replica.until(process.is_synced)
        real = process.cluster_state.node_changed
        monkeypatch.setattr(process.cluster_state, "node_changed", poisoned(real, lambda seen: seen.name == "bad"))
        for name in ("bad", "good"):
            api.add_node(node(name).card().manifest())
        await replica.until(lambda: "good" in process.ledger.fleet)
        assert "bad" not in process.ledger.fleet


async def test_the_watch_of_leases_and_the_check_of_agents_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(cluster(node("bad").card(), node("good").card())) as replica:
        process = replica.process
        await replica.until(process.is_synced)
        judged: list[str] = []

        def judge(nodes: list[str]) -> list[Instruction]:
            judged.extend(nodes)
            return []

        monkeypatch.setattr(process.cluster_state, "agents_changed", poisoned(judge, lambda nodes: nodes == ["bad"]))
        process.follower.update_agents(["bad", "good"])
        assert judged == ["good"]


async def test_a_list_of_leases_applies_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(cluster(node("bad").card(), node("good").card())) as replica:
        process = replica.process
        await replica.until(process.is_synced)
        agents = process.cluster_state.agents
        monkeypatch.setattr(agents, "_update", poisoned(agents._update, lambda lease: lease.name == "bad"))
        leases = [{"metadata": {"name": name}, "spec": {"holderIdentity": "x"}} for name in ("bad", "good")]
        await process.follower._leases_listed(msgspec.convert(leases, tuple[AgentLease, ...]))
        assert ("bad" in agents, "good" in agents) == (False, True)


async def test_a_list_of_nodes_removes_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(cluster(node("bad").card(), node("good").card())) as replica:
        process = replica.process
        await replica.until(process.is_synced)
        real = process.cluster_state.node_gone
        monkeypatch.setattr(process.cluster_state, "node_gone", poisoned(real, lambda name: name == "bad"))
        await process.follower._nodes_listed(())
        assert process.ledger.fleet.names() == ["bad"]


async def test_a_watch_that_fails_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKOFF", 0.0)
    api = cluster()
    real, begun = api.follow_nodes, 0

    async def follow() -> Any:
        nonlocal begun
        begun += 1
        if begun == 1:
            raise Poison("in the stream itself")
        async for seen in real():
            yield seen

    monkeypatch.setattr(api, "follow_nodes", follow)
    async with running(api) as replica:
        await replica.until(replica.process.is_synced)
        assert begun == 2


async def test_the_node_of_an_uncounted_pod_accepts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod that was skipped must not lose its cards: until it is counted, its node is blocked."""
    async with running(cluster(node("n1").cards(2, size=16), node("n2").cards(2, size=16))) as replica:
        process, api = replica.process, replica.api
        await replica.until(process.is_synced)
        with monkeypatch.context() as patched:
            real = process.cluster_state._read_bound
            patched.setattr(
                process.cluster_state, "_read_bound", poisoned(real, lambda seen, known: seen.name == "bad")
            )
            api.add_pod(pod(tile(16), name="bad", uid="uid-bad", on="n1"))
            await replica.until(lambda: process.cluster_state.uncounted)
        assert process.availability.blocked(["n1", "n2"], "uid-other") == {"n1": NodeReason.UNCOUNTED}
        api.add_pod(pod(tile(8), name="other", uid="uid-other"))
        await replica.until(lambda: "uid-other" in process.cluster_state.pending)
        body = {"Pod": api.pods["default/other"], "Nodes": None, "NodeNames": ["n1", "n2"]}
        assert (await replica.ask("/gputile/filter", body))[1]["NodeNames"] == ["n2"]
        api.add_pod({**api.pods["default/bad"], "status": {"phase": "Running"}})  # shown again, and handled this time
        await replica.until(lambda: not process.cluster_state.uncounted)
        assert process.availability.blocked(["n1", "n2"], "uid-other") == {}


async def test_the_tick_does_its_other_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(cluster()) as replica:
        process = replica.process
        await replica.until(process.is_synced)
        shown: list[float] = []
        monkeypatch.setattr(process.follower, "check_agents", poisoned(print, lambda: True))
        monkeypatch.setattr(process, "_update_metrics", shown.append)
        process.tick(1.0)
        assert shown == [1.0]


async def test_deleted_pods_are_removed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(cluster()) as replica:
        process, looked = replica.process, list[str]()
        await replica.until(process.is_synced)
        orphans = process.cluster_state.orphans
        monkeypatch.setattr(orphans, "kept", lambda: ["bad", "good"])

        def look(uid: str, *, is_disconnected: bool) -> list[Instruction]:
            looked.append(uid)
            return []

        monkeypatch.setattr(orphans, "check", poisoned(look, lambda uid: uid == "bad"))
        process.tick(1.0)
        assert looked[:1] == ["good"]


async def test_the_audit_checks_the_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    async with running(cluster(node("bad").card(), node("good").card()), audit=0.001) as replica:
        process = replica.process
        await replica.until(process.is_synced)
        monkeypatch.setattr(process.ledger, "check_node", poisoned(checked.append, lambda name: name == "bad"))
        await replica.until(lambda: "good" in checked)


async def test_grants_for_pods_bound_by_other_schedulers_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(node("n1").cards(2, size=16))
    for name in ("bad", "good"):
        rig.arrive(tile(8), name=name, on="n1")
    real = rig.reconciler._grant
    monkeypatch.setattr(rig.reconciler, "_grant", poisoned(real, lambda uid: uid == "uid-bad"))
    await rig.reconciler.round()
    assert rig.written("good") is not None
    assert [(note.pod, note.reason) for note in rig.api.notes] == [("bad", "InternalError")]
    await rig.reconciler.round()
    assert rig.count("internal_errors_total", loop="grants") == 1, "it backs off"


async def test_writes_for_other_pods_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(node("n1").cards(2, size=16))
    for name in ("bad", "good"):
        rig.arrive(tile(8), name=name, on="n1")
    monkeypatch.setattr(rig.reconciler, "_write", poisoned(rig.reconciler._write, lambda uid: uid == "uid-bad"))
    await rig.reconciler.round()
    assert (rig.written("bad"), rig.written("good") is not None) == (None, True)


async def test_double_allocations_on_other_nodes_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(node("bad").card(), node("good").card())
    overlap_resolver, settled = rig.reconciler._overlap_resolver, list[str]()

    async def settle_card(name: str, card: Card, leaving: set[str]) -> None:
        settled.append(name)

    monkeypatch.setattr(overlap_resolver, "_overcommitted", lambda name: [rig.ledger.fleet.view(name).node.cards[0]])
    monkeypatch.setattr(
        overlap_resolver, "_resolve_card", poisoned(settle_card, lambda name, card, leaving: name == "bad")
    )
    for name in ("bad", "good"):
        overlap_resolver.add(Conflict("uid", name, ()))
    await overlap_resolver.round()
    assert settled == ["good"]


async def test_other_pending_pods_get_events_and_nudges(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(node("n1").card(size=16))
    for name, size in (("bad", 100), ("good", 200)):
        rig.arrive(tile(size), name=name)
        rig.filter(name)
    real = rig.pending_pods._reason
    monkeypatch.setattr(rig.pending_pods, "_reason", poisoned(real, lambda request, ns: request.asks[0].memory == 100))
    await rig.pending_pods.round()
    events = [(note.pod, note.reason) for note in rig.api.notes]
    assert events == [("good", "NoFittingGPU")]
    rig.api.add_node(node("n2").card(size="80Gi").manifest())
    rig.catch_up()
    rig.clock.now += 5.0
    fits = rig.ledger.fleet.fits
    monkeypatch.setattr(rig.ledger.fleet, "fits", poisoned(fits, lambda may, *rest: may.asks[0].memory == 100))
    await rig.pending_pods.round()
    assert [name for name, *_ in rig.api.patches] == ["default/good"]


async def test_preemption_for_other_pods_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await full_cluster()
    for name, size in (("bad", 11), ("good", 10)):
        arrive(rig, name, size, HIGH)
        rig.filter(name)
    rig.clock.now += 1.5
    real = rig.preemptor._find_candidates
    monkeypatch.setattr(
        rig.preemptor, "_find_candidates", poisoned(real, lambda preemptor, budget: preemptor.pod.name == "bad")
    )
    await rig.preemptor.round()
    assert rig.api.evicted == ["default/low"]
    assert rig.ledger.nomination("uid-good") is not None


async def test_other_nominations_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(node("n1").cards(1, size=16), node("n2").cards(1, size=16))
    for number in (1, 2):
        await settle(rig, f"low-{number}", 16, LOW)
    for name in ("bad", "good"):
        arrive(rig, name, 16, HIGH)
        rig.filter(name)
    rig.clock.now += 1.5
    executor = rig.preemptor._executor
    with monkeypatch.context() as patched:
        patched.setattr(executor, "_announce", poisoned(executor._announce, lambda opened: True))
        await rig.preemptor.round()
    assert (len(executor._open), rig.api.evicted) == (2, [])
    monkeypatch.setattr(executor, "_announce", poisoned(executor._announce, lambda opened: opened.pod.name == "bad"))
    rig.clock.now += 2.0
    await rig.preemptor.round()
    evicted = [name for name in rig.api.evicted if name.startswith("default/low")]
    assert len(evicted) == 1
    assert rig.count("internal_errors_total", loop="nominations") == 1


async def test_nominations_of_other_pods_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await full_cluster()
    for name in ("bad", "good"):
        arrive(rig, name, 30, HIGH)
    executor, recalled = rig.preemptor._executor, list[str]()

    def restore(uid: str, waiting: UnboundPod) -> None:
        recalled.append(uid)

    monkeypatch.setattr(executor, "_restore", poisoned(restore, lambda uid, waiting: uid == "uid-bad"))
    rig.preemptor.listed()
    assert recalled == ["uid-good"]


async def test_the_projection_of_the_metrics_api_shows_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = ProjectionRig()
    projection, looked = rig.projection, list[str]()
    await projection.refresh()
    monkeypatch.setattr(projection, "_refresh_node", poisoned(looked.append, lambda name: name == "bad"))
    projection.touched(["bad", "good"])
    await projection.refresh()
    assert looked == ["good"]


async def test_another_quota_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = WatcherRig()
    kept: list[str] = []

    async def keep(source: Any) -> None:
        kept.append(source.name)

    monkeypatch.setattr(
        rig.quota_watcher, "_keep_last_good", poisoned(keep, lambda source: source.name == "gputile-quota")
    )
    await rig.quota_watcher.report()
    assert kept == ["gpuquota"]


async def test_a_quota_that_fails_once_is_still_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = WatcherRig()
    quota_watcher, updates = rig.quota_watcher, list[Any]()

    async def feed(namespace: str, name: str) -> Any:
        yield Snapshot(())
        yield Change("ADDED", None)

    async def update(source: Any, config_map: Any) -> None:
        updates.append(config_map)
        if len(updates) == 1:
            raise Poison("the first")

    monkeypatch.setattr(quota_watcher._api, "follow_config_map", feed)
    monkeypatch.setattr(quota_watcher, "_update", update)
    await quota_watcher._watch(quota_watcher.sources[0])
    assert len(updates) == 2


# ---- verbs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "part", "method"),
    [
        pytest.param("/gputile/filter", "filter_service", "filter", id="filter"),
        pytest.param("/gputile/filter-dryrun", "filter_service", "dry_run_in_turns", id="dry-run"),
        pytest.param("/gputile/prioritize", "filter_service", "prioritize", id="prioritize"),
        pytest.param("/gputile/steer", "steering", "filter", id="steer"),
        pytest.param("/gputile/bind", "binder", "bind", id="bind"),
        pytest.param("/gputile/preempt", "preemptor", "answer_in_slices", id="preempt"),
    ],
)
async def test_a_verb_that_fails_answers_200_with_the_reason_and_the_next_is_served(
    monkeypatch: pytest.MonkeyPatch, path: str, part: str, method: str
) -> None:
    asks = pod(tile(8), name="web", uid="uid-web")
    async with running(cluster(pods=(asks,))) as replica:
        process, api = replica.process, replica.api
        await replica.until(lambda: "uid-web" in process.cluster_state.pending and process.may_write())
        bodies: dict[str, Json] = {
            "bind": {"PodName": "web", "PodNamespace": "default", "PodUID": "uid-web", "Node": "n1"},
            "preempt": {"Pod": api.pods["default/web"], "NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": "x"}]}}},
        }
        usual: Json = {"Pod": api.pods["default/web"], "Nodes": None, "NodeNames": ["n1"]}
        body = bodies.get(path.rpartition("/")[2], usual)
        with monkeypatch.context() as patched:
            patched.setattr(getattr(process, part), method, poisoned(print, lambda *_: True))
            status, answer = await replica.ask(path, body)
        assert status == 200
        if path.endswith(("filter", "filter-dryrun", "steer", "bind")):
            assert answer["Error"] == "internal error of gputile; see the log of its scheduler"
        assert value(process, "internal_errors_total", loop="verbs") == 1
        assert (await replica.ask("/gputile/filter", usual))[1]["NodeNames"] == ["n1"]
