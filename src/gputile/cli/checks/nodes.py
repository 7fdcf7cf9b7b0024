"""Checks of nodes and pods: agents, inventories, runtimes, others who hand out the same cards, pods that went by."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from gputile.cli.checks.facts import ClusterFacts, Finding, fail, few, items, meta, ok, parsed, unseen, warn
from gputile.cli.lease_age import seconds_expired
from gputile.cli.render.terminal import plural
from gputile.cli.source import UnreadableKind
from gputile.dialects.gputile import GRANT, INVENTORY
from gputile.dialects.parsing import count_of
from gputile.dialects.records import read_grant
from gputile.dialects.registry import DIALECTS, read_node, read_pod
from gputile.kube.api import AgentLease
from gputile.model.cards import Node
from gputile.model.refusals import NodeReason
from gputile.model.requests import PodRequest

OTHER_AGENTS = {  # in the name of a DaemonSet: whose it is
    "gpushare-device-plugin": "gpushare",
    "hami-device-plugin": "HAMi",
    "vgpu-manager-device-plugin": "vgpu-manager",
    "gpu-manager": "gpu-manager",
    "nvidia-device-plugin": "NVIDIA",
    "elastic-gpu-agent": "elastic-gpu",
    "nano-gpu-agent": "nano-gpu",
}
OTHER_SCHEDULERS = {  # in the name of a Deployment or DaemonSet
    "gpushare-schd-extender": "gpushare",
    "hami-scheduler": "HAMi",
    "vgpu-manager-scheduler": "vgpu-manager",
    "gpu-admission": "gpu-admission",
    "elastic-gpu-scheduler": "elastic-gpu",
    "nano-gpu-scheduler": "nano-gpu",
}


def agents_live(facts: ClusterFacts) -> Iterable[Finding]:
    found = facts.of("agents")
    if isinstance(found, UnreadableKind):
        yield unseen("agents", "Leases in gputile-agents", found)
        return
    leases = [msgspec.convert(one, AgentLease) for one in items(found)]
    names = {node.name for node in facts.seen.nodes}
    silent = {one.name for one in leases if one.name in names and seconds_expired(one, facts.now) is not None}
    gone = {one.name for one in leases if one.name not in names}
    if silent:
        text = f"{len(silent)} of {len(leases)} agents are silent, their nodes take no new pods: {few(silent)}"
        fix = "kubectl -n kube-system get pods -o wide -l app.kubernetes.io/name=gputile-agent; look at those nodes"
        yield fail("agents", text, fix)
    elif leases:
        yield ok("agents", f"{len(leases)} agents renew their Leases")
    else:
        text = "no agent of gputile has a Lease: cards are known only where another system's agent tells of them"
        yield warn("agents", text, "kubectl apply -f deploy/agent.yaml")
    if gone:
        text = f"Leases of nodes that are gone: {few(gone)}"
        yield warn("agents", text, "kubectl -n gputile-agents delete lease <name>; harmless")


def nodes_tell_their_cards(facts: ClusterFacts) -> Iterable[Finding]:
    leases = facts.of("agents")
    with_agent = {meta(one).get("name") for one in ([] if isinstance(leases, UnreadableKind) else items(leases))}
    resources = frozenset().union(*(dialect.resources(facts.settings) for dialect in DIALECTS))
    broken: set[str] = set()
    lost: set[str] = set()
    mute: set[str] = set()
    told = 0
    for found in facts.seen.nodes:
        node = read_node(found, facts.settings)
        fault = node.fault if isinstance(node, Node) else NodeReason.BAD_INVENTORY
        said = [name for name in resources if count_of(found.allocatable, name)]
        has_gpu = said or found.name in with_agent or str(found.labels.get("nvidia.com/gpu.present")) == "true"
        told += isinstance(node, Node) and bool(node.cards)
        if fault == NodeReason.BAD_INVENTORY:
            broken.add(found.name)
        elif fault == NodeReason.PLUGIN_GONE:
            lost.add(found.name)
        elif has_gpu and isinstance(node, Node) and not node.cards and INVENTORY not in found.annotations:
            mute.add(found.name)
    for names, what, fix in (
        (broken, "what is said of the cards cannot be read", "restart the agent there"),
        (lost, "the kubelet has lost the device plugin", "restart the agent there; then look at the kubelet's log"),
        (mute, "GPUs, but no inventory", "does the agent run there, and find the driver's library (NVML)?"),
    ):
        if names:
            yield fail("inventory", f"on {plural(len(names), 'node')} {what}: {few(names)}", fix)
    if told and not broken | lost | mute:
        yield ok("inventory", f"{told} of {len(facts.seen.nodes)} nodes tell of cards")
    elif not told:
        fix = "kubectl apply -f deploy/agent.yaml, or install NVIDIA's GPU feature discovery"
        yield fail("inventory", "no node tells of any card", fix)


def runtimes_obey(facts: ClusterFacts) -> Iterable[Finding]:
    """Where the runtime ignores CDI, or NVIDIA's runtime class is missing, containers see no card, or all."""
    one_by_one = {
        node.name
        for found in facts.seen.nodes
        if isinstance(node := read_node(found, facts.settings), Node) and node.one_at_a_time
    }
    if one_by_one:
        slow = f"{plural(len(one_by_one), 'node')} start GPU pods one at a time"
        text = f"{slow}, for the runtime there does not obey CDI: {few(one_by_one)}"
        yield warn("runtime", text, "containerd 2, or enable_cdi = true in its config; docs/agent.md")
    agent, classes = facts.of("agent"), facts.of("runtime classes")
    wanted = _pod_spec({} if isinstance(agent, UnreadableKind) else agent).get("runtimeClassName")
    hidden = (
        agent
        if isinstance(agent, UnreadableKind)
        else classes
        if wanted and isinstance(classes, UnreadableKind)
        else None
    )
    if hidden is not None:
        yield unseen("runtime", "what runtime class the agent wants, and whether there is such a one,", hidden)
    elif wanted and wanted not in {meta(one).get("name") for one in items(classes)}:
        text = f"the agent wants the runtime class `{wanted}`, and there is none: its pods cannot start"
        fix = "install NVIDIA's container toolkit and RuntimeClass, or take runtimeClassName out of deploy/agent.yaml"
        yield fail("runtime", text, fix)
    elif not one_by_one:
        yield ok("runtime", "no node is known whose runtime does not do as it is told")


