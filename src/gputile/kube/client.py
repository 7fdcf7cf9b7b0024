"""The `Api` over HTTP: one connection pool, and one `request` that all calls use.

A 4xx is `ApiRejected`: nothing was written. A 5xx, a timeout, a reset or an undecodable response is `OutcomeUnknown`:
the write may have happened. A connection that could not be opened is `ApiRejected` too. Only a 401 is retried, once,
with new credentials; and a GET, once, if a kept connection was dead. No other request must be retried here. Make a
`Client` inside the running loop, and `close` it.
"""

import asyncio
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import closing
from datetime import UTC, datetime
from typing import TypeVar
from urllib.parse import quote, urlencode

import msgspec
import orjson

from gputile import __version__
from gputile.dialects.kube_objects import NodeObject, Pod
from gputile.http.client import ConnectionBroken, ConnectionPool, HttpAnswer, NotSent, header
from gputile.kube.api import (
    AgentLease,
    ApiRejected,
    Binding,
    Json,
    KubeEvent,
    Leases,
    OutcomeUnknown,
    WatchUpdate,
)
from gputile.kube.auth import ClusterAccess
from gputile.kube.disruption_budgets import DisruptionBudget, DisruptionBudgetList
from gputile.kube.leader_election import ApiLeases
from gputile.kube.quota_config_maps import QuotaConfigMap
from gputile.kube.watch import STATUS, UNREADABLE, ApiFeed, ApiStatus, Pause, follow
from gputile.model.decode_errors import decode_problem
from gputile.model.errors import InputError

T = TypeVar("T")
MERGE, STRATEGIC = "application/merge-patch+json", "application/strategic-merge-patch+json"
BUDGETS = "/apis/policy/v1/poddisruptionbudgets"
LONGEST_NAME, LONGEST_MESSAGE = 253, 1024  # of an Event
HEADERS = (
    header("User-Agent", f"gputile/{__version__}")
    + header("Accept", "application/json")
    + header("Accept-Encoding", "identity")  # the client does not decompress
)
KINDS = {kind: header("Content-Type", kind) for kind in ("application/json", MERGE, STRATEGIC)}
WATCH_MARGIN = 30.0  # seconds that a watch may last beyond its own timeout


class ClientSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Connections and timeouts of requests to the API server."""

    connections: int = 100
    """Concurrent connections. Five are watches; each bind in flight needs one."""

    request_timeout: float = 10.0
    """Seconds for one request, unless the caller sets another timeout."""

    page: int = 250
    """Objects per page of a list, at most; fewer if they are large."""

    watch_timeout: int = 300
    """Seconds after which the API server may end a watch. To resume costs one request."""

    watch_idle_timeout: float = 90.0
    """Seconds without a byte after which a watch counts as dropped. Bookmarks arrive about once a minute."""


class Client:
    """The client of a real API server; it implements `Api`."""

    def __init__(
        self,
        access: ClusterAccess,
        settings: ClientSettings | None = None,
        *,
        component: str = "gputile-scheduler",
        instance: str = "",
        wall: Callable[[], float] = time.time,
        pause: Pause = asyncio.sleep,
    ) -> None:
        self._access, self._settings = access, settings or ClientSettings()
        self._component, self._instance, self._wall, self._pause = component, instance, wall, pause
        self._pool = ConnectionPool(
            access.server,
            connections=self._settings.connections,
            server_name=access.server_name,
            proxy=access.proxy,
        )
        self._authorization: str | None = None
        self._headers = HEADERS  # with the Authorization header
        self._pods = self.feed("/api/v1/pods", "Pod", Pod)
        self._nodes = self.feed("/api/v1/nodes", "Node", NodeObject)

    def feed(self, path: str, kind: str, item: type[T], **selector: str) -> ApiFeed[T]:
        """A resource to list and watch, such as `feed(path, "Pod", Pod, fieldSelector="spec.nodeName=a")`."""
        page, watch_timeout = self._settings.page, self._settings.watch_timeout
        return ApiFeed(self, path, kind, item, page=page, watch_timeout=watch_timeout, selector=selector)

    async def close(self) -> None:
        await self._pool.close()

    # ---- reading ----------------------------------------------------------------------------------------------------

    def follow_pods(self) -> AsyncGenerator[WatchUpdate[Pod], None]:
        return follow(self._pods, self._pause)

    def follow_nodes(self) -> AsyncGenerator[WatchUpdate[NodeObject], None]:
        return follow(self._nodes, self._pause)

    def follow_leases(self, namespace: str) -> AsyncGenerator[WatchUpdate[AgentLease], None]:
        path = f"/apis/coordination.k8s.io/v1/namespaces{path_of(namespace, 'leases')}"
        return follow(self.feed(path, "Lease", AgentLease), self._pause)

    def follow_config_map(self, namespace: str, name: str) -> AsyncGenerator[WatchUpdate[QuotaConfigMap], None]:
        """By its name, so that RBAC can be limited to this ConfigMap."""
        path = f"/api/v1/namespaces{path_of(namespace, 'configmaps')}"
        return follow(self.feed(path, "ConfigMap", QuotaConfigMap, fieldSelector=f"metadata.name={name}"), self._pause)

    async def pod(self, namespace: str, name: str) -> Pod | None:
        try:
            return _decoded(await self.request("GET", pod_path(namespace, name)), Pod)
        except ApiRejected as error:
            if error.status == 404:
                return None
            raise

    async def list_pods(self) -> tuple[Pod, ...]:
        """All pods that can be decoded."""
        return (await self._pods.list()).items

    async def budgets(self) -> tuple[DisruptionBudget, ...]:
        """Without pages: clusters have few PodDisruptionBudgets."""
        return _decoded(await self.request("GET", BUDGETS), DisruptionBudgetList).items

    # ---- writing ----------------------------------------------------------------------------------------------------

    async def bind(self, binding: Binding, timeout: float) -> None:
        meta = {
            "name": binding.name,
            "namespace": binding.namespace,
            "uid": binding.uid,
            "annotations": binding.annotations,
            "labels": binding.labels,
        }
        target = {"apiVersion": "v1", "kind": "Node", "name": binding.node}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": meta, "target": target}
        path = pod_path(binding.namespace, binding.name, "binding")
        _decoded(await self.request("POST", path, body=body, timeout=timeout), ApiStatus)

    async def patch_pod(
        self,
        namespace: str,
        name: str,
        uid: str,
        annotations: dict[str, str | None],
        labels: dict[str, str | None],
        *,
        version: str | None = None,
        nominate: str | None = None,
        timeout: float | None = None,
    ) -> None:
        """Through pods/status, which allows to write metadata without the right to update pods."""
        meta: Json = {"uid": uid}
        if annotations:
            meta["annotations"] = annotations
        if labels:
            meta["labels"] = labels
        if version:
            meta["resourceVersion"] = version
        body: Json = {"metadata": meta}
        if nominate is not None:
            body["status"] = {"nominatedNodeName": nominate or None}
        path = pod_path(namespace, name, "status")
        await self.request("PATCH", path, body=body, content_type=MERGE, timeout=timeout)

    async def label_pod(self, namespace: str, name: str, labels: dict[str, str | None]) -> None:
        """Set (or with None remove) labels of gputile's own pod."""
        body = {"metadata": {"labels": labels}}
        await self.request("PATCH", pod_path(namespace, name, "status"), body=body, content_type=MERGE)

    async def annotate_config_map(self, namespace: str, name: str, uid: str, annotations: dict[str, str]) -> None:
        body = {"metadata": {"uid": uid, "annotations": annotations}}
        path = f"/api/v1/namespaces{path_of(namespace, 'configmaps', name)}"
        await self.request("PATCH", path, body=body, content_type=MERGE)

    async def evict(self, namespace: str, name: str, uid: str, *, timeout: float | None = None) -> None:
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        meta = {"name": name, "namespace": namespace}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta, "deleteOptions": options}
        await self.request("POST", pod_path(namespace, name, "eviction"), body=body, timeout=timeout)

    async def note(self, note: KubeEvent) -> None:
        now = datetime.fromtimestamp(self._wall(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        tail = f".{secrets.token_hex(8)}"
        about = {"apiVersion": "v1", "kind": note.about, "namespace": note.namespace, "name": note.pod, "uid": note.uid}
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": note.pod[: LONGEST_NAME - len(tail)] + tail, "namespace": note.namespace},
            "involvedObject": about,
            "type": note.kind,
            "reason": note.reason,
            "message": note.message[:LONGEST_MESSAGE],
            "action": "Scheduling",
            "source": {"component": self._component},
            "reportingComponent": self._component,
            "reportingInstance": self._instance,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        await self.request("POST", path_of("api", "v1", "namespaces", note.namespace, "events"), body=body)

    def leases(self, namespace: str, name: str, timeout: float = 2.0) -> Leases:
        """One Lease. The timeout is short: a leader that cannot renew in time loses leadership."""
        return ApiLeases(self, namespace, name, timeout)

    # ---- HTTP -------------------------------------------------------------------------------------------------------

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
        timeout: float | None = None,
    ) -> bytes:
        """Return the body of a 2xx response; all others raise."""
        target = f"{path}?{urlencode(params)}" if params else path
        data = b"" if body is None else orjson.dumps(body)
        content_header = b"" if body is None else KINDS[content_type]
        limit = timeout or self._settings.request_timeout
        for may_retry in (True, False):
            credentials = await self._authorize(method, path)
            try:
                answer = await self._pool.request(
                    method, target, self._headers + content_header, data, tls=self._access.ssl, timeout=limit
                )
            except (NotSent, ConnectionBroken, TimeoutError) as error:
                raise self._api_error(f"{method} {path}", error) from error
            if answer.status == 401:
                self._access.rejected(credentials)
                if may_retry:
                    continue
            return _content(f"{method} {path}", answer)
        raise AssertionError("the second response is final")

    async def stream(self, path: str, params: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """A 200 response in pieces as they arrive, after an empty piece for its head; all other responses raise."""
        settings, target = self._settings, f"{path}?{urlencode(params)}"
        for may_retry in (True, False):
            credentials = await self._authorize("GET", path)
            try:
                opened = await self._pool.open(
                    target,
                    self._headers,
                    tls=self._access.ssl,
                    connect=settings.request_timeout,
                    silence=settings.watch_idle_timeout,
                    timeout=settings.watch_timeout + WATCH_MARGIN,
                )
                with closing(opened) as answer:
                    if answer.status == 401:
                        self._access.rejected(credentials)
                        if may_retry:
                            continue
                    if answer.status != 200:
                        _content(f"GET {path}", HttpAnswer(answer.status, answer.headers, await answer.read()))
                    yield b""  # the watch is accepted; on a quiet cluster the first event may take a minute
                    async for piece in answer:
                        yield piece
                    return
            except (NotSent, ConnectionBroken, TimeoutError) as error:
                raise self._api_error(f"GET {path}", error) from error

    async def _authorize(self, method: str, path: str) -> dict[str, str]:
        """Load the credentials into `_headers`, and return them."""
        try:
            credentials = await self._access.headers()
            if (authorization := credentials.get("Authorization")) != self._authorization:
                line = header("Authorization", authorization) if authorization else b""
                self._headers, self._authorization = HEADERS + line, authorization
        except (InputError, NotSent) as error:
            reason = f"{method} {path}: not sent, no credentials: {error}"
            raise ApiRejected(401, "Unauthorized", reason) from error
        return credentials

    def _api_error(self, request: str, error: Exception) -> ApiRejected | OutcomeUnknown:
        """Translate an error of the connection."""
        if isinstance(error, NotSent):
            return ApiRejected(0, "Unreachable", f"{request}: cannot connect to {self._access.server}: {error}")
        if isinstance(error, TimeoutError):
            return OutcomeUnknown(f"{request}: timed out waiting for the response")
        return OutcomeUnknown(f"{request}: connection lost before the response was complete: {error}")


# ---- paths and responses --------------------------------------------------------------------------------------------


def path_of(*parts: str) -> str:
    """A URL path of names; a name that would change the path is rejected before the request is sent."""
    for part in parts:
        if part in ("", ".", ".."):
            raise ApiRejected(0, "Invalid", f"{part!r}: not a valid object name; the request was not sent")
    return "".join([f"/{part if PLAIN(part) else quote(part, safe='')}" for part in parts])


PLAIN = re.compile(r"[A-Za-z0-9._~-]+").fullmatch  # nearly all names match; `quote` takes four times as long


def pod_path(namespace: str, name: str, *sub: str) -> str:
    return f"/api/v1/namespaces{path_of(namespace, 'pods', name, *sub)}"


def _decoded(content: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except UNREADABLE as error:
        raise OutcomeUnknown(f"the API server's response cannot be decoded: {decode_problem(error)}") from error


def _content(request: str, answer: HttpAnswer) -> bytes:
    """The body of a 2xx response; any other raises with the message of its Status."""
    if 200 <= answer.status < 300:
        return answer.body
    status = _status(answer.body)
    message = f"{request}: HTTP {answer.status}: {status.message or status.reason or '(no message)'}"
    if 400 <= answer.status < 500:
        after = answer.headers.get(b"retry-after", b"")
        wait = float(after) if after.isdigit() else None
        raise ApiRejected(answer.status, status.reason or "", message, retry_after=wait)
    raise OutcomeUnknown(message)


def _status(content: bytes) -> ApiStatus:
    try:
        return STATUS.decode(content)
    except UNREADABLE:
        return ApiStatus(message=content[:300].decode(errors="replace").strip())
