"""Hostile pods, nodes, Leases and quotas, fed to every loop of a running replica: no loop ends and no other object is
affected. After each of them a good pod is bound, a pod bound by another scheduler gets its grant, one that fits nowhere
gets its Event, one of high priority gets its victims, and a node, a heartbeat and a quota take effect.
"""

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import pytest
from bench.fuzz.verbs import malformed
from hypothesis import given
from hypothesis import strategies as st

from gputile.dialects.gputile import GRANT
from gputile.kube.api import Json
from gputile.kube.fake import MemoryApi
from gputile.scheduler import app as process
from gputile.scheduler.app import SchedulerApp
from gputile.scheduler.binding import reconciler
from gputile.scheduler.pending import pending_pods
from gputile.scheduler.preemption import preemptor
from gputile.scheduler.settings import PreemptSettings, Settings, TellSettings
from gputile.telemetry.metrics import Metrics
from gputile.testing.builders import node, pod
from tests import hostile
from tests.effort import examples
from tests.hostile import MakePod
from tests.scheduler.rig import tile

ROUND = 0.01  # seconds between two rounds of a loop
PATIENCE = 50.0  # seconds for something that takes milliseconds: only a loop that hangs or has ended takes longer
SIZE = 81_920  # MiB of a GPU
QUOTA = "namespaces: {team: {limits: [{cards: %d}]}}"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops pause for milliseconds instead of a quarter of a second."""
    shorten_intervals(monkeypatch)


def shorten_intervals(patch: pytest.MonkeyPatch) -> None:
    for module in (reconciler, preemptor, pending_pods):
        patch.setattr(module, "ROUND", ROUND)
    patch.setattr(process, "TICK", ROUND)
    patch.setattr(pending_pods, "SHARE", 1.0)  # no pause after an explanation


class Cluster:
    """A running replica, and a kube-scheduler that calls it over HTTP."""

    def __init__(
        self, process: SchedulerApp, api: MemoryApi, http: aiohttp.ClientSession, task: asyncio.Task[None]
    ) -> None:
        self.process, self.api, self.http, self.task = process, api, http, task
        self._numbers = itertools.count()

    async def until(self, goal: str, holds: Callable[[], object]) -> None:
        """The process must be running when it holds, too."""
        try:
            async with asyncio.timeout(PATIENCE):
                while not holds() and not self.task.done():
                    await asyncio.sleep(0.001)
        except TimeoutError:
            raise AssertionError(f"in vain: {goal}") from None
        if self.task.done():
            self.task.result()  # raises what ended it
            raise AssertionError(f"the process ended before: {goal}")

    async def ask(self, verb: str, body: Json) -> Json:
        """The response, which kube-scheduler must be able to parse."""
        url = f"http://127.0.0.1:{self.process.server.port}/gputile/{verb}"
        async with self.http.post(url, json=body) as answer:
            text = await answer.read()
            assert answer.status == 200, f"{verb}: HTTP {answer.status}: {text[:300]!r}"
        assert not malformed(verb, text), f"{verb}: {malformed(verb, text)}"
        result: Json = json.loads(text)
        return result

    async def page(self, path: str) -> str:
        async with self.http.get(f"http://127.0.0.1:{self.process.server.port}{path}") as answer:
            assert answer.status == 200, path
            return await answer.text()

    # ---- hostile objects --------------------------------------------------------------------------------------------

    async def submit(self, made: Json) -> None:
        """The pod is created, shown by the watch and, if it is pending, sent with every verb of kube-scheduler."""
        self.create(made)
        await self.turn()
        if made["spec"].get("nodeName"):
            return
        nodes = list(self.api.nodes)
        body = {"Pod": made, "Nodes": None, "NodeNames": nodes}
        for verb in ("filter", "filter-dryrun", "prioritize", "steer"):
            await self.ask(verb, body)
        victims = {name: {"Pods": [{"UID": "uid-victim"}], "NumPDBViolations": 0} for name in nodes}
        await self.ask("preempt", {"Pod": made, "NodeNameToVictims": None, "NodeNameToMetaVictims": victims})
        metadata = made.get("metadata") or {}
        named = {"PodName": metadata.get("name"), "PodNamespace": "default", "PodUID": str(metadata.get("uid"))}
        await self.ask("bind", {**named, "Node": nodes[0]})

    async def binds_beside(self, made: Json) -> None:
        """A good pod is bound beside it; then it is deleted."""
        await self.submit(made)
        name = made["metadata"]["name"]
        await self._binds(f"beside-{name}")
        self.api.delete_pod(f"default/{name}")

    def create(self, made: Json) -> None:
        """Unvalidated: a real API server would reject some of them."""
        self.api.pods[f"default/{made['metadata']['name']}"] = made
        self.api._notify("Pod", "ADDED", made)

    async def turn(self) -> None:
        """Every loop runs once more."""
        await asyncio.sleep(2 * ROUND)

    # ---- good objects -----------------------------------------------------------------------------------------------

    async def still_serves(self) -> None:
        """Every loop serves another object."""
        number = next(self._numbers)
        await self._binds(f"good-{number}")
        await self._grants(f"around-{number}")
        await self._gets_event(f"unknown-model-{number}")
        await self._preempts(number)
        await self._follows(number)
        assert await self.page("/healthz") == "ok"
        assert "gputile_ledger_pods" in await self.page("/metrics")
        await self.page("/gpushare-scheduler/inspect")

    async def _created(self, name: str, limits: Json, **more: Any) -> Json:
        spec = more.pop("spec", {})
        made = pod(limits, name=name, uid=f"uid-{name}", **more)
        made["spec"] |= spec
        self.api.add_pod(made)
        await self.until(f"{name} is seen", lambda: self.process.cluster_state.pod(f"uid-{name}"))
        return made

    async def _binds(self, name: str) -> None:
        made = await self._created(name, tile(10))
        nodes: list[str] = []
        for _ in range(5):  # a node that was offered and not used ranks last, and may be the only one
            nodes = (await self.ask("filter", {"Pod": made, "Nodes": None, "NodeNames": ["n1", "n2"]}))["NodeNames"]
            if nodes:
                break
            await self.turn()
        assert nodes, f"{name} fits"
        named = {"PodName": name, "PodNamespace": "default", "PodUID": f"uid-{name}"}
        assert await self.ask("bind", {**named, "Node": nodes[0]}) == {"Error": ""}
        await self.until(f"{name} is confirmed", lambda: self.process.cluster_state.is_granted(f"uid-{name}"))
        self.api.delete_pod(f"default/{name}")

    async def _grants(self, name: str) -> None:
        await self._created(name, tile(10), on="n2")
        await self.until(f"{name} gets its grant", lambda: GRANT in self.live(name)["metadata"]["annotations"])
        self.api.delete_pod(f"default/{name}")

    async def _gets_event(self, name: str) -> None:
        made = await self._created(name, tile(10), annotations={"gputile.io/model": "of-no-node"})
        body = {"Pod": made, "Nodes": None, "NodeNames": ["n1", "n2"]}
        assert not (await self.ask("filter", body))["NodeNames"]
        event = ("NoFittingGPU", name)
        await self.until(f"{name} has its event", lambda: any((n.reason, n.pod) == event for n in self.api.notes))
        self.api.delete_pod(f"default/{name}")

    async def _preempts(self, number: int) -> None:
        """Node `full` has one small pod on each GPU; a pod that requests a whole GPU must preempt."""
        victim, vip = f"victim-{number}", f"vip-{number}"
        await self._created(victim, tile(SIZE), on="full")
        await self.until(f"{victim} holds its GPU", lambda: self.process.cluster_state.is_granted(f"uid-{victim}"))
        made = await self._created(vip, tile(SIZE), spec={"priority": 2 * hostile.IMPORTANT})
        await self.ask("filter", {"Pod": made, "Nodes": None, "NodeNames": ["full"]})
        await self.until(f"{vip} gets its victim", lambda: f"default/{victim}" not in self.api.pods)
        self.api.delete_pod(f"default/{vip}")
        await self.until(f"{vip} is gone", lambda: self.process.cluster_state.pod(f"uid-{vip}") is None)

    async def _follows(self, number: int) -> None:
        self.api.add_node(node(f"new-{number}").card(size=1).manifest())
        await self.until("a new node is seen", lambda: f"new-{number}" in self.process.ledger.fleet)
        self.api.delete_node(f"new-{number}")
        await self.until("a node is gone", lambda: f"new-{number}" not in self.process.ledger.fleet)
        agents = self.process.cluster_state.agents
        before = sum(agents.counts().values())
        self.api.add_lease(f"beat-{number}", holderIdentity="a", leaseDurationSeconds=9, renewTime="1")
        await self.until("a heartbeat counts", lambda: sum(agents.counts().values()) > before)
        self.api.add_config_map("kube-system", "gputile-quota", {"quota.yaml": QUOTA % (number + 1)})
        await self.until("a quota is taken", lambda: "team" in self.process.ledger.quota_usage.quotas)
        self.api.delete_config_map("kube-system", "gputile-quota")
        await self.until("a quota is gone", lambda: "team" not in self.process.ledger.quota_usage.quotas)

    def live(self, name: str) -> Json:
        return self.api.pods[f"default/{name}"]


class Tracebacks(logging.Handler):
    """Collects unexpected errors. Isolation is not enough: hostile input must be expected."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


