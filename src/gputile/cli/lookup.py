"""Names that a person types: found, or answered with the nearest; and completed by the shell.

Room:  no command waits long for a completion, and none fails because of one.
Door:  `node_named`, `pod_named`; `complete_node`, `complete_pod` for click.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import click

from gputile.cli.pod_conditions import PodWithConditions
from gputile.model.errors import GputileError, InputError


class HasName(Protocol):
    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=HasName)


def node_named(name: str, nodes: Sequence[N]) -> N:
    name = name.removeprefix("node/").removeprefix("nodes/")
    found = next((node for node in nodes if node.name == name), None)
    if found is None:
        names = [node.name for node in nodes]
        raise InputError(f"no node named {name!r} has cards; {_hint(name, names, 'those with cards')}")
    return found


def pod_named(said: str, namespace: str, pods: Sequence[PodWithConditions]) -> PodWithConditions:
    """`web-0`, `pod/web-0` or `team/web-0`. One that ended and one that lives may share no name, so the first is it."""
    said = said.removeprefix("pod/").removeprefix("pods/").removeprefix("po/")
    if "/" in said:
        namespace, _, said = said.partition("/")
    found = next((pod for pod in pods if pod.key == f"{namespace}/{said}"), None)
    if found is not None:
        return found
    elsewhere = sorted({pod.namespace for pod in pods if pod.name == said})
    if elsewhere:
        raise InputError(f"no pod {said!r} in namespace {namespace}; there is one in {', '.join(elsewhere)}: add -n")
    names = [pod.name for pod in pods if pod.namespace == namespace]
    raise InputError(f"no pod {said!r} in namespace {namespace}; {_hint(said, names, 'there')}")


def _hint(name: str, names: list[str], which: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, names, n=3, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(near)}?"
    shown = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"{which}: {shown or '(none)'}"


# ---- completion -----------------------------------------------------------------------------------------------------


def complete_node(context: click.Context, _: click.Parameter, begun: str) -> list[str]:
    return [name for name in _names(context, "/api/v1/nodes") if name.startswith(begun)]


def complete_pod(context: click.Context, _: click.Parameter, begun: str) -> list[str]:
    where = _where(context)
    try:
        namespace = where.namespace
    except GputileError:
        return []
    return [name for name in _names(context, f"/api/v1/namespaces/{namespace}/pods") if name.startswith(begun)]


def _where(context: click.Context) -> Any:
    from gputile.cli.source import ClusterSource

    said = context.params
    return ClusterSource(
        kubeconfig=said.get("kubeconfig"), context=said.get("context"), namespace_said=said.get("namespace")
    )


def _names(context: click.Context, path: str) -> list[str]:
    """A shell that completes must not show errors: without a cluster there is nothing to complete."""
    try:
        answer = _where(context).get({"names": f"{path}?limit=500"})["names"]
    except GputileError:
        return []
    items = answer.get("items") if isinstance(answer, dict) else None
    return sorted(item["metadata"]["name"] for item in items or ())
