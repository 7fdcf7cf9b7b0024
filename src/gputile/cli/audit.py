"""`gputile audit`: prove from a cluster's pods and nodes that no card is sold twice, or tell the story."""

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from gputile.audit.checking import audit, stories
from gputile.audit.report import Report, SeenPod
from gputile.dialects.settings import DialectSettings
from gputile.dialects.wire import NodeObject
from gputile.model.errors import InputError

T = TypeVar("T")

EPILOG = """\b
Examples:
  gputile audit                                            the cluster of your kubeconfig
  gputile audit --context prod -o json | jq .findings
  kubectl get nodes,pods -A -o json > all.json
  gputile audit -f all.json                                the same, offline; YAML works too

\b
Exit codes:
  0  every card holds at most what it has, every grant belongs to its pod
  1  something is sold twice or wrong; the story is printed
  2  pods or nodes could not be read: no cluster, no right to list them, a bad file
"""


@click.command("audit", epilog=EPILOG)
@click.option("-f", "--file", "files", multiple=True, help="Saved lists of nodes and pods, JSON or YAML; - is stdin.")
@click.option("--kubeconfig", help="A kubeconfig file. [default: $KUBECONFIG, the pod's own account, ~/.kube/config]")
@click.option("--context", help="The context in it. [default: its current one]")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option(
    "--gpushare-unit",
    type=click.Choice(["GiB", "MiB", "auto"]),
    default="GiB",
    show_default=True,
    help="What one aliyun.com/gpu-mem is, as the scheduler's setting has it.",
)
def command(
    files: tuple[str, ...], kubeconfig: str | None, context: str | None, output: str, gpushare_unit: Any
) -> None:
    """Prove that no card is sold twice and every grant belongs to its pod.

    Looks at the pods and nodes of a cluster, nothing else, and does its own sums: it shares no code with the
    scheduler's book. It changes nothing, and needs the right to list pods and nodes.
    """
    nodes, pods = _from_files(files) if files else asyncio.run(_from_cluster(kubeconfig, context))
    report = audit(nodes, pods, DialectSettings(gpushare_unit=gpushare_unit), time.time())
    click.echo(_json(report) if output == "json" else _text(report))
    raise SystemExit(0 if report.is_right else 1)


# ---- reading --------------------------------------------------------------------------------------------------------


class _Object(msgspec.Struct):
    kind: str | None = None
    items: list[msgspec.Raw] | None = None


async def _from_cluster(kubeconfig: str | None, context: str | None) -> tuple[list[NodeObject], list[SeenPod]]:
    from gputile.kube.auth import load
    from gputile.kube.client import Client
    from gputile.kube.following import ServerFeed
    from gputile.kube.values import Refused, Unclear

    client = Client(load(kubeconfig, context, os.environ))
    try:
        pods = await ServerFeed(client, "/api/v1/pods", "Pod", SeenPod).list()
        nodes = await ServerFeed(client, "/api/v1/nodes", "Node", NodeObject).list()
    except (Refused, Unclear) as wrong:
        raise InputError(f"pods and nodes cannot be listed: {wrong}") from wrong
    finally:
        await client.close()
    for spoilt in (*pods.spoilt, *nodes.spoilt):
        raise InputError(f"{spoilt.what} cannot be read ({spoilt.why}), so nothing is proven; correct it first")
    return list(nodes.items), list(pods.items)


def _from_files(files: tuple[str, ...]) -> tuple[list[NodeObject], list[SeenPod]]:
    found: list[tuple[str, bytes]] = []
    for name in files:
        found += _objects(_bytes(name), name)
    nodes = [_decoded(raw, NodeObject, "Node") for kind, raw in found if kind == "Node"]
    pods = [_decoded(raw, SeenPod, "Pod") for kind, raw in found if kind == "Pod"]
    if not nodes:
        raise InputError(f"{', '.join(files)}: there is no node; write it with `kubectl get nodes,pods -A -o json`")
    return nodes, pods


def _bytes(name: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as wrong:
        raise InputError(f"{name}: cannot be read: {wrong}; name a YAML or JSON file") from wrong


def _objects(content: bytes, source: str) -> list[tuple[str, bytes]]:
    """Every object with its kind, as JSON. YAML, which is read a thousand times more slowly, only if it is no JSON."""
    try:
        return _in_json(content)
    except msgspec.DecodeError:
        pass
    from gputile.sim.manifests import load

    try:
        manifests = load(content.decode(), source)
    except UnicodeDecodeError as wrong:
        raise InputError(f"{source}: cannot be read: {wrong}; give it YAML or JSON") from wrong
    pods = [workload.pod for workload in manifests.workloads if workload.kind == "Pod"]
    return [
        *(("Node", msgspec.json.encode(node)) for node in manifests.nodes),
        *(("Pod", msgspec.json.encode(pod)) for pod in pods),
    ]


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
    except msgspec.ValidationError as wrong:
        raise InputError(f"a {word} cannot be read: {wrong}; is it what kubectl printed?") from wrong


# ---- telling --------------------------------------------------------------------------------------------------------


def _json(report: Report) -> str:
    """All but who holds which card, which is in the findings where it matters (docs/audit.md)."""
    told = {key: value for key, value in msgspec.to_builtins(report).items() if key != "sold"}
    return msgspec.json.format(msgspec.json.encode({"right": report.is_right, **told}), indent=2).decode()


def _text(report: Report) -> str:
    lines = [f"{click.style('wrong', fg='red')}: {line}" for line in _blocks(report.findings)]
    lines += [f"{click.style('note', fg='yellow')}: {line}" for line in _blocks(report.remarks)]
    share = 100 * report.memory_sold // report.memory if report.memory else 0
    seen = (
        f"{report.nodes} nodes with {report.cards} cards, {report.pods} pods on them "
        f"({share} % of the memory sold), {report.waiting} waiting"
    )
    verdict = "nothing is sold twice, every grant belongs to its pod"
    wrong = f"{len(report.findings)} thing{'s are' if len(report.findings) > 1 else ' is'} wrong"
    return "\n".join([*lines, f"{seen}: {verdict if report.is_right else wrong}"])


def _blocks(notices: tuple[Any, ...]) -> list[str]:
    return ["\n".join(stories([notice])) for notice in notices]