def _pod_spec(workload: Any) -> dict[str, Any]:
    return (((workload or {}).get("spec") or {}).get("template") or {}).get("spec") or {}


def nobody_else_hands_out(facts: ClusterFacts) -> Iterable[Finding]:
    """Two device plugins for one name, two schedulers for one card."""
    found = [facts.of("daemon sets"), facts.of("deployments")]
    if any(isinstance(one, UnreadableKind) for one in found):
        yield unseen(
            "others", "DaemonSets and Deployments", next(one for one in found if isinstance(one, UnreadableKind))
        )
        return
    everyone = [meta(one).get("name") or "" for one in (*items(found[0]), *items(found[1]))]
    ours = any(name.startswith("gputile-agent") for name in everyone)
    agents, rivals = _whose(everyone, OTHER_AGENTS), _whose(everyone, OTHER_SCHEDULERS)
    if rivals:
        text = f"schedulers of {', '.join(sorted(rivals))} run too: two that hand out the same cards sell them twice"
        fix = "stop the old extender once gputile schedules its pods; docs/install.md, coming from another system"
        yield warn("others", text, fix)
    if agents and ours:
        whose = ", ".join(sorted(agents))
        text = f"agents of {whose} run beside ours: of two plugins for one resource a kubelet takes the last"
        fix = "on each node let one of them serve a name: the setting `serve` of gputile's agent, or a nodeSelector"
        yield warn("others", text, fix)
    if not rivals and not (agents and ours):
        yield ok("others", "nobody else hands out these cards")


def _whose(names: Iterable[str], systems: Mapping[str, str]) -> set[str]:
    """A chart may put the name of its release in front."""
    return {system for name in names for part, system in systems.items() if name.startswith(part) or f"-{part}" in name}


# ---- pods -----------------------------------------------------------------------------------------------------------


def pods_come_by_us(facts: ClusterFacts) -> Iterable[Finding]:
    """Pods that another scheduler placed, or that nobody will ever place."""
    served = served_names(facts)
    read = [read_node(found, facts.settings) for found in facts.seen.nodes]
    nodes = {node.name: node for node in read if isinstance(node, Node)}
    around: set[str] = set()
    orphans: dict[str, set[str]] = {}
    granted = 0
    for pod in facts.seen.pods:
        if pod.is_terminal or not isinstance(read_pod(pod, facts.settings), PodRequest):
            continue
        name = (pod.spec and pod.spec.scheduler_name) or "default-scheduler"
        granted += GRANT in pod.annotations
        if pod.node_name and read_grant(pod, nodes.get(pod.node_name), facts.settings) is None:
            around.add(pod.key)
        elif not pod.node_name and served is not None and name not in served:
            orphans.setdefault(name, set()).add(pod.key)
    if around:
        text = f"{len(around)} pods hold cards without a grant, they came around gputile: {few(around)}"
        fix = "see `leader`, who grants them within a second; let their scheduler ask gputile (docs/install.md, step 3)"
        yield fail("pods", text, fix)
    for name, pods in sorted(orphans.items()):
        text = (
            f"{len(pods)} pods wait for the scheduler `{name}`, which nobody serves as far as can be seen: {few(pods)}"
        )
        yield warn("pods", text, f"start it, add `{name}` to a scheduler's profiles, or change them")
    if not around and not orphans:
        yield ok("pods", f"{granted} pods carry grants, none came around gputile")


def served_names(facts: ClusterFacts) -> set[str] | None:
    """Scheduler names that somebody serves, as far as configurations can be seen; None when none can."""
    config = facts.of("second scheduler")
    if isinstance(config, UnreadableKind):
        return None
    names = {"default-scheduler"}
    for text in ((config or {}).get("data") or {}).values():
        names |= {str(p.get("schedulerName")) for p in (parsed(str(text)) or {}).get("profiles") or ()}
    return names