@contextmanager
def no_tracebacks() -> Iterator[None]:
    handler = Tracebacks()
    logging.getLogger("gputile").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("gputile").removeHandler(handler)
    assert not handler.found, handler.found[:3]


@asynccontextmanager
async def running(*pods: Json, **more: Any) -> AsyncIterator[Cluster]:
    """Two free nodes, and one that the test fills; `pods` exist before the process starts."""
    nodes = [node(name).cards(8, size=SIZE).manifest() for name in ("n1", "n2")]
    api = MemoryApi([*nodes, node("full").card(size=SIZE).manifest()], pods)
    settings = Settings(
        listen="127.0.0.1:0",
        tell=TellSettings(per_second=10_000),
        preempt=PreemptSettings(patience=0.0),
        audit=5 * ROUND,
        steer_cpu_pods=True,
        **more,
    )
    replica = SchedulerApp(api, settings, Metrics())
    stop = asyncio.Event()
    task = asyncio.create_task(replica.run(stop))
    async with aiohttp.ClientSession() as http:
        cluster = Cluster(replica, api, http, task)
        try:
            await cluster.until("the cluster is seen", lambda: replica.is_synced() and replica.server.port)
            with no_tracebacks():
                yield cluster
        finally:
            stop.set()
            await task


# ---- one after the other --------------------------------------------------------------------------------------------

