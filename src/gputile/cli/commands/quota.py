"""`gputile quota`: the GPU quota of namespaces and its use, from a cluster's ConfigMaps, nodes and pods alone."""

from collections.abc import Iterator, Mapping
from typing import Any

import click
import msgspec

from gputile.cli.output import say, style
from gputile.cli.render.terminal import PROGRAMS, emit, output_option, size
from gputile.cli.source import ClusterSnapshot, ClusterSource, UnreadableKind, cluster_options, unit_option
from gputile.dialects import gpushare, records, registry
from gputile.dialects.settings import DialectSettings
from gputile.kube.quota_config_maps import QuotaConfigMap, read_quotas
from gputile.model.cards import Node
from gputile.model.decode_errors import decode_problem
from gputile.model.errors import InputError
from gputile.model.grants import Grant
from gputile.model.requests import PodRequest
from gputile.model.units import ALL
from gputile.quota.arithmetic import KINDS, Spent, add, cost_of, show_cards, total
from gputile.quota.documents import OLD_KEY, OUR_KEY, merged
from gputile.quota.limits import ANY_MODEL, DEFAULT_KEY, Amount, Limit, Quota, Quotas, quota_of

OURS, OLD = "kube-system/gputile-quota", "kube-system/gpuquota"
LISTED_BY = "kubectl get nodes,pods,configmaps -A -o json"
NOTHING = Limit(model="", cards=0, memory=0, cores=0)
SHOWN_LAST = "its last valid content is in force, and shown"
NOTHING_LAST = "it keeps no valid content, so the quota in force is unknown: see the scheduler's metrics"

EPILOG = """\b
Examples:
  gputile quota                                            every namespace with a quota
  gputile quota team-a -o wide                             one namespace, with its pods and the ConfigMap
  gputile quota -o json | jq '.quotas[] | select(.cards.limit != null and .cards.used >= .cards.limit)'
  kubectl get nodes,pods,configmaps -A -o json > all.json
  gputile quota -f all.json                                the same, offline

\b
Exit codes:
  0  printed, also where a namespace has used up its quota
  2  ConfigMaps, pods or nodes could not be read: no cluster, no right, a bad file; or a quota is invalid
     and the one in force before is unknown
"""


@click.command("quota", epilog=EPILOG)
@click.argument("namespace", required=False)
@output_option()
@click.option("--configmap", default=OURS, show_default=True, help="ConfigMap with the quotas, as NAMESPACE/NAME.")
@click.option("--old-configmap", default=OLD, show_default=True, help="ConfigMap of gpu-admission.")
@unit_option
@cluster_options
def command(
    namespace: str | None,
    output: str,
    configmap: str,
    old_configmap: str,
    gpushare_unit: Any,
    files: tuple[str, ...],
    kubeconfig: str | None,
    context: str | None,
) -> None:
    """Show the GPU quota of namespaces, by model, and how much of it is in use.

    Reads the ConfigMaps of the quotas, nodes and pods; of one namespace, if it is named. It needs the right to read
    them and nothing else: the scheduler is not contacted. Pods that are being bound at this moment do not count.
    """
    places = (configmap, old_configmap)
    for place in places:
        if place.count("/") != 1:
            raise InputError(f"{place!r} is not the name of a ConfigMap; write NAMESPACE/NAME, such as {OURS}")
    source = ClusterSource(kubeconfig=kubeconfig, context=context, files=files)
    snapshot = source.snapshot(only=namespace)
    quotas, unusable = in_force(_maps_in_file(snapshot) if files else _maps_of_cluster(source, places), *places)
    settings = gpushare.resolved(DialectSettings(gpushare_unit=gpushare_unit), snapshot.nodes)
    rows = list(_rows(quotas, _usage(snapshot, settings), namespace))
    for item in unusable:
        say(f"gputile: {item.why}; {SHOWN_LAST if item.has_last else NOTHING_LAST}", err=True)
    is_known = all(item.has_last for item in unusable)
    if output in PROGRAMS:
        emit({"quotas": rows, "broken": [item.why for item in unusable]}, output)
    elif rows:
        say(*_table(rows, wide=output == "wide"))
    elif is_known:
        subject = f"namespace {namespace} has no quota" if namespace else "no namespace has a quota"
        say(f"{subject}: any free GPU may be used; see docs/quota.md")
    raise SystemExit(0 if is_known else 2)


