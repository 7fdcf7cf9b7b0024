"""The quota watcher: which ConfigMap counts, that an invalid edit changes nothing, its Events, and `known`.

Seen to fail, each alone: `_reject` that forgets the last good quotas; `_restore` left out; `report` on a replica that
is not the leader; `_put_in_force` without nudging pending pods; `known` set before both ConfigMaps were listed.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gputile.kube.api import ApiRejected, KubeEvent, Undecodable, WatchFailed, WatchUpdate
from gputile.kube.fake import MemoryApi
from gputile.kube.quota_config_maps import LAST_GOOD, QuotaConfigMap
from gputile.ledger.events import Freed, Instruction
from gputile.ledger.ledger import Ledger
from gputile.scheduler.quota_watcher import MAX_FORBIDDEN, REPEAT, QuotaSettings, QuotaWatcher
from gputile.telemetry.metrics import Metrics
from gputile.testing.builders import pod
from tests.scheduler.rig import tile
from tests.scheduler.test_app import cluster, filter_body, running

ONE_CARD = "namespaces: {team-a: {limits: [{cards: 1}]}}"
TWO_CARDS = "namespaces: {team-a: {limits: [{cards: 2}]}}"
BROKEN = "namespaces: {team-a: {limits: [{crads: 9}]}}"
TITLE = "kube-system/gputile-quota"


class WatcherRig:
    """A quota watcher, and the cluster that it watches."""

    def __init__(self, api: MemoryApi | None = None, **settings: Any) -> None:
        self.api, self.ledger, self.metrics = api or MemoryApi(), Ledger(), Metrics()
        self.now, self.leading, self.done = 1000.0, True, list[Instruction]()
        self.quota_watcher = QuotaWatcher(
            self.api,
            self.ledger,
            QuotaSettings(**settings),
            self.metrics,
            leads=lambda: self.leading,
            clock=lambda: self.now,
            apply=self.done.extend,
            pause=self._pause,
        )

    async def _pause(self, seconds: float) -> None:
        await asyncio.Event().wait()  # the test calls `report` itself

    def write(self, text: str, name: str = "gputile-quota", key: str = "quota.yaml") -> None:
        self.api.add_config_map("kube-system", name, {key: text})

    async def until(self, done: Callable[[], Any]) -> None:
        async with asyncio.timeout(2):
            while not done():
                await asyncio.sleep(0.001)

    def cards(self, namespace: str = "team-a") -> int | None:
        quota = self.ledger.quota_usage.quotas.get(namespace)
        return quota.limits[0].cards if quota else None

    def number(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"gputile_{name}", labels) or 0.0


@asynccontextmanager
async def following(rig: WatcherRig) -> AsyncIterator[WatcherRig]:
    task = asyncio.create_task(rig.quota_watcher.run())
    try:
        await rig.until(rig.quota_watcher.known.is_set)
        yield rig
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_edit_takes_effect_at_once_and_nudges_pending_pods() -> None:
    async with following(WatcherRig()) as rig:
        assert rig.ledger.quota_usage.quotas == {}
        rig.write(ONE_CARD)
        await rig.until(lambda: rig.cards() == 100)
        assert rig.done == [Freed("")]
        rig.write(TWO_CARDS)
        await rig.until(lambda: rig.cards() == 200)
        rig.api.delete_config_map("kube-system", "gputile-quota")
        await rig.until(lambda: rig.cards() is None)
        assert len(rig.done) == 3
        assert rig.number("quota_edits_total", configmap=TITLE, result="taken") == 3


async def test_an_invalid_edit_changes_nothing_and_is_reported_once() -> None:
    rig = WatcherRig()
    rig.write(ONE_CARD)
    async with following(rig):
        rig.write(BROKEN)
        await rig.until(lambda: rig.number("quota_invalid", configmap=TITLE))
        assert rig.cards() == 100
        for _ in range(3):
            await rig.quota_watcher.report()
        [note] = rig.api.notes
        assert (note.about, note.namespace, note.pod, note.reason) == (
            "ConfigMap",
            "kube-system",
            "gputile-quota",
            "QuotaInvalid",
        )
        assert "namespace `team-a`: `limits[0]`: the field `crads` does not exist" in note.message
        assert note.message.endswith("The previous content stays in force: quotas of 1 namespaces.")
        rig.now += REPEAT + 1
        await rig.quota_watcher.report()
        assert len(rig.api.notes) == 2, "Events are kept for one hour only"
        rig.write(TWO_CARDS)
        await rig.until(lambda: rig.cards() == 200)
        assert rig.number("quota_invalid", configmap=TITLE) == 0
        rig.now += REPEAT + 1
        await rig.quota_watcher.report()
        assert len(rig.api.notes) == 2


async def test_a_process_that_starts_after_the_mistake_knows_the_last_good_quota() -> None:
    first = WatcherRig()
    first.write(ONE_CARD)
    async with following(first):
        await first.quota_watcher.report()
        first.write(BROKEN)
        await first.until(lambda: first.number("quota_invalid", configmap=TITLE))
        await first.quota_watcher.report()
    kept = first.api.config_maps[TITLE]["metadata"]["annotations"]
    assert kept == {LAST_GOOD: ONE_CARD}, "written again, because the edit had removed it"
    async with following(WatcherRig(first.api)) as second:
        assert second.cards() == 100
        assert second.number("quota_invalid", configmap=TITLE) == 1


async def test_an_unreadable_last_good_quota_is_no_quota() -> None:
    rig = WatcherRig()
    rig.write(BROKEN)
    rig.api.config_maps[TITLE]["metadata"]["annotations"] = {LAST_GOOD: "["}
    async with following(rig):
        assert rig.ledger.quota_usage.quotas == {}
        await rig.quota_watcher.report()
        assert rig.api.notes[0].message.endswith("The previous content stays in force: no quota.")


async def test_only_the_leader_writes() -> None:
    rig = WatcherRig()
    rig.write(ONE_CARD)
    async with following(rig):
        rig.write(BROKEN)
        await rig.until(lambda: rig.number("quota_invalid", configmap=TITLE))
        rig.leading = False
        await rig.quota_watcher.report()
        assert rig.api.notes == []
        assert "annotations" not in rig.api.config_maps[TITLE]["metadata"]
        rig.leading = True
        await rig.quota_watcher.report()
        assert len(rig.api.notes) == 1


class ReadOnly(MemoryApi):
    """An API server that rejects Events and annotations."""

    async def annotate_config_map(self, *_: object) -> None:
        raise ApiRejected(403, "Forbidden", "configmaps is forbidden")

    async def note(self, note: KubeEvent) -> None:
        raise ApiRejected(403, "Forbidden", "events is forbidden")


async def test_a_failed_write_stops_nothing() -> None:
    rig = WatcherRig(ReadOnly())
    rig.write(ONE_CARD)
    async with following(rig):
        rig.write(BROKEN)
        await rig.until(lambda: rig.number("quota_invalid", configmap=TITLE))
        for _ in range(3):
            await rig.quota_watcher.report()
        rig.write(TWO_CARDS)
        await rig.until(lambda: rig.cards() == 200)


async def test_our_config_map_counts_before_the_old_one_and_each_has_its_own_last_good() -> None:
    rig = WatcherRig()
    rig.write('{"team-a": {"quota": {"T4": 7}}, "team-b": {"quota": {"T4": 3}}}', "gpuquota", "gpu_quota")
    rig.write(ONE_CARD)
    async with following(rig):
        await rig.until(lambda: (rig.cards(), rig.cards("team-b")) == (100, 300))
        rig.write("{", "gpuquota", "gpu_quota")
        await rig.until(lambda: rig.number("quota_invalid", configmap="kube-system/gpuquota"))
        rig.api.delete_config_map("kube-system", "gputile-quota")
        await rig.until(lambda: (rig.cards(), rig.cards("team-b")) == (700, 300))


async def test_an_empty_name_watches_nothing() -> None:
    rig = WatcherRig(name="", old_name="")
    assert rig.quota_watcher.known.is_set()
    assert rig.quota_watcher.sources == []


FORBIDDEN = WatchFailed("HTTP 403", forbidden=True)


class Scripted(MemoryApi):
    """Delivers the same updates for both ConfigMaps."""

    def __init__(self, *updates: WatchUpdate[QuotaConfigMap]) -> None:
        super().__init__()
        self.updates = updates

    async def follow_config_map(self, namespace: str, name: str) -> AsyncIterator[WatchUpdate[QuotaConfigMap]]:
        for update in self.updates:
            yield update
        await asyncio.Event().wait()


async def test_without_the_right_to_read_config_maps_there_is_no_quota() -> None:
    async with following(WatcherRig(Scripted(*[FORBIDDEN] * MAX_FORBIDDEN))) as rig:
        assert rig.ledger.quota_usage.quotas == {}
        assert rig.number("watch_failures_total", kind="configmaps") == 2 * MAX_FORBIDDEN


@pytest.mark.parametrize(
    "updates",
    [
        pytest.param([WatchFailed("timed out")], id="does-not-answer"),
        pytest.param([FORBIDDEN] * (MAX_FORBIDDEN - 1), id="has-just-started-and-has-no-rbac-rules-yet"),
        pytest.param([FORBIDDEN, WatchFailed("timed out")] * MAX_FORBIDDEN, id="restarts-again-and-again"),
    ],
)
async def test_it_waits_for_an_api_server_that(updates: list[WatchUpdate[QuotaConfigMap]]) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), following(WatcherRig(Scripted(*updates))):
            pass


async def test_an_undecodable_config_map_is_invalid_too() -> None:
    async with following(WatcherRig(Scripted(Undecodable("ConfigMap gputile-quota", "Expected `str`")))) as rig:
        assert rig.number("quota_invalid", configmap=TITLE) == 1
        await rig.quota_watcher.report()
        assert rig.api.notes == [], "its UID is unknown"


# ---- in the process -------------------------------------------------------------------------------------------------


async def test_no_pod_is_placed_before_the_quotas_are_known() -> None:
    api = cluster()
    gate = asyncio.Event()
    real = api.follow_config_map

    async def late(namespace: str, name: str) -> AsyncIterator[WatchUpdate[QuotaConfigMap]]:
        if name == "gputile-quota":  # the other is known at once
            await gate.wait()
        async for seen in real(namespace, name):
            yield seen

    api.follow_config_map = late  # type: ignore[method-assign]
    api.add_config_map("kube-system", "gputile-quota", {"quota.yaml": "namespaces: {default: {limits: []}}"})
    async with running(api) as replica:
        await replica.until(lambda: replica.process.follower.pods.listed.is_set())
        assert not replica.process.is_synced()
        assert (await replica.ask("/readyz"))[0] != 200
        gate.set()
        await replica.until(replica.process.is_synced)
        api.add_pod(pod(tile(8), uid="uid-web-0"))
        await replica.until(lambda: "uid-web-0" in replica.process.cluster_state.pending)
        _, answer = await replica.ask("/gputile/filter", filter_body(api, "web-0"))
        assert answer["FailedAndUnresolvableNodes"] == {
            "n1": "node(s) have too few GPUs of a model in the namespace's quota"
        }


async def test_the_gauges_show_usage_and_limit() -> None:
    api = cluster()
    text = "namespaces: {default: {limits: [{model: A100, cards: 1, memory: 1Gi}]}}"
    api.add_config_map("kube-system", "gputile-quota", {"quota.yaml": text})
    async with running(api) as replica:
        await replica.until(replica.process.is_synced)
        api.add_pod(pod(tile(8), uid="uid-web-0"))
        await replica.until(lambda: "uid-web-0" in replica.process.cluster_state.pending)
        await replica.ask("/gputile/filter", filter_body(api, "web-0"))
        shown = (await replica.ask("/metrics"))[1]
        assert gauge(shown, "used", "cards") == 0.5, "a reservation counts"
        assert gauge(shown, "limit", "cards") == 1
        assert (gauge(shown, "used", "memory"), gauge(shown, "limit", "memory")) == (8 * 1024**2, 1024**3)
        assert gauge(shown, "limit", "cores") is None


def gauge(shown: str, of: str, kind: str) -> float | None:
    start = f'gputile_quota_{of}{{namespace="default",model="A100",kind="{kind}"}} '
    return next((float(line.removeprefix(start)) for line in shown.splitlines() if line.startswith(start)), None)