BOUND = hostile.bound("n1")
WORST = (  # what issue 15 confirmed on a real API server
    *("1,300 containers", "1,300 init containers", "1,300 sidecars"),
    *("24 containers that fit nowhere", "24 containers that fit nowhere, and are important"),
    *("64 containers that fit nowhere", "17,000 keys of ours", "45,000 UUIDs", "45,000 models"),
)
SITS = ("1,200 init containers", "1,300 sidecars", "17,000 keys of ours", "17,000 keys, and no GPU", "a copied grant")


@pytest.mark.parametrize("make", [pytest.param(hostile.TENANT[name], id=name) for name in WORST])
async def test_a_pending_pod(make: MakePod) -> None:
    async with running() as cluster:
        await cluster.submit(make("bad"))
        await cluster.still_serves()


@pytest.mark.parametrize("make", [pytest.param(BOUND[name], id=name) for name in SITS])
async def test_a_pod_bound_by_another_scheduler(make: MakePod) -> None:
    async with running() as cluster:
        await cluster.submit(make("bad"))
        await cluster.still_serves()


PODS = {
    **{f"{name}, waiting": make for name, make in hostile.TENANT.items() if name not in WORST},
    **{f"{name}, bound": make for name, make in BOUND.items() if name not in SITS and "record:" not in name},
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("turn", range(4))
async def test_every_other_pod(turn: int) -> None:
    """A good pod is bound after each, and every loop has served another object after all of them."""
    async with running() as cluster:
        for number, name in enumerate(list(PODS)[turn::4]):
            with after(name):
                await cluster.binds_beside(PODS[name](f"bad-{number}"))
        await cluster.still_serves()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", list(hostile.RECORDS))
async def test_garbage_in_a_familys_records(family: str) -> None:
    """On bound pods; and, all together, on pending pods."""
    async with running() as cluster:
        for number, garbage in enumerate(hostile.GARBAGE):
            make = BOUND[f"{family} record: {garbage}"]
            with after(garbage):
                await cluster.binds_beside(make(f"bound-{number}"))
            made = make(f"pending-{number}")
            made["spec"]["nodeName"] = None
            cluster.create(made)
        await cluster.still_serves()


async def test_pods_that_no_api_server_would_accept() -> None:
    async with running() as cluster:
        for number, (name, make) in enumerate(hostile.MISSHAPEN.items()):
            with after(name):
                cluster.create(make(f"bad-{number}"))
                await cluster.turn()
                await cluster._binds(f"beside-{number}")
        await cluster.still_serves()


@pytest.mark.timeout(300)
async def test_nodes() -> None:
    async with running() as cluster:
        for number, (name, made) in enumerate(hostile.NODES.items()):
            with after(name):
                cluster.api.add_node(made)
                await cluster.turn()
                await cluster.binds_beside(
                    pod(tile(10), name=f"there-{number}", uid=f"uid-there-{number}", on="hostile")
                )
        await cluster.still_serves()


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"holderIdentity": "a", "leaseDurationSeconds": 9, "renewTime": "1"}, id="a-good-lease"),
        pytest.param({"leaseDurationSeconds": -(2**63), "renewTime": hostile.ESCAPES}, id="a-lease-of-zero-seconds"),
        pytest.param({"leaseDurationSeconds": 2**63 - 1, "holderIdentity": ""}, id="a-lease-of-infinite-time"),
        pytest.param({"leaseDurationSeconds": "9", "renewTime": 7}, id="a-lease-of-other-types"),
    ],
)
async def test_usage_reported_by_an_agent(spec: Json) -> None:
    async with running() as cluster:
        for number, (name, use) in enumerate(hostile.USES.items()):
            with after(name):
                for beat in range(2):  # the first beat may be old: the second one counts
                    renewed = {"renewTime": f"{number}-{beat}"} if spec.get("renewTime") == "1" else {}
                    cluster.api.add_lease("n1", {"gputile.io/use": use}, **{**spec, **renewed})
                    await cluster.turn()
                assert "gputile_ledger_pods" in await cluster.page("/metrics")
        cluster.api.delete_lease("n1")
        await cluster.still_serves()


