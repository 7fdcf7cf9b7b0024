"""Fuzzes the aggregated metrics API: paths, queries and headers that the API server's front proxy would not send.

Requests go to the handler as the connection would pass them, most of them as if from the front proxy. None may be
answered with 500 or with invalid JSON, or change the served objects.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from bench.fuzz.mutator import Mutator
from bench.fuzz.verbs import cluster, good_bodies
from gputile.dialects.kube_objects import NodeObject
from gputile.http.messages import Reply, Request, Response
from gputile.kube.api import Json
from gputile.metrics_api.authentication import FrontProxy
from gputile.metrics_api.authorization import Authorizer
from gputile.metrics_api.handlers import ResourceHandlers
from gputile.metrics_api.objects import GROUP, VERSION
from gputile.metrics_api.projection import Projection
from gputile.metrics_api.resources import OLD_GROUP, OLD_VERSION
from gputile.metrics_api.server import ApiServer
from gputile.scheduler.app import SchedulerApp
from gputile.scheduler.settings import Settings
from gputile.telemetry.metrics import Metrics

PROXY = "front-proxy-client"
WATCHED = 0.002  # seconds that a watch is read
PATHS = [
    f"/apis/{group}/{version}{rest}"
    for group, version in ((GROUP, VERSION), (OLD_GROUP, OLD_VERSION))
    for rest in (
        *("", "/gpuinfos", "/gpuinfos/n1", "/podresources", "/podresources/old-0"),
        *("/namespaces/default/podresources", "/namespaces/default/podresources/old-0", "/schedule/filter"),
    )
] + ["/apis", f"/apis/{GROUP}", "/openapi/v2", "/openapi/v3", "/healthz", "/"]
QUERIES = [
    "",
    "limit=1",
    "limit=1&continue=eyJ2IjoxfQ",
    "watch=true&resourceVersion=0&allowWatchBookmarks=true&timeoutSeconds=5",
    "watch=1&resourceVersion=1",
    "resourceVersion=5&resourceVersionMatch=NotOlderThan",
    "labelSelector=a%3Db%2Cc+in+(d%2Ce)%2C!f",
    "fieldSelector=metadata.name%3Dn1%2Cmetadata.namespace!%3Dx",
    "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&watch=true",
]
HEADERS = [
    b"accept: application/json",
    b"accept: application/json;as=Table;v=v1;g=meta.k8s.io,application/json",
    b"accept: application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList",
    b"x-remote-user: jane\nx-remote-group: dev\nx-remote-extra-scopes: a%2Fb",
    b"x-remote-user: \xff\nx-remote-extra-%ff: a",
    b"content-type: application/json",
]


class AllowAll:
    """An authorizer that allows everything."""

    async def review(self, spec: Json) -> tuple[bool, str]:
        return True, ""


class MetricsApiTarget:
    """The handler of the metrics API on the cluster of the verbs."""

    def __init__(self, server: ApiServer, reader: ResourceHandlers) -> None:
        self._server, self._reader = server, reader
        self._bodies = [body for _, body in good_bodies()]
        self._good = Request("GET", PATHS[1], b"", False, True, "", [(b"x-remote-user", b"jane")], PROXY, True)
        self._before = b""

    def sample(self, rng: random.Random) -> tuple[str, bytes]:
        lines = [rng.choice(("GET", "GET", "GET", "POST", "PUT", "DELETE", "", "get")).encode()]
        lines += [rng.choice(PATHS).encode(), rng.choice(QUERIES).encode(), b"x-remote-user: jane"]
        lines += rng.sample(HEADERS, rng.randrange(3))
        mutator = Mutator(rng, [*lines, *(query.encode() for query in QUERIES)])
        for _ in range(rng.choice((1, 1, 2, 4))):
            at = rng.randrange(1, len(lines))
            lines[at] = mutator.mutate_bytes(lines[at])
        body = mutator.mutate(rng.choice(self._bodies)) if lines[0] == b"POST" else b""
        return lines[1].decode("latin-1")[:200], b"\0\0".join([*lines, body])

    async def problem(self, path: str, body: bytes) -> str:
        reply = self._server._handle(_request(body))
        response: Reply = await reply if isinstance(reply, Awaitable) else reply
        if isinstance(response, Response):
            return _malformed(response)
        try:
            async with asyncio.timeout(WATCHED):
                for line in (await anext(response.pieces)).splitlines():
                    json.loads(line)
        except (TimeoutError, StopAsyncIteration):
            pass
        finally:
            await response.pieces.aclose()
        return ""

    async def audit(self) -> str:
        response = await self._list()
        if not self._before:
            self._before = response
        return "" if response == self._before else "the list of GPUs has changed"

    async def _list(self) -> bytes:
        reply = self._server._handle(self._good)
        response: Any = await reply if isinstance(reply, Awaitable) else reply
        return bytes(response.body)


def _request(encoded: bytes) -> Request:
    method, path, query, *heads, body = encoded.split(b"\0\0")
    fields = [line.partition(b": ") for head in heads for line in head.split(b"\n")]
    return Request(
        method=method.decode("latin-1"),
        path=path.decode("latin-1"),
        body=body,
        is_too_large=False,
        is_known=True,
        query=query.decode("latin-1"),
        fields=[(name.lower(), value) for name, _, value in fields],
        caller=PROXY,
        is_trusted=True,
    )


def _malformed(response: Response) -> str:
    if response.status >= 500 and response.status != 503:
        return f"HTTP {response.status}: {response.body[:300]!r}"
    if response.content_type.startswith("application/json"):
        json.loads(response.body)
    return ""


@asynccontextmanager
async def target() -> AsyncIterator[MetricsApiTarget]:
    api, metrics = cluster(), Metrics()
    process = SchedulerApp(api, Settings(listen="127.0.0.1:0"), metrics)
    stop = asyncio.Event()
    running = asyncio.create_task(process.run(stop))
    while not (process.is_synced() and process.server.port and not process.cluster_state.ungranted):
        await asyncio.sleep(0.01)
    projection = Projection(process.cluster_state, 100, lambda: 1e9, 7)
    reader = ResourceHandlers(projection, lambda: 1e9)
    authorizer = Authorizer(AllowAll().review, 60.0, lambda: 0.0)
    server = ApiServer(
        reader, authorizer, process.server.verb, body_limit=1, metrics=metrics, is_synced=process.is_synced
    )
    server._front = FrontProxy(ca="", names=(PROXY,))
    for manifest in api.nodes.values():
        projection.node_changed(msgspec.convert(manifest, NodeObject))
    projection.all_changed(is_last=True)
    await projection.refresh()
    try:
        yield MetricsApiTarget(server, reader)
    finally:
        stop.set()
        await running
