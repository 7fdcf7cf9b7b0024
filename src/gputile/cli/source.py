"""Where a command reads a cluster from: the API server of a kubeconfig, or a snapshot in a file.

Defines the flags that commands share. Only nodes and pods are required; whatever else cannot be read, or is not in the
file, is reported on stderr, and the command goes on without it. Nothing here writes to a cluster.
"""

import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from gputile.cli.output import say
from gputile.cli.pod_conditions import PodWithConditions
from gputile.dialects.kube_objects import NodeObject, NodeStatus
from gputile.model.errors import InputError
from gputile.text.terminal import one_line

if TYPE_CHECKING:
    from gputile.kube.auth import ClusterAccess
    from gputile.kube.watch import ListResult

T = TypeVar("T")
P = TypeVar("P")
N = TypeVar("N")
F = TypeVar("F", bound=Callable[..., Any])

LISTED_BY = "kubectl get nodes,pods -A -o json"
ALL_LISTED_BY = "kubectl get nodes,pods,events,leases,configmaps -A -o json"
LARGEST = 2**30  # bytes of a snapshot; a cluster of 30,000 pods has a third of that
RIGHTS = "deploy/reader.yaml has a ClusterRole with the RBAC rights that these commands need"


class NodeAddress(msgspec.Struct, frozen=True):
    """One entry of `status.addresses` of a Node."""

    type: str = ""
    address: str = ""


class ShownStatus(NodeStatus, frozen=True):
    """The `status` of a Node, with its addresses."""

    addresses: tuple[NodeAddress, ...] | None = None


class ShownSpec(msgspec.Struct, frozen=True):
    """The `spec` of a Node, as far as commands show it."""

    unschedulable: bool = False


class ShownNode(NodeObject, frozen=True):
    """A node with the fields that a table shows besides its cards."""

    status: ShownStatus | None = None
    spec: ShownSpec | None = None

    @property
    def address(self) -> str:
        addresses = (self.status and self.status.addresses) or ()
        return next((address.address for address in addresses if address.type == "InternalIP"), "unknown")

    @property
    def is_cordoned(self) -> bool:
        return bool(self.spec and self.spec.unschedulable)


class ClusterSnapshot(msgspec.Struct, kw_only=True):
    """The nodes and pods of a cluster at one moment."""

    nodes: list[ShownNode]
    pods: list[PodWithConditions]
    others: list[tuple[str, bytes]] = []  # from a file: objects of other kinds, as JSON


class UnreadableKind(msgspec.Struct, frozen=True):
    """Objects that may exist and cannot be read: why, and how to get the right to read them."""

    why: str
    fix: str = RIGHTS


