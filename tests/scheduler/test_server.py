"""The extender over HTTP: every path, both node forms, TLS, limits; and a verb always answers 200 with a reason."""

import asyncio
import gzip
import io
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from gputile import __version__
from gputile.dialects.settings import DialectSettings
from gputile.kube.api import Json
from gputile.ledger.ledger import AllocationState
from gputile.scheduler.binding.binder import NOT_LEADER
from gputile.scheduler.extender.server import ExtenderServer, routes, tls_context
from gputile.scheduler.settings import TlsSettings
from gputile.testing.builders import node
from tests.kube.certificates import Authority
from tests.scheduler.rig import MEMORY, Rig, tile

VERBS = ("filter", "prioritize", "bind", "preempt", "filter-dryrun", "steer")


class Probes:
    synced = True
    why = ""

    def is_synced(self) -> bool:
        return self.synced

    def why_not_ready(self) -> str:
        return self.why


class Line:
    """A server on a free local port, and a client."""

    def __init__(self, rig: Rig, server: ExtenderServer, http: aiohttp.ClientSession, probes: Probes) -> None:
        self.rig, self.server, self.http, self.probes = rig, server, http, probes
        self.scheme = "http"

    def url(self, path: str) -> str:
        return f"{self.scheme}://localhost:{self.server.port}{path}"

    async def post(self, path: str, body: Any, **more: Any) -> Any:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.url(path), data=io.BytesIO(data), **more) as answer:
            assert (answer.status, answer.content_type) == (200, "application/json")
            return json.loads(await answer.read())

    async def get(self, path: str, method: str = "GET", **more: Any) -> tuple[int, str]:
        async with self.http.request(method, self.url(path), **more) as answer:
            return answer.status, await answer.text()


def rig(**settings: Any) -> Rig:
    running = Rig(node("n1").cards(2, size=16), node("n2").cards(2, size=16), listen="127.0.0.1:0", **settings)
    running.arrive(tile(8))
    return running


@asynccontextmanager
async def serving(r: Rig | None = None, client: ssl.SSLContext | bool = True) -> AsyncIterator[Line]:
    r, probes = r or rig(), Probes()
    free_by_card: Any = {"settings": r.settings, "metrics": r.metrics, "state": probes, "leads": lambda: r.leading}
    server = ExtenderServer(r.filter_service, r.preemptor, r.steering, r.binder, r.cluster_state, **free_by_card)
    await server.start()
    connector = aiohttp.TCPConnector(ssl=client)
    try:
        async with aiohttp.ClientSession(connector=connector) as http:
            yield Line(r, server, http, probes)
    finally:
        await server.stop()


def bind_body(name: str = "web-0", to: str = "n1") -> Json:
    return {"PodName": name, "PodNamespace": "default", "PodUID": f"uid-{name}", "Node": to}


# ---- paths ----------------------------------------------------------------------------------------------------------

PATHS = {
    "filter": [
        "/gpushare-scheduler/filter",
        "/scheduler/filter",
        "/scheduler/predicates",
        "/apis/metrics.nvidia.com/v1alpha1/schedule/filter",
        "/apis/nvidia-gpu-scheduler/v1/schedule/filter",
        "/filter",
        "/gputile/filter",
    ],
    "prioritize": [
        "/scheduler/priorities",
        "/scheduler/prioritize",
        "/apis/metrics.nvidia.com/v1alpha1/schedule/prioritize",
        "/apis/nvidia-gpu-scheduler/v1/schedule/prioritize",
        "/gputile/prioritize",
    ],
    "bind": [
        "/gpushare-scheduler/bind",
        "/scheduler/bind",
        "/apis/metrics.nvidia.com/v1alpha1/schedule/bind",
        "/apis/nvidia-gpu-scheduler/v1/schedule/bind",
        "/bind",
        "/gputile/bind",
    ],
    "preempt": [
        "/scheduler/preempt",
        "/apis/metrics.nvidia.com/v1alpha1/schedule/preempt",
        "/apis/nvidia-gpu-scheduler/v1/schedule/preempt",
        "/gputile/preempt",
    ],
    "filter-dryrun": ["/scheduler/filter-dryrun", "/gputile/filter-dryrun"],
    "steer": ["/gputile/steer"],
}


