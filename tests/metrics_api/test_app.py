"""The server over real TLS: authentication, responses, and watches."""

import asyncio
import json
import re
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gputile.kube.aggregation import FrontProxyConfigMap, Secret, SecretMetadata
from gputile.kube.api import Change, Json, Snapshot, Undecodable, WatchFailed, WatchUpdate
from gputile.metrics_api import discovery, watch_limits
from gputile.metrics_api.app import MetricsApi
from gputile.metrics_api.projection import Projection
from gputile.metrics_api.settings import MetricsApiSettings
from gputile.model.errors import InputError
from gputile.scheduler.app import SchedulerApp
from gputile.scheduler.settings import Settings, checked
from gputile.telemetry.metrics import Metrics
from gputile.testing.builders import pod
from tests.kube.certificates import Authority, Issued
from tests.metrics_api.rig import OLD_ROOT, ROOT, held
from tests.scheduler.rig import ScriptedApi, tile
from tests.scheduler.test_app import RevocableLeadership, cluster

PROXY = {"X-Remote-User": "jane", "X-Remote-Group": "dev"}
NAME = "gputile-metrics.kube-system.svc"


class ApiServer:
    """The API server's part: front proxy and access reviews; its CA and our certificate come from the test."""

    def __init__(self, authority: Authority) -> None:
        self.authority = authority
        self.allowed = {"jane"}
        self.reviews: list[Json] = []
        self.maps: asyncio.Queue[WatchUpdate[FrontProxyConfigMap]] = asyncio.Queue()
        self.maps.put_nowait(Snapshot((front(authority),)))
        self.secrets: asyncio.Queue[WatchUpdate[Secret]] = asyncio.Queue()

    async def follow_front_proxy(self) -> AsyncIterator[WatchUpdate[FrontProxyConfigMap]]:
        while True:
            yield await self.maps.get()

    async def follow_secret(self, namespace: str, name: str) -> AsyncIterator[WatchUpdate[Secret]]:
        while True:
            yield await self.secrets.get()

    async def write_secret(self, namespace: str, name: str, version: str, data: Mapping[str, bytes]) -> Secret:
        raise AssertionError("there is a good one")

    async def ca_bundle(self, service: str) -> bytes | None:
        return None

    async def set_ca_bundle(self, service: str, bundle: bytes) -> None:
        raise AssertionError("there is no such service")

    async def review(self, spec: Json) -> tuple[bool, str]:
        self.reviews.append(spec)
        return spec["user"] in self.allowed, ""


def front(authority: Authority, names: str = '["front-proxy-client"]') -> FrontProxyConfigMap:
    data = {
        "requestheader-client-ca-file": authority.pem.decode(),
        "requestheader-allowed-names": names,
        "requestheader-username-headers": '["X-Remote-User"]',
        "requestheader-group-headers": '["X-Remote-Group"]',
        "requestheader-extra-headers-prefix": "[]",
    }
    return FrontProxyConfigMap(SecretMetadata("extension-apiserver-authentication"), data)


class Line:
    def __init__(self, process: SchedulerApp, api: ScriptedApi, there: ApiServer, http: aiohttp.ClientSession) -> None:
        self.process, self.api, self.there, self.http = process, api, there, http

    @property
    def metrics_api(self) -> MetricsApi:
        assert self.process.metrics_api is not None
        return self.process.metrics_api

    def url(self, path: str) -> str:
        return f"https://localhost:{self.metrics_api.server.port}{path}"

    async def ask(self, path: str, method: str = "GET", body: Any = None, **headers: str) -> tuple[int, Any]:
        fields = {**PROXY, **{name.replace("_", "-").title(): value for name, value in headers.items()}}
        async with self.http.request(method, self.url(path), headers=fields, json=body) as answer:
            return answer.status, json.loads(await answer.read())

    async def until(self, true: Any) -> None:
        async with asyncio.timeout(5):
            while not true():
                await asyncio.sleep(0.005)


