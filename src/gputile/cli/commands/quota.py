"""`gputile quota`: what namespaces may hold and do hold, from a cluster's ConfigMaps, nodes and pods alone."""

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
from gputile.model.errors import InputError
from gputile.model.grants import Grant
from gputile.model.quotas import ANY_MODEL, DEFAULT_KEY, Amount, Limit, Quota, Quotas, quota_of
from gputile.model.requests import PodRequest
from gputile.model.units import ALL
from gputile.quota.arithmetic import KINDS, Spent, add, cost_of, show_cards, total
from gputile.quota.documents import OLD_KEY, OUR_KEY, merged

OURS, OLD = "kube-system/gputile-quota", "kube-system/gpuquota"
LISTED_BY = "kubectl get nodes,pods,configmaps -A -o json"
NOTHING = Limit(model="", cards=0, memory=0, cores=0)
SHOWN_LAST = "what the scheduler understood last is shown"
NOTHING_LAST = "what it said before is not kept in it, so it is not known what is in force: ask the scheduler's metrics"

EPILOG = """\b
Examples:
  gputile quota                                            every namespace with a quota
  gputile quota team-a -o wide                             one of them, with pods and where it is written
  gputile quota -o json | jq '.quotas[] | select(.cards.limit != null and .cards.used >= .cards.limit)'
  kubectl get nodes,pods,configmaps -A -o json > all.json
  gputile quota -f all.json                                the same, offline

\b
Exit codes:
  0  told, also where a namespace has used up its quota
  2  ConfigMaps, pods or nodes could not be read: no cluster, no right, a bad file; or a quota that cannot be used
     and of which nobody knows what it said before
"""


@click.command("quota", epilog=EPILOG)
@click.argument("namespace", required=False)
@output_option()
@click.option("--configmap", default=OURS, show_default=True, help="Where the scheduler reads quotas.")
@click.option("--old-configmap", default=OLD, show_default=True, help="Where gpu-admission read them.")
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
    """What namespaces may hold of which GPU model, and what they hold now.

    Reads the ConfigMaps of the quotas, and nodes and pods; of one namespace, if it is named. It needs the right to do
    so and nothing else: the scheduler is not asked. Pods that are being bound at this moment are not seen.
    """
    places = (configmap, old_configmap)
    for place in places:
        if place.count("/") != 1:
            raise InputError(f"{place!r} names no ConfigMap; write NAMESPACE/NAME, such as {OURS}")
    where = ClusterSource(kubeconfig=kubeconfig, context=context, files=files)
    seen = where.look(only=namespace)
    quotas, broken = in_force(_maps_in_file(seen) if files else _maps_of_cluster(where, places), *places)
    settings = gpushare.resolved(DialectSettings(gpushare_unit=gpushare_unit), seen.nodes)
    rows = list(_rows(quotas, _held(seen, settings), namespace))
    for one in broken:
        say(f"gputile: {one.why}; {SHOWN_LAST if one.has_last else NOTHING_LAST}", err=True)
    is_known = all(one.has_last for one in broken)
    if output in PROGRAMS:
        emit({"quotas": rows, "broken": [one.why for one in broken]}, output)
    elif rows:
        say(*_table(rows, wide=output == "wide"))
    elif is_known:
        whose = f"namespace {namespace} has no quota" if namespace else "no namespace has a quota"
        say(f"{whose}: it may hold whatever is free; see docs/quota.md")
    raise SystemExit(0 if is_known else 2)


# ---- reading --------------------------------------------------------------------------------------------------------


def _maps_in_file(seen: ClusterSnapshot) -> dict[str, QuotaConfigMap]:
    """By namespace/name. Every cluster has some ConfigMaps: a file without any was made without them."""
    found = [raw for kind, raw in seen.others if kind == "ConfigMap"]
    if not found:
        raise InputError(f"the file has no ConfigMaps, so it is not known who has a quota; write it with `{LISTED_BY}`")
    try:
        maps = [msgspec.json.decode(raw, type=QuotaConfigMap) for raw in found]
    except msgspec.ValidationError as wrong:
        raise InputError(f"a ConfigMap cannot be read: {wrong}; is it what kubectl printed?") from wrong
    return {f"{one.metadata.namespace}/{one.name}": one for one in maps}


def _maps_of_cluster(where: ClusterSource, places: tuple[str, ...]) -> dict[str, QuotaConfigMap]:
    answers = where.get({place: "/api/v1/namespaces/{}/configmaps/{}".format(*place.split("/")) for place in places})
    for place, answer in answers.items():
        if isinstance(answer, UnreadableKind):
            raise InputError(f"ConfigMap {place} cannot be read: {answer.why}; docs/quota.md has the rights")
    return {place: msgspec.convert(answer, QuotaConfigMap) for place, answer in answers.items() if answer is not None}