def test_the_table_of_paths() -> None:
    """Repeated here, because existing configurations depend on it."""
    assert routes() == {path: verb for verb, paths in PATHS.items() for path in paths}


async def test_every_path_reaches_its_verb() -> None:
    async with serving() as line:
        for path in PATHS["filter"]:
            assert (await line.post(path, line.rig.body()))["NodeNames"], path
        for path in PATHS["filter-dryrun"]:
            assert (await line.post(path, line.rig.body()))["NodeNames"] == ["n1", "n2"], path
        for path in PATHS["prioritize"]:
            answer = await line.post(path, line.rig.body())
            assert [entry.keys() for entry in answer] == [{"Host", "Score"}] * 2, path
        for path in PATHS["preempt"]:
            offers = {"n1": {"Pods": [], "NumPDBViolations": 0}}
            body = {"Pod": line.rig.live(), "NodeNameToVictims": None, "NodeNameToMetaVictims": offers}
            assert await line.post(path, body) == {"NodeNameToMetaVictims": offers}, path
        for path in PATHS["steer"]:
            assert (await line.post(path, line.rig.body()))["NodeNames"] == ["n1", "n2"], path
        for path in PATHS["bind"]:
            assert await line.post(path, bind_body()) == {"Error": ""}, path
            line.rig.catch_up()


async def test_steering_over_http_steers_and_passes() -> None:
    """The pod with GPUs passes even while verbs are unavailable: this extender must not delay any pod."""
    async with serving(rig(steer_cpu_pods=True, policy="binpack")) as line:
        line.rig.arrive({"cpu": "4"}, name="plain")
        line.rig.arrive({"cpu": "60"}, name="large")
        assert len((await line.post("/gputile/steer", line.rig.body("large")))["NodeNames"]) == 2
        (full,) = (await line.post("/gputile/steer", line.rig.body("plain")))["NodeNames"]
        assert full == line.rig.node_of("large")
        line.rig.leading, line.probes.synced = False, False
        answer = await line.post("/gputile/steer", line.rig.body())
        assert (answer["NodeNames"], answer["Error"]) == (["n1", "n2"], "")
        assert line.rig.count("verbs_total", verb="steer", result="accepted") == 2
        assert line.rig.count("verbs_total", verb="steer", result="passed") == 1


async def test_a_slash_at_the_end_changes_nothing() -> None:
    async with serving() as line:
        assert (await line.post("/gputile/filter/", line.rig.body()))["NodeNames"] == ["n1", "n2"]


async def test_node_objects_are_answered_with_node_objects() -> None:
    async with serving() as line:
        answer = await line.post("/gputile/filter", line.rig.body(whole=True))
        assert answer["Nodes"]["items"] == list(line.rig.api.nodes.values())
        assert answer["NodeNames"] is None


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        pytest.param("GET", "/gputile/filter", 405, "use POST", id="a-verb-is-posted-to"),
        pytest.param("PUT", "/bind", 405, "use POST", id="and-not-put"),
        pytest.param("GET", "/nowhere", 404, "/nowhere not found", id="no-such-path"),
        pytest.param("POST", "/gputile/nothing", 404, "not found", id="no-such-verb"),
        pytest.param("GET", "/", 404, "/ not found", id="the-root"),
        pytest.param("GET", "/healthz", 200, "ok", id="alive"),
        pytest.param("GET", "/readyz", 200, "ok", id="ready"),
        pytest.param("GET", "/version", 200, __version__, id="version"),
    ],
)
async def test_pages(method: str, path: str, status: int, text: str) -> None:
    async with serving() as line:
        code, body = await line.get(path, method)
        assert code == status
        assert text in body


async def test_not_ready_says_why() -> None:
    async with serving() as line:
        line.probes.why = "not all pods have been seen yet"
        assert await line.get("/readyz") == (503, "not all pods have been seen yet")
        assert (await line.get("/healthz"))[0] == 200