def client(issued: Issued | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # without the machine's CAs: to load them takes 50 ms
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if issued is not None:
        issued.load_into(context)
    return context


@asynccontextmanager
async def serving(
    folder: Path,
    api: ScriptedApi | None = None,
    *,
    caller: str = "front-proxy-client",
    foreign_ca: bool = False,
    wait: bool = True,
) -> AsyncIterator[Line]:
    """`caller`: common name of the client certificate, "" for no certificate; `foreign_ca`: another CA signed it.
    `wait`: until the projection is complete."""
    authority = Authority()
    there = ApiServer(authority)
    signer = Authority() if foreign_ca else authority
    settings = MetricsApiSettings(listen="127.0.0.1:0", **certificate(folder))
    api = api or cluster(pods=(held("web"),))
    process = SchedulerApp(api, Settings(listen="127.0.0.1:0", metrics_api=settings), Metrics(), aggregated=there)
    stop = asyncio.Event()
    connector = aiohttp.TCPConnector(ssl=client(signer.issue(caller) if caller else None))
    async with aiohttp.ClientSession(connector=connector) as http:
        line = Line(process, api, there, http)
        task = asyncio.create_task(process.run(stop))
        seen = line.metrics_api
        await line.until(lambda: not wait or task.done() or (seen.server.port and seen.projection.is_complete))
        try:
            yield line
        finally:
            stop.set()
            await task


def certificate(folder: Path) -> dict[str, Any]:
    """Our certificate, in files."""
    own = Authority().issue(NAME)
    (folder / "tls.crt").write_bytes(own.certificate)
    (folder / "tls.key").write_bytes(own.key)
    return {"certificate": str(folder / "tls.crt"), "key": str(folder / "tls.key")}


# ---- access ---------------------------------------------------------------------------------------------------------


async def test_the_front_proxy_gets_the_objects_that_its_user_may_read(tmp_path: Path) -> None:
    async with serving(tmp_path) as line:
        status, body = await line.ask(f"{ROOT}/gpuinfos")
        assert (status, [item["metadata"]["name"] for item in body["items"]]) == (200, ["n1"])
        assert line.there.reviews[0]["resourceAttributes"]["resource"] == "gpuinfos"
        status, body = await line.ask(f"{ROOT}/namespaces/default/podresources/web")
        assert (status, body["kind"]) == (200, "PodResource")
        status, body = await line.ask(f"{ROOT}/podresources", x_remote_user="joe")
        assert (status, body["kind"], body["reason"]) == (403, "Status", "Forbidden")


@pytest.mark.parametrize("caller", ["", "another-client"], ids=["no-certificate", "another-name"])
async def test_all_others_get_401_without_an_access_review(tmp_path: Path, caller: str) -> None:
    async with serving(tmp_path, caller=caller) as line:
        for path in (f"{ROOT}/gpuinfos", "/apis", f"{ROOT}/schedule/filter", "/metrics"):
            status, body = await line.ask(path)
            assert (status, body["kind"], body["code"]) == (401, "Status", 401), path
        assert line.there.reviews == []
        async with line.http.get(line.url("/healthz")) as answer:
            assert await answer.text() == "ok"


async def test_a_certificate_of_another_ca_gets_no_connection(tmp_path: Path) -> None:
    async with serving(tmp_path, foreign_ca=True) as line:
        with pytest.raises(aiohttp.ClientError):
            await line.ask(f"{ROOT}/gpuinfos")


async def test_the_front_proxy_config_map_is_watched(tmp_path: Path) -> None:
    async with serving(tmp_path) as line:
        for broken in (
            WatchFailed("gone"),
            Undecodable("ConfigMap x", "no"),
            Change("MODIFIED", FrontProxyConfigMap()),
        ):
            line.there.maps.put_nowait(broken)
        line.there.maps.put_nowait(Change("MODIFIED", front(line.there.authority, '["another"]')))
        await line.until(lambda: line.there.maps.empty())
        assert (await line.ask(f"{ROOT}/gpuinfos"))[0] == 401, "on an existing connection, too"
        line.there.maps.put_nowait(Change("MODIFIED", front(line.there.authority)))
        await line.until(lambda: line.there.maps.empty())
        assert (await line.ask(f"{ROOT}/gpuinfos"))[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        pytest.param("DELETE", f"{ROOT}/gpuinfos/n1", 405, id="delete-is-not-allowed"),
        pytest.param("POST", f"{ROOT}/gpuinfos", 405, id="create-is-not-allowed"),
        pytest.param("GET", f"{ROOT}/gpus", 404, id="no-such-kind"),
        pytest.param("GET", f"{ROOT}/gpuinfos/n9", 404, id="no-such-object"),
        pytest.param("POST", f"{ROOT}/schedule/dance", 404, id="no-such-verb"),
        pytest.param("GET", f"{ROOT}/gpuinfos?watch=1&resourceVersion=5", 410, id="a-version-that-is-too-old"),
        pytest.param("GET", f"{ROOT}/gpuinfos?labelSelector=(", 400, id="an-invalid-selector"),
    ],
)
async def test_every_error_is_a_status(tmp_path: Path, method: str, path: str, code: int) -> None:
    async with serving(tmp_path) as line:
        status, body = await line.ask(path, method)
        assert (status, body["kind"], body["code"]) == (code, "Status", code)
        assert body["message"]