QUOTAS = {
    "nothing": "",
    "a list": "[]",
    "a list of itself": "&a [*a]",
    "a map of itself": "namespaces: &a {team: *a}",
    "deep": "[" * 3000,
    "a number of 5,000 digits": f"namespaces: {{team: {{limits: [{{cards: {hostile.digits()}}}]}}}}",
    "infinite": "namespaces: {team: {limits: [{cards: .inf}]}}",
    "a time": "namespaces: {team: 2020-13-45}",
    "bytes": "namespaces: {team: !!binary AAA}",
    "an object of Python": "!!python/object/apply:os.system [exit]",
    "two documents": "a: 1\n---\nb: 2",
    "escapes": f"namespaces: {{{hostile.ESCAPES!r}: 1}}",
}


async def test_quotas() -> None:
    async with running() as cluster:
        for number, (name, text) in enumerate(QUOTAS.items()):
            with after(name):
                cluster.api.add_config_map("kube-system", "gputile-quota", {"quota.yaml": text})
                cluster.api.add_config_map("kube-system", "gpuquota", {"gpu_quota": text})
                await cluster.turn()
                await cluster._binds(f"beside-{number}")
        cluster.api.delete_config_map("kube-system", "gpuquota")
        await cluster.still_serves()


@contextmanager
def after(name: str) -> Iterator[None]:
    """Names the object in the error that it caused."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"after {name}: {type(error).__name__}: {error}") from error


# ---- all at once ----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
async def test_a_replica_that_starts_among_them_and_relists() -> None:
    """Objects that ended one process still exist for the next."""
    hostile_pods = [make(f"bad-{number}") for number, make in enumerate(PODS.values())]
    async with running(*hostile_pods, *hostile.fractions()) as cluster:
        await cluster._binds("first")
        for number, make in enumerate(map(BOUND.get, SITS)):
            assert make is not None
            cluster.create(make(f"worse-{number}"))
        await cluster.process.resync()
        await cluster.still_serves()


# ---- at random ------------------------------------------------------------------------------------------------------

NUMBERS = st.sampled_from([0, 1, 2, 8, 9, 100, 4096, 2**15, 2**31 - 1, 2**31, 2**63 - 1, -1])
AMOUNTS = (
    NUMBERS | st.sampled_from(["", "1", "1k", "1Gi", "0.5", "-1", "1e3", "1e400", "nan", hostile.digits()]) | st.none()
)
RESOURCES = st.sampled_from(sorted({name for limits, _ in hostile.RECORDS.values() for name in limits} | {"cpu"}))
KEYS = st.sampled_from(
    sorted(
        {name for _, names in hostile.RECORDS.values() for name in names}
        | set(hostile.SELECTING)
        | set(hostile.ASSUMED)
    )
)
VALUES = (
    st.sampled_from(sorted(hostile.GARBAGE.values()))
    | st.text(max_size=20)
    | st.sampled_from([hostile.listed(count=2000), "require", "prefer", "binpack", "tiling", "topology", "n1", "0,1"])
)
LIMITS = st.dictionaries(RESOURCES, AMOUNTS, max_size=3) | st.sampled_from(
    [limits for limits, _ in hostile.RECORDS.values()]
)


@st.composite
def pods(draw: st.DrawFn) -> Json:
    """A pod with many containers, requests in any dialect or several, and garbage in any annotation."""
    limits = draw(LIMITS)
    kinds = [draw(LIMITS) for _ in range(draw(st.integers(0, 3)))]
    apps = [limits] * draw(st.sampled_from([0, 1, 1, 2, 24, 65, hostile.MANY])) + kinds
    inits = [{**limits, "sidecar": draw(st.booleans())}] * draw(st.sampled_from([0, 0, 1, 3, 65, hostile.MANY]))
    made = pod(*apps, init=tuple(inits), annotations=draw(st.dictionaries(KEYS, VALUES, max_size=6)))
    made["spec"]["nodeName"] = draw(st.sampled_from([None, None, "n1", "n1", "n2", "hostile", "nowhere"]))
    made["spec"]["priority"] = draw(st.sampled_from([0, 5, hostile.IMPORTANT, None]))
    made["status"] = {"phase": draw(st.sampled_from([None, "Pending", "Running", "Unknown"]))}
    if draw(st.booleans()):
        made["metadata"]["deletionTimestamp"] = draw(st.sampled_from(["2026-01-01T00:00:00Z", "", "never"]))
    return made


CARDS = st.builds(
    hostile.card,
    st.integers(-1, 9),
    memory=NUMBERS,
    cores=NUMBERS,
    slots=NUMBERS,
    numa=NUMBERS,
    model=st.text(max_size=5),
    links=st.dictionaries(st.sampled_from(["0", "1", "x"]), NUMBERS, max_size=2),
)


@st.composite
def nodes(draw: st.DrawFn) -> Json:
    resources = draw(st.dictionaries(RESOURCES, AMOUNTS, max_size=4))
    notes = hostile.inventory(draw(st.lists(CARDS, max_size=4))) if draw(st.booleans()) else {}
    return hostile.node("hostile", {**notes, **draw(st.dictionaries(KEYS, VALUES, max_size=2))}, resources)


@given(st.lists(pods(), min_size=1, max_size=6), st.lists(nodes(), max_size=3))
@examples(8)
@pytest.mark.timeout(300)
def test_any_pods_and_nodes(bad: list[Json], places: list[Json]) -> None:
    async def run() -> None:
        async with running() as cluster:
            for made in places:
                cluster.api.add_node(made)
            for number, made in enumerate(bad):
                made["metadata"] |= {"name": f"bad-{number}", "uid": f"uid-bad-{number}"}
                await cluster.submit(made)
            await cluster.still_serves()

    with pytest.MonkeyPatch.context() as patch:
        shorten_intervals(patch)
        asyncio.run(run())
