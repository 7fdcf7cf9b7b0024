"""`gputile quota`: what namespaces may hold and do hold, from a cluster's ConfigMaps, nodes and pods alone."""

import asyncio
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from gputile.dialects import speaking
from gputile.dialects.quotas import OLD_KEY, OUR_KEY, merged
from gputile.dialects.settings import DialectSettings
from gputile.dialects.wire import NodeObject, Pod
from gputile.engine.quota import KINDS, Spent, add, cost_of, show_cards, total
from gputile.kube.config_maps import ConfigMap, read_quotas
from gputile.model.cards import Node
from gputile.model.errors import InputError
from gputile.model.grants import Grant
from gputile.model.quotas import EVERYBODY, Amount, Limit, Quota, Quotas, quota_of
from gputile.model.requests import PodRequest
from gputile.model.units import ALL, show_memory

OURS, OLD = "kube-system/gputile-quota", "kube-system/gpuquota"

EPILOG = """\b
Examples:
  gputile quota                                            every namespace with a quota
  gputile quota team-a -o wide                             one of them, with pods and where it is written
  gputile quota -o json | jq '.quotas[] | select(.cards.used >= .cards.limit)'
  kubectl get nodes,pods,configmaps -A -o json > all.json
  gputile quota -f all.json                                the same, offline

\b
Exit codes:
  0  told, also where a namespace has used up its quota
  2  ConfigMaps, pods or nodes could not be read: no cluster, no right, a bad file
"""


class Cluster(msgspec.Struct, frozen=True):
    """What is looked at."""

    nodes: tuple[NodeObject, ...]
    pods: tuple[Pod, ...]
    maps: dict[str, ConfigMap]  # by namespace/name


@click.command("quota", epilog=EPILOG)
@click.argument("namespace", required=False)
@click.option(
    "-f", "--file", "files", multiple=True, help="Saved lists of nodes, pods and ConfigMaps, JSON; - is stdin."
)
@click.option("--kubeconfig", help="A kubeconfig file. [default: $KUBECONFIG, the pod's own account, ~/.kube/config]")
@click.option("--context", help="The context in it. [default: its current one]")
@click.option("-o", "--output", type=click.Choice(["text", "wide", "json", "yaml"]), default="text", show_default=True)
@click.option("--configmap", default=OURS, show_default=True, help="Where the scheduler reads quotas.")
@click.option("--old-configmap", default=OLD, show_default=True, help="Where gpu-admission read them.")
@click.option(
    "--gpushare-unit",
    type=click.Choice(["GiB", "MiB"]),
    default="GiB",
    show_default=True,
    help="What one aliyun.com/gpu-mem is, as the scheduler's setting has it.",
)
def command(
    namespace: str | None,
    files: tuple[str, ...],
    kubeconfig: str | None,
    context: str | None,
    output: str,
    configmap: str,
    old_configmap: str,
    gpushare_unit: Any,
) -> None:
    """What namespaces may hold of which GPU model, and what they hold now.

    Reads the ConfigMaps of the quotas, and nodes and pods; of one namespace, if it is named. It needs the right to do
    so and nothing else: the scheduler is not asked. Pods that are being bound at this moment are not seen.
    """
    places = (configmap, old_configmap)
    for place in places:
        if place.count("/") != 1:
            raise InputError(f"{place!r} names no ConfigMap; write NAMESPACE/NAME, such as {OURS}")
    cluster = _from_files(files) if files else asyncio.run(_from_cluster(kubeconfig, context, places, namespace))
    quotas, broken = in_force(cluster.maps, configmap, old_configmap)
    settings = DialectSettings(gpushare_unit=gpushare_unit)
    rows = list(_rows(quotas, _held(cluster, settings), namespace))
    for one in broken:
        click.echo(f"gputile: {one}; what the scheduler understood last is shown", err=True)
    if output in ("json", "yaml"):
        click.echo(_encoded({"quotas": rows, "broken": broken}, output))
    elif rows:
        click.echo(_table(rows, wide=output == "wide"))
    else:
        whose = f"namespace {namespace} has no quota" if namespace else "no namespace has a quota"
        click.echo(f"{whose}: it may hold whatever is free; see docs/quota.md")