class UnusableConfigMap(msgspec.Struct, frozen=True):
    """A ConfigMap that cannot be used."""

    why: str
    has_last: bool  # whether it is known what it said before, which is in force instead


def in_force(
    maps: Mapping[str, QuotaConfigMap], ours: str = OURS, old: str = OLD
) -> tuple[Quotas, list[UnusableConfigMap]]:
    """What is in force, as the scheduler would have it, and what is wrong with what is written."""
    broken: list[UnusableConfigMap] = []
    read: list[Quotas] = []
    for place, key in ((ours, OUR_KEY), (old, OLD_KEY)):
        found = maps.get(place)
        try:
            read.append({} if found is None else read_quotas(found.text(key), key, found.title))
        except InputError as wrong:
            assert found is not None
            last = _last_good(found, key)
            broken.append(UnusableConfigMap(str(wrong), last is not None))
            read.append(last or {})
    return merged(*read), broken


def _last_good(found: QuotaConfigMap, key: str) -> Quotas | None:
    try:
        return None if found.last_good is None else read_quotas(found.last_good, key, found.title)
    except InputError:
        return None


class NamespaceUsage(msgspec.Struct):
    """What one namespace holds."""

    spent: Spent = msgspec.field(default_factory=dict)
    pods: int = 0
    waiting: int = 0  # pods without a node that ask for cards


def _held(seen: ClusterSnapshot, settings: DialectSettings) -> dict[str, NamespaceUsage]:
    read = [registry.read_node(found, settings) for found in seen.nodes]
    nodes = {node.name: node for node in read if isinstance(node, Node)}
    by_namespace: dict[str, NamespaceUsage] = {}
    for pod in seen.pods:
        if pod.is_terminal:
            continue
        held = by_namespace.setdefault(pod.namespace, NamespaceUsage())
        node = nodes.get(pod.node_name)
        grant = records.read_grant(pod, node, settings) if node is not None else None
        if node is not None and isinstance(grant, Grant):
            held.spent, held.pods = add(held.spent, cost_of(grant, node)), held.pods + 1
        elif not pod.node_name and not pod.is_terminating and isinstance(registry.read_pod(pod, settings), PodRequest):
            held.waiting += 1
    return by_namespace


# ---- the JSON contract (docs/quota.md) ------------------------------------------------------------------------------


def _rows(quotas: Quotas, held: dict[str, NamespaceUsage], only: str | None) -> Iterator[dict[str, Any]]:
    """One per limit, and one per model that is held and not allowed; a namespace that may have nothing has one row
    without a model, for all that it holds. `*` itself holds nothing: what it says counts for each by itself."""
    others = {name for name, found in held.items() if found.pods or found.waiting}
    for name in sorted({*quotas, *others}) if only is None else [only]:
        quota = quota_of(name, quotas)
        if quota is None:
            continue
        found = held.get(name, NamespaceUsage())
        if not quota.limits:
            yield _row(name, quota, found, NOTHING, None, sum(found.spent.values(), Amount()))
        for limit in quota.limits:
            yield _row(name, quota, found, limit, limit.model, total(found.spent, limit))
        for model in sorted(found.spent) if quota.limits else ():
            if not any(limit.covers(model) for limit in quota.limits):
                yield _row(name, quota, found, NOTHING, model, found.spent[model])


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
    """Cards as a number of them, memory in MiB, cores in percent of one card; no limit is null."""
    most, scale = getattr(limit, kind), ALL if kind == "cards" else 1
    return {
        "used": None if used is None else getattr(used, kind) / scale,
        "limit": None if most is None else most / scale,
    }


# ---- for people -----------------------------------------------------------------------------------------------------


def _table(rows: list[dict[str, Any]], *, wide: bool) -> list[str]:
    head = ["NAMESPACE", "MODEL", "CARDS", "MEMORY", "CORES", "POOLS", "WAITING"]
    lines = [_line(row) for row in rows]
    if wide:
        head += ["PODS", "WRITTEN IN"]
        lines = [[*line, str(row["pods"]), row["source"]] for line, row in zip(lines, rows, strict=True)]
    widths = [max(len(line[n]) for line in [head, *lines]) for n in range(len(head))]
    shown = [_padded(head, widths)]
    for line, row in zip(lines, rows, strict=True):
        full = any(_is_full(row[kind]) for kind in KINDS)
        shown.append(style(_padded(line, widths), fg="yellow") if full else _padded(line, widths))
    return shown


def _padded(words: list[str], widths: list[int]) -> str:
    return "  ".join(word.ljust(width) for word, width in zip(words, widths, strict=True)).rstrip()


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
