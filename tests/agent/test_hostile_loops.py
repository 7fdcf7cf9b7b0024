"""Hostile pods, nodes, checkpoints and runtimes, fed to every loop of a running agent: it and the others go on.
After each of them a container of a good pod starts with its GPU, the node is reported, compared and measured, and the
heartbeat goes on.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import grpc
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.agent import app
from gputile.agent.app import Agent
from gputile.agent.settings import AgentSettings, FolderSettings, HeartbeatSettings
from gputile.dialects import gputile
from gputile.dialects.kube_objects import NodeObject, Pod
from gputile.kube.api import Change, Json, Snapshot, Undecodable
from gputile.kube.node_client import NodeClient, NodeLease
from gputile.kubelet import messages as wire
from gputile.kubelet.checkpoint import CHECKPOINT
from gputile.kubelet.cri import RUNNING, UID, CdiSupport
from gputile.nvml.driver import DriverGpu
from gputile.nvml.fake import FakeDriver
from gputile.telemetry.agent_metrics import AgentMetrics
from gputile.testing import hostile
from gputile.testing.builders import pod
from gputile.testing.hostile import MakePod
from tests.agent.node import NodeInMemory
from tests.agent.rig import Kubelet
from tests.effort import examples
from tests.kubelet.kubelet import ScriptedKubelet
from tests.kubelet.runtime import runtime
from tests.scheduler.test_hostile import after, no_tracebacks, pods

PATIENCE = 50.0  # seconds for something that takes milliseconds: only a loop that hangs or is gone takes longer
GPUS = tuple(DriverGpu(index=n, uuid=f"GPU-n1-{n}", model="T4", memory=16384, minor=n) for n in range(4))
GOOD = "GPU-n1-2"  # nobody hostile holds it


def quicken(patch: pytest.MonkeyPatch) -> None:
    """What happens once in ten seconds happens all the time."""
    for name in ("SWEEP", "REPORT"):
        patch.setattr(app, name, 0.005)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


class Node:
    """A running agent, its kubelet, and the API server's view of its node."""

    def __init__(self, folder: Path, kubelet: ScriptedKubelet, api: NodeInMemory, agent: Agent) -> None:
        self.folder, self.kubelet, self.api, self.agent = folder, kubelet, api, agent
        self.checkpoint = Kubelet(folder)
        self._stop = asyncio.Event()
        self.task = asyncio.create_task(agent.run(self._stop))

    async def stop(self) -> None:
        self._stop.set()
        await self.task

    async def until(self, what: str, holds: Callable[[], object]) -> None:
        """The agent must be running when it holds, too."""
        try:
            async with asyncio.timeout(PATIENCE):
                while not holds() and not self.task.done():
                    await asyncio.sleep(0.002)
        except TimeoutError:
            raise AssertionError(f"in vain: {what}") from None
        if self.task.done():
            self.task.result()  # raises what ended it
            raise AssertionError(f"the agent ended before: {what}")

    # ---- what is bad ------------------------------------------------------------------------------------------------

    async def suffer(self, made: Json) -> None:
        """The pod is seen, and the kubelet tries to start its first container."""
        self.show(made)
        await asyncio.sleep(0.01)
        with suppress(grpc.aio.AioRpcError):
            await self._start(str((made.get("metadata") or {}).get("uid")), "GPU-n1-0::0")

    async def bears(self, made: Json) -> None:
        """The agent goes on beside it; then it goes."""
        await self.suffer(made)
        await self.beats()
        self.forget()
        with suppress(msgspec.ValidationError):
            self.api.pods.put_nowait(Change("DELETED", msgspec.convert(made, Pod)))

    def show(self, made: Json) -> None:
        """As the client of the API server would."""
        try:
            self.api.pods.put_nowait(Change("ADDED", msgspec.convert(made, Pod)))
        except msgspec.ValidationError as wrong:
            self.api.pods.put_nowait(Undecodable("Pod default/bad", str(wrong)))

    async def _start(self, uid: str, device: str) -> None:
        asked = wire.AllocateRequest(containers=[wire.DeviceIds(ids=[device])])
        given = await self.kubelet.call("Allocate", asked, wire.AllocateResponse)
        self.checkpoint.gave(uid, "c0", [device], given.containers[0])
        await self.kubelet.call("PreStartContainer", wire.DeviceIds(ids=[device]), wire.Empty)

    # ---- what is good -----------------------------------------------------------------------------------------------

    async def goes_on(self) -> None:
        self.forget()
        limits = {gputile.GPU: 1, gputile.MEMORY: 1}
        grant = hostile.grant("uid-good", "n1").replace("GPU-n1-0", GOOD).replace('"index": 0', '"index": 2')
        self.show(pod(limits, name="good", uid="uid-good", on="n1", annotations={gputile.GRANT: grant}))
        await self.until("the good pod is seen", lambda: self.agent.node_pods.get("uid-good"))
        await self._start("uid-good", f"{GOOD}::1")
        (spec,) = (self.folder / "cdi").glob("gputile.io-slot_uid-good_*.json")
        assert f"NVIDIA_VISIBLE_DEVICES={GOOD}" in spec.read_text()
        await self.beats()
        self.api.annotate(**{gputile.CORDON: "GPU-n1-3"})
        await self.until("it reports", lambda: len(self.api.writes) > 0 and self.agent.reporter.cordoned())
        self.agent.driver.report(79, "GPU-n1-1")  # type: ignore[attr-defined]
        await self.until("it hears the driver", lambda: "XID 79" in str(self.api.inventory()))
        assert self.agent.why_not_ready() == ""

    async def beats(self) -> None:
        beats, compared = len(self.api.beats), self._count("gputile_agent_consistency_checks_total")
        await self.until("the heart beats", lambda: len(self.api.beats) > beats + 1)
        await self.until("it compares", lambda: self._count("gputile_agent_consistency_checks_total") > compared)

    def forget(self) -> None:
        """The kubelet has given nothing to anybody."""
        (self.folder / CHECKPOINT).unlink(missing_ok=True)
        self.checkpoint = Kubelet(self.folder)

    def _count(self, name: str) -> float:
        lines = self.agent.metrics.text().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@asynccontextmanager