# ---- reading --------------------------------------------------------------------------------------------------------


async def _from_cluster(
    kubeconfig: str | None, context: str | None, places: Iterable[str], namespace: str | None
) -> Cluster:
    from gputile.kube.auth import load
    from gputile.kube.client import Client
    from gputile.kube.values import Refused, Unclear

    client = Client(load(kubeconfig, context, os.environ))
    try:
        maps = {place: await client.config_map(*place.split("/")) for place in places}
        path = f"/api/v1/namespaces/{namespace}/pods" if namespace else "/api/v1/pods"
        pods = await client.feed(path, "Pod", Pod).list()
        nodes = await client.feed("/api/v1/nodes", "Node", NodeObject).list()
    except (Refused, Unclear) as wrong:
        raise InputError(f"quotas, pods and nodes cannot be read: {wrong}; docs/quota.md has the rights") from wrong
    finally:
        await client.close()
    return Cluster(nodes.items, pods.items, {place: found for place, found in maps.items() if found is not None})


class _Object(msgspec.Struct):
    kind: str | None = None
    items: list[msgspec.Raw] | None = None


def _from_files(files: tuple[str, ...]) -> Cluster:
    nodes: list[NodeObject] = []
    pods: list[Pod] = []
    maps: list[ConfigMap] = []
    for name in files:
        try:
            content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
            for raw in msgspec.json.decode(content, type=_Object).items or ():
                kind = msgspec.json.decode(raw, type=_Object).kind
                if kind == "Node":
                    nodes.append(msgspec.json.decode(raw, type=NodeObject))
                elif kind == "Pod":
                    pods.append(msgspec.json.decode(raw, type=Pod))
                elif kind == "ConfigMap":
                    maps.append(msgspec.json.decode(raw, type=ConfigMap))
        except (OSError, msgspec.DecodeError) as wrong:
            said = "write it with `kubectl get nodes,pods,configmaps -A -o json`"
            raise InputError(f"{name}: cannot be read: {wrong}; {said}") from wrong
    return Cluster(tuple(nodes), tuple(pods), {f"{m.metadata.namespace}/{m.name}": m for m in maps})


def in_force(maps: Mapping[str, ConfigMap], ours: str = OURS, old: str = OLD) -> tuple[Quotas, list[str]]:
    """What is in force, as the scheduler would have it, and what is wrong with what is written."""
    broken: list[str] = []
    read: list[Quotas] = []
    for place, key in ((ours, OUR_KEY), (old, OLD_KEY)):
        found = maps.get(place)
        try:
            read.append({} if found is None else read_quotas(found.text(key), key, found.title))
        except InputError as wrong:
            broken.append(str(wrong))
            assert found is not None
            read.append({} if found.last_good is None else read_quotas(found.last_good, key, found.title))
    return merged(*read), broken


class Held(msgspec.Struct):
    """What one namespace holds."""

    spent: Spent = msgspec.field(default_factory=dict)
    pods: int = 0
    waiting: int = 0  # pods without a node that ask for cards


def _held(cluster: Cluster, settings: DialectSettings) -> dict[str, Held]:
    read = [speaking.read_node(found, settings) for found in cluster.nodes]
    nodes = {node.name: node for node in read if isinstance(node, Node)}
    by_namespace: dict[str, Held] = {}
    for pod in cluster.pods:
        if pod.is_over:
            continue
        held = by_namespace.setdefault(pod.namespace, Held())
        node = nodes.get(pod.node_name)
        grant = speaking.read_grant(pod, node.cards, settings) if node is not None else None
        if node is not None and isinstance(grant, Grant):
            held.spent, held.pods = add(held.spent, cost_of(grant, node)), held.pods + 1
        elif not pod.node_name and isinstance(speaking.read_pod(pod, settings), PodRequest):
            held.waiting += 1
    return by_namespace


