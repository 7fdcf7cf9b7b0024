"""Checks of nodes and pods: agents, inventories, runtimes, other GPU systems, ungranted pods, left-over annotations."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from gputile.cli.checks.facts import SHOWN, ClusterFacts, Finding, fail, few, items, meta, ok, parsed, unseen, warn
from gputile.cli.lease_age import seconds_expired
from gputile.cli.render.terminal import plural
from gputile.cli.source import UnreadableKind
from gputile.dialects.gputile import GRANT, INVENTORY
from gputile.dialects.parsing import count_of
from gputile.dialects.records import read_grant
from gputile.dialects.registry import all_resources, read_node, read_pod
from gputile.kube.api import AgentLease
from gputile.model.cards import Node
from gputile.model.refusals import NodeReason
from gputile.model.requests import PodRequest

OTHER_AGENTS = {  # part of a DaemonSet's name, and the system that it belongs to
    "gpushare-device-plugin": "gpushare",
    "hami-device-plugin": "HAMi",
    "vgpu-manager-device-plugin": "vgpu-manager",
    "gpu-manager": "gpu-manager",
    "nvidia-device-plugin": "NVIDIA",
    "elastic-gpu-agent": "elastic-gpu",
    "nano-gpu-agent": "nano-gpu",
}
OTHER_SCHEDULERS = {  # part of a Deployment's or DaemonSet's name
    "gpushare-schd-extender": "gpushare",
    "hami-scheduler": "HAMi",
    "vgpu-manager-scheduler": "vgpu-manager",
    "gpu-admission": "gpu-admission",
    "elastic-gpu-scheduler": "elastic-gpu",
    "nano-gpu-scheduler": "nano-gpu",
}

OLD_NOMINATION, OLD_ORPHANED = "gputile.io/promise", "gputile.io/lingering"
"""Annotations of earlier builds; `gputile.io/nomination` on pods and `gputile.io/orphaned` on nodes replaced them."""


def agents_are_alive(facts: ClusterFacts) -> Iterable[Finding]:
    """Every agent renews its Lease, and every Lease belongs to a node."""
    answer = facts.of("agents")
    if isinstance(answer, UnreadableKind):
        yield unseen("agents", "Leases in gputile-agents", answer)
        return
    leases = [msgspec.convert(item, AgentLease) for item in items(answer)]
    names = {node.name for node in facts.snapshot.nodes}
    stale = {lease.name for lease in leases if lease.name in names and seconds_expired(lease, facts.now) is not None}
    gone = {lease.name for lease in leases if lease.name not in names}
    if stale:
        text = f"{len(stale)} of {len(leases)} agents are stale, their nodes take no new pods: {few(stale)}"
        fix = "kubectl -n kube-system get pods -o wide -l app.kubernetes.io/name=gputile-agent; look at those nodes"
        yield fail("agents", text, fix)
    elif leases:
        yield ok("agents", f"{len(leases)} agents renew their Leases")
    else:
        text = "no gputile agent has a Lease: GPUs are known only where another system's agent publishes them"
        yield warn("agents", text, "kubectl apply -f deploy/agent.yaml")
    if gone:
        text = f"Leases of nodes that are gone: {few(gone)}"
        yield warn("agents", text, "kubectl -n gputile-agents delete lease <name>; harmless")


def inventories_are_published(facts: ClusterFacts) -> Iterable[Finding]:
    """Every node with GPUs publishes a readable inventory of them."""
    leases = facts.of("agents")
    with_agent = {meta(lease).get("name") for lease in ([] if isinstance(leases, UnreadableKind) else items(leases))}
    resources = all_resources(facts.settings)
    unreadable: set[str] = set()
    lost_plugin: set[str] = set()
    without_inventory: set[str] = set()
    with_cards = 0
    for shown in facts.snapshot.nodes:
        node = read_node(shown, facts.settings)
        fault = node.fault if isinstance(node, Node) else NodeReason.BAD_INVENTORY
        allocatable = [name for name in resources if count_of(shown.allocatable, name)]
        labelled = str(shown.labels.get("nvidia.com/gpu.present")) == "true"
        has_gpu = allocatable or shown.name in with_agent or labelled
        with_cards += isinstance(node, Node) and bool(node.cards)
        if fault == NodeReason.BAD_INVENTORY:
            unreadable.add(shown.name)
        elif fault == NodeReason.PLUGIN_GONE:
            lost_plugin.add(shown.name)
        elif has_gpu and isinstance(node, Node) and not node.cards and INVENTORY not in shown.annotations:
            without_inventory.add(shown.name)
    for names, problem, fix in (
        (unreadable, "the inventory cannot be read", "restart the agent there"),
        (lost_plugin, "the kubelet lost the device plugin", "restart the agent there; then read the kubelet's log"),
        (without_inventory, "GPUs without an inventory", "does the agent run there, and find the NVML library?"),
    ):
        if names:
            yield fail("inventory", f"{problem}: {_counted(names, 'node')}", fix)
    if with_cards and not unreadable | lost_plugin | without_inventory:
        yield ok("inventory", f"{with_cards} of {len(facts.snapshot.nodes)} nodes publish GPUs")
    elif not with_cards:
        fix = "kubectl apply -f deploy/agent.yaml, or install NVIDIA's GPU feature discovery"
        yield fail("inventory", "no node publishes any GPU", fix)


def runtimes_support_cdi(facts: ClusterFacts) -> Iterable[Finding]:
    """Where the runtime ignores CDI, or NVIDIA's runtime class is missing, containers see no GPU, or all of them."""
    one_at_a_time = {
        node.name
        for shown in facts.snapshot.nodes
        if isinstance(node := read_node(shown, facts.settings), Node) and node.one_at_a_time
    }
    if one_at_a_time:
        start = f"{plural(len(one_at_a_time), 'node')} start GPU pods one at a time"
        text = f"{start}, because the container runtime there ignores CDI: {few(one_at_a_time)}"
        yield warn("runtime", text, "containerd 2, or enable_cdi = true in its config; docs/agent.md")
    agent, classes = facts.of("agent"), facts.of("runtime classes")
    wanted = _pod_spec({} if isinstance(agent, UnreadableKind) else agent).get("runtimeClassName")
    unreadable = (
        agent
        if isinstance(agent, UnreadableKind)
        else classes
        if wanted and isinstance(classes, UnreadableKind)
        else None
    )
    if unreadable is not None:
        yield unseen("runtime", "the agent's runtime class, or the list of runtime classes,", unreadable)
    elif wanted and wanted not in {meta(runtime_class).get("name") for runtime_class in items(classes)}:
        text = f"the agent uses the runtime class `{wanted}`, which does not exist: its pods cannot start"
        fix = "install NVIDIA's container toolkit and RuntimeClass, or remove runtimeClassName from deploy/agent.yaml"
        yield fail("runtime", text, fix)
    elif not one_at_a_time:
        yield ok("runtime", "no node has a container runtime that is known to ignore CDI")