# ---- bodies ---------------------------------------------------------------------------------------------------------

SHAPES = {
    "filter": {"Nodes", "NodeNames", "FailedNodes", "FailedAndUnresolvableNodes", "Error"},
    "filter-dryrun": {"Nodes", "NodeNames", "FailedNodes", "FailedAndUnresolvableNodes", "Error"},
    "steer": {"Nodes", "NodeNames", "FailedNodes", "FailedAndUnresolvableNodes", "Error"},
    "bind": {"Error"},
}


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"Pod":null}', b"\xff" * 10, b"[" * 100_000])
async def test_a_malformed_body_is_answered_with_its_reason_and_changes_nothing(body: bytes) -> None:
    async with serving() as line:
        for verb, keys in SHAPES.items():
            answer = await line.post(f"/gputile/{verb}", body)
            assert answer.keys() == keys
            assert answer["Error"]
            assert line.rig.count("verbs_total", verb=verb, result="malformed") == 1
        assert await line.post("/gputile/prioritize", body) == []
        assert await line.post("/gputile/preempt", body) == {"NodeNameToMetaVictims": {}}
        assert len(line.rig.ledger) == 0
        assert line.rig.api.calls == []


async def test_a_body_that_is_too_large() -> None:
    async with serving(rig(body_limit=1)) as line:
        answer = await line.post("/gputile/filter", b" " * (2**20 + 1))
        assert answer["Error"] == "the body is larger than 1 MiB; raise setting `body_limit`"
        assert (await line.post("/gputile/filter", line.rig.body() + b" " * 2**19))["Error"] == ""


async def test_a_body_in_pieces() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        body = line.rig.body()
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    async with serving() as line, line.http.post(line.url("/filter"), data=pieces()) as answer:
        assert json.loads(await answer.read())["NodeNames"] == ["n1", "n2"]