# ---- reading --------------------------------------------------------------------------------------------------------


def _maps_in_file(snapshot: ClusterSnapshot) -> dict[str, QuotaConfigMap]:
    """By namespace/name. Every cluster has some ConfigMaps: a file without any was written without them."""
    objects = [raw for kind, raw in snapshot.others if kind == "ConfigMap"]
    if not objects:
        raise InputError(f"the file has no ConfigMaps, so quotas are unknown; write it with `{LISTED_BY}`")
    try:
        maps = [msgspec.json.decode(raw, type=QuotaConfigMap) for raw in objects]
    except msgspec.ValidationError as error:
        problem = f"a ConfigMap cannot be read: {decode_problem(error)}"
        raise InputError(f"{problem}; write the file with kubectl") from error
    return {f"{config_map.metadata.namespace}/{config_map.name}": config_map for config_map in maps}


def _maps_of_cluster(source: ClusterSource, places: tuple[str, ...]) -> dict[str, QuotaConfigMap]:
    answers = source.get({place: "/api/v1/namespaces/{}/configmaps/{}".format(*place.split("/")) for place in places})
    for place, answer in answers.items():
        if isinstance(answer, UnreadableKind):
            raise InputError(f"ConfigMap {place} cannot be read: {answer.why}; docs/quota.md lists the RBAC rights")
    return {place: msgspec.convert(answer, QuotaConfigMap) for place, answer in answers.items() if answer is not None}


class UnusableConfigMap(msgspec.Struct, frozen=True):
    """A ConfigMap whose quota is invalid."""

    why: str
    has_last: bool  # whether its last valid content is known, which is in force instead


def in_force(
    maps: Mapping[str, QuotaConfigMap], ours: str = OURS, old: str = OLD
) -> tuple[Quotas, list[UnusableConfigMap]]:
    """The quotas in force, as the scheduler would have them, and the ConfigMaps that are invalid."""
    unusable: list[UnusableConfigMap] = []
    read: list[Quotas] = []
    for place, key in ((ours, OUR_KEY), (old, OLD_KEY)):
        config_map = maps.get(place)
        try:
            read.append({} if config_map is None else read_quotas(config_map.text(key), key, config_map.title))
        except InputError as error:
            assert config_map is not None
            last = _last_good(config_map, key)
            unusable.append(UnusableConfigMap(str(error), last is not None))
            read.append(last or {})
    return merged(*read), unusable


def _last_good(config_map: QuotaConfigMap, key: str) -> Quotas | None:
    try:
        return None if config_map.last_good is None else read_quotas(config_map.last_good, key, config_map.title)
    except InputError:
        return None


class NamespaceUsage(msgspec.Struct):
    """What the pods of one namespace hold."""

    spent: Spent = msgspec.field(default_factory=dict)
    pods: int = 0
    waiting: int = 0  # pods without a node that request GPUs


def _usage(snapshot: ClusterSnapshot, settings: DialectSettings) -> dict[str, NamespaceUsage]:
    read = [registry.read_node(shown, settings) for shown in snapshot.nodes]
    nodes = {node.name: node for node in read if isinstance(node, Node)}
    by_namespace: dict[str, NamespaceUsage] = {}
    for pod in snapshot.pods:
        if pod.is_terminal:
            continue
        usage = by_namespace.setdefault(pod.namespace, NamespaceUsage())
        node = nodes.get(pod.node_name)
        grant = records.read_grant(pod, node, settings) if node is not None else None
        if node is not None and isinstance(grant, Grant):
            usage.spent, usage.pods = add(usage.spent, cost_of(grant, node)), usage.pods + 1
        elif not pod.node_name and not pod.is_terminating and isinstance(registry.read_pod(pod, settings), PodRequest):
            usage.waiting += 1
    return by_namespace