class ClusterSource(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster or the files that the shared flags select."""

    kubeconfig: str | None = None
    context: str | None = None
    namespace_flag: str | None = None
    files: tuple[str, ...] = ()

    def access(self) -> "ClusterAccess":
        from gputile.kube.auth import load

        return load(self.kubeconfig, self.context, os.environ)

    @property
    def namespace(self) -> str:
        """As in kubectl: the flag, else the context's namespace, else `default`."""
        if self.namespace_flag or self.files:
            return self.namespace_flag or "default"
        return self.access().namespace

    def snapshot(self, *, complete: bool = False, only: str | None = None) -> ClusterSnapshot:
        """All nodes and pods. An object that cannot be decoded is reported and left out; an error with `complete`.

        `only`: list the pods of this namespace alone, for users who may list no others.
        """
        if self.files:
            return from_files(self.files)
        snapshot: ClusterSnapshot = _run(_from_cluster(self.access(), complete, only))
        return snapshot

    def objects(self) -> tuple[list[Any], list[Any]]:
        """All nodes and all pods as plain JSON, for the audit, which decodes them itself. None: invalid JSON."""
        if self.files:
            return _plain(self.files)
        objects: tuple[list[Any], list[Any]] = _run(_plain_from_cluster(self.access()))
        return objects

    def get(self, paths: Mapping[str, str]) -> dict[str, Any]:
        """Further objects, by a name of the caller's choice: JSON, bytes if it is not JSON, `UnreadableKind` with the
        reason, None if there is no such object."""
        return dict(_run(_get_all(self.access(), paths)))


def cluster_options(command: F) -> F:
    """Add --kubeconfig, --context and --objects to a command."""
    options = (
        click.option(
            "-f",
            "--objects",
            "--file",
            "files",
            multiple=True,
            metavar="FILE",
            help=f"Read a file instead of a cluster: the output of `{LISTED_BY}`; YAML too, - is stdin.",
        ),
        click.option("--context", help="Context in the kubeconfig. [default: the current context]"),
        click.option(
            "--kubeconfig",
            metavar="FILE",
            help="Kubeconfig file. [default: $KUBECONFIG, the pod's service account, ~/.kube/config]",
        ),
    )
    for option in options:
        command = option(command)
    return command


namespace_option = click.option(
    "-n", "--namespace", "namespace", help="Namespace of the pod. [default: that of the context]"
)

unit_option = click.option(
    "--gpushare-unit",
    type=click.Choice(["GiB", "MiB", "auto"]),
    default="auto",
    show_default=True,
    help="Unit of aliyun.com/gpu-mem (not part of the API object); auto guesses it from the nodes.",
)


def warn_fallback(message: str) -> None:
    """Report on stderr, for people and not for scripts, what the command goes on without."""
    say(f"gputile: {message}", err=True)


# ---- from the API server --------------------------------------------------------------------------------------------


def _run(coroutine: Any) -> Any:
    import asyncio

    return asyncio.run(coroutine)


async def _from_cluster(access: "ClusterAccess", complete: bool, only: str | None) -> ClusterSnapshot:
    pods, nodes = await _list(access, PodWithConditions, ShownNode, only)
    for undecodable in (*pods.undecodable, *nodes.undecodable):
        if complete:
            problem = f"{undecodable.what} cannot be read ({undecodable.why})"
            raise InputError(f"{problem}, so nothing is proven; correct the object first")
        warn_fallback(f"{undecodable.what} is left out, it cannot be read: {undecodable.why}")
    return ClusterSnapshot(nodes=list(nodes.items), pods=list(pods.items))


async def _plain_from_cluster(access: "ClusterAccess") -> tuple[list[Any], list[Any]]:
    pods, nodes = await _list(access, dict, dict, None)
    return [*nodes.items, *(None for _ in nodes.undecodable)], [*pods.items, *(None for _ in pods.undecodable)]


async def _list(
    access: "ClusterAccess", pod: type[P], node: type[N], only: str | None
) -> "tuple[ListResult[P], ListResult[N]]":
    import asyncio

    from gputile.kube.api import ApiRejected, OutcomeUnknown
    from gputile.kube.client import Client

    client = Client(access)
    path = f"/api/v1/namespaces/{only}/pods" if only else "/api/v1/pods"
    try:
        return await asyncio.gather(
            client.feed(path, "Pod", pod).list(), client.feed("/api/v1/nodes", "Node", node).list()
        )
    except (ApiRejected, OutcomeUnknown) as error:
        raise InputError(f"pods and nodes cannot be listed: {error}{_advice(error, only)}") from error
    finally:
        await client.close()


def _advice(error: Exception, only: str | None) -> str:
    status = getattr(error, "status", None)
    if status == 403:
        return f"; {RIGHTS}" if only is None else "; docs/quota.md lists the RBAC rights that it takes"
    if status == 401:
        return "; the API server rejects your credentials: log in again, or correct the kubeconfig's user"
    return "; is the cluster up, and is it the right --context?" if status == 0 else ""


async def _get_all(access: "ClusterAccess", paths: Mapping[str, str]) -> dict[str, Any]:
    import asyncio

    from gputile.kube.api import ApiRejected, OutcomeUnknown
    from gputile.kube.client import Client

    client = Client(access)

    async def get(path: str) -> Any:
        try:
            return _json(await client.request("GET", path))
        except (ApiRejected, OutcomeUnknown) as error:
            return None if getattr(error, "status", None) == 404 else UnreadableKind(str(error))

    try:
        return dict(zip(paths, await asyncio.gather(*map(get, paths.values())), strict=True))
    finally:
        await client.close()


def _json(content: bytes) -> Any:
    """An answer that is not JSON (/metrics, /version of the scheduler) stays bytes."""
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return content


# ---- from files -----------------------------------------------------------------------------------------------------


class _Object(msgspec.Struct):
    """An object or a List, as far as its kind and its items."""

    kind: str | None = None
    items: list[msgspec.Raw] | None = None


class _Meta(msgspec.Struct):
    """The `metadata` of any object."""

    name: str | None = None
    namespace: str | None = None
    annotations: dict[str, str | None] | None = None
    labels: dict[str, str | None] | None = None


class _Other(msgspec.Struct):
    """An object of any other kind, as far as all kinds are alike."""

    metadata: _Meta | None = None


def from_files(files: tuple[str, ...]) -> ClusterSnapshot:
    objects = _all_objects(files)
    for kind, raw in objects:
        if kind not in ("Node", "Pod"):
            _decoded(raw, _Other, one_line(kind) or "object without a kind")
    nodes = [_decoded(raw, ShownNode, "Node") for kind, raw in objects if kind == "Node"]
    pods = [_decoded(raw, PodWithConditions, "Pod") for kind, raw in objects if kind == "Pod"]
    others = [(kind, raw) for kind, raw in objects if kind not in ("Node", "Pod")]
    return ClusterSnapshot(nodes=nodes, pods=pods, others=others)


def _plain(files: tuple[str, ...]) -> tuple[list[Any], list[Any]]:
    objects = _all_objects(files)
    nodes, pods = ([_json_or_none(raw) for kind, raw in objects if kind == wanted] for wanted in ("Node", "Pod"))
    return nodes, pods


def _json_or_none(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None


def _all_objects(files: tuple[str, ...]) -> list[tuple[str, bytes]]:
    objects = [entry for name in files for entry in _objects(_bytes(name), name)]
    if not any(kind == "Node" for kind, _ in objects):
        raise InputError(f"{', '.join(files)}: there is no node in it; write the file with `{LISTED_BY}`")
    return objects


def _bytes(name: str) -> bytes:
    try:
        if name == "-":
            content = sys.stdin.buffer.read(LARGEST + 1)
        else:
            with open(name, "rb") as file:  # pathlib would cost a twentieth of the command's start
                content = file.read(LARGEST + 1)
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {_file_problem(error)}; name a YAML or JSON file") from error
    if len(content) > LARGEST:
        raise InputError(f"{name}: has more than {LARGEST} bytes; name a file of one cluster")
    return content


def _file_problem(error: Exception) -> str:
    from gputile.model.decode_errors import file_problem  # errors alone need it

    return file_problem(error)


def _objects(content: bytes, source: str) -> list[tuple[str, bytes]]:
    """Every object with its kind, as JSON. YAML, which takes a thousand times as long, only if it is not JSON."""
    try:
        return _in_json(content)
    except (msgspec.DecodeError, RecursionError):
        pass
    from gputile.sim.manifests import every_object

    try:
        objects = every_object(content.decode(), source)
        return [(str(item.get("kind") or ""), msgspec.json.encode(item)) for item in objects]
    except (UnicodeDecodeError, TypeError, OverflowError, msgspec.MsgspecError) as error:  # YAML has more than JSON
        advice = "give it YAML or JSON as kubectl prints it"
        raise InputError(f"{source}: cannot be read: {_file_problem(error)}; {advice}") from error


def _in_json(content: bytes) -> list[tuple[str, bytes]]:
    whole = msgspec.json.decode(content, type=_Object)
    if whole.items is None:
        return [(whole.kind or "", content)]
    kind = (whole.kind or "").removesuffix("List")
    return [(_kind(raw) or kind, bytes(raw)) for raw in whole.items]


def _kind(raw: msgspec.Raw) -> str:
    return msgspec.json.decode(raw, type=_Object).kind or ""


def _decoded(raw: bytes, kind: type[T], name: str) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"a {name} cannot be read: {_file_problem(error)}; write the file with kubectl") from error