async def test_a_body_in_pieces_that_is_too_large() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 2**16

    async with serving(rig(body_limit=1)) as line, line.http.post(line.url("/filter"), data=pieces()) as answer:
        assert "larger than 1 MiB" in json.loads(await answer.read())["Error"]


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"Pod\r\n', id="chunks-cut-short"),
        pytest.param(b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", id="chunks-of-no-length"),
        pytest.param(b'Content-Length: 100\r\n\r\n{"Pod"', id="less-than-its-content-length"),
        pytest.param(b"Content-Length: -5\r\n\r\n{}", id="a-negative-length"),
        pytest.param(b"Content-Length: 5\r\nContent-Encoding: gzip\r\n\r\nabcde", id="a-false-gzip"),
    ],
)
async def test_a_client_that_disconnects_harms_no_other(sent: bytes) -> None:
    async with serving() as line:
        reader, writer = await asyncio.open_connection("127.0.0.1", line.server.port)
        writer.write(b"POST /gputile/filter HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + sent)
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        assert b" 500 " not in answer.split(b"\r\n")[0]
        assert (await line.get("/healthz"))[0] == 200
        assert len(line.rig.ledger) == 0


async def test_a_client_that_disconnects_is_not_logged_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """For example after a timeout of kube-scheduler."""
    async with serving() as line:
        _, writer = await asyncio.open_connection("127.0.0.1", line.server.port)
        writer.write(b'POST /gputile/filter HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"Pod"')
        await writer.drain()
        assert (await line.get("/healthz"))[0] == 200
        writer.close()
        await writer.wait_closed()
        assert (await line.get("/healthz"))[0] == 200
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_compressed_body_is_not_decompressed() -> None:
    """kube-scheduler never compresses, and a few compressed bytes can be a large body."""
    async with serving(rig(body_limit=1)) as line:
        answer = await line.post("/filter", gzip.compress(b" " * 2**22), headers={"Content-Encoding": "gzip"})
        assert "not a JSON object" in answer["Error"]


async def test_expect_100_continue_is_answered() -> None:
    """curl sends it with bodies of more than a megabyte."""
    async with serving() as line:
        answer = await line.post("/filter", line.rig.body(), expect100=True)
        assert answer["NodeNames"] == ["n1", "n2"]


# ---- when it may answer ---------------------------------------------------------------------------------------------


async def test_before_the_cluster_is_listed_nothing_is_decided() -> None:
    async with serving() as line:
        line.probes.synced = False
        for verb in ("filter", "filter-dryrun"):
            assert "has not seen the whole cluster" in (await line.post(f"/gputile/{verb}", line.rig.body()))["Error"]
        assert "has not seen the whole cluster" in (await line.post("/bind", bind_body()))["Error"]
        assert line.rig.state() is None


@pytest.mark.parametrize(("leads", "connection"), [(True, ""), (False, "close")])
async def test_a_replica_that_is_not_the_leader_closes_the_connection_so_that_the_next_try_reaches_the_leader(
    leads: bool, connection: str
) -> None:
    """A connection through a Service stays with its pod when the leader label moves."""
    async with serving() as line:
        line.rig.leading = leads
        async with line.http.post(line.url("/filter"), data=line.rig.body()) as answer:
            assert answer.headers.get("Connection", "") == connection


async def test_a_replica_that_is_not_the_leader_closes_all_connections_at_the_first_request() -> None:
    """kube-scheduler has several, and backs off longer after each error."""
    async with serving() as line:
        idle, writer = await asyncio.open_connection("127.0.0.1", line.server.port)
        assert (await line.post("/filter", line.rig.body()))["Error"] == ""
        line.rig.leading = False
        assert (await line.post("/filter", line.rig.body()))["Error"] == NOT_LEADER
        async with asyncio.timeout(2):
            assert await idle.read() == b""
        writer.close()


async def test_a_replica_that_is_not_the_leader_says_so_and_still_answers_dry_runs() -> None:
    async with serving() as line:
        line.rig.leading = False
        assert (await line.post("/filter", line.rig.body()))["Error"] == NOT_LEADER
        assert (await line.post("/bind", bind_body()))["Error"] == NOT_LEADER
        body = {"Pod": line.rig.live(), "NodeNameToMetaVictims": {"n1": {"Pods": []}}}
        assert await line.post("/gputile/preempt", body) == {"NodeNameToMetaVictims": {}}
        assert (await line.post("/gputile/filter-dryrun", line.rig.body()))["NodeNames"] == ["n1", "n2"]
        assert line.rig.state() is None


@pytest.mark.parametrize("why", ["not synced", "not leading"])
async def test_a_pod_without_gpus_passes_on_every_replica(why: str) -> None:
    async with serving() as line:
        line.probes.synced, line.rig.leading = why != "not synced", why != "not leading"
        line.rig.arrive({"cpu": 1}, name="plain")
        assert (await line.post("/filter", line.rig.body("plain")))["NodeNames"] == ["n1", "n2"]
        offers = {"n1": {"Pods": [{"UID": "x"}], "NumPDBViolations": 0}}
        body = {"Pod": line.rig.live("plain"), "NodeNameToMetaVictims": offers}
        assert await line.post("/gputile/preempt", body) == {"NodeNameToMetaVictims": offers}


async def test_many_more_candidates_than_nodes_in_the_cluster_are_rejected() -> None:
    async with serving() as line:
        body = {"Pod": line.rig.live(), "NodeNames": [f"n{n}" for n in range(10_009)]}
        for verb in ("filter", "filter-dryrun"):
            answer = await line.post(f"/gputile/{verb}", body)
            assert answer["Error"] == "10009 nodes in the request, but the cluster has 2; send only its nodes"
        assert await line.post("/gputile/prioritize", body) == []


async def test_a_bind_that_fails_is_200_with_its_reason() -> None:
    async with serving() as line:
        answer = await line.post("/bind", bind_body(to="n9"))
        assert "n9 is unknown to gputile" in answer["Error"]
        assert line.rig.count("verbs_total", verb="bind", result="error") == 1


async def test_a_client_that_disconnects_does_not_stop_its_bind() -> None:
    async with serving() as line:
        gate = line.rig.api.gates["bind"] = asyncio.Event()
        post = asyncio.create_task(line.post("/bind", bind_body()))
        async with asyncio.timeout(2):
            while not line.rig.api.bindings:
                await asyncio.sleep(0.001)
        post.cancel()
        await asyncio.gather(post, return_exceptions=True)
        await asyncio.sleep(0.005)
        gate.set()
        await line.rig.binder.finish()
        assert line.rig.state() is AllocationState.ASSUMED
        assert line.rig.live()["spec"]["nodeName"] == "n1"


async def test_stopping_answers_the_bind_in_flight() -> None:
    async with serving() as line:
        gate = line.rig.api.gates["bind"] = asyncio.Event()
        post = asyncio.create_task(line.post("/bind", bind_body()))
        async with asyncio.timeout(2):
            while not line.rig.api.bindings:
                await asyncio.sleep(0.001)
        stopping = asyncio.create_task(line.server.stop())
        await asyncio.sleep(0.005)
        gate.set()
        assert await post == {"Error": ""}
        await stopping


# ---- what the older families show -----------------------------------------------------------------------------------


async def test_inspect_answers_as_gpushare_does() -> None:
    r = Rig(node("b").cards(2, size=16384), node("a").card(size=8192), node("bare"), listen="127.0.0.1:0")
    for name, size in (("web-1", 2048), ("web-0", 4096)):
        r.arrive(tile(size), name=name)
        assert await r.bind(name, "b") == ""
    r.arrive(tile(1024), name="reserved")
    r.filter("reserved", ["a"])
    pods = [{"name": name, "namespace": "default", "usedGPU": used} for name, used in (("web-0", 4), ("web-1", 2))]
    b = {
        "name": "b",
        "totalGPU": 32,
        "usedGPU": 6,
        "devs": [
            {"id": 0, "totalGPU": 16, "usedGPU": 6, "pods": pods},
            {"id": 1, "totalGPU": 16, "usedGPU": 0, "pods": []},
        ],
    }
    a = {"name": "a", "totalGPU": 8, "usedGPU": 1, "devs": [{"id": 0, "totalGPU": 8, "usedGPU": 1, "pods": []}]}
    async with serving(r) as line:
        assert json.loads((await line.get("/gpushare-scheduler/inspect"))[1]) == {"nodes": [a, b]}
        assert json.loads((await line.get("/gpushare-scheduler/inspect/b"))[1]) == {"nodes": [b]}
        unknown = json.loads((await line.get("/gpushare-scheduler/inspect/zz"))[1])
        assert unknown == {"nodes": [], "error": "node zz is unknown to gputile"}


async def test_inspect_uses_gpushares_unit() -> None:
    r = Rig(node("a").card(size=8192), listen="127.0.0.1:0", dialects=DialectSettings(gpushare_unit="MiB"))
    async with serving(r) as line:
        assert json.loads((await line.get("/gpushare-scheduler/inspect"))[1])["nodes"][0]["totalGPU"] == 8192


async def test_status_answers_as_both_generations_of_nano_do() -> None:
    r = Rig(node("n1").cards(2, size=16), node("bare"), listen="127.0.0.1:0")
    r.arrive(tile(6, cores=30))
    assert await r.bind() == ""
    async with serving(r) as line:
        for method in ("POST", "GET"):
            assert json.loads((await line.get("/status", method))[1]) == {
                "n1": {
                    "Rater": {},
                    "Name": "n1",
                    "GPUs": [{"Percent": 70, "PercentTotal": 100}, {"Percent": 100, "PercentTotal": 100}],
                    "PlanCache": {},
                }
            }
        elastic = json.loads((await line.get("/scheduler/status"))[1])
        assert set(elastic) == {"elasticgpu.io/gpu-core", "elasticgpu.io/gpu-memory"}
        for document in elastic.values():
            assert json.loads(document) == {
                "n1": [
                    {"CoreAvailable": 70, "MemoryAvailable": 10, "CoreTotal": 100, "MemoryTotal": 16},
                    {"CoreAvailable": 100, "MemoryAvailable": 16, "CoreTotal": 100, "MemoryTotal": 16},
                ]
            }


async def test_metrics_have_the_names_that_the_docs_list() -> None:
    async with serving() as line:
        r = line.rig
        await line.post("/filter", r.body())
        await line.post("/bind", bind_body())
        r.arrive(tile(99), name="big")
        await line.post("/filter", r.body("big"))
        r.arrive({MEMORY: 1}, name="bad")
        await line.post("/filter", r.body("bad"))
        status, text = await line.get("/metrics")
        assert status == 200
        for line_ in (
            'gputile_verbs_total{result="accepted",verb="filter"} 1.0',
            'gputile_verbs_total{result="rejected",verb="filter"} 2.0',
            'gputile_verbs_total{result="accepted",verb="bind"} 1.0',
            'gputile_refusals_total{code="CardTooSmall"} 2.0',
            'gputile_bad_requests_total{code="NoDeviceResource"} 1.0',
            'gputile_reservations_total{outcome="bound"} 1.0',
            'gputile_binds_total{outcome="bound"} 1.0',
            "gputile_assumed_expired_total 0.0",
            "gputile_overcommits_total 0.0",
            "gputile_copied_grants_total 0.0",
            "gputile_adopted_pods_total 0.0",
            "gputile_nudges_total 0.0",
            "gputile_undecodable_objects_total 0.0",
        ):
            assert line_ in text.splitlines()
        for stage in ("read", "decide", "write"):
            assert f'gputile_verb_seconds_count{{stage="{stage}",verb="filter"}} 3.0' in text
        for name in ("ledger_pods", "watch_age_seconds", "leader", "synced", "nodes", "gpus", "watch_failures_total"):
            assert f"# TYPE gputile_{name.removesuffix('_total')}" in text


# ---- TLS ------------------------------------------------------------------------------------------------------------


def written(folder: Path, authority: Authority) -> TlsSettings:
    ours = authority.issue("localhost")
    for name, content in (("tls.crt", ours.certificate), ("tls.key", ours.key), ("ca.crt", authority.pem)):
        (folder / name).write_bytes(content)
    return TlsSettings(
        certificate=str(folder / "tls.crt"), key=str(folder / "tls.key"), client_ca=str(folder / "ca.crt")
    )


def client(authority: Authority, *, signed_by: Authority | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=authority.pem.decode())
    if signed_by is not None:
        signed_by.issue("kube-scheduler").load_into(context)
    return context


async def test_with_a_client_ca_verbs_need_a_certificate_and_probes_do_not(tmp_path: Path) -> None:
    authority = Authority()
    r = rig(tls=written(tmp_path, authority))
    async with serving(r, client(authority)) as line:
        line.scheme = "https"
        for path in ("/healthz", "/readyz", "/metrics", "/version"):
            assert (await line.get(path))[0] == 200
        closed = [*routes(), "/gpushare-scheduler/inspect", "/gpushare-scheduler/inspect/n1", "/status", "/nowhere"]
        for path in closed:
            status, text = await line.get(path, "POST", data=r.body())
            assert (status, text) == (
                403,
                "client certificate missing or not trusted; send one that the CA of `tls.client_ca` signed",
            )
        assert (await line.get("/scheduler/status"))[0] == 403
        assert len(r.ledger) == 0


async def test_with_a_certificate_of_that_ca_verbs_answer(tmp_path: Path) -> None:
    authority = Authority()
    async with serving(rig(tls=written(tmp_path, authority)), client(authority, signed_by=authority)) as line:
        line.scheme = "https"
        assert (await line.post("/filter", line.rig.body()))["NodeNames"] == ["n1", "n2"]


@pytest.mark.parametrize(
    ("names", "allowed"),
    [
        pytest.param((), True, id="no-names-every-certificate"),
        pytest.param(("kube-scheduler",), True, id="its-common-name"),
        pytest.param(("other", "system:kube-scheduler"), False, id="none-of-its-names"),
        pytest.param(("scheduler.example",), True, id="an-alternative-name"),
        pytest.param(("KUBE-SCHEDULER",), False, id="names-are-case-sensitive"),
    ],
)
async def test_certificates_that_may_call_the_verbs_can_be_limited_by_name(
    tmp_path: Path, names: tuple[str, ...], allowed: bool
) -> None:
    authority = Authority()
    tls = msgspec.structs.replace(written(tmp_path, authority), client_names=names)
    caller = ssl.create_default_context(cadata=authority.pem.decode())
    authority.issue("kube-scheduler", also=["scheduler.example"]).load_into(caller)
    r = rig(tls=tls)
    async with serving(r, caller) as line:
        line.scheme = "https"
        status, text = await line.get("/filter", "POST", data=r.body())
        assert status == (200 if allowed else 403)
        assert ("`tls.client_names`" in text) is not allowed
        assert (len(r.ledger) == 1) is allowed
        assert (await line.get("/metrics"))[0] == 200, "a client with any certificate may still read metrics"


async def test_with_a_client_ca_the_body_of_an_unknown_client_is_not_read(tmp_path: Path) -> None:
    """The answer arrives before the body is sent, and the connection is closed."""
    authority = Authority()
    async with serving(rig(tls=written(tmp_path, authority))) as line:
        reader, writer = await asyncio.open_connection("localhost", line.server.port, ssl=client(authority))
        writer.write(b"POST /gputile/filter HTTP/1.1\r\nHost: x\r\nContent-Length: 60000000\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 403 ")
        assert b"Connection: close" in head
        writer.close()


@pytest.mark.parametrize(
    ("verb", "path", "want"),
    [
        pytest.param("filter", "/gputile/filter", "Error", id="filter"),
        pytest.param("filter-dryrun", "/gputile/filter-dryrun", "Error", id="a-dry-run"),
        pytest.param("bind", "/gputile/bind", "Error", id="bind-which-is-asynchronous"),
        pytest.param("prioritize", "/gputile/prioritize", "", id="prioritize-which-has-no-error-field"),
    ],
)
async def test_a_verb_that_crashes_answers_and_the_next_is_answered(
    verb: str, path: str, want: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def crash(*_: Any, **__: Any) -> Any:
        raise RecursionError("a thousand containers")

    async with serving() as line:
        good = bind_body() if verb == "bind" else line.rig.body()
        for owner, name in (
            (line.rig.filter_service, verb.replace("filter-dryrun", "dry_run_in_turns")),
            (line.rig.binder, "bind"),
        ):
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, crash)
        answer = await line.post(path, good)
        assert "internal error of gputile" in answer[want] if want else answer == []
        monkeypatch.undo()
        again = await line.post(path, good)
        assert not (want and "failed" in again[want])
        assert "a thousand containers" in caplog.text


async def test_a_certificate_of_another_ca_gets_no_connection(tmp_path: Path) -> None:
    authority = Authority()
    async with serving(rig(tls=written(tmp_path, authority)), client(authority, signed_by=Authority())) as line:
        line.scheme = "https"
        with pytest.raises(aiohttp.ClientError):
            await line.post("/filter", line.rig.body())


async def test_without_a_client_ca_every_client_may_call(tmp_path: Path) -> None:
    authority = Authority()
    files = written(tmp_path, authority)
    open_to_all = TlsSettings(certificate=files.certificate, key=files.key)
    async with serving(rig(tls=open_to_all), client(authority)) as line:
        line.scheme = "https"
        assert (await line.post("/filter", line.rig.body()))["NodeNames"] == ["n1", "n2"]


async def test_a_renewed_certificate_is_used_for_new_connections(tmp_path: Path) -> None:
    old, new = Authority(), Authority()
    async with serving(
        rig(tls=TlsSettings(certificate=written(tmp_path, old).certificate, key=f"{tmp_path}/tls.key"))
    ) as line:
        line.scheme = "https"
        assert (await line.get("/healthz", ssl=client(old)))[0] == 200
        written(tmp_path, new)
        line.server.renew_certificate()
        async with aiohttp.ClientSession() as http, http.get(line.url("/healthz"), ssl=client(new)) as answer:
            assert answer.status == 200


async def test_without_tls_there_is_nothing_to_renew() -> None:
    assert tls_context(TlsSettings()) is None
    async with serving() as line:
        line.server.renew_certificate()
