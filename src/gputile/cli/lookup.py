"""Names that a user types: looked up, or answered with the nearest known name; and completed by the shell.

A completion never delays a command, and never fails one.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import click

from gputile.cli.pod_conditions import PodWithConditions
from gputile.model.errors import GputileError, InputError


class HasName(Protocol):
    """Anything with a name: a node, as several modules represent it."""

    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=HasName)


def node_named(name: str, nodes: Sequence[N]) -> N:
    """The node; an `InputError` with the nearest names when there is none."""
    name = name.removeprefix("node/").removeprefix("nodes/")
    node = next((node for node in nodes if node.name == name), None)
    if node is None:
        names = [node.name for node in nodes]
        raise InputError(f"no node named {name!r} has GPUs; {_hint(name, names, 'nodes with GPUs')}")
    return node


def pod_named(name: str, namespace: str, pods: Sequence[PodWithConditions]) -> PodWithConditions:
    """The pod `web-0`, `pod/web-0` or `team/web-0`. Names are unique per namespace, so the first match is the pod."""
    name = name.removeprefix("pod/").removeprefix("pods/").removeprefix("po/")
    if "/" in name:
        namespace, _, name = name.partition("/")
    pod = next((pod for pod in pods if pod.key == f"{namespace}/{name}"), None)
    if pod is not None:
        return pod
    elsewhere = sorted({pod.namespace for pod in pods if pod.name == name})
    if elsewhere:
        raise InputError(f"no pod {name!r} in namespace {namespace}; there is one in {', '.join(elsewhere)}: add -n")
    names = [pod.name for pod in pods if pod.namespace == namespace]
    raise InputError(f"no pod {name!r} in namespace {namespace}; {_hint(name, names, 'pods there')}")


def _hint(name: str, names: list[str], heading: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, names, n=3, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(near)}?"
    shown = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"{heading}: {shown or '(none)'}"


# ---- completion -----------------------------------------------------------------------------------------------------


def complete_node(context: click.Context, _: click.Parameter, prefix: str) -> list[str]:
    return [name for name in _names(context, "/api/v1/nodes") if name.startswith(prefix)]


def complete_pod(context: click.Context, _: click.Parameter, prefix: str) -> list[str]:
    source = _source(context)
    try:
        namespace = source.namespace
    except GputileError:
        return []
    return [name for name in _names(context, f"/api/v1/namespaces/{namespace}/pods") if name.startswith(prefix)]


def _source(context: click.Context) -> Any:
    from gputile.cli.source import ClusterSource

    flags = context.params
    return ClusterSource(
        kubeconfig=flags.get("kubeconfig"), context=flags.get("context"), namespace_flag=flags.get("namespace")
    )


def _names(context: click.Context, path: str) -> list[str]:
    """A shell that completes must not show errors: without a cluster there is nothing to complete."""
    try:
        answer = _source(context).get({"names": f"{path}?limit=500"})["names"]
    except GputileError:
        return []
    items = answer.get("items") if isinstance(answer, dict) else None
    return sorted(item["metadata"]["name"] for item in items or ())
