"""A synchronous Kubernetes client for tests. It must not share code with gputile: tests compare gputile with it.

Threads may share one `Kube`; connections are reused. A kind is written as `"Pod"` or `"apps/v1/Deployment"`.
"""

import select
import socket
import ssl
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import msgspec
import yaml

from tests.e2e.certificates import Pair

Manifest = dict[str, Any]
Manifests = list[Manifest]  # in `Kube`, `list` is a verb
PATCHES = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "json": "application/json-patch+json",
    "apply": "application/apply-patch+yaml",
}
VERSIONS = {  # kinds that may be named without their group
    "Deployment": "apps/v1",
    "StatefulSet": "apps/v1",
    "ReplicaSet": "apps/v1",
    "DaemonSet": "apps/v1",
    "Job": "batch/v1",
    "Lease": "coordination.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
    "PriorityClass": "scheduling.k8s.io/v1",
    "Role": "rbac.authorization.k8s.io/v1",
    "RoleBinding": "rbac.authorization.k8s.io/v1",
    "ClusterRole": "rbac.authorization.k8s.io/v1",
    "ClusterRoleBinding": "rbac.authorization.k8s.io/v1",
    "APIService": "apiregistration.k8s.io/v1",
}
TIMEOUT = 30.0


class ApiError(Exception):
    """A 4xx or 5xx response of the API server, with its reason and message."""

    def __init__(self, status: int, reason: str, message: str, request: str) -> None:
        super().__init__(f"{request}: {status} {reason}: {message}")
        self.status, self.reason, self.message = status, reason, message


class Resource(msgspec.Struct, frozen=True):
    """The API path of one kind."""

    version: str
    plural: str
    namespaced: bool

    def path(self, namespace: str | None, *rest: str) -> str:
        root = f"/apis/{self.version}" if "/" in self.version else f"/api/{self.version}"
        inside = [f"namespaces/{namespace}"] if self.namespaced and namespace else []
        return "/".join([root, *inside, self.plural, *(word for word in rest if word)])


class Connections:
    """Idle connections to one server. A connection that the server closed meanwhile is dropped."""

    def __init__(self, server: str, context: ssl.SSLContext | None) -> None:
        self._at, self._context = urlsplit(server), context
        self._idle: list[HTTPConnection] = []
        self._lock = threading.Lock()

    def acquire(self) -> HTTPConnection:
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                if not _closed(connection):
                    return connection
                connection.close()
        return self.new(TIMEOUT)

    def new(self, timeout: float) -> HTTPConnection:
        host, port = self._at.hostname or "", self._at.port
        if self._context is None:
            return HTTPConnection(host, port, timeout=timeout)
        return HTTPSConnection(host, port, timeout=timeout, context=self._context)

    def release(self, connection: HTTPConnection) -> None:
        with self._lock:
            self._idle.append(connection)

    def close(self) -> None:
        with self._lock:
            while self._idle:
                self._idle.pop().close()


def _closed(connection: HTTPConnection) -> bool:
    """A readable idle connection was closed by the server."""
    sock: socket.socket | None = connection.sock
    return sock is None or bool(select.select([sock], [], [], 0)[0])