async def test_no_selector_is_parsed_for_a_forbidden_user(tmp_path: Path) -> None:
    async with serving(tmp_path) as line:
        assert (await line.ask(f"{ROOT}/podresources?labelSelector=(", x_remote_user="joe"))[0] == 403


async def test_selectors_work_over_http_too(tmp_path: Path) -> None:
    async with serving(tmp_path) as line:
        _, body = await line.ask(f"{ROOT}/podresources?fieldSelector=metadata.name!=web")
        assert body["items"] == []


async def test_right_after_the_start_no_partial_list_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster is synced, but the projection has not refreshed yet: an empty list would be wrong."""
    may_look, look = asyncio.Event(), Projection.refresh

    async def wait_and_look(projection: Projection) -> None:
        await may_look.wait()
        await look(projection)

    monkeypatch.setattr(Projection, "refresh", wait_and_look)
    async with serving(tmp_path, cluster(pods=tuple(held(f"web{n}", 1) for n in range(12))), wait=False) as line:
        await line.until(lambda: line.metrics_api.server.port and line.process.is_synced())
        status, body = await line.ask(f"{ROOT}/podresources")
        assert (status, body["reason"], body["details"]) == (503, "ServiceUnavailable", {"retryAfterSeconds": 1})
        may_look.set()
        await line.until(lambda: line.metrics_api.projection.is_complete)
        status, body = await line.ask(f"{ROOT}/podresources")
        assert (status, len(body["items"])) == (200, 12)


async def test_before_the_cluster_is_synced_no_list_is_served(tmp_path: Path) -> None:
    async with serving(tmp_path) as line:
        line.process._listed["pods"].clear()
        assert (await line.ask(f"{ROOT}/podresources"))[0] == 503
        line.process._listed["pods"].set()


# ---- verbs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", [ROOT, OLD_ROOT])
async def test_extender_verbs_need_the_right_to_create_schedules(tmp_path: Path, root: str) -> None:
    asks = pod(tile(8), name="asks", uid="uid-asks")
    async with serving(tmp_path, cluster(pods=(asks,))) as line:
        body = {"Pod": line.api.pods["default/asks"], "Nodes": None, "NodeNames": ["n1"]}
        status, answer = await line.ask(f"{root}/schedule/filter", "POST", body)
        assert (status, answer["NodeNames"], answer["Error"]) == (200, ["n1"], "")
        wanted = line.there.reviews[-1]["resourceAttributes"]
        assert (wanted["verb"], wanted["resource"], wanted["name"]) == ("create", "schedule", "filter")
        bind = {"PodName": "asks", "PodNamespace": "default", "PodUID": "uid-asks", "Node": "n1"}
        assert await line.ask(f"{root}/schedule/bind", "POST", bind) == (200, {"Error": ""})
        assert (await line.ask(f"{root}/schedule/filter", "POST", body, x_remote_user="joe"))[0] == 403


# ---- watches --------------------------------------------------------------------------------------------------------


async def test_a_watch_over_http_1_1_shows_a_pod_at_once_and_ends_when_we_stop(tmp_path: Path) -> None:
    async with serving(tmp_path) as line:
        await line.until(lambda: len(line.metrics_api.projection.pods))
        answer = await line.http.get(line.url(f"{ROOT}/podresources?watch=1"), headers=PROXY)
        assert json.loads(await answer.content.readline())["type"] == "ADDED"
        line.api.add_pod(held("later", 4, 1))
        async with asyncio.timeout(1):
            event = json.loads(await answer.content.readline())
        assert (event["type"], event["object"]["metadata"]["name"]) == ("ADDED", "later")
        stopping = asyncio.create_task(line.metrics_api.stop())
        assert await answer.content.read() == b"", "a clean end of the response"
        await stopping


async def test_a_watch_ends_when_leadership_is_lost_and_may_begin_again(tmp_path: Path) -> None:
    """A replica that is cut off has only stale data; the new leader has the present data."""
    async with serving(tmp_path) as line:
        await line.until(lambda: len(line.metrics_api.projection.pods))
        for _ in range(2):
            async with line.http.get(line.url(f"{ROOT}/podresources?watch=1"), headers=PROXY) as answer:
                assert json.loads(await answer.content.readline())["type"] == "ADDED"
                line.metrics_api.drain()
                async with asyncio.timeout(2):
                    assert await answer.content.read() == b""


async def test_a_watch_that_returns_to_a_former_leader_is_closed_again(tmp_path: Path) -> None:
    """The Service has no new leader yet, and never moves an open connection."""
    async with serving(tmp_path) as line:
        await line.until(lambda: len(line.metrics_api.projection.pods))
        line.process.tick(time.monotonic())
        line.process.leadership = leadership = RevocableLeadership()
        leadership.is_held = False
        for _ in range(3):
            async with line.http.get(line.url(f"{ROOT}/podresources?watch=1"), headers=PROXY) as answer:
                line.process.tick(time.monotonic())
                async with asyncio.timeout(2):
                    await answer.content.read()


async def test_watches_are_limited_per_user_and_in_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_limits, "MOST_PER_USER", 2)
    monkeypatch.setattr(watch_limits, "MOST", 3)
    path = f"{ROOT}/podresources?watch=1"
    async with serving(tmp_path) as line:
        line.there.allowed |= {"joe", "jim"}
        await line.until(lambda: len(line.metrics_api.projection.pods))
        watches = [await line.http.get(line.url(path), headers=PROXY) for _ in range(2)]
        for watch in watches:
            await watch.content.readline()
        status, body = await line.ask(path)
        assert (status, body["reason"], body["details"]) == (429, "TooManyRequests", {"retryAfterSeconds": 10})
        assert "'jane': the limit of 2 watches is reached" in body["message"]
        watches.append(await line.http.get(line.url(path), headers={**PROXY, "X-Remote-User": "joe"}))
        await watches[-1].content.readline()
        assert (await line.ask(path, x_remote_user="jim"))[0] == 429, "three in total"
        assert (await line.ask(f"{ROOT}/podresources"))[0] == 200, "lists are not limited"
        for watch in watches:
            watch.close()
        await line.until(lambda: len(line.metrics_api.server._watches) == 0)
        (again := await line.http.get(line.url(path), headers=PROXY)).close()
        assert again.status == 200


@pytest.mark.parametrize("caller", ["", "another-client"], ids=["no-certificate", "another-name"])
async def test_no_body_of_an_unauthenticated_client_is_read(tmp_path: Path, caller: str) -> None:
    async with serving(tmp_path, caller=caller) as line:
        issued = line.there.authority.issue(caller) if caller else None
        handlers, writer = await asyncio.open_connection("localhost", line.metrics_api.server.port, ssl=client(issued))
        writer.write(f"POST {ROOT}/schedule/filter HTTP/1.1\r\nHost: x\r\nContent-Length: 50000000\r\n\r\n".encode())
        head = await handlers.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 401 ")
        assert b"Connection: close" in head
        writer.close()


async def test_an_internal_error_is_a_status_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any) -> bytes:
        raise RuntimeError("a bug")

    async with serving(tmp_path) as line:
        monkeypatch.setattr(line.metrics_api.handlers, "get", crash)
        status, body = await line.ask(f"{ROOT}/gpuinfos/n1")
        assert (status, body["kind"], body["reason"]) == (500, "Status", "InternalError")
        assert (await line.ask(f"{ROOT}/gpuinfos"))[0] == 200


# ---- discovery ------------------------------------------------------------------------------------------------------


async def test_discovery_is_open_to_every_authenticated_user(tmp_path: Path) -> None:
    async with serving(tmp_path) as line:
        _, groups = await line.ask("/apis", x_remote_user="joe")
        assert [group["name"] for group in groups["groups"]] == ["metrics.nvidia.com", "nvidia-gpu-scheduler"]
        _, resources = await line.ask(ROOT, x_remote_user="joe")
        listed = {(resource["name"], resource["kind"], resource["namespaced"]) for resource in resources["resources"]}
        assert listed == {("gpuinfos", "GpuInfo", False), ("podresources", "PodResource", True)}
        assert all(resource["verbs"] == ["get", "list", "watch"] for resource in resources["resources"])
        assert line.there.reviews == []


def test_aggregated_discovery() -> None:
    accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
    document = discovery.document("/apis", accept)
    assert document is not None
    assert document.content_type == accept
    body = json.loads(document.body)
    assert body["apiVersion"] == "apidiscovery.k8s.io/v2"
    (version,) = body["items"][0]["versions"]
    assert [(resource["resource"], resource["scope"]) for resource in version["resources"]] == [
        ("gpuinfos", "Cluster"),
        ("podresources", "Namespaced"),
    ]


@pytest.mark.parametrize("path", ["/openapi/v2", f"/openapi/v3{ROOT}", f"/openapi/v3{OLD_ROOT}"])
def test_open_api_has_no_dangling_reference(path: str) -> None:
    document = discovery.document(path, "")
    assert document is not None
    body = json.loads(document.body)
    known = body.get("definitions") or body["components"]["schemas"]
    text = document.body.decode()
    for reference in re.findall(r'"\$ref":"#/(?:definitions|components/schemas)/([^"]+)"', text):
        assert reference in known
    assert body["paths"]


def test_every_open_api_document_is_named_in_the_index() -> None:
    document = discovery.document("/openapi/v3", "")
    assert document is not None
    for name, place in json.loads(document.body)["paths"].items():
        assert discovery.document(f"/openapi/v3/{name}", "") is not None
        assert "?hash=" in place["serverRelativeURL"]


# ---- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        pytest.param({"listen": "nowhere"}, "`metrics_api.listen` is 'nowhere'; write HOST:PORT", id="no-port"),
        pytest.param({"listen": "0.0.0.0:1", "certificate": "a"}, "go together", id="a-certificate-without-its-key"),
    ],
)
def test_invalid_settings(settings: dict[str, Any], hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        checked(Settings(metrics_api=MetricsApiSettings(**settings)))


def test_a_cluster_in_memory_has_no_api_server_in_front() -> None:
    settings = Settings(metrics_api=MetricsApiSettings(listen="127.0.0.1:0"))
    with pytest.raises(InputError, match="needs an API server in front"):
        SchedulerApp(ScriptedApi(), settings, Metrics())


async def test_an_address_in_use_is_an_error(tmp_path: Path) -> None:
    async with serving(tmp_path) as line:
        taken = MetricsApiSettings(listen=f"127.0.0.1:{line.metrics_api.server.port}", **certificate(tmp_path))
        there = ApiServer(line.there.authority)
        settings = Settings(listen="127.0.0.1:0", metrics_api=taken)
        process = SchedulerApp(cluster(), settings, Metrics(), aggregated=there)
        with pytest.raises(InputError, match=r"set another `metrics_api.listen`"):
            await process.run(asyncio.Event())
