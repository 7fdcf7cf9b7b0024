"""What a command sees of a cluster: the one of a kubeconfig, or a snapshot of one in a file.

Room:  options that all commands share, and reading. Only nodes and pods are needed; what else is asked for and may not
       be read, or is not in the file, is told on stderr, and the command goes on without it.
Door:  `cluster_options` for the flags, `ClusterSource.look()` for one look, `ClusterSource.get()` for a few more
       objects.
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
RIGHTS = "deploy/reader.yaml has a ClusterRole with the rights that these commands need"


class NodeAddress(msgspec.Struct, frozen=True):
    type: str = ""
    address: str = ""


class ShownStatus(NodeStatus, frozen=True):
    addresses: tuple[NodeAddress, ...] | None = None


class ShownSpec(msgspec.Struct, frozen=True):
    unschedulable: bool = False


class ShownNode(NodeObject, frozen=True):
    """A node with what a table shows of it besides its cards."""

    status: ShownStatus | None = None
    spec: ShownSpec | None = None

    @property
    def address(self) -> str:
        said = (self.status and self.status.addresses) or ()
        return next((one.address for one in said if one.type == "InternalIP"), "unknown")

    @property
    def is_cordoned(self) -> bool:
        return bool(self.spec and self.spec.unschedulable)


class ClusterSnapshot(msgspec.Struct, kw_only=True):
    """One look."""

    nodes: list[ShownNode]
    pods: list[PodWithConditions]
    others: list[tuple[str, bytes]] = []  # from a file: objects of other kinds, as JSON


class UnreadableKind(msgspec.Struct, frozen=True):
    """Something that may be there and cannot be read."""

    why: str
    fix: str = RIGHTS


class ClusterSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where to look: what the shared options say."""

    kubeconfig: str | None = None
    context: str | None = None
    namespace_said: str | None = None
    files: tuple[str, ...] = ()

    def access(self) -> "ClusterAccess":
        from gputile.kube.auth import load

        return load(self.kubeconfig, self.context, os.environ)

    @property
    def namespace(self) -> str:
        """As kubectl has it: the flag, else the context's, else `default`."""
        if self.namespace_said or self.files:
            return self.namespace_said or "default"
        return self.access().namespace

    def look(self, *, complete: bool = False, only: str | None = None) -> ClusterSnapshot:
        """All nodes and pods. One that cannot be read is told and left out; with `complete` it is an error.

        `only`: of a cluster no pods but this namespace's, for those who may see no others.
        """
        if self.files:
            return from_files(self.files)
        seen: ClusterSnapshot = _run(_from_cluster(self.access(), complete, only))
        return seen

    def objects(self) -> tuple[list[Any], list[Any]]:
        """All nodes and all pods as plain JSON, for the audit, which reads them by itself. None: it is no JSON."""
        if self.files:
            return _plain(self.files)
        found: tuple[list[Any], list[Any]] = _run(_plain_from_cluster(self.access()))
        return found

    def get(self, paths: Mapping[str, str]) -> dict[str, Any]:
        """Further objects by a name of the caller's: JSON, bytes if it is none, `UnreadableKind` with the reason,
        None if it is not there."""
        return dict(_run(_ask(self.access(), paths)))


def cluster_options(command: F) -> F:
    """--kubeconfig, --context, --objects; the command gets `where`."""
    options = (
        click.option(
            "-f",
            "--objects",
            "--file",
            "files",
            multiple=True,
            metavar="FILE",
            help=f"Instead of a cluster: what `{LISTED_BY}` printed; YAML too, - is stdin.",
        ),
        click.option("--context", help="The context in the kubeconfig. [default: its current one]"),
        click.option("--kubeconfig", metavar="FILE", help="[default: $KUBECONFIG, the pod's account, ~/.kube/config]"),
    )
    for option in options:
        command = option(command)
    return command


namespace_option = click.option("-n", "--namespace", "namespace", help="[default: that of the context]")

unit_option = click.option(
    "--gpushare-unit",
    type=click.Choice(["GiB", "MiB", "auto"]),
    default="auto",
    show_default=True,
    help="What one aliyun.com/gpu-mem is; it is nowhere on the wire. auto guesses from the nodes.",
)


def fell_back(what: str) -> None:
    """Tell a person, and no script, what we do without."""
    say(f"gputile: {what}", err=True)


# ---- from the API server --------------------------------------------------------------------------------------------


def _run(what: Any) -> Any:
    import asyncio

    return asyncio.run(what)


async def _from_cluster(access: "ClusterAccess", complete: bool, only: str | None) -> ClusterSnapshot:
    pods, nodes = await _listed(access, PodWithConditions, ShownNode, only)
    for spoilt in (*pods.spoilt, *nodes.spoilt):
        if complete:
            raise InputError(f"{spoilt.what} cannot be read ({spoilt.why}), so nothing is proven; correct it first")
        fell_back(f"{spoilt.what} is left out, it cannot be read: {spoilt.why}")
    return ClusterSnapshot(nodes=list(nodes.items), pods=list(pods.items))