class Kube:
    """An API server as seen by one user."""

    def __init__(self, server: str, ca: Path | None = None, token: str = "", client: Pair | None = None) -> None:
        self.server, self.ca, self.token = server, ca, token
        context = _trust(ca, client) if server.startswith("https") else None
        self.connections = Connections(server, context)
        self._resources: dict[str, dict[str, Resource]] = {}

    def __enter__(self) -> "Kube":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.connections.close()

    def as_token(self, token: str) -> "Kube":
        """A client of the same server with another user's token."""
        return Kube(self.server, self.ca, token)

    # --- one request

    def request(self, method: str, path: str, body: Any = None, content: str = "application/json") -> Any:
        """Send and decode; `ApiError` for a 4xx or 5xx. Requests are never retried: a lost response is an OSError."""
        status, data = self.raw(method, path, body, content)
        if status >= 400:
            raise _error(status, data, f"{method} {path}")
        return msgspec.json.decode(data) if data[:1] in (b"{", b"[") else data.decode()

    def raw(self, method: str, path: str, body: Any = None, content: str = "application/json") -> tuple[int, bytes]:
        """Status and body of the response, also of a 4xx or 5xx."""
        connection = self.connections.acquire()
        try:
            connection.request(method, path, None if body is None else msgspec.json.encode(body), self.headers(content))
            response = connection.getresponse()
            data = response.read()
        except BaseException:
            connection.close()
            raise
        if response.will_close:
            connection.close()
        else:
            self.connections.release(connection)
        return response.status, data

    def headers(self, content: str = "application/json") -> dict[str, str]:
        headers = {"Content-Type": content, "Accept": "application/json"}
        return {**headers, "Authorization": f"Bearer {self.token}"} if self.token else headers

    def resource(self, kind: str) -> Resource:
        """Look a kind up in the server's discovery, once per group version."""
        version, _, name = kind.rpartition("/")
        version = version or VERSIONS.get(name, "v1")
        if name not in self._resources.get(version, {}):
            self._resources[version] = self._discover(version)
        if name not in self._resources[version]:
            raise KeyError(f"the API server has no kind {name} in {version}; write it as group/version/Kind")
        return self._resources[version][name]

    def _discover(self, version: str) -> dict[str, Resource]:
        root = f"/apis/{version}" if "/" in version else f"/api/{version}"
        listed = self.request("GET", root)["resources"]
        return {r["kind"]: Resource(version, r["name"], r["namespaced"]) for r in listed if "/" not in r["name"]}

    # --- reading

    def get(self, kind: str, name: str, namespace: str = "default") -> Manifest:
        manifest: Manifest = self.request("GET", self.resource(kind).path(namespace, name))
        return manifest

    def find(self, kind: str, name: str, namespace: str = "default") -> Manifest | None:
        """As `get`; None if the object does not exist."""
        try:
            return self.get(kind, name, namespace)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def list(self, kind: str, namespace: str | None = None, labels: str = "", fields: str = "") -> Manifests:
        """All objects of a kind; of every namespace unless one is named."""
        query = selectors(labels, fields)
        listed = self.request("GET", f"{self.resource(kind).path(namespace)}?{urlencode(query)}")
        return listed["items"] or []

    # --- writing

    def create(self, manifest: Manifest, namespace: str | None = None, subresource: str = "") -> Manifest:
        """POST; the namespace is the manifest's, else the argument, else `default`. With a subresource, to its name."""
        inside = namespace_of(manifest, namespace)
        name = manifest["metadata"]["name"] if subresource else ""
        resource = self.resource("Pod" if subresource in ("binding", "eviction") else kind_of(manifest))
        created: Manifest = self.request("POST", resource.path(inside, name, subresource), manifest)
        return created

    def create_many(self, manifests: Iterable[Manifest], namespace: str | None = None, threads: int = 4) -> Manifests:
        """Create all manifests, several at once; the first error is raised."""
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(lambda manifest: self.create(manifest, namespace), manifests))

    def apply(self, what: Manifest | Path, namespace: str | None = None) -> Manifests:
        """Server-side apply of one manifest, or of all documents of a YAML file."""
        return [self._apply(manifest, namespace) for manifest in manifests_of(what)]

    def _apply(self, manifest: Manifest, namespace: str | None) -> Manifest:
        path = self.resource(kind_of(manifest)).path(namespace_of(manifest, namespace), manifest["metadata"]["name"])
        applied: Manifest = self.request("PATCH", f"{path}?fieldManager=e2e&force=true", manifest, PATCHES["apply"])
        return applied

    def patch(
        self,
        kind: str,
        name: str,
        body: Any,
        namespace: str = "default",
        subresource: str = "",
        how: str = "merge",
    ) -> Manifest:
        """`how`: merge, strategic or json."""
        path = self.resource(kind).path(namespace, name, subresource)
        patched: Manifest = self.request("PATCH", path, body, PATCHES[how])
        return patched

    def delete(
        self,
        kind: str,
        name: str,
        namespace: str = "default",
        grace: int | None = None,
        only: Mapping[str, str] | None = None,
    ) -> None:
        """`only`: preconditions, `{"uid": ...}`."""
        options: Manifest = {"preconditions": dict(only)} if only else {}
        options |= {} if grace is None else {"gracePeriodSeconds": grace}
        self.request("DELETE", self.resource(kind).path(namespace, name), options)

    def delete_all(self, kind: str, namespace: str = "default", labels: str = "", grace: int | None = None) -> None:
        """Delete all objects of a kind in one namespace, in one call."""
        options = {} if grace is None else {"gracePeriodSeconds": grace}
        query = urlencode(selectors(labels))
        self.request("DELETE", f"{self.resource(kind).path(namespace)}?{query}", options)

    def token_for(
        self,
        service_account: str,
        namespace: str = "default",
        seconds: int = 3600,
        bound: Mapping[str, str] | None = None,
    ) -> str:
        """A token of a ServiceAccount, by TokenRequest; `bound` adds a reference to a Node or Pod."""
        path = self.resource("ServiceAccount").path(namespace, service_account, "token")
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": seconds, **({"boundObjectRef": dict(bound)} if bound else {})},
        }
        return str(self.request("POST", path, body)["status"]["token"])


def kind_of(manifest: Manifest) -> str:
    return f"{manifest['apiVersion']}/{manifest['kind']}"


def namespace_of(manifest: Manifest, otherwise: str | None = None) -> str:
    return manifest["metadata"].get("namespace") or otherwise or "default"


def selectors(labels: str = "", fields: str = "") -> dict[str, str]:
    both = {"labelSelector": labels, "fieldSelector": fields}
    return {name: value for name, value in both.items() if value}


def manifests_of(what: Manifest | Path) -> Manifests:
    """One manifest, or the documents of a file; a `List` is replaced by its items."""
    documents = [what] if isinstance(what, dict) else [d for d in yaml.safe_load_all(what.read_text()) if d]
    return [
        item for manifest in documents for item in (manifest["items"] if manifest["kind"] == "List" else [manifest])
    ]


def _trust(ca: Path | None, client: Pair | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca)
    if client:
        context.load_cert_chain(client.cert, client.key)
    return context


def _error(status: int, data: bytes, request: str) -> ApiError:
    try:
        status_object = msgspec.json.decode(data)
        return ApiError(status, status_object.get("reason", ""), status_object.get("message", ""), request)
    except (msgspec.DecodeError, AttributeError):
        return ApiError(status, "", data.decode(errors="replace")[:500], request)
