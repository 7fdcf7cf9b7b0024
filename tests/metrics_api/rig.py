"""A projection of a rig's cluster state, and a client that reads it by path."""

from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from gputile.dialects.kube_objects import NodeObject, Pod
from gputile.http.messages import Request
from gputile.kube.api import AgentLease, Json
from gputile.metrics_api.handlers import ResourceHandlers
from gputile.metrics_api.objects import GROUP, VERSION
from gputile.metrics_api.projection import Projection
from gputile.metrics_api.request_info import ListOptions, read_list_options, with_selectors
from gputile.metrics_api.resources import OLD_GROUP, OLD_VERSION
from gputile.testing.builders import NodeBuilder, node, pod
from tests.scheduler.rig import Rig, tile
from tests.scheduler.test_cluster_state import grant

ROOT, OLD_ROOT = f"/apis/{GROUP}/{VERSION}", f"/apis/{OLD_GROUP}/{OLD_VERSION}"
NOW = 1_700_000_000.0
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"


class ProjectionRig:
    """A cluster, and its projection in the aggregated API. `look` is what the running projection does by itself."""

    def __init__(self, *nodes: NodeBuilder, pods: tuple[Json, ...] = (), history: int = 1000, mark: int = 7) -> None:
        self.scheduler = Rig(*(nodes or (node("n1").cards(2, "Tesla T4", 16), node("n2").cards(1))), pods=pods)
        self.now = NOW
        self.projection = Projection(self.scheduler.cluster_state, history, lambda: self.now, mark)
        self.handlers = ResourceHandlers(self.projection, lambda: self.now)
        for manifest in self.scheduler.api.nodes.values():
            self.projection.node_changed(msgspec.convert(manifest, NodeObject))
        self.projection.all_changed()

    async def look(self) -> None:
        """Our watch delivers its events, and the projection refreshes."""
        events = list(self.scheduler.api.events)
        for freed in self.scheduler.catch_up():
            if type(freed).__name__ == "Freed":
                self.projection.touched([freed.node])  # type: ignore[union-attr]
        for of, kind, item in events:
            if of == "Pod":
                self.projection.pod_changed(msgspec.convert(item, Pod))
            elif of == "Lease":
                self.projection.touched([msgspec.convert(item, AgentLease).name])
            else:
                self.projection.node_changed(msgspec.convert(item, NodeObject), deleted=kind == "DELETED")
        await self.projection.refresh()

    async def run(self, name: str, memory: int = 8, index: int = 0, on: str = "n1", **more: Any) -> None:
        """A pod that holds a tile."""
        self.scheduler.api.add_pod(held(name, memory, index, on, **more))
        await self.look()

    async def end(self, key: str) -> None:
        self.scheduler.api.delete_pod(key)
        await self.look()

    # ---- requests ---------------------------------------------------------------------------------------------------

    async def listed(self, path: str, accept: str = "") -> Json:
        body: Json = msgspec.json.decode(await self.handlers.listed(ask(path, accept)))
        return body

    def get(self, path: str, accept: str = "") -> Json:
        body: Json = msgspec.json.decode(self.handlers.get(ask(path, accept)))
        return body

    async def names(self, path: str) -> list[str]:
        return [item["metadata"]["name"] for item in (await self.listed(path))["items"]]

    def watch(self, path: str, accept: str = "") -> "Listener":
        return Listener(self.handlers.watch(ask(path, accept)))

    async def version(self, path: str) -> str:
        return str((await self.listed(path))["metadata"]["resourceVersion"])


class Listener:
    """Reads a watch, event by event."""

    def __init__(self, pieces: AsyncGenerator[bytes, None]) -> None:
        self._pieces, self._lines = pieces, list[bytes]()

    async def next(self) -> Json:
        while not self._lines:
            self._lines = (await anext(self._pieces)).splitlines()
        body: Json = msgspec.json.decode(self._lines.pop(0))
        return body

    async def events(self, count: int) -> list[tuple[str, str]]:
        """Type and name of the next events."""
        events = [await self.next() for _ in range(count)]
        return [(event["type"], event["object"]["metadata"]["name"]) for event in events]

    async def rest(self) -> list[Json]:
        """Until it ends."""
        async for piece in self._pieces:
            self._lines += piece.splitlines()
        return [msgspec.json.decode(line) for line in self._lines]

    async def close(self) -> None:
        await self._pieces.aclose()


def held(name: str, memory: int = 8, index: int = 0, on: str = "n1", *, uid: str = "", **more: Any) -> Json:
    changes = {"pod": uid} if uid else {}
    made = grant(memory, index, name=name, on=on, **changes)
    return pod(tile(memory), name=name, uid=uid or f"uid-{name}", on=on, annotations=made, **more)


def request(path: str, accept: str = "", method: str = "GET", **headers: str) -> Request:
    where, _, query = path.partition("?")
    fields = [(b"accept", accept.encode())] if accept else []
    fields += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request(method, where, b"", False, True, query, fields, "front-proxy-client")


def ask(path: str, accept: str = "") -> ListOptions:
    options = read_list_options(request(path, accept))
    assert options is not None
    return with_selectors(options)