async def running(folder: Path, *seen: NodeObject, **more: Any) -> AsyncIterator[Node]:
    """`seen`: the node as it is when the agent starts."""
    api = NodeInMemory()
    if seen:
        api.nodes.get_nowait()
        api.nodes.put_nowait(Snapshot(seen))
    settings = AgentSettings(
        node="n1",
        folders=FolderSettings(plugins=str(folder), cdi=str(folder / "cdi")),
        poll_interval=0.01,
        grant_timeout=0.05,
        heartbeat=HeartbeatSettings(renew=0.005),
        report_use=True,
        **{"runtime": str(folder / "none.sock"), **more},
    )
    client, heartbeat = cast(NodeClient, api), cast(NodeLease, api)
    agent = Agent(client, heartbeat, FakeDriver(GPUS), settings, AgentMetrics(), cdi=CdiSupport(True))
    async with ScriptedKubelet(folder) as kubelet:
        found = Node(folder, kubelet, api, agent)
        try:
            await found.until("it is registered", lambda: kubelet.registrations and api.inventory() and api.beats)
            with no_tracebacks():
                yield found
        finally:
            await found.stop()


# ---- one after the other --------------------------------------------------------------------------------------------

BOUND = hostile.bound("n1")
WORST = ("1,200 init containers", "1,300 sidecars", "17,000 keys of ours", "17,000 keys, and no GPU", "45,000 UUIDs")
OTHERS = {name: make for name, make in BOUND.items() if name not in WORST and "record:" not in name}


@pytest.mark.parametrize("make", [pytest.param(BOUND[name], id=name) for name in WORST])
async def test_a_pod(tmp_path: Path, make: MakePod) -> None:
    async with running(tmp_path) as found:
        await found.suffer(make("bad"))
        await found.goes_on()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("turn", range(3))
async def test_every_other_pod(tmp_path: Path, turn: int) -> None:
    async with running(tmp_path) as found:
        for number, (name, make) in enumerate(list(OTHERS.items())[turn::3]):
            with after(name):
                await found.bears(make(f"bad-{number}"))
        await found.goes_on()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", list(hostile.RECORDS))
async def test_garbage_in_a_familys_records(tmp_path: Path, family: str) -> None:
    async with running(tmp_path) as found:
        for number, what in enumerate(hostile.GARBAGE):
            found.show(BOUND[f"{family} record: {what}"](f"bad-{number}"))
        await found.suffer(BOUND[f"{family} record: deep objects"]("last"))
        await found.goes_on()


async def test_pods_that_no_api_server_would_take(tmp_path: Path) -> None:
    async with running(tmp_path) as found:
        for number, (name, make) in enumerate(hostile.MISSHAPEN.items()):
            with after(name):
                await found.bears(make(f"bad-{number}"))
        await found.goes_on()