def _pod_spec(workload: Any) -> dict[str, Any]:
    return (((workload or {}).get("spec") or {}).get("template") or {}).get("spec") or {}


def no_other_gpu_system(facts: ClusterFacts) -> Iterable[Finding]:
    """Two device plugins for one resource, or two schedulers for one GPU, allocate it twice."""
    answers = [facts.of("daemon sets"), facts.of("deployments")]
    for answer in answers:
        if isinstance(answer, UnreadableKind):
            yield unseen("others", "DaemonSets and Deployments", answer)
            return
    names = [meta(workload).get("name") or "" for answer in answers for workload in items(answer)]
    with_ours = any(name.startswith("gputile-agent") for name in names)
    agents, schedulers = _systems(names, OTHER_AGENTS), _systems(names, OTHER_SCHEDULERS)
    if schedulers:
        systems = ", ".join(sorted(schedulers))
        text = f"schedulers of {systems} run too: two schedulers for the same GPUs double-allocate them"
        fix = "stop the old extender once gputile schedules its pods; docs/install.md, coming from another system"
        yield warn("others", text, fix)
    if agents and with_ours:
        systems = ", ".join(sorted(agents))
        text = f"agents of {systems} run beside gputile's: of two plugins for one resource a kubelet uses the last"
        fix = "serve each resource by one agent per node: the setting `serve` of gputile's agent, or a nodeSelector"
        yield warn("others", text, fix)
    if not schedulers and not (agents and with_ours):
        yield ok("others", "no other GPU scheduler or conflicting device plugin runs here")


