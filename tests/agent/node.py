"""An agent with a scripted kubelet, a fake driver and a node in memory."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec

from gputile.agent.app import Agent
from gputile.agent.settings import AgentSettings, FolderSettings, HealthSettings, HeartbeatSettings
from gputile.dialects import gputile
from gputile.dialects.kube_objects import NodeObject, Pod
from gputile.kube.api import ApiRejected, Change, KubeEvent, Snapshot, WatchUpdate
from gputile.kube.node_client import NodeClient, NodeLease
from gputile.kubelet.cri import CdiSupport
from gputile.nvml.driver import DriverGpu
from gputile.nvml.fake import FakeDriver
from gputile.telemetry.agent_metrics import AgentMetrics
from tests.kubelet.kubelet import ScriptedKubelet


class NodeInMemory:
    """The part of the API server that an agent uses: one node, its pods, its Lease."""

    def __init__(self) -> None:
        self.node: dict[str, Any] = {"metadata": {"name": "n1", "annotations": {}, "labels": {}}, "status": {}}
        self.pods: asyncio.Queue[WatchUpdate[Pod]] = asyncio.Queue()
        self.nodes: asyncio.Queue[WatchUpdate[NodeObject]] = asyncio.Queue()
        self.notes: list[KubeEvent] = []
        self.writes: list[dict[str, Any]] = []
        self.beats: list[str] = []
        self.conflicts = 0  # how many of the next withdrawals the API server rejects
        self.uses: list[str] = []  # the usage annotation of each heartbeat
        self.pods.put_nowait(Snapshot(()))
        self.nodes.put_nowait(Snapshot((self._object(),)))

    def _object(self) -> NodeObject:
        return msgspec.convert(self.node, NodeObject)

    async def follow_pods(self) -> AsyncIterator[WatchUpdate[Pod]]:
        while True:
            yield await self.pods.get()

    async def follow_node(self) -> AsyncIterator[WatchUpdate[NodeObject]]:
        while True:
            yield await self.nodes.get()

    async def patch(self, annotations: dict[str, str | None], labels: dict[str, str | None]) -> None:
        self.writes.append({"annotations": annotations, "labels": labels})
        for part, patch in (("annotations", annotations), ("labels", labels)):
            merged = {**self.node["metadata"][part], **patch}
            self.node["metadata"][part] = {key: value for key, value in merged.items() if value is not None}
        self.nodes.put_nowait(Change("MODIFIED", self._object()))

    async def patch_status(self, resources: dict[str, int | None], conditions: list[dict[str, Any]]) -> None:
        self.writes.append({"resources": resources, "conditions": conditions})
        self.node["status"].setdefault("allocatable", {}).update({k: str(v) for k, v in resources.items()})
        self.nodes.put_nowait(Change("MODIFIED", self._object()))

    def annotate(self, **annotations: str) -> None:
        self.node["metadata"]["annotations"] |= annotations
        self.nodes.put_nowait(Change("MODIFIED", self._object()))

    async def note(self, note: KubeEvent) -> None:
        self.notes.append(note)

    async def close(self) -> None: ...

    async def beat(self, now: float, use: str = "") -> None:
        self.beats.append("beat")
        self.uses.append(use)

    async def withdraw(self, now: float) -> None:
        if self.conflicts:
            self.conflicts -= 1
            raise ApiRejected(409, "Conflict", "the Lease has been modified")
        self.beats.append("withdrawn")

    def inventory(self) -> list[dict[str, Any]]:
        annotation = self.node["metadata"]["annotations"].get(gputile.INVENTORY)
        return json.loads(annotation)["cards"] if annotation else []


UID = "0f3c1a2b-1111-2222-3333-444455556666"
GPUS = tuple(DriverGpu(index=n, uuid=f"GPU-{n}", model="T4", memory=16384, minor=n) for n in range(4))


class Rig:
    """An agent with short intervals, its API server and its driver."""

    def __init__(self, folder: Path, driver: FakeDriver, **more: Any) -> None:
        self.api, self.driver, self.folder = NodeInMemory(), driver, folder
        folders = FolderSettings(plugins=str(folder), cdi=str(folder / "cdi"))
        short = {
            "poll_interval": 0.01,
            "grant_timeout": 2.0,
            "heartbeat": HeartbeatSettings(renew=0.01),
            "health": HealthSettings(probation=0.3),
        }
        settings = AgentSettings(node="n1", folders=folders, **{**short, **more})
        self.agent = Agent(
            cast(NodeClient, self.api),
            cast(NodeLease, self.api),
            driver,
            settings,
            AgentMetrics(),
            cdi=CdiSupport(True),
        )

    @staticmethod
    def driver_of(*gpus: DriverGpu) -> FakeDriver:
        return FakeDriver(gpus)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def running(
    folder: Path, *gpus: DriverGpu, offered: dict[str, str] | None = None, inventory: str | None = None, **more: Any
) -> AsyncIterator[tuple[Rig, ScriptedKubelet]]:
    rig, stop = Rig(folder, FakeDriver(gpus), **more), asyncio.Event()
    rig.api.node["status"]["allocatable"] = {**(offered or {})}
    if inventory is not None:
        rig.api.nodes.get_nowait()  # the node existed before this agent, with another inventory
    rig.api.annotate(**({gputile.INVENTORY: inventory} if inventory is not None else {}))
    async with ScriptedKubelet(folder) as kubelet:
        task = asyncio.create_task(rig.agent.run(stop))
        try:
            yield rig, kubelet
        finally:
            stop.set()
            await task
