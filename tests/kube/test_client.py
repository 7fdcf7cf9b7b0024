"""The client against a scripted API server: its requests, and the result of every kind of response."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import orjson
import pytest

from gputile.dialects.kube_objects import Pod
from gputile.kube.api import (
    Api,
    ApiRejected,
    Binding,
    Bookmark,
    Change,
    KubeEvent,
    LeaseRecord,
    LeaseRenewal,
    OutcomeUnknown,
    Snapshot,
    WatchFailed,
    WatchUpdate,
)
from gputile.kube.auth import ClusterAccess, ServerTrust
from gputile.kube.client import Client, ClientSettings
from gputile.kube.credentials import TokenFile
from tests.kube.certificates import Authority
from tests.kube.server import Answer, Server, fails, hangs, line, listing, pod, resets, responds, streams

pytestmark = pytest.mark.asyncio

DONE = responds(201, {"kind": "Status", "status": "Success"})
BINDING = Binding(
    namespace="ns", name="p", uid="u1", node="n1", annotations={"gputile.io/grant": "{}"}, labels={"l": "v"}
)
SETTINGS = ClientSettings(page=2)
SOON = 0.03  # seconds, if no response will arrive; other timeouts are long, for a busy machine


@asynccontextmanager
async def serving(*script: Answer, settings: ClientSettings = SETTINGS) -> AsyncGenerator[tuple[Client, Server], None]:
    async with Server(*script) as server:
        client = Client(
            ClusterAccess(server.url), settings, instance="pod-0", wall=lambda: 1_700_000_000.9, pause=no_pause
        )
        try:
            yield client, server
        finally:
            await client.close()


async def no_pause(_: float) -> None:
    pass


def as_api(client: Client) -> Api:
    """A `Client` is an `Api`; mypy checks it."""
    return client


# ---- results of responses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        pytest.param(fails(409, "Conflict", "pod is already assigned"), 409, "already assigned", id="conflict"),
        pytest.param(fails(404, "NotFound", "pods p not found"), 404, "not found", id="not-found"),
        pytest.param(fails(403, "Forbidden", "not yours"), 403, "not yours", id="forbidden"),
        pytest.param(fails(408, "Timeout", "too slow"), 408, "too slow", id="request-timeout"),
        pytest.param(responds(413, b"<html>large</html>"), 413, "<html>large", id="a-proxy's-page"),
        pytest.param(responds(400, b""), 400, "HTTP 400", id="an-empty-body"),
        pytest.param(responds(422, [1]), 422, "[1]", id="JSON-that-is-no-Status"),
    ],
)
async def test_a_4xx_is_api_rejected(answer: Answer, status: int, words: str) -> None:
    async with serving(answer) as (client, server):
        with pytest.raises(ApiRejected, match="POST /api/v1/namespaces/ns/pods/p/binding") as caught:
            await client.bind(BINDING, 5.0)
    assert caught.value.status == status
    assert words in str(caught.value)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("headers", "want"),
    [
        pytest.param({"Retry_After": "7"}, 7.0, id="seconds"),
        pytest.param({"Retry_After": "Wed, 21 Oct 2015 07:28:00 GMT"}, None, id="a-date-is-not-read"),
        pytest.param({"Retry_After": "-1"}, None, id="an-invalid-value-is-not-read"),
        pytest.param({}, None, id="none"),
    ],
)
async def test_retry_after_of_too_many_requests(headers: dict[str, str], want: float | None) -> None:
    async with serving(fails(429, "TooManyRequests", "slow down", **headers)) as (client, _):
        with pytest.raises(ApiRejected) as caught:
            await client.bind(BINDING, 5.0)
    assert (caught.value.status, caught.value.retry_after) == (429, want)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(fails(500, "InternalError", "etcd"), id="internal-error"),
        pytest.param(fails(504, "Timeout", "etcd"), id="gateway-timeout"),
        pytest.param(resets(), id="reset-before-the-response"),
        pytest.param(resets(b'{"kind": "Status"'), id="reset-in-the-middle-of-the-response"),
        pytest.param(responds(201, b'{"kind": "Sta'), id="half-a-response"),
        pytest.param(responds(200, b"<html>welcome</html>"), id="a-response-of-another-server"),
        pytest.param(responds(307, None, Location="/elsewhere"), id="a-redirect-is-not-followed"),
    ],
)
async def test_an_inconclusive_response_is_outcome_unknown(answer: Answer) -> None:
    async with serving(answer) as (client, server):
        with pytest.raises(OutcomeUnknown):
            await client.bind(BINDING, 5.0)
    assert len(server.requests) == 1  # one attempt, one write


async def test_a_timeout_is_outcome_unknown() -> None:
    async with serving(hangs()) as (client, _):
        with pytest.raises(OutcomeUnknown, match="timed out waiting for the response"):
            await client.bind(BINDING, SOON)


async def test_a_bind_is_never_retried_even_on_a_kept_connection() -> None:
    """A GET is retried if a kept connection is dead; a write must not be."""
    async with serving(DONE, resets(), DONE) as (client, server):
        await client.bind(BINDING, 5.0)
        with pytest.raises(OutcomeUnknown):
            await client.bind(BINDING, 5.0)
    assert len(server.requests) == 2


async def test_a_get_is_retried_when_a_kept_connection_is_dead() -> None:
    async with serving(DONE, resets(), responds(200, listing(pod("a")))) as (client, server):
        await client.bind(BINDING, 5.0)
        assert [item.name for item in await client.list_pods()] == ["a"]
    assert [request.method for request in server.requests] == ["POST", "GET", "GET"]


async def test_a_timeout_waiting_for_a_connection_is_api_rejected() -> None:
    async with serving(hangs(), settings=ClientSettings(connections=1)) as (client, server):
        first = asyncio.ensure_future(client.list_pods())
        while not server.requests:
            await asyncio.sleep(0.001)
        with pytest.raises(ApiRejected, match="cannot connect") as caught:
            await client.bind(BINDING, SOON)
        first.cancel()
        await asyncio.wait([first])
    assert (caught.value.status, caught.value.reason, len(server.requests)) == (0, "Unreachable", 1)


async def test_a_refused_connection_is_api_rejected() -> None:
    async with Server() as server:
        url = server.url
    client = Client(ClusterAccess(url))
    with pytest.raises(ApiRejected) as caught:
        await client.bind(BINDING, 5.0)
    await client.close()
    assert (caught.value.status, caught.value.reason) == (0, "Unreachable")


async def test_a_name_that_would_change_the_path_is_never_sent() -> None:
    async with serving(responds(404)) as (client, server):
        for name in ("..", "."):
            with pytest.raises(ApiRejected):
                await client.pod("ns", name)
        assert server.requests == []
        await client.pod("ns", "a/../b?x")
        assert server.requests[0].line == "GET /api/v1/namespaces/ns/pods/a%2F..%2Fb%3Fx"


# ---- credentials ----------------------------------------------------------------------------------------------------


def authorizations(server: Server) -> list[str]:
    return [request.headers.get("Authorization", "") for request in server.requests]


async def test_a_401_is_retried_once_with_a_new_token(tmp_path: Any) -> None:
    token = tmp_path / "token"
    token.write_text("old")
    async with Server(DONE, fails(401, "Unauthorized"), DONE) as server:
        client = Client(ClusterAccess(server.url, TokenFile(token)))
        await client.bind(BINDING, 5.0)
        token.write_text("new\n")
        await client.bind(BINDING, 5.0)
        await client.close()
    assert authorizations(server) == ["Bearer old", "Bearer old", "Bearer new"]


async def test_a_second_401_is_final() -> None:
    async with serving(fails(401, "Unauthorized", "unknown token"), fails(401, "Unauthorized", "unknown token")) as (
        client,
        server,
    ):
        with pytest.raises(ApiRejected, match="unknown token"):
            await client.list_pods()
    assert len(server.requests) == 2


async def test_without_credentials_nothing_is_sent(tmp_path: Any) -> None:
    async with Server() as server:
        client = Client(ClusterAccess(server.url, TokenFile(tmp_path / "absent")))
        with pytest.raises(ApiRejected, match="no credentials") as caught:
            await client.bind(BINDING, 5.0)
        await client.close()
    assert (caught.value.status, server.requests) == (401, [])


async def test_a_token_that_could_inject_a_header_is_never_sent(tmp_path: Any) -> None:
    token = tmp_path / "token"
    token.write_text("a\r\nX-Remote-User: admin")
    async with Server(DONE) as server:
        client = Client(ClusterAccess(server.url, TokenFile(token)))
        with pytest.raises(ApiRejected, match="no credentials") as caught:
            await client.bind(BINDING, 5.0)
        await client.close()
    assert (caught.value.status, server.requests) == (401, [])
    assert "admin" not in str(caught.value), "no secret is ever part of an error"


async def test_tls_server_name_and_client_certificate() -> None:
    authority = Authority()
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cadata=authority.pem.decode())
    tls.verify_mode = ssl.CERT_REQUIRED
    authority.issue("api.internal").load_into(tls)
    trust = ServerTrust(tls=True, authority=authority.pem)
    me = authority.issue("gputile").pem
    async with Server(responds(200, listing(pod("a"))), tls=tls) as server:
        known = Client(ClusterAccess(server.url, trust=trust, certificate=me, server_name="api.internal"))
        unknown = Client(ClusterAccess(server.url, trust=trust, certificate=me))
        assert [item.name for item in await known.list_pods()] == ["a"]
        with pytest.raises(ApiRejected, match="certificate") as caught:
            await unknown.list_pods()
        await known.close()
        await unknown.close()
    assert caught.value.reason == "Unreachable"


async def test_the_proxy_is_used() -> None:
    async with Server(responds(200, listing(pod("a")))) as proxy:
        client = Client(ClusterAccess("http://api.invalid", proxy=proxy.url))
        assert [item.name for item in await client.list_pods()] == ["a"]
        await client.close()
    assert proxy.requests[0].headers["Host"] == "api.invalid"


# ---- requests -------------------------------------------------------------------------------------------------------

POD = "/api/v1/namespaces/ns/pods/p"
MERGE = "application/merge-patch+json"
Call = Callable[[Client], Awaitable[object]]


@pytest.mark.parametrize(
    ("call", "line_", "kind", "body"),
    [
        pytest.param(
            lambda client: client.bind(BINDING, 5.0),
            f"POST {POD}/binding",
            "application/json",
            {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {
                    "name": "p",
                    "namespace": "ns",
                    "uid": "u1",
                    "annotations": {"gputile.io/grant": "{}"},
                    "labels": {"l": "v"},
                },
                "target": {"apiVersion": "v1", "kind": "Node", "name": "n1"},
            },
            id="bind",
        ),
        pytest.param(
            lambda client: client.patch_pod("ns", "p", "u1", {"a": "1", "b": None}, {"l": None}),
            f"PATCH {POD}/status",
            MERGE,
            {"metadata": {"uid": "u1", "annotations": {"a": "1", "b": None}, "labels": {"l": None}}},
            id="patch-pod",
        ),
        pytest.param(
            lambda client: client.patch_pod("ns", "p", "u1", {"a": "1"}, {}),
            f"PATCH {POD}/status",
            MERGE,
            {"metadata": {"uid": "u1", "annotations": {"a": "1"}}},
            id="patch-pod-omits-empty-fields",
        ),
        pytest.param(
            lambda client: client.label_pod("ns", "p", {"leader": "true", "old": None}),
            f"PATCH {POD}/status",
            MERGE,
            {"metadata": {"labels": {"leader": "true", "old": None}}},
            id="label-pod",
        ),
        pytest.param(
            lambda client: client.patch_pod("ns", "p", "u1", {"a": "1"}, {}, nominate="n1"),
            f"PATCH {POD}/status",
            "application/merge-patch+json",
            {"metadata": {"uid": "u1", "annotations": {"a": "1"}}, "status": {"nominatedNodeName": "n1"}},
            id="patch-with-a-nomination",
        ),
        pytest.param(
            lambda client: client.patch_pod("ns", "p", "u1", {"a": None}, {}, nominate=""),
            f"PATCH {POD}/status",
            "application/merge-patch+json",
            {"metadata": {"uid": "u1", "annotations": {"a": None}}, "status": {"nominatedNodeName": None}},
            id="patch-that-clears-a-nomination",
        ),
        pytest.param(
            lambda client: client.evict("ns", "p", "u1"),
            f"POST {POD}/eviction",
            "application/json",
            {
                "apiVersion": "policy/v1",
                "kind": "Eviction",
                "metadata": {"name": "p", "namespace": "ns"},
                "deleteOptions": {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": "u1"}},
            },
            id="evict",
        ),
    ],
)
async def test_the_requests_of_writes(call: Call, line_: str, kind: str, body: object) -> None:
    async with serving(DONE) as (client, server):
        await call(client)
    (request,) = server.requests
    assert (request.line, request.headers["Content-Type"], request.body) == (line_, kind, body)
    assert request.headers["User-Agent"].startswith("gputile/")
    assert request.query == {}


async def test_the_fields_of_an_event() -> None:
    note = KubeEvent(namespace="ns", pod="p", uid="u1", reason="Unschedulable", message="m" * 2000)
    async with serving(DONE) as (client, server):
        await client.note(note)
    (request,) = server.requests
    name = request.body["metadata"].pop("name")
    stem, _, tail = name.rpartition(".")
    assert (request.line, stem, len(tail), int(tail, 16) >= 0) == ("POST /api/v1/namespaces/ns/events", "p", 16, True)
    assert request.body == {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"namespace": "ns"},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": "ns", "name": "p", "uid": "u1"},
        "type": "Warning",
        "reason": "Unschedulable",
        "message": "m" * 1024,
        "action": "Scheduling",
        "source": {"component": "gputile-scheduler"},
        "reportingComponent": "gputile-scheduler",
        "reportingInstance": "pod-0",
        "firstTimestamp": "2023-11-14T22:13:20Z",
        "lastTimestamp": "2023-11-14T22:13:20Z",
        "count": 1,
    }


async def test_the_name_of_an_event_is_never_too_long() -> None:
    async with serving(DONE) as (client, server):
        await client.note(KubeEvent(namespace="ns", pod="p" * 253, uid="u1", reason="Unschedulable", message="m"))
    assert len(server.requests[0].body["metadata"]["name"]) == 253


# ---- reading --------------------------------------------------------------------------------------------------------


async def test_a_pod_is_read_by_a_quorum_read() -> None:
    async with serving(responds(200, pod("p", "5")), fails(404, "NotFound"), responds(200, b"[]")) as (client, server):
        live = await client.pod("ns", "p")
        assert isinstance(live, Pod)
        assert live.uid == "uid-p"
        assert await client.pod("ns", "p") is None
        with pytest.raises(OutcomeUnknown):
            await client.pod("ns", "p")
    assert [request.query for request in server.requests] == [{}, {}, {}]


async def test_all_pods_are_listed_page_by_page_and_again_when_a_page_expires() -> None:
    script = (
        responds(200, listing(pod("old"), pod("older"), more="c+1/=&")),
        fails(410, "Expired", "the continue token is too old"),
        responds(200, listing(pod("a"), pod("b", spec={"containers": 3}), pod("c"))),
    )
    async with serving(*script) as (client, server):
        assert [item.name for item in await client.list_pods()] == ["a", "c"]
    assert [request.query for request in server.requests] == [{"limit": "2"}, {"limit": "2", "continue": "c+1/=&"}, {}]


async def take(client: Client, count: int) -> list[WatchUpdate[Pod]]:
    async with aclosing(client.follow_pods()) as stream:
        return [await anext(stream) for _ in range(count)]


def shown(update: WatchUpdate[Pod]) -> str:
    match update:
        case Snapshot(items):
            return f"all: {' '.join(item.name for item in items)}"
        case Change(kind, item):
            return f"{kind} {item.name}"
        case Bookmark():
            return "alive"
        case WatchFailed():
            return "failed"
    return f"undecodable {update.what}"


LARGE = pod("large", "3", status={"phase": "Running", "message": "x" * (1 << 20)})
SMALL = line("ADDED", pod("a", "2"))
BOOKMARK = line("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": "9"}})
ERROR = line("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})
HERE = responds(200, listing(version="1"))


@pytest.mark.parametrize(
    ("script", "want", "last"),
    [
        pytest.param(
            [HERE, streams(SMALL[:20], SMALL[20:] + BOOKMARK, then="hang")],
            ["all: ", "alive", "ADDED a", "alive"],
            "1",
            id="lines-split-across-chunks",
        ),
        pytest.param(
            [HERE, streams(line("MODIFIED", LARGE) + SMALL)],
            ["all: ", "alive", "MODIFIED large", "ADDED a"],
            "1",
            id="a-line-of-a-mebibyte",
        ),
        pytest.param(
            [HERE, streams(SMALL), streams(BOOKMARK)],
            ["all: ", "alive", "ADDED a", "alive"],
            "2",
            id="a-watch-that-ends-is-resumed-from-its-version",
        ),
        pytest.param(
            [HERE, streams(SMALL, then="reset"), streams(BOOKMARK)],
            ["all: ", "alive", "ADDED a", "failed", "alive"],
            "2",
            id="a-watch-that-is-reset-is-resumed-too",
        ),
        pytest.param(
            [HERE, streams(SMALL, ERROR), responds(200, listing(pod("b"), version="20")), streams(BOOKMARK)],
            ["all: ", "alive", "ADDED a", "failed", "all: b", "alive"],
            "20",
            id="expired-as-an-event",
        ),
        pytest.param(
            [HERE, fails(410, "Expired"), responds(200, listing(pod("b"), version="20")), streams(BOOKMARK)],
            ["all: ", "failed", "all: b", "alive"],
            "20",
            id="expired-as-a-status",
        ),
        pytest.param(
            [HERE, fails(401, "Unauthorized"), streams(BOOKMARK)],
            ["all: ", "alive"],
            "1",
            id="a-watch-with-an-old-token-is-retried-at-once",
        ),
        pytest.param(
            [fails(500), fails(429, Retry_After="1"), resets(b"{"), HERE, fails(503), streams(BOOKMARK)],
            ["failed", "failed", "failed", "all: ", "failed", "alive"],
            "1",
            id="a-failing-server",
        ),
        pytest.param(
            [responds(200, listing(pod("a"), pod("b", spec=3))), streams(line("ADDED", pod("c", spec=3)), BOOKMARK)],
            ["undecodable Pod ns/b", "all: a", "alive", "undecodable Pod ns/c", "alive"],
            "10",
            id="undecodable-objects-among-valid-ones",
        ),
        pytest.param(
            [responds(200, listing(pod("a"), more="m")), resets(b"{"), HERE, streams(BOOKMARK)],
            ["failed", "all: ", "alive"],
            "1",
            id="a-list-that-breaks-midway-yields-nothing",
        ),
    ],
)
async def test_list_and_watch(script: list[Answer], want: list[str], last: str) -> None:
    async with serving(*script) as (client, server):
        assert [shown(update) for update in await take(client, len(want))] == want
    watches = [request.query["resourceVersion"] for request in server.requests if "watch" in request.query]
    assert watches[-1] == last


async def test_a_silent_watch_counts_as_dropped() -> None:
    async with serving(HERE, streams(then="hang"), settings=ClientSettings(watch_idle_timeout=SOON)) as (client, _):
        assert [shown(update) for update in await take(client, 3)] == ["all: ", "alive", "failed"]


async def test_closing_closes_the_connection() -> None:
    async with serving(HERE, streams(SMALL, then="hang")) as (client, server):
        await take(client, 2)
        await asyncio.wait_for(server.left.wait(), 5.0)


async def test_cancelling_closes_the_connection() -> None:
    async with serving(HERE, streams(SMALL, then="hang")) as (client, server):
        task = asyncio.ensure_future(take(client, 4))
        while len(server.requests) < 2:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await asyncio.wait_for(server.left.wait(), 5.0)


async def test_nodes_are_watched_too() -> None:
    node = {"metadata": {"name": "n1"}, "status": {"allocatable": {"cpu": "4"}}}
    async with serving(responds(200, listing(node))) as (client, server), aclosing(client.follow_nodes()) as stream:
        seen = await anext(stream)
    assert isinstance(seen, Snapshot)
    assert [item.name for item in seen.items] == ["n1"]
    assert server.requests[0].line == "GET /api/v1/nodes"


async def test_the_leases_of_a_namespace_are_watched_and_few_fields_decoded() -> None:
    spec = {"holderIdentity": "n1", "leaseDurationSeconds": 10, "renewTime": "now", "leaseTransitions": "odd"}
    leases = [{"metadata": {"name": "n1", "labels": 7}, "spec": spec}, {"metadata": {"name": "n2"}, "spec": None}]
    async with (
        serving(responds(200, listing(*leases))) as (client, server),
        aclosing(client.follow_leases("ns")) as stream,
    ):
        seen = await anext(stream)
    assert isinstance(seen, Snapshot)
    assert [(lease.name, lease.beat) for lease in seen.items] == [
        ("n1", LeaseRenewal("n1", 10, "now")),
        ("n2", LeaseRenewal()),
    ]
    assert server.requests[0].line == "GET /apis/coordination.k8s.io/v1/namespaces/ns/leases"


# ---- leases ---------------------------------------------------------------------------------------------------------

LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"
RECORD = LeaseRecord(holder_identity="a", lease_duration_seconds=6, lease_transitions=1)


def lease(version: str) -> dict[str, Any]:
    spec = {"holderIdentity": "a", "leaseDurationSeconds": 6, "leaseTransitions": 1}
    return {"kind": "Lease", "metadata": {"name": "gputile", "resourceVersion": version}, "spec": spec}


async def test_a_lease_is_read_created_and_written_with_its_version() -> None:
    script = (fails(404, "NotFound"), responds(201, lease("5")), responds(200, lease("6")), responds(200, lease("7")))
    async with serving(*script) as (client, server):
        leases = client.leases("kube-system", "gputile")
        assert await leases.read() is None
        assert await leases.create(RECORD) == "5"
        assert await leases.read() == (RECORD, "6")
        assert await leases.write(RECORD, "6") == "7"
    assert [request.line for request in server.requests] == [
        f"GET {LEASES}/gputile",
        f"POST {LEASES}",
        f"GET {LEASES}/gputile",
        f"PUT {LEASES}/gputile",
    ]
    assert server.requests[3].body["metadata"] == {
        "name": "gputile",
        "namespace": "kube-system",
        "resourceVersion": "6",
    }
    assert orjson.dumps(server.requests[3].body["spec"]).startswith(b'{"holderIdentity":"a","leaseDurationSeconds":6')


@pytest.mark.parametrize(
    ("answer", "timeout", "want"),
    [
        pytest.param(fails(409, "Conflict"), 5.0, ApiRejected, id="a-conflict"),
        pytest.param(hangs(), SOON, OutcomeUnknown, id="a-timeout"),
        pytest.param(responds(200, {"metadata": {}}), 5.0, OutcomeUnknown, id="a-response-that-is-no-Lease"),
    ],
)
async def test_a_failed_write_of_a_lease(answer: Answer, timeout: float, want: type[Exception]) -> None:
    async with serving(answer) as (client, _):
        with pytest.raises(want):
            await client.leases("kube-system", "gputile", timeout).write(RECORD, "6")