# ---- the JSON contract (docs/quota.md) ------------------------------------------------------------------------------


def _rows(quotas: Quotas, usage: dict[str, NamespaceUsage], only: str | None) -> Iterator[dict[str, Any]]:
    """One per limit, and one per model that is held and not allowed; a namespace that is allowed nothing has one row
    without a model, for all that it holds. `*` itself holds nothing: its limits apply to each namespace by itself."""
    others = {name for name, held in usage.items() if held.pods or held.waiting}
    for name in sorted({*quotas, *others}) if only is None else [only]:
        quota = quota_of(name, quotas)
        if quota is None:
            continue
        held = usage.get(name, NamespaceUsage())
        if not quota.limits:
            yield _row(name, quota, held, NOTHING, None, sum(held.spent.values(), Amount()))
        for limit in quota.limits:
            yield _row(name, quota, held, limit, limit.model, total(held.spent, limit))
        for model in sorted(held.spent) if quota.limits else ():
            if not any(limit.covers(model) for limit in quota.limits):
                yield _row(name, quota, held, NOTHING, model, held.spent[model])


def _row(
    namespace: str, quota: Quota, held: NamespaceUsage, limit: Limit, model: str | None, used: Amount
) -> dict[str, Any]:
    return {
        "namespace": namespace,
        "model": model,
        "allowed": limit is not NOTHING,
        **{kind: _amount(kind, None if namespace == DEFAULT_KEY else used, limit) for kind in KINDS},
        "pools": list(quota.pools),
        "pods": held.pods,
        "waiting": held.waiting,
        "source": quota.source,
    }


def _amount(kind: str, used: Amount | None, limit: Limit) -> dict[str, Any]:
    """Cards as a number of them, memory in MiB, cores in percent of one card; null means no limit."""
    limit_value, scale = getattr(limit, kind), ALL if kind == "cards" else 1
    return {
        "used": None if used is None else getattr(used, kind) / scale,
        "limit": None if limit_value is None else limit_value / scale,
    }


# ---- the table ------------------------------------------------------------------------------------------------------


def _table(rows: list[dict[str, Any]], *, wide: bool) -> list[str]:
    head = ["NAMESPACE", "MODEL", "GPUS", "MEMORY", "CORES", "POOLS", "PENDING"]
    lines = [_line(row) for row in rows]
    if wide:
        head += ["PODS", "CONFIGMAP"]
        lines = [[*line, str(row["pods"]), row["source"]] for line, row in zip(lines, rows, strict=True)]
    widths = [max(len(line[n]) for line in [head, *lines]) for n in range(len(head))]
    shown = [_padded(head, widths)]
    for line, row in zip(lines, rows, strict=True):
        full = any(_is_full(row[kind]) for kind in KINDS)
        shown.append(style(_padded(line, widths), fg="yellow") if full else _padded(line, widths))
    return shown


def _padded(cells: list[str], widths: list[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _line(row: dict[str, Any]) -> list[str]:
    pools = ", ".join(row["pools"]) or "any"
    amounts = [_shown(kind, row[kind], row["allowed"]) for kind in KINDS]
    return [row["namespace"], _model(row), *amounts, pools, str(row["waiting"])]


def _model(row: dict[str, Any]) -> str:
    if row["model"] is None:
        return "nothing is allowed"
    model = "any" if row["model"] == ANY_MODEL else row["model"] or "unknown model"
    return model if row["allowed"] else f"{model} (not allowed)"


def _shown(kind: str, amount: dict[str, Any], allowed: bool) -> str:
    def show(number: float) -> str:
        if kind == "cards":
            return show_cards(round(number * ALL))
        return size(int(number)) if kind == "memory" else f"{number:.0f} %"

    used, limit = amount["used"], amount["limit"]
    if not allowed:
        return show(used) if used else "-"
    if used is None:
        return "any" if limit is None else f"up to {show(limit)}"
    return show(used) if limit is None else f"{show(used)} of {show(limit)}"


def _is_full(amount: dict[str, Any]) -> bool:
    used, limit = amount["used"], amount["limit"]
    return used is not None and limit is not None and used >= limit