def own(made: Json) -> NodeObject | None:
    """The agent's own node, written by somebody else; None where the client of the API server could not read it."""
    try:
        return msgspec.convert({**made, "metadata": {**made["metadata"], "name": "n1"}}, NodeObject)
    except msgspec.ValidationError:
        return None


NODES = {
    **hostile.NODES,
    "45,000 GPUs cordoned": hostile.node("n1", {gputile.CORDON: hostile.listed()}),
    "escapes cordoned": hostile.node("n1", {gputile.CORDON: hostile.ESCAPES}),
    "17,000 keys": hostile.node("n1", hostile.keys()),
}


@pytest.mark.parametrize("name", ["4,000 GPUs and a link", "1,000 orphans", "45,000 GPUs cordoned", "17,000 keys"])
async def test_its_node_changed_before_it_starts(tmp_path: Path, name: str) -> None:
    seen = own(NODES[name])
    assert seen is not None
    async with running(tmp_path, seen) as found:
        await found.goes_on()


@pytest.mark.timeout(300)
async def test_its_node_changed_while_it_runs(tmp_path: Path) -> None:
    async with running(tmp_path) as found:
        for name, made in NODES.items():
            with after(name):
                seen = own(made)
                found.api.nodes.put_nowait(
                    Undecodable("Node n1", "unreadable") if seen is None else Change("MODIFIED", seen)
                )
                await found.until("it is seen", found.api.nodes.empty)
                await found.beats()
        await found.goes_on()


ENTRY = {"PodUID": "uid-bad", "ContainerName": "c0", "ResourceName": gputile.GPU, "DeviceIDs": {"-1": ["GPU-n1-0::0"]}}
CHECKPOINTS: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "no UTF-8": b"\xff\xfe",
    "deep": hostile.deep("[").encode(),
    "deep where nobody looks": b'{"Data":{"X":' + hostile.deep("[").encode(),
    "of other kinds": json.dumps({"Data": {"PodDeviceEntries": {"a": 1}, "RegisteredDevices": []}}).encode(),
    "entries of other kinds": json.dumps({"Data": {"PodDeviceEntries": [None, 7, {}]}}).encode(),
    "an answer that is no base64": json.dumps({"Data": {"PodDeviceEntries": [{**ENTRY, "AllocResp": "%"}]}}).encode(),
    "an answer that is garbled": json.dumps(
        {"Data": {"PodDeviceEntries": [{**ENTRY, "AllocResp": "//////8="}]}}
    ).encode(),
    "10,000 entries": json.dumps(
        {"Data": {"PodDeviceEntries": [{**ENTRY, "PodUID": str(n)} for n in range(10_000)]}}
    ).encode(),
    "escapes": json.dumps({"Data": {"PodDeviceEntries": [{**ENTRY, "PodUID": hostile.ESCAPES}]}}).encode(),
}


async def test_checkpoints(tmp_path: Path) -> None:
    async with running(tmp_path) as found:
        for name, said in CHECKPOINTS.items():
            with after(name):
                (tmp_path / CHECKPOINT).write_bytes(said)
                with suppress(grpc.aio.AioRpcError):
                    await found.kubelet.call("PreStartContainer", wire.DeviceIds(ids=["GPU-n1-0::0"]), wire.Empty)
                await found.beats()
        await found.goes_on()


async def test_a_runtime_that_says_anything(tmp_path: Path) -> None:
    labels = [{}, {UID: hostile.ESCAPES}, {UID: "x" * 100_000}, {UID: "uid-good"}, {UID: ""}]
    said = [wire.ListedContainer(id=f"c{n}", state=RUNNING, labels=one) for n, one in enumerate(labels)]
    said += [wire.ListedContainer(id="", state=-1), wire.ListedContainer(id="c0", state=2**62, created_at=-1)]
    socket = tmp_path / "runtime.sock"
    async with runtime(socket, *said), running(tmp_path, runtime=str(socket)) as found:
        await found.goes_on()


# ---- at random ------------------------------------------------------------------------------------------------------


@given(bad=st.lists(pods(), min_size=1, max_size=8))
@examples(3)
@pytest.mark.timeout(300)
def test_any_pods(tmp_path_factory: pytest.TempPathFactory, bad: list[Json]) -> None:
    async def run(folder: Path) -> None:
        async with running(folder) as found:
            for number, made in enumerate(bad):
                made["metadata"] |= {"name": f"bad-{number}", "uid": f"uid-bad-{number}"}
                made["spec"]["nodeName"] = "n1"
                found.show(made)
            await found.suffer(bad[0])
            await found.goes_on()

    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        asyncio.run(run(tmp_path_factory.mktemp("agent")))