async def _plain_from_cluster(access: "ClusterAccess") -> tuple[list[Any], list[Any]]:
    pods, nodes = await _listed(access, dict, dict, None)
    return [*nodes.items, *(None for _ in nodes.spoilt)], [*pods.items, *(None for _ in pods.spoilt)]


async def _listed(
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
    except (ApiRejected, OutcomeUnknown) as wrong:
        raise InputError(f"pods and nodes cannot be listed: {wrong}{_advice(wrong, only)}") from wrong
    finally:
        await client.close()


def _advice(wrong: Exception, only: str | None) -> str:
    status = getattr(wrong, "status", None)
    if status == 403:
        return f"; {RIGHTS}" if only is None else "; docs/quota.md has the rights that it takes"
    if status == 401:
        return "; the server does not know you: log in again, or mend the kubeconfig's user"
    return "; is the cluster up, and the right --context chosen?" if status == 0 else ""


async def _ask(access: "ClusterAccess", paths: Mapping[str, str]) -> dict[str, Any]:
    import asyncio

    from gputile.kube.api import ApiRejected, OutcomeUnknown
    from gputile.kube.client import Client

    client = Client(access)

    async def one(path: str) -> Any:
        try:
            return _json(await client.request("GET", path))
        except (ApiRejected, OutcomeUnknown) as wrong:
            return None if getattr(wrong, "status", None) == 404 else UnreadableKind(str(wrong))

    try:
        return dict(zip(paths, await asyncio.gather(*map(one, paths.values())), strict=True))
    finally:
        await client.close()


def _json(content: bytes) -> Any:
    """What is no JSON (/metrics, /version of the scheduler) stays bytes."""
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return content


# ---- from files -----------------------------------------------------------------------------------------------------


class _Object(msgspec.Struct):
    kind: str | None = None
    items: list[msgspec.Raw] | None = None


class _Meta(msgspec.Struct):
    name: str | None = None
    namespace: str | None = None
    annotations: dict[str, str | None] | None = None
    labels: dict[str, str | None] | None = None


class _Other(msgspec.Struct):
    """What every object has, whatever its kind."""

    metadata: _Meta | None = None


def from_files(files: tuple[str, ...]) -> ClusterSnapshot:
    found = _all_objects(files)
    for kind, raw in found:
        if kind not in ("Node", "Pod"):
            _decoded(raw, _Other, one_line(kind) or "nameless object")
    nodes = [_decoded(raw, ShownNode, "Node") for kind, raw in found if kind == "Node"]
    pods = [_decoded(raw, PodWithConditions, "Pod") for kind, raw in found if kind == "Pod"]
    return ClusterSnapshot(nodes=nodes, pods=pods, others=[one for one in found if one[0] not in ("Node", "Pod")])


def _plain(files: tuple[str, ...]) -> tuple[list[Any], list[Any]]:
    found = _all_objects(files)
    nodes, pods = ([_json_or_none(raw) for kind, raw in found if kind == word] for word in ("Node", "Pod"))
    return nodes, pods


def _json_or_none(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None


def _all_objects(files: tuple[str, ...]) -> list[tuple[str, bytes]]:
    found = [one for name in files for one in _objects(_bytes(name), name)]
    if not any(kind == "Node" for kind, _ in found):
        raise InputError(f"{', '.join(files)}: there is no node; write it with `{LISTED_BY}`")
    return found


def _bytes(name: str) -> bytes:
    try:
        if name == "-":
            found = sys.stdin.buffer.read(LARGEST + 1)
        else:
            with open(name, "rb") as file:  # pathlib would cost a twentieth of the command's start
                found = file.read(LARGEST + 1)
    except OSError as wrong:
        raise InputError(f"{name}: cannot be read: {wrong}; name a YAML or JSON file") from wrong
    if len(found) > LARGEST:
        raise InputError(f"{name}: has more than {LARGEST} bytes; name a file of one cluster")
    return found


def _objects(content: bytes, source: str) -> list[tuple[str, bytes]]:
    """Every object with its kind, as JSON. YAML, which is read a thousand times more slowly, only if it is no JSON."""
    try:
        return _in_json(content)
    except (msgspec.DecodeError, RecursionError):
        pass
    from gputile.sim.manifests import every_object

    try:
        found = every_object(content.decode(), source)
        return [(str(one.get("kind") or ""), msgspec.json.encode(one)) for one in found]
    except (
        UnicodeDecodeError,
        TypeError,
        OverflowError,
        msgspec.MsgspecError,
    ) as wrong:  # what YAML has and JSON lacks
        raise InputError(f"{source}: cannot be read: {wrong}; give it YAML or JSON as kubectl prints it") from wrong


def _in_json(content: bytes) -> list[tuple[str, bytes]]:
    whole = msgspec.json.decode(content, type=_Object)
    if whole.items is None:
        return [(whole.kind or "", content)]
    kind = (whole.kind or "").removesuffix("List")
    return [(_kind(raw) or kind, bytes(raw)) for raw in whole.items]


def _kind(raw: msgspec.Raw) -> str:
    return msgspec.json.decode(raw, type=_Object).kind or ""


def _decoded(raw: bytes, kind: type[T], word: str) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError) as wrong:
        raise InputError(f"a {word} cannot be read: {str(wrong)[:200]}; is it what kubectl printed?") from wrong
