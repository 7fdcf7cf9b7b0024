"""Hostile pods, nodes, checkpoints and runtimes in every loop of a running agent: all its loops continue.

After each of them a container of a good pod starts with its GPU, the node is reported, compared and measured, and the
heartbeat is renewed.
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
from gputile.testing.builders import pod
from tests import hostile
from tests.agent.node import NodeInMemory
from tests.agent.rig import Kubelet
from tests.effort import examples
from tests.hostile import MakePod
from tests.kubelet.kubelet import ScriptedKubelet
from tests.kubelet.runtime import runtime
from tests.scheduler.test_hostile import after, no_tracebacks, pods

PATIENCE = 50.0  # seconds; normally milliseconds suffice, only a loop that hangs or has ended takes longer
GPUS = tuple(DriverGpu(index=n, uuid=f"GPU-n1-{n}", model="T4", memory=16384, minor=n) for n in range(4))
GOOD = "GPU-n1-2"  # no hostile pod holds it


def shorten_intervals(patch: pytest.MonkeyPatch) -> None:
    """Make the agent clean up and report all the time, instead of every ten seconds."""
    for name in ("CLEANUP_INTERVAL", "REPORT_INTERVAL"):
        patch.setattr(app, name, 0.005)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_intervals(monkeypatch)


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

    async def until(self, description: str, condition: Callable[[], object]) -> None:
        """Wait for the condition; the agent must still run then."""
        try:
            async with asyncio.timeout(PATIENCE):
                while not condition() and not self.task.done():
                    await asyncio.sleep(0.002)
        except TimeoutError:
            raise AssertionError(f"timeout: {description}") from None
        if self.task.done():
            self.task.result()  # raises the error that ended it
            raise AssertionError(f"the agent ended before: {description}")

    # ---- hostile pods -----------------------------------------------------------------------------------------------

    async def start_hostile(self, manifest: Json) -> None:
        """List the pod, and let the kubelet try to start its first container."""
        self.show(manifest)
        await asyncio.sleep(0.01)
        with suppress(grpc.aio.AioRpcError):
            await self._start(str((manifest.get("metadata") or {}).get("uid")), "GPU-n1-0::0")

    async def survives(self, manifest: Json) -> None:
        """The agent continues beside the pod; then the pod is deleted."""
        await self.start_hostile(manifest)
        await self.beats()
        self.forget()
        with suppress(msgspec.ValidationError):
            self.api.pods.put_nowait(Change("DELETED", msgspec.convert(manifest, Pod)))

    def show(self, manifest: Json) -> None:
        """As the client of the API server delivers it."""
        try:
            self.api.pods.put_nowait(Change("ADDED", msgspec.convert(manifest, Pod)))
        except msgspec.ValidationError as error:
            self.api.pods.put_nowait(Undecodable("Pod default/bad", str(error)))

    async def _start(self, uid: str, device: str) -> None:
        request = wire.AllocateRequest(containers=[wire.DeviceIds(ids=[device])])
        response = await self.kubelet.call("Allocate", request, wire.AllocateResponse)
        self.checkpoint.record(uid, "c0", [device], response.containers[0])
        await self.kubelet.call("PreStartContainer", wire.DeviceIds(ids=[device]), wire.Empty)

    # ---- checks -----------------------------------------------------------------------------------------------------

    async def works(self) -> None:
        self.forget()
        limits = {gputile.GPU: 1, gputile.MEMORY: 1}
        grant = hostile.grant("uid-good", "n1").replace("GPU-n1-0", GOOD).replace('"index": 0', '"index": 2')
        self.show(pod(limits, name="good", uid="uid-good", on="n1", annotations={gputile.GRANT: grant}))
        await self.until("the good pod is listed", lambda: self.agent.node_pods.get("uid-good"))
        await self._start("uid-good", f"{GOOD}::1")
        (spec,) = (self.folder / "cdi").glob("gputile.io-slot_uid-good_*.json")
        assert f"NVIDIA_VISIBLE_DEVICES={GOOD}" in spec.read_text()
        await self.beats()
        self.api.annotate(**{gputile.CORDON: "GPU-n1-3"})
        await self.until(
            "the agent reports its node", lambda: len(self.api.writes) > 0 and self.agent.reporter.cordoned()
        )
        self.agent.driver.report(79, "GPU-n1-1")  # type: ignore[attr-defined]
        await self.until("the agent records the XID error", lambda: "XID 79" in str(self.api.inventory()))
        assert self.agent.why_not_ready() == ""

    async def beats(self) -> None:
        beats, compared = len(self.api.beats), self._count("gputile_agent_consistency_checks_total")
        await self.until("the heartbeat is renewed", lambda: len(self.api.beats) > beats + 1)
        await self.until(
            "the agent compares the node with its grants",
            lambda: self._count("gputile_agent_consistency_checks_total") > compared,
        )

    def forget(self) -> None:
        """Clear the kubelet's checkpoint."""
        (self.folder / CHECKPOINT).unlink(missing_ok=True)
        self.checkpoint = Kubelet(self.folder)

    def _count(self, name: str) -> float:
        lines = self.agent.metrics.text().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@asynccontextmanager
async def running(folder: Path, *nodes: NodeObject, **more: Any) -> AsyncIterator[Node]:
    """`nodes`: the node object when the agent starts."""
    api = NodeInMemory()
    if nodes:
        api.nodes.get_nowait()
        api.nodes.put_nowait(Snapshot(nodes))
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
        node = Node(folder, kubelet, api, agent)
        try:
            await node.until("the agent is registered", lambda: kubelet.registrations and api.inventory() and api.beats)
            with no_tracebacks():
                yield node
        finally:
            await node.stop()


