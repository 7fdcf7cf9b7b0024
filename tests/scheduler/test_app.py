"""One replica put together, on a cluster in memory: from a pod's creation to its confirmed bind in the ledger."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest

from gputile.background import failure_isolation
from gputile.concurrency import time_slices
from gputile.dialects.kube_objects import NodeObject, Pod
from gputile.engine.fleet.fleet import Fleet
from gputile.engine.policies.workload_model import TrainingData
from gputile.kube.api import Bookmark, Change, Json, OutcomeUnknown, Snapshot, Undecodable, WatchFailed, WatchUpdate
from gputile.kube.leader_election import Term
from gputile.ledger.ledger import AllocationState, LedgerSettings
from gputile.model.errors import InputError, Overcommitted
from gputile.model.requests import PodRequest
from gputile.scheduler import app as module
from gputile.scheduler.app import VOLUMES, SchedulerApp
from gputile.scheduler.cluster_follower import STALE
from gputile.scheduler.extender_api import read_filter
from gputile.scheduler.leadership import ElectedReplica, SingleReplica
from gputile.scheduler.settings import Settings
from gputile.telemetry.metrics import Metrics
from gputile.testing.builders import NodeBuilder, node, pod
from tests.scheduler.rig import Clock, ScriptedApi, bind_args, tile
from tests.scheduler.test_cluster_state import grant


def settings(**more: Any) -> Settings:
    return Settings(**{"listen": "127.0.0.1:0", "policy": "binpack", **more})


class Replica:
    """A running process, and an HTTP client of it."""

    def __init__(self, process: SchedulerApp, api: ScriptedApi, http: aiohttp.ClientSession) -> None:
        self.process, self.api, self.http = process, api, http
        self.stop = asyncio.Event()

    async def ask(self, path: str, body: Json | None = None) -> tuple[int, Any]:
        url = f"http://127.0.0.1:{self.process.server.port}{path}"
        async with self.http.request("GET" if body is None else "POST", url, json=body) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if answer.content_type == "application/json" else text

    async def until(self, done: Any) -> None:
        async with asyncio.timeout(2):
            while not done():
                await asyncio.sleep(0.001)

    def state(self, uid: str) -> AllocationState | None:
        entry = self.process.ledger.entry(uid)
        return entry.state if entry is not None else None


@asynccontextmanager
async def running(api: ScriptedApi, leadership: Any = None, **more: Any) -> AsyncIterator[Replica]:
    process = SchedulerApp(api, settings(**more), Metrics(), leadership)
    async with aiohttp.ClientSession() as http:
        replica = Replica(process, api, http)
        task = asyncio.create_task(process.run(replica.stop))
        await replica.until(lambda: process.server.port or task.done())
        try:
            yield replica
        finally:
            replica.stop.set()
            await task


def cluster(*nodes: NodeBuilder, pods: tuple[Json, ...] = ()) -> ScriptedApi:
    return ScriptedApi([builder.manifest() for builder in nodes or (node("n1").cards(2, size=16),)], pods)


def filter_body(api: ScriptedApi, name: str) -> Json:
    return {"Pod": api.pods[f"default/{name}"], "Nodes": None, "NodeNames": list(api.nodes)}


def bind_body(name: str, to: str = "n1") -> Json:
    return {"PodName": name, "PodNamespace": "default", "PodUID": f"uid-{name}", "Node": to}


async def test_a_pod_is_filtered_bound_confirmed_and_deleted() -> None:
    async with running(cluster()) as replica:
        api, process = replica.api, replica.process
        await replica.until(process.is_synced)
        api.add_pod(pod(tile(8), uid="uid-web-0"))
        await replica.until(lambda: "uid-web-0" in process.cluster_state.pending)
        _, answer = await replica.ask("/gputile/filter", filter_body(api, "web-0"))
        assert answer["NodeNames"] == ["n1"]
        assert replica.state("uid-web-0") is AllocationState.RESERVED
        assert await replica.ask("/gputile/bind", bind_body("web-0")) == (200, {"Error": ""})
        await replica.until(lambda: replica.state("uid-web-0") is AllocationState.CONFIRMED)
        process.ledger.check()
        assert len(api.bindings) == 1
        api.delete_pod("default/web-0")
        await replica.until(lambda: replica.state("uid-web-0") is None)
        assert [free.memory for free in process.ledger.fleet.view("n1").free_by_card] == [16, 16]


async def test_a_cluster_filled_by_other_schedulers_is_in_the_ledger_after_one_list() -> None:
    hami = pod(
        {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3},
        annotations={"hami.io/vgpu-devices-allocated": "GPU-n1-1,NVIDIA,3,0:;"},
        uid="uid-h",
        name="h",
        on="n1",
    )
    ours = pod(tile(8), annotations=grant(), uid="uid-web-0", on="n1")
    around = pod(tile(5), name="around", uid="uid-around", on="n1")
    async with running(cluster(pods=(hami, ours, around))) as replica:
        await replica.until(replica.process.is_synced)
        await replica.until(lambda: replica.api.patches)
        await asyncio.sleep(0.01)
        free = [free.memory for free in replica.process.ledger.fleet.view("n1").free_by_card]
        assert sorted(free) in ([3, 13], [8, 8])
        assert sum(free) == 16
        replica.process.ledger.check()


class Slow(ScriptedApi):
    """An API server that lists no pods before the gate opens."""

    def __init__(self, *nodes: NodeBuilder) -> None:
        super().__init__([builder.manifest() for builder in nodes])
        self.gate = asyncio.Event()

    async def _late(self) -> AsyncIterator[WatchUpdate[Pod]]:
        await self.gate.wait()
        async for seen in super().follow_pods():
            yield seen

    def follow_pods(self) -> AsyncIterator[WatchUpdate[Pod]]:
        return self._late()


async def test_ready_only_after_nodes_and_pods_are_listed() -> None:
    api = Slow(node("n1").cards(1, size=16))
    async with running(api) as replica:
        await replica.until(lambda: len(replica.process.ledger.fleet))
        assert await replica.ask("/healthz") == (200, "ok")
        assert await replica.ask("/readyz") == (503, "not synced: the list of pods is incomplete")
        assert not replica.process.may_write()
        api.add_pod(pod(tile(8), uid="uid-web-0"))
        _, answer = await replica.ask("/filter", filter_body(api, "web-0"))
        assert "has not seen the whole cluster" in answer["Error"]
        api.gate.set()
        await replica.until(replica.process.is_synced)
        assert await replica.ask("/readyz") == (200, "ok")
        assert replica.process.may_write()
    assert replica.process.why_not_ready() == "stopping"


class ScriptedWatch(ScriptedApi):
    """An API server whose watch of pods delivers the updates of the test."""

    def __init__(self, *nodes: NodeBuilder) -> None:
        super().__init__([builder.manifest() for builder in nodes])
        self.updates: asyncio.Queue[WatchUpdate[Pod]] = asyncio.Queue()

    async def _deliver(self) -> AsyncIterator[WatchUpdate[Pod]]:
        while True:
            yield await self.updates.get()

    def follow_pods(self) -> AsyncIterator[WatchUpdate[Pod]]:
        return self._deliver()


@pytest.mark.parametrize(
    "healing",
    [
        pytest.param(Snapshot[Pod](()), id="a-list"),
        pytest.param(Bookmark(), id="a-bookmark"),
        pytest.param(Change("MODIFIED", Pod()), id="a-change"),
    ],
)
async def test_a_watch_that_stays_broken_is_not_ready(
    healing: WatchUpdate[Pod], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", _Time(clock))
    api = ScriptedWatch(node("n1").card())
    async with running(api) as replica:
        process = replica.process
        api.updates.put_nowait(Snapshot(()))
        await replica.until(process.is_synced)
        api.updates.put_nowait(WatchFailed("timed out"))
        await replica.until(lambda: process.metrics.registry.get_sample_value(*TROUBLES) == 1)
        assert process.why_not_ready() == ""
        clock.now += STALE / 2
        api.updates.put_nowait(WatchFailed("timed out"))
        await replica.until(lambda: process.metrics.registry.get_sample_value(*TROUBLES) == 2)
        clock.now += STALE / 2 + 1
        assert process.why_not_ready() == "the watch of pods is broken"
        assert await replica.ask("/readyz") == (503, "the watch of pods is broken")
        assert process.is_synced(), "the listed state stays"
        api.updates.put_nowait(healing)
        await replica.until(lambda: not process.why_not_ready())
    assert [record.msg for record in caplog.records].count("watch failed; reconnecting") == 2, "each failure is logged"


TROUBLES = ("gputile_watch_failures_total", {"kind": "pods"})


class _Time:
    """The module `time`, as far as the process uses it."""

    def __init__(self, clock: Clock) -> None:
        self.monotonic, self.time_ns = clock, lambda: int(clock.now * 1e9)


async def test_an_undecodable_object_is_counted_and_affects_no_other() -> None:
    api = ScriptedWatch(node("n1").card())
    async with running(api) as replica:
        process = replica.process
        api.updates.put_nowait(Snapshot(()))
        api.updates.put_nowait(Undecodable("Pod default/odd", "spec is a list"))
        name = "gputile_undecodable_objects_total"
        await replica.until(lambda: process.metrics.registry.get_sample_value(name) == 1)
        assert process.why_not_ready() == ""


async def test_stopping_finishes_the_bind_in_flight_and_then_releases_the_lease() -> None:
    history: list[str] = []

    class Watched(SingleReplica):
        async def run(self) -> None:
            try:
                await super().run()
            finally:
                history.append("cancelled")

        async def step_down(self, *, release: bool) -> None:
            history.append("stepped down")

    api = cluster()
    gate = api.gates["bind"] = asyncio.Event()
    async with running(api, Watched()) as replica:
        await replica.until(replica.process.is_synced)
        api.add_pod(pod(tile(8), uid="uid-web-0"))
        await replica.until(lambda: "uid-web-0" in replica.process.cluster_state.pending)
        bind = asyncio.create_task(replica.ask("/bind", bind_body("web-0")))
        await replica.until(lambda: api.bindings)
        replica.stop.set()
        await replica.until(lambda: replica.process.why_not_ready() == "stopping")
        assert history == []
        gate.set()
        assert await bind == (200, {"Error": ""})
    assert api.pods["default/web-0"]["spec"]["nodeName"] == "n1"
    assert sorted(history) == ["cancelled", "stepped down"]


async def test_stopping_finishes_a_bind_whose_client_disconnected() -> None:
    history: list[str] = []

    class Watched(SingleReplica):
        async def step_down(self, *, release: bool) -> None:
            history.append(f"bound to {api.pods['default/web-0']['spec']['nodeName']}, release {release}")

    api = cluster()
    gate = api.gates["bind"] = asyncio.Event()
    async with running(api, Watched()) as replica:
        await replica.until(replica.process.is_synced)
        api.add_pod(pod({"cpu": 1}, uid="uid-web-0"))
        bind = asyncio.create_task(replica.ask("/bind", bind_body("web-0")))
        await replica.until(lambda: api.bindings)
        bind.cancel()
        await asyncio.gather(bind, return_exceptions=True)
        replica.stop.set()
        await replica.until(lambda: replica.process.why_not_ready() == "stopping")
        await asyncio.sleep(0.01)
        assert history == []
        gate.set()
    assert history == ["bound to n1, release True"]


async def test_the_election_ends_before_its_lease_is_released() -> None:
    """`Elector.release`: cancel `run` first. Else it may acquire the lease again that was just released."""
    history: list[str] = []

    class Watched(SingleReplica):
        async def run(self) -> None:
            try:
                await super().run()
            finally:
                history.append("election ended")

        async def step_down(self, *, release: bool) -> None:
            history.append("lease released")

    async with running(cluster(), Watched()) as replica:
        await replica.until(replica.process.is_synced)
    assert history == ["election ended", "lease released"]


@pytest.mark.parametrize("settled", [True, False])
async def test_the_lease_is_kept_while_a_bind_may_still_take_effect(settled: bool) -> None:
    """The next leader waits out a lease that expires, and not one that was released."""
    released: list[bool] = []

    class Watched(SingleReplica):
        async def step_down(self, *, release: bool) -> None:
            released.append(release)

    async def answer() -> bool:
        return settled

    async with running(cluster(), Watched()) as replica:
        replica.process._wait_until_settled = answer  # type: ignore[method-assign]
    assert released == [settled]


async def test_binds_are_settled_once_the_watch_has_shown_them() -> None:
    async with running(cluster(pods=(pod(tile(8), uid="uid-web-0"),))) as replica:
        await replica.until(replica.process.is_synced)
        assert await replica.process._wait_until_settled()
        assert await replica.ask("/bind", bind_body("web-0")) == (200, {"Error": ""})
        assert await replica.process._wait_until_settled()
        assert replica.state("uid-web-0") is AllocationState.CONFIRMED


async def test_a_lease_that_cannot_be_released_does_not_block_shutdown() -> None:
    class Stubborn(SingleReplica):
        async def step_down(self, *, release: bool) -> None:
            raise OutcomeUnknown("timed out")

    async with running(cluster(), Stubborn()) as replica:
        await replica.until(replica.process.is_synced)


async def test_a_loop_that_fails_by_a_bug_is_restarted_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_isolation, "BACKOFF", 0.0)

    class Broken(SingleReplica):
        starts = 0

        async def run(self) -> None:
            self.starts += 1
            if self.starts < 3:
                raise RuntimeError("a bug")
            await super().run()

    broken = Broken()
    async with running(cluster(), broken) as replica:
        await replica.until(lambda: broken.starts == 3 and replica.process.is_synced())
        assert (await replica.ask("/readyz"))[0] == 200
        assert value(replica.process, "internal_errors_total", loop="leadership") == 2


async def test_unusable_settings_still_end_the_process() -> None:
    class Unusable(SingleReplica):
        async def run(self) -> None:
            raise InputError("a file that is not there; name another")

    process = SchedulerApp(cluster(), settings(), Metrics(), Unusable())
    with pytest.raises(InputError, match="not there"):
        await process.run(asyncio.Event())


class Held:
    """An election that was won."""

    term = Term(1, inherited=True)
    predecessor = ""

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def release(self) -> None:
        return None


async def test_a_new_leader_resyncs_before_it_writes() -> None:
    metrics = Metrics()
    labels: list[bool] = []

    async def label(leads: bool) -> None:
        labels.append(leads)

    leader = ElectedReplica(
        metrics,
        Held(),  # type: ignore[arg-type]
        resync=lambda: process.resync(),
        wait_out=0.01,
        set_label=label,
    )
    api = cluster()
    process = SchedulerApp(api, settings(), metrics, leader)
    stop = asyncio.Event()
    task = asyncio.create_task(process.run(stop))
    async with asyncio.timeout(2):
        while not process.may_write():
            await asyncio.sleep(0.001)
    assert process.follower.pods._listed_stream == 2, "listed once at its start, and once more for this term"
    stop.set()
    await task
    assert not process.may_write()


class RevocableLeadership(SingleReplica):
    """A leadership that the test can take away."""

    is_held = True

    def may_write(self) -> bool:
        return self.is_held


async def test_a_replica_that_lost_leadership_closes_all_connections() -> None:
    """The next call then opens a new connection, which the Service routes to the new leader."""
    leadership = RevocableLeadership()
    async with running(cluster(), leadership) as replica:
        await replica.until(replica.process.may_write)
        reader, writer = await asyncio.open_connection("127.0.0.1", replica.process.server.port)
        assert await replica.ask("/healthz") == (200, "ok")
        replica.process.tick(time.monotonic())
        assert not reader.at_eof()
        leadership.is_held = False
        replica.process.tick(time.monotonic())
        async with asyncio.timeout(2):
            assert await reader.read() == b""
        writer.close()


# ---- resync ---------------------------------------------------------------------------------------------------------


async def test_a_resync_lists_again_in_the_watch_itself() -> None:
    """So that the list and the watch events arrive in the right order."""
    api = ScriptedWatch(node("n1").cards(2, size=16))
    bound = ScriptedApi().add_pod(pod(tile(8), annotations=grant(), uid="uid-web-0", on="n1"))
    async with running(api) as replica:
        process = replica.process
        api.updates.put_nowait(Snapshot(()))
        await replica.until(process.is_synced)
        resync = asyncio.create_task(process.resync())
        await replica.until(lambda: process.follower.pods._stream == 2)
        assert not resync.done(), "the new list has not arrived yet"
        api.updates.put_nowait(Snapshot((bound,)))
        await resync
        assert replica.state("uid-web-0") is AllocationState.CONFIRMED
        api.updates.put_nowait(Change("DELETED", bound))
        await replica.until(lambda: replica.state("uid-web-0") is None)


async def test_after_a_resync_the_reconciler_starts_a_new_term(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    async with running(cluster()) as replica:
        await replica.until(replica.process.is_synced)
        monkeypatch.setattr(replica.process.reconciler, "on_elected", lambda: called.append("new term"))
        await replica.process.resync()
    assert called == ["new term"]


async def test_a_watch_that_was_replaced_delivers_nothing_more() -> None:
    api = cluster()
    async with running(api) as replica:
        await replica.until(replica.process.is_synced)
        for _ in range(3):
            await replica.process.resync()
        api.add_pod(pod(tile(8), uid="uid-web-0"))
        await replica.until(lambda: "uid-web-0" in replica.process.cluster_state.pending)
        assert len(replica.process.cluster_state.take_arrivals()) <= 1


# ---- ticks ----------------------------------------------------------------------------------------------------------


async def ticking(monkeypatch: pytest.MonkeyPatch, *pods: Json, **more: Any) -> tuple[SchedulerApp, Clock]:
    clock = Clock()
    monkeypatch.setattr(module, "time", _Time(clock))
    api = cluster(node("n1").cards(2, size=16), node("n2").cards(2, size=16), pods=pods)
    process = SchedulerApp(api, settings(**more), Metrics())
    process.cluster_state.nodes_listed(msgspec.convert(manifest, NodeObject) for manifest in api.nodes.values())
    await process.follower._pods_listed(await api.list_pods())
    for event in process._known.values():
        event.set()
    return process, clock


def ask(process: SchedulerApp, manifest: Json, *nodes: str) -> list[str]:
    body = json.dumps({"Pod": manifest, "NodeNames": list(nodes or ("n1", "n2"))}).encode()
    return process.filter_service.filter(read_filter(body)).names


def value(process: SchedulerApp, name: str, **labels: str) -> float | None:
    return process.metrics.registry.get_sample_value(f"gputile_{name}", labels)


async def test_a_reservation_expires_and_its_node_ranks_last(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = pod(tile(8), uid="uid-web-0")
    process, clock = await ticking(monkeypatch, manifest)
    assert ask(process, manifest) == ["n1", "n2"]
    process.tick(clock.now + 1.9)
    assert process.ledger.reservations() == 1
    process.tick(clock.now + 2.1)
    assert process.ledger.reservations() == 0
    assert value(process, "reservations_total", outcome="expired") == 1
    assert ask(process, manifest) == ["n2"]


async def test_a_reservation_is_kept_while_kube_scheduler_prepares_volumes_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest = pod(tile(8), uid="uid-web-0") | {"status": {"nominatedNodeName": "n1"}}
    process, clock = await ticking(monkeypatch, manifest)
    ask(process, manifest, "n1")
    begun = clock.now
    while clock.now < begun + VOLUMES - 5:
        clock.now += 0.9
        process.tick(clock.now)
    assert process.ledger.reservations() == 1
    while clock.now < begun + VOLUMES + 5:
        clock.now += 0.9
        process.tick(clock.now)
    assert process.ledger.reservations() == 0, "but not forever"


async def test_a_reservation_is_not_kept_when_another_node_is_nominated(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = pod(tile(8), uid="uid-web-0") | {"status": {"nominatedNodeName": "n2"}}
    process, clock = await ticking(monkeypatch, manifest)
    ask(process, manifest, "n1")
    for _ in range(4):
        clock.now += 0.9
        process.tick(clock.now)
    assert process.ledger.reservations() == 0


async def test_the_metrics_of_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    pods = (
        pod(tile(8), name="a", uid="uid-a", annotations=grant(name="a"), on="n1"),
        pod(tile(8), name="b", uid="uid-b"),
        pod(tile(8), name="c", uid="uid-c"),
        pod(tile(8), name="d", uid="uid-d"),
    )
    process, clock = await ticking(monkeypatch, *pods)
    for manifest in pods[1:3]:
        ask(process, manifest)
    assert await process.binder.bind(bind_args("c")) == ""
    process.follower.pods.seen_at = clock.now - 7
    process.tick(clock.now)
    states = {
        state: value(process, "ledger_pods", state=state) for state in ("reserved", "assumed", "confirmed", "pending")
    }
    assert states == {"reserved": 1, "assumed": 1, "confirmed": 1, "pending": 3}
    assert value(process, "nodes") == 2
    assert value(process, "watch_age_seconds", kind="pods") == 7


async def test_the_metric_of_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    process, clock = await ticking(monkeypatch)
    process.tick(clock.now)
    assert value(process, "gpus") == 4


async def test_an_old_bind_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = pod(tile(8), name="c", uid="uid-c")
    process, clock = await ticking(monkeypatch, manifest, ledger=LedgerSettings(assume_ttl=10.0))
    assert await process.binder.bind(bind_args("c")) == ""
    process.tick(clock.now + 11)
    await process.reconciler.round()
    entry = process.ledger.entry("uid-c")
    assert entry is not None
    assert entry.state is AllocationState.CONFIRMED
    assert value(process, "assumed_expired_total") == 1


async def test_freed_capacity_nudges_pending_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = pod(tile(16), uid="uid-web-0")
    old = [
        pod(tile(16), name=f"o{n}", uid=f"uid-o{n}", annotations=grant(16, n, name=f"o{n}"), on="n1") for n in (0, 1)
    ]
    process, clock = await ticking(monkeypatch, manifest, *old)
    assert isinstance(process.api, ScriptedApi)
    assert ask(process, manifest, "n1") == []
    await process.follower._pod_changed(process.api.add_pod(old[0]), True)
    clock.now += 1
    await process.pending_pods.round()
    assert [key for key, _, _ in process.api.patches] == ["default/web-0"]


async def test_a_new_request_is_learnt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    process, clock = await ticking(monkeypatch)
    learnt: list[object] = []
    monkeypatch.setattr(process.ledger.fleet.scorer, "observe", learnt.append)
    process.cluster_state.pod_changed(ScriptedApi().add_pod(pod(tile(8), uid="uid-new")))
    process.tick(clock.now)
    process.tick(clock.now)
    assert len(learnt) == 1


async def test_the_first_list_is_read_a_few_at_a_time_and_learnt_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes are answered in between, and ticks must not consume the requests that are to be learnt."""
    monkeypatch.setattr(time_slices, "SLICE", -1.0)
    api = cluster(pods=tuple(pod(tile(1), name=f"p{n}", uid=f"uid-{n}") for n in range(5)))
    process = SchedulerApp(api, settings(), Metrics())
    learnt: list[int] = []

    def counted(requests: list[PodRequest]) -> TrainingData:
        learnt.append(len(requests))
        return Fleet().scorer.lesson_from(requests)

    monkeypatch.setattr(process.ledger.fleet.scorer, "lesson_from", counted)
    process.cluster_state.nodes_listed(msgspec.convert(manifest, NodeObject) for manifest in api.nodes.values())
    reading = asyncio.create_task(process.follower._pods_listed(await api.list_pods()))
    seen = []
    while not reading.done():
        await asyncio.sleep(0)
        seen.append(len(process.cluster_state.pending))
        process.tick(0.0)
    assert seen[:6] == [0, 1, 2, 3, 4, 5]
    assert learnt == [5]


async def test_nodes_are_read_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    process, _ = await ticking(monkeypatch)
    monkeypatch.setattr(time_slices, "SLICE", -1.0)
    listed = [msgspec.convert(node(name).cards(1).manifest(), NodeObject) for name in ("n2", "n3")]
    reading = asyncio.create_task(process.follower._nodes_listed(tuple(listed)))
    seen = []
    while not reading.done():
        await asyncio.sleep(0)
        seen.append(process.ledger.fleet.names())
    assert seen == [["n2"], ["n2"], ["n2", "n3"]]


async def test_an_inconsistent_ledger_is_detected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checked = []

    def inconsistent(name: str) -> None:
        checked.append(name)
        if name == "n1":
            raise Overcommitted("n1-0 is overcommitted. History: ...")

    async with running(cluster(node("n1").card(), node("n2").card()), audit=0.001) as replica:
        await replica.until(replica.process.is_synced)
        monkeypatch.setattr(replica.process.ledger, "check_node", inconsistent)
        await replica.until(lambda: "n2" in checked)
        await replica.until(lambda: value(replica.process, "overcommits_total"))
    assert "ledger inconsistent: a GPU is overcommitted" in [record.message for record in caplog.records]
