"""Quotas followed live: which counts, what a slip changes (nothing), who is told, and who must know before pods come.

Seen to fail, each alone: `_refuse` that forgets what was good; `_restore` left out; `tell` by whoever does not lead;
`_put_in_force` without telling those who wait; `known` set before both ConfigMaps were seen.
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
from gputile.scheduler.quota_watcher import BELIEVED, REPEAT, QuotaSettings, QuotaWatcher
from gputile.telemetry.metrics import Metrics
from gputile.testing.builders import pod
from tests.scheduler.rig import tile
from tests.scheduler.test_app import cluster, filter_body, running

ONE_CARD = "namespaces: {team-a: {limits: [{cards: 1}]}}"
TWO_CARDS = "namespaces: {team-a: {limits: [{cards: 2}]}}"
BROKEN = "namespaces: {team-a: {limits: [{crads: 9}]}}"
TITLE = "kube-system/gputile-quota"


class Trial:
    """One process that follows, and the cluster that it follows."""

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
        await asyncio.Event().wait()  # the test calls `tell` itself

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
async def following(trial: Trial) -> AsyncIterator[Trial]:
    task = asyncio.create_task(trial.quota_watcher.run())
    try:
        await trial.until(trial.quota_watcher.known.is_set)
        yield trial
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_edit_is_taken_at_once_and_those_who_wait_hear_of_it() -> None:
    async with following(Trial()) as trial:
        assert trial.ledger.quota_usage.quotas == {}
        trial.write(ONE_CARD)
        await trial.until(lambda: trial.cards() == 100)
        assert trial.done == [Freed("")]
        trial.write(TWO_CARDS)
        await trial.until(lambda: trial.cards() == 200)
        trial.api.delete_config_map("kube-system", "gputile-quota")
        await trial.until(lambda: trial.cards() is None)
        assert len(trial.done) == 3
        assert trial.number("quota_edits_total", configmap=TITLE, result="taken") == 3


async def test_a_slip_changes_nothing_and_says_so_once() -> None:
    trial = Trial()
    trial.write(ONE_CARD)
    async with following(trial):
        trial.write(BROKEN)
        await trial.until(lambda: trial.number("quota_invalid", configmap=TITLE))
        assert trial.cards() == 100
        for _ in range(3):
            await trial.quota_watcher.tell()
        [note] = trial.api.notes
        assert (note.about, note.namespace, note.pod, note.reason) == (
            "ConfigMap",
            "kube-system",
            "gputile-quota",
            "QuotaInvalid",
        )
        assert "namespace `team-a`: Object contains unknown field `crads`" in note.message
        assert note.message.endswith("What it said before stays in force: quotas of 1 namespaces.")
        trial.now += REPEAT + 1
        await trial.quota_watcher.tell()
        assert len(trial.api.notes) == 2, "Events are kept for an hour only"
        trial.write(TWO_CARDS)
        await trial.until(lambda: trial.cards() == 200)
        assert trial.number("quota_invalid", configmap=TITLE) == 0
        trial.now += REPEAT + 1
        await trial.quota_watcher.tell()
        assert len(trial.api.notes) == 2


async def test_a_process_that_starts_after_the_slip_knows_the_last_good_one() -> None:
    first = Trial()
    first.write(ONE_CARD)
    async with following(first):
        await first.quota_watcher.tell()
        first.write(BROKEN)
        await first.until(lambda: first.number("quota_invalid", configmap=TITLE))
        await first.quota_watcher.tell()
    kept = first.api.config_maps[TITLE]["metadata"]["annotations"]
    assert kept == {LAST_GOOD: ONE_CARD}, "written again, for the edit had taken it off"
    async with following(Trial(first.api)) as second:
        assert second.cards() == 100
        assert second.number("quota_invalid", configmap=TITLE) == 1


async def test_a_last_good_one_that_cannot_be_read_either_is_no_quota() -> None:
    trial = Trial()
    trial.write(BROKEN)
    trial.api.config_maps[TITLE]["metadata"]["annotations"] = {LAST_GOOD: "["}
    async with following(trial):
        assert trial.ledger.quota_usage.quotas == {}
        await trial.quota_watcher.tell()
        assert trial.api.notes[0].message.endswith("What it said before stays in force: no quota.")


async def test_only_the_leader_writes() -> None:
    trial = Trial()
    trial.write(ONE_CARD)
    async with following(trial):
        trial.write(BROKEN)
        await trial.until(lambda: trial.number("quota_invalid", configmap=TITLE))
        trial.leading = False
        await trial.quota_watcher.tell()
        assert trial.api.notes == []
        assert "annotations" not in trial.api.config_maps[TITLE]["metadata"]
        trial.leading = True
        await trial.quota_watcher.tell()
        assert len(trial.api.notes) == 1


class Mute(MemoryApi):
    """Where nothing of this can be written."""

    async def annotate_config_map(self, *_: object) -> None:
        raise ApiRejected(403, "Forbidden", "configmaps is forbidden")

    async def note(self, note: KubeEvent) -> None:
        raise ApiRejected(403, "Forbidden", "events is forbidden")


async def test_what_cannot_be_written_stops_nothing() -> None:
    trial = Trial(Mute())
    trial.write(ONE_CARD)
    async with following(trial):
        trial.write(BROKEN)
        await trial.until(lambda: trial.number("quota_invalid", configmap=TITLE))
        for _ in range(3):
            await trial.quota_watcher.tell()
        trial.write(TWO_CARDS)
        await trial.until(lambda: trial.cards() == 200)


async def test_ours_counts_before_the_old_and_each_has_its_own_last_good() -> None:
    trial = Trial()
    trial.write('{"team-a": {"quota": {"T4": 7}}, "team-b": {"quota": {"T4": 3}}}', "gpuquota", "gpu_quota")
    trial.write(ONE_CARD)
    async with following(trial):
        await trial.until(lambda: (trial.cards(), trial.cards("team-b")) == (100, 300))
        trial.write("{", "gpuquota", "gpu_quota")
        await trial.until(lambda: trial.number("quota_invalid", configmap="kube-system/gpuquota"))
        trial.api.delete_config_map("kube-system", "gputile-quota")
        await trial.until(lambda: (trial.cards(), trial.cards("team-b")) == (700, 300))


async def test_an_empty_name_follows_nothing() -> None:
    trial = Trial(name="", old_name="")
    assert trial.quota_watcher.known.is_set()
    assert trial.quota_watcher.sources == []


FORBIDDEN = WatchFailed("HTTP 403", forbidden=True)


class Scripted(MemoryApi):
    """Says what it is told to, of both ConfigMaps."""

    def __init__(self, *seen: WatchUpdate[QuotaConfigMap]) -> None:
        super().__init__()
        self.seen = seen

    async def follow_config_map(self, namespace: str, name: str) -> AsyncIterator[WatchUpdate[QuotaConfigMap]]:
        for one in self.seen:
            yield one
        await asyncio.Event().wait()


async def test_without_the_right_to_read_them_there_is_no_quota_and_all_else_goes_on() -> None:
    async with following(Trial(Scripted(*[FORBIDDEN] * BELIEVED))) as trial:
        assert trial.ledger.quota_usage.quotas == {}
        assert trial.number("watch_failures_total", kind="configmaps") == 2 * BELIEVED


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param([WatchFailed("timed out")], id="does-not-answer"),
        pytest.param([FORBIDDEN] * (BELIEVED - 1), id="has-just-started-and-knows-no-rights-yet"),
        pytest.param([FORBIDDEN, WatchFailed("timed out")] * BELIEVED, id="starts-again-and-again"),
    ],
)
async def test_a_server_is_waited_for_that(seen: list[WatchUpdate[QuotaConfigMap]]) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), following(Trial(Scripted(*seen))):
            pass


async def test_an_object_that_cannot_be_read_is_a_slip_too() -> None:
    async with following(Trial(Scripted(Undecodable("ConfigMap gputile-quota", "Expected `str`")))) as trial:
        assert trial.number("quota_invalid", configmap=TITLE) == 1
        await trial.quota_watcher.tell()
        assert trial.api.notes == [], "nobody knows its UID"


# ---- in the process -------------------------------------------------------------------------------------------------


async def test_nobody_is_let_in_before_the_quotas_are_known() -> None:
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
        await replica.until(lambda: replica.process._listed["pods"].is_set())
        assert not replica.process.is_synced()
        assert (await replica.ask("/readyz"))[0] != 200
        gate.set()
        await replica.until(replica.process.is_synced)
        api.add_pod(pod(tile(8), uid="uid-web-0"))
        await replica.until(lambda: "uid-web-0" in replica.process.cluster_state.pending)
        _, answer = await replica.ask("/gputile/filter", filter_body(api, "web-0"))
        assert answer["FailedAndUnresolvableNodes"] == {"n1": "too few GPUs of a model in the namespace's quota"}


async def test_the_gauges_show_what_is_held_and_what_may_be() -> None:
    api = cluster()
    text = "namespaces: {default: {limits: [{model: A100, cards: 1, memory: 1Gi}]}}"
    api.add_config_map("kube-system", "gputile-quota", {"quota.yaml": text})
    async with running(api) as replica:
        await replica.until(replica.process.is_synced)
        api.add_pod(pod(tile(8), uid="uid-web-0"))
        await replica.until(lambda: "uid-web-0" in replica.process.cluster_state.pending)
        await replica.ask("/gputile/filter", filter_body(api, "web-0"))
        shown = (await replica.ask("/metrics"))[1]
        assert gauge(shown, "used", "cards") == 0.5, "a pencil counts"
        assert gauge(shown, "limit", "cards") == 1
        assert (gauge(shown, "used", "memory"), gauge(shown, "limit", "memory")) == (8 * 1024**2, 1024**3)
        assert gauge(shown, "limit", "cores") is None


def gauge(shown: str, of: str, kind: str) -> float | None:
    start = f'gputile_quota_{of}{{namespace="default",model="A100",kind="{kind}"}} '
    return next((float(line.removeprefix(start)) for line in shown.splitlines() if line.startswith(start)), None)
