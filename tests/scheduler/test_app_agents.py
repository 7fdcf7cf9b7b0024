"""The process watches the agents' Leases beside pods and nodes, and is ready without them."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable

import pytest

from gputile.dialects.gputile import ORPHANED, write_orphaned_pods
from gputile.kube.api import AgentLease, Bookmark, Json, Undecodable, WatchFailed, WatchUpdate
from gputile.ledger.events import Instruction
from gputile.model.refusals import NodeReason
from gputile.scheduler.app import SchedulerApp
from gputile.scheduler.cluster_follower import STALE
from gputile.scheduler.state.agent_liveness import AgentLivenessSettings
from gputile.telemetry.metrics import Metrics
from gputile.testing.builders import node, pod
from tests.scheduler.rig import ScriptedApi, tile
from tests.scheduler.test_app import Replica, cluster, filter_body, running, settings
from tests.scheduler.test_cluster_state import grant
from tests.scheduler.test_orphaned_pods import held


def fault(replica: Replica) -> str | None:
    view = replica.process.ledger.fleet.node("n1")
    return view.fault if view is not None else None


def beat(api: ScriptedApi, renewed: str, holder: str = "n1") -> None:
    api.add_lease("n1", holderIdentity=holder, leaseDurationSeconds=10, renewTime=renewed)


async def test_an_agent_that_stops_and_comes_back() -> None:
    api = cluster()
    beat(api, "1")
    async with running(api) as replica:
        await replica.until(replica.process.is_synced)
        await replica.until(lambda: "n1" in replica.process.cluster_state.agents)
        assert fault(replica) == ""
        beat(api, "2", holder="")
        await replica.until(lambda: fault(replica) == NodeReason.AGENT_SILENT)
        replica.process.tick(time.monotonic())
        assert (await replica.ask("/metrics"))[1].count('gputile_agents{state="stale"} 1.0') == 1
        api.add_pod(pod(tile(8), uid="uid-web-0"))
        await replica.until(lambda: "uid-web-0" in replica.process.cluster_state.pending)
        _, answer = await replica.ask("/gputile/filter", filter_body(api, "web-0"))
        assert answer["FailedAndUnresolvableNodes"] == {"n1": "node(s) have a GPU agent whose Lease has expired"}
        beat(api, "3")
        await replica.until(lambda: fault(replica) == "")
        _, answer = await replica.ask("/gputile/filter", filter_body(api, "web-0"))
        assert answer["NodeNames"] == ["n1"]


async def test_an_agent_whose_lease_becomes_stale(caplog: pytest.LogCaptureFixture) -> None:
    api = cluster()
    api.add_lease("n1", holderIdentity="n1", leaseDurationSeconds=1, renewTime="1")
    async with running(api) as replica:
        process = replica.process
        await replica.until(lambda: process.is_synced() and "n1" in process.cluster_state.agents)
        process.cluster_state.agents._clock = lambda: time.monotonic() + 2.0
        process.tick(time.monotonic())
        assert fault(replica) == NodeReason.AGENT_SILENT
        assert "the agent's lease is stale" in caplog.text


class ScriptedLeases(ScriptedApi):
    """An API server whose watch of Leases delivers these updates first."""

    def __init__(self, *updates: WatchUpdate[AgentLease], nodes: Iterable[Json]) -> None:
        super().__init__(nodes)
        self.updates = updates
        self.namespaces: list[str] = []

    async def _deliver(self) -> AsyncIterator[WatchUpdate[AgentLease]]:
        for update in self.updates:
            yield update
        async for update in super().follow_leases(""):
            yield update

    def follow_leases(self, namespace: str) -> AsyncIterator[WatchUpdate[AgentLease]]:
        self.namespaces.append(namespace)
        return self._deliver()


NODES = [node("n1").cards(2, size=16).manifest()]


async def test_without_the_right_to_leases_it_logs_once_and_is_ready(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = ScriptedLeases(*[WatchFailed("403: forbidden")] * 5, WatchFailed("reset"), nodes=NODES)
    async with running(api) as replica:
        await replica.until(replica.process.is_synced)
        await replica.until(lambda: replica.process.cluster_state.agents.counts()["alive"] == 0)
        assert [record.msg for record in caplog.records].count("watch of the agents' leases failed; reconnecting") == 2
        late = time.monotonic() + 2 * STALE
        monkeypatch.setattr(replica.process.follower, "_clock", lambda: late)
        assert replica.process.why_not_ready() == ""


@pytest.mark.parametrize(
    ("updates", "is_disconnected"),
    [
        pytest.param([WatchFailed("reset")], True, id="a-failure"),
        pytest.param([WatchFailed("reset"), Undecodable("Lease a/n2", "odd")], True, id="an-undecodable-lease"),
        pytest.param([WatchFailed("reset"), Bookmark()], False, id="a-bookmark-ends-it"),
    ],
)
async def test_the_agents_are_not_blamed_for_a_broken_watch(
    updates: list[WatchUpdate[AgentLease]], is_disconnected: bool
) -> None:
    process = SchedulerApp(ScriptedLeases(*updates, nodes=NODES), settings(), Metrics())
    for update in updates:
        await process.follower.leases._handle(update)
    assert process.cluster_state.agents.is_disconnected is is_disconnected


async def test_an_undecodable_lease_is_skipped() -> None:
    api = ScriptedLeases(Undecodable("Lease gputile-agents/n2", "odd"), nodes=NODES)
    beat(api, "1")
    async with running(api) as replica:
        await replica.until(lambda: "n1" in replica.process.cluster_state.agents)


@pytest.mark.parametrize(("namespace", "namespaces"), [("", []), ("elsewhere", ["elsewhere"])])
async def test_the_namespace_of_the_leases(namespace: str, namespaces: list[str]) -> None:
    api = ScriptedLeases(nodes=NODES)
    async with running(api, agents=AgentLivenessSettings(namespace=namespace)) as replica:
        await replica.until(replica.process.is_synced)
        await asyncio.sleep(0)
        assert api.namespaces == namespaces


async def test_a_force_deleted_pod_keeps_its_tile_until_its_agent_reports() -> None:
    api = cluster(pods=(pod(tile(8), annotations=grant(), uid="uid-web-0", on="n1"),))
    beat(api, "1")
    async with running(api, agents=AgentLivenessSettings(orphan_grace=0.001)) as replica:
        process = replica.process
        await replica.until(lambda: process.is_synced() and "n1" in process.cluster_state.agents)
        api.delete_pod("default/web-0")
        await replica.until(lambda: len(process.cluster_state.orphans))
        manifest = node("n1").cards(2, size=16).manifest()
        manifest["metadata"]["annotations"][ORPHANED] = write_orphaned_pods([held()])
        api.add_node(manifest)
        await replica.until(lambda: process.cluster_state.orphans.allocations())
        process.tick(time.monotonic())
        assert "gputile_orphaned_pods 1.0" in (await replica.ask("/metrics"))[1]
        assert [free.memory for free in process.ledger.fleet.view("n1").free_by_card] == [8, 16]
        api.add_node(node("n1").cards(2, size=16).manifest())
        await replica.until(lambda: replica.state("uid-web-0") is None)


async def test_while_a_watch_is_broken_no_tile_is_freed() -> None:
    api = cluster(pods=(pod(tile(8), annotations=grant(), uid="uid-web-0", on="n1"),))
    beat(api, "1")
    async with running(api, agents=AgentLivenessSettings(orphan_grace=0.001)) as replica:
        process = replica.process
        await replica.until(lambda: process.is_synced() and "n1" in process.cluster_state.agents)
        stale: list[bool] = []

        def check(uid: str, *, is_disconnected: bool = False) -> list[Instruction]:
            stale.append(is_disconnected)
            return []

        process.cluster_state.orphans.kept = lambda: ["uid-gone"]  # type: ignore[method-assign]
        process.cluster_state.orphans.check = check  # type: ignore[method-assign]
        process.tick(time.monotonic())
        assert stale[-1] is False
        process.follower.nodes.broken_since = time.monotonic()
        process.tick(time.monotonic())
        process.follower.nodes.broken_since = None
        assert stale[-1] is True