def _systems(names: Iterable[str], systems: Mapping[str, str]) -> set[str]:
    """The systems that workloads of these names belong to; a chart may put the name of its release in front."""
    return {system for name in names for part, system in systems.items() if name.startswith(part) or f"-{part}" in name}


# ---- pods -----------------------------------------------------------------------------------------------------------


def pods_have_grants(facts: ClusterFacts) -> Iterable[Finding]:
    """Pods that another scheduler bound, or that name a scheduler that does not run."""
    schedulers = known_schedulers(facts)
    read = [read_node(shown, facts.settings) for shown in facts.snapshot.nodes]
    nodes = {node.name: node for node in read if isinstance(node, Node)}
    ungranted: set[str] = set()
    unscheduled: dict[str, set[str]] = {}
    granted = 0
    for pod in facts.snapshot.pods:
        if pod.is_terminal or not isinstance(read_pod(pod, facts.settings), PodRequest):
            continue
        name = (pod.spec and pod.spec.scheduler_name) or "default-scheduler"
        granted += GRANT in pod.annotations
        if pod.node_name and read_grant(pod, nodes.get(pod.node_name), facts.settings) is None:
            ungranted.add(pod.key)
        elif not pod.node_name and schedulers is not None and name not in schedulers:
            unscheduled.setdefault(name, set()).add(pod.key)
    if ungranted:
        text = f"bound by another scheduler, holding GPUs without a grant: {_counted(ungranted, 'pod')}"
        fix = "see the check `leader`: the leader grants them within a second; let that scheduler call gputile"
        yield fail("pods", text, f"{fix} (docs/install.md, step 3)")
    for name, pods in sorted(unscheduled.items()):
        text = f"pending for the scheduler `{name}`, which no configuration here serves: {_counted(pods, 'pod')}"
        yield warn("pods", text, f"start it, add `{name}` to a scheduler's profiles, or change the pods")
    if not ungranted and not unscheduled:
        yield ok("pods", f"{plural(granted, 'pod')} with a grant, none was bound by another scheduler")


def known_schedulers(facts: ClusterFacts) -> set[str] | None:
    """Scheduler names that a readable configuration serves; None when none can be read."""
    config = facts.of("second scheduler")
    if isinstance(config, UnreadableKind):
        return None
    names = {"default-scheduler"}
    for text in ((config or {}).get("data") or {}).values():
        names |= {str(p.get("schedulerName")) for p in (parsed(str(text)) or {}).get("profiles") or ()}
    return names


# ---- keys of earlier builds -----------------------------------------------------------------------------------------


def no_leftover_annotations(facts: ClusterFacts) -> Iterable[Finding]:
    """Annotations that earlier builds wrote under keys which this build neither reads nor removes."""
    pods = {pod.key for pod in facts.snapshot.pods if OLD_NOMINATION in pod.annotations}
    nodes = {node.name for node in facts.snapshot.nodes if OLD_ORPHANED in node.annotations}
    if pods:
        text = f"annotation `{OLD_NOMINATION}` of an earlier build, which is not read, on {_counted(pods, 'pod')}"
        yield warn("leftovers", text, "; ".join(_remove_from_pods(sorted(pods)[:SHOWN])))
    if nodes:
        text = f"annotation `{OLD_ORPHANED}` of an earlier build, which is not read, on {_counted(nodes, 'node')}"
        yield warn("leftovers", text, f"kubectl annotate node {' '.join(sorted(nodes)[:SHOWN])} {OLD_ORPHANED}-")
    if not pods and not nodes:
        yield ok("leftovers", "no pod or node carries an annotation of an earlier build")


def _counted(names: set[str], noun: str) -> str:
    return f"{plural(len(names), noun)}: {few(names)}"


def _remove_from_pods(keys: Iterable[str]) -> list[str]:
    """One kubectl command per namespace; `keys` are namespace/name."""
    by_namespace: dict[str, list[str]] = {}
    for key in keys:
        namespace, _, name = key.partition("/")
        by_namespace.setdefault(namespace, []).append(name)
    return [f"kubectl annotate pod -n {space} {' '.join(n)} {OLD_NOMINATION}-" for space, n in by_namespace.items()]