# ---- the JSON contract (docs/quota.md) ------------------------------------------------------------------------------


def _rows(quotas: Quotas, held: dict[str, Held], only: str | None) -> Iterator[dict[str, Any]]:
    """One per limit; a namespace that may have nothing has one without a model."""
    named = {name for name in quotas if name != EVERYBODY}
    others = {name for name, found in held.items() if found.pods or found.waiting}
    for name in sorted(named | others):
        quota = quota_of(name, quotas)
        if quota is not None and only in (None, name):
            found = held.get(name, Held())
            for limit in quota.limits or (None,):
                yield _row(name, quota, limit, found)


def _row(namespace: str, quota: Quota, limit: Limit | None, held: Held) -> dict[str, Any]:
    has = total(held.spent, limit) if limit is not None else Amount()
    return {
        "namespace": namespace,
        "model": limit.model if limit is not None else None,
        **{kind: _amount(kind, has, limit) for kind in KINDS},
        "pools": list(quota.pools),
        "pods": held.pods,
        "waiting": held.waiting,
        "source": quota.source,
    }


def _amount(kind: str, has: Amount, limit: Limit | None) -> dict[str, Any]:
    """Cards as a number of them, memory in MiB, cores in percent of one card; no limit is null."""
    most = getattr(limit, kind) if limit is not None else 0
    scale = ALL if kind == "cards" else 1
    return {"used": getattr(has, kind) / scale, "limit": None if most is None else most / scale}


def _encoded(found: dict[str, Any], output: str) -> str:
    if output == "yaml":
        import yaml

        text: str = yaml.safe_dump(found, sort_keys=False, allow_unicode=True)
        return text.rstrip()
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode()


# ---- for people -----------------------------------------------------------------------------------------------------


def _table(rows: list[dict[str, Any]], *, wide: bool) -> str:
    head = ["NAMESPACE", "MODEL", "CARDS", "MEMORY", "CORES", "POOLS", "WAITING"]
    lines = [_line(row) for row in rows]
    if wide:
        head += ["PODS", "WRITTEN IN"]
        lines = [[*line, str(row["pods"]), row["source"]] for line, row in zip(lines, rows, strict=True)]
    widths = [max(len(line[n]) for line in [head, *lines]) for n in range(len(head))]
    shown = [_padded(head, widths)]
    for line, row in zip(lines, rows, strict=True):
        full = any(_is_full(row[kind]) for kind in KINDS)
        shown.append(click.style(_padded(line, widths), fg="yellow") if full else _padded(line, widths))
    return "\n".join(shown)


def _padded(words: list[str], widths: list[int]) -> str:
    return "  ".join(word.ljust(width) for word, width in zip(words, widths, strict=True)).rstrip()


def _line(row: dict[str, Any]) -> list[str]:
    pools = ", ".join(row["pools"]) or "any"
    if row["model"] is None:
        return [row["namespace"], "nothing is allowed", "-", "-", "-", pools, str(row["waiting"])]
    model = "any" if row["model"] == "*" else row["model"]
    amounts = [_shown(kind, row[kind]) for kind in KINDS]
    return [row["namespace"], model, *amounts, pools, str(row["waiting"])]


def _shown(kind: str, amount: dict[str, Any]) -> str:
    def show(number: float) -> str:
        if kind == "cards":
            return show_cards(round(number * ALL))
        return show_memory(int(number)) if kind == "memory" else f"{number:.0f} %"

    return show(amount["used"]) if amount["limit"] is None else f"{show(amount['used'])} of {show(amount['limit'])}"


def _is_full(amount: dict[str, Any]) -> bool:
    return amount["limit"] is not None and amount["used"] >= amount["limit"]