# ---- one by one -----------------------------------------------------------------------------------------------------

BOUND = hostile.bound("n1")
WORST = ("1,200 init containers", "1,300 sidecars", "17,000 keys of ours", "17,000 keys, and no GPU", "45,000 UUIDs")
OTHERS = {name: make for name, make in BOUND.items() if name not in WORST and "record:" not in name}


@pytest.mark.parametrize("make", [pytest.param(BOUND[name], id=name) for name in WORST])
async def test_a_hostile_pod(tmp_path: Path, make: MakePod) -> None:
    async with running(tmp_path) as node:
        await node.start_hostile(make("bad"))
        await node.works()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("turn", range(3))
async def test_every_other_hostile_pod(tmp_path: Path, turn: int) -> None:
    async with running(tmp_path) as node:
        for number, (name, make) in enumerate(list(OTHERS.items())[turn::3]):
            with after(name):
                await node.survives(make(f"bad-{number}"))
        await node.works()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", list(hostile.RECORDS))
async def test_garbage_in_a_familys_records(tmp_path: Path, family: str) -> None:
    async with running(tmp_path) as node:
        for number, kind in enumerate(hostile.GARBAGE):
            node.show(BOUND[f"{family} record: {kind}"](f"bad-{number}"))
        await node.start_hostile(BOUND[f"{family} record: deep objects"]("last"))
        await node.works()


async def test_pods_that_the_api_server_would_reject(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        for number, (name, make) in enumerate(hostile.MISSHAPEN.items()):
            with after(name):
                await node.survives(make(f"bad-{number}"))
        await node.works()


def own(manifest: Json) -> NodeObject | None:
    """The object under the name of the agent's node; None where the client of the API server cannot decode it."""
    try:
        return msgspec.convert({**manifest, "metadata": {**manifest["metadata"], "name": "n1"}}, NodeObject)
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
    own_node = own(NODES[name])
    assert own_node is not None
    async with running(tmp_path, own_node) as node:
        await node.works()


@pytest.mark.timeout(300)
async def test_its_node_changed_while_it_runs(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        for name, manifest in NODES.items():
            with after(name):
                own_node = own(manifest)
                node.api.nodes.put_nowait(
                    Undecodable("Node n1", "unreadable") if own_node is None else Change("MODIFIED", own_node)
                )
                await node.until("the node is seen", node.api.nodes.empty)
                await node.beats()
        await node.works()


ENTRY = {"PodUID": "uid-bad", "ContainerName": "c0", "ResourceName": gputile.GPU, "DeviceIDs": {"-1": ["GPU-n1-0::0"]}}
CHECKPOINTS: dict[str, bytes] = {
    "empty": b"",
    "not JSON": b"{",
    "not UTF-8": b"\xff\xfe",
    "deep": hostile.deep("[").encode(),
    "deep in an unknown field": b'{"Data":{"X":' + hostile.deep("[").encode(),
    "of other types": json.dumps({"Data": {"PodDeviceEntries": {"a": 1}, "RegisteredDevices": []}}).encode(),
    "entries of other types": json.dumps({"Data": {"PodDeviceEntries": [None, 7, {}]}}).encode(),
    "a response that is not base64": json.dumps({"Data": {"PodDeviceEntries": [{**ENTRY, "AllocResp": "%"}]}}).encode(),
    "an undecodable response": json.dumps(
        {"Data": {"PodDeviceEntries": [{**ENTRY, "AllocResp": "//////8="}]}}
    ).encode(),
    "10,000 entries": json.dumps(
        {"Data": {"PodDeviceEntries": [{**ENTRY, "PodUID": str(n)} for n in range(10_000)]}}
    ).encode(),
    "escapes": json.dumps({"Data": {"PodDeviceEntries": [{**ENTRY, "PodUID": hostile.ESCAPES}]}}).encode(),
}


async def test_hostile_checkpoints(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        for name, content in CHECKPOINTS.items():
            with after(name):
                (tmp_path / CHECKPOINT).write_bytes(content)
                with suppress(grpc.aio.AioRpcError):
                    await node.kubelet.call("PreStartContainer", wire.DeviceIds(ids=["GPU-n1-0::0"]), wire.Empty)
                await node.beats()
        await node.works()


async def test_a_hostile_runtime(tmp_path: Path) -> None:
    label_sets = [{}, {UID: hostile.ESCAPES}, {UID: "x" * 100_000}, {UID: "uid-good"}, {UID: ""}]
    containers = [wire.ListedContainer(id=f"c{n}", state=RUNNING, labels=labels) for n, labels in enumerate(label_sets)]
    containers += [wire.ListedContainer(id="", state=-1), wire.ListedContainer(id="c0", state=2**62, created_at=-1)]
    socket = tmp_path / "runtime.sock"
    async with runtime(socket, *containers), running(tmp_path, runtime=str(socket)) as node:
        await node.works()


# ---- at random ------------------------------------------------------------------------------------------------------


@given(bad=st.lists(pods(), min_size=1, max_size=8))
@examples(3)
@pytest.mark.timeout(300)
def test_random_pods(tmp_path_factory: pytest.TempPathFactory, bad: list[Json]) -> None:
    async def run(folder: Path) -> None:
        async with running(folder) as node:
            for number, manifest in enumerate(bad):
                manifest["metadata"] |= {"name": f"bad-{number}", "uid": f"uid-bad-{number}"}
                manifest["spec"]["nodeName"] = "n1"
                node.show(manifest)
            await node.start_hostile(bad[0])
            await node.works()

    with pytest.MonkeyPatch.context() as patch:
        shorten_intervals(patch)
        asyncio.run(run(tmp_path_factory.mktemp("agent")))
