"""The traps of installing a GPU scheduler, one by one: each looked for, each with its fix.

Room:  pure functions over objects as the API server gives them. What may not be read is `unknown`, and never `ok`.
Door:  `examine(facts)`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import yaml

from gputile.cli.heartbeats import silent_for
from gputile.cli.cluster import Seen, Unseen
from gputile.dialects.gputile import GRANT, INVENTORY
from gputile.dialects.settings import DialectSettings
from gputile.dialects.speaking import DIALECTS, read_grant, read_node, read_pod
from gputile.dialects.wire import count_of
from gputile.kube.values import Heartbeat
from gputile.model.cards import Node
from gputile.model.refusals import NodeCode
from gputile.model.requests import PodRequest

NAME = "gputile-scheduler"
OK, WARN, FAIL, UNKNOWN = "ok", "warn", "fail", "unknown"
POLICIES = ("gputile-records", "gputile-leader", "gputile-agents")
BROKEN_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
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
SHOWN = 5


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one check found."""

    check: str
    state: str  # ok, warn, fail, unknown
    text: str
    fix: str = ""


class Facts(msgspec.Struct, kw_only=True):
    """What was seen. Of the objects by name: JSON, a list of them, None where there is none, `Unseen` where it is not
    to be told."""

    seen: Seen
    now: float  # seconds since 1970
    settings: DialectSettings = DialectSettings()
    objects: Mapping[str, Any] = {}
    metrics: bytes | Unseen | None = None  # of the leading scheduler

    def of(self, name: str) -> Any:
        return self.objects.get(name)


Check = Callable[[Facts], Iterable[Finding]]


def parsed(text: str) -> dict[str, Any] | None:
    """A YAML document that is a mapping; None when it is none."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    return found if isinstance(found, dict) else None


def meta(found: Any) -> dict[str, Any]:
    return (found or {}).get("metadata") or {}


def items(found: Any) -> list[Any]:
    return list((found or {}).get("items") or ())


def few(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:SHOWN]) + (f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else "")


def unseen(check: str, what: str, found: Unseen) -> Finding:
    return Finding(check=check, state=UNKNOWN, text=f"{what} cannot be seen: {found.why}", fix=found.fix)


# ---- our own processes ----------------------------------------------------------------------------------------------


def scheduler_runs(facts: Facts) -> Iterable[Finding]:
    found = facts.of("scheduler")
    if isinstance(found, Unseen):
        yield unseen("scheduler", f"Deployment {NAME}", found)
        return
    if found is None:
        pods = [pod for pod in facts.seen.pods if pod.labels.get("app.kubernetes.io/name") == NAME]
        text = f"there is no Deployment {NAME} in kube-system" + (f", but {len(pods)} pods of that name" * bool(pods))
        yield Finding(check="scheduler", state=WARN if pods else FAIL, text=text, fix="kubectl apply -f deploy/scheduler.yaml")
        return
    wanted, ready = (found.get("spec") or {}).get("replicas", 1), (found.get("status") or {}).get("readyReplicas", 0)
    state = OK if ready >= wanted > 0 else WARN if ready else FAIL
    fix = "" if state == OK else f"kubectl -n kube-system describe pods -l app.kubernetes.io/name={NAME}"
    yield Finding(check="scheduler", state=state, text=f"{ready} of {wanted} replicas of {NAME} are ready", fix=fix)
    if wanted == 1:
        text = "there is one replica: while it restarts, GPU pods wait"
        yield Finding(check="scheduler", state=WARN, text=text, fix=f"kubectl -n kube-system scale deployment {NAME} --replicas=2")


def images_come(facts: Facts) -> Iterable[Finding]:
    """Images that cannot be pulled: the registry that nobody reaches, the tag that does not exist."""
    found = facts.of("our pods")
    if isinstance(found, Unseen) or found is None:
        return
    bad = {
        f"{meta(pod).get('name')} ({state['waiting'].get('reason')}: {status.get('image')})"
        for pod in items(found)
        for status in (pod.get("status") or {}).get("containerStatuses") or ()
        if ((state := status.get("state") or {}).get("waiting") or {}).get("reason") in BROKEN_IMAGE
    }
    if bad:
        fix = "put your registry in front of the image in deploy/*.yaml, and a tag that exists there"
        yield Finding(check="images", state=FAIL, text=f"images cannot be pulled: {few(bad)}", fix=fix)
    else:
        yield Finding(check="images", state=OK, text="no pod of ours waits for its image")


def somebody_leads(facts: Facts) -> Iterable[Finding]:
    found = facts.of("leader")
    if isinstance(found, Unseen):
        yield unseen("leader", f"Lease {NAME}", found)
        return
    if found is None:
        yield Finding(check="leader", state=FAIL, text=f"there is no Lease {NAME}: no scheduler has ever led", fix="see `scheduler`")
        return
    silent = silent_for(msgspec.convert(found, Heartbeat), facts.now)
    holder = (found.get("spec") or {}).get("holderIdentity") or "nobody"
    if silent is not None:
        text = f"the Lease {NAME} was last renewed {silent:.0f} s ago, by {holder}: nobody leads, GPU pods wait"
        yield Finding(check="leader", state=FAIL, text=text, fix="look at the scheduler's logs; can it reach the API server?")
        return
    labelled = [p for p in facts.seen.pods if p.labels.get("gputile.io/leader") == "true"]
    if len(labelled) != 1:
        text = f"{holder} leads, but {len(labelled)} pods carry the label gputile.io/leader=true, which the Service selects"
        fix = "may the scheduler patch pods/status? apply deploy/scheduler.yaml and deploy/admission.yaml again"
        yield Finding(check="leader", state=FAIL, text=text, fix=fix)
        return
    yield Finding(check="leader", state=OK, text=f"{labelled[0].name} leads")


def policies_are_there(facts: Facts) -> Iterable[Finding]:
    found, bound = facts.of("policies"), facts.of("policy bindings")
    if isinstance(found, Unseen) or isinstance(bound, Unseen):
        yield unseen("admission", "admission policies", found if isinstance(found, Unseen) else bound)
        return
    fix = "kubectl apply -f deploy/admission.yaml"
    if found is None:
        text = "this API server has no ValidatingAdmissionPolicy: before 1.30 only RBAC keeps others from writing grants"
        yield Finding(check="admission", state=WARN, text=text, fix="upgrade Kubernetes, or watch who may patch pods")
        return
    names = {meta(one).get("name") for one in items(found)}
    in_force = {(one.get("spec") or {}).get("policyName") for one in items(bound)}
    missing = [name for name in POLICIES if name not in names]
    unbound = [name for name in POLICIES if name in names and name not in in_force]
    if missing or unbound:
        said = [f"missing: {', '.join(missing)}"] * bool(missing) + [f"not bound: {', '.join(unbound)}"] * bool(unbound)
        text = f"admission policies {'; '.join(said)}: others may write grants"
        yield Finding(check="admission", state=FAIL, text=text, fix=fix)
    else:
        yield Finding(check="admission", state=OK, text="only the scheduler may write grants, agents only to their nodes")


def webhooks_answer(facts: Facts) -> Iterable[Finding]:
    """A webhook for pods whose server is gone: with `Fail` nothing starts any more, with `Ignore` it skips in silence."""
    hooks, slices = facts.of("webhooks"), facts.of("endpoint slices")
    if isinstance(hooks, Unseen) or isinstance(slices, Unseen):
        yield unseen("webhooks", "webhooks or their endpoints", hooks if isinstance(hooks, Unseen) else slices)
        return
    served = {_service(one) for one in items(slices) if any(_is_ready(e) for e in one.get("endpoints") or ())}
    bad = False
    for configuration in items(hooks):
        for hook in configuration.get("webhooks") or ():
            service = (hook.get("clientConfig") or {}).get("service") or {}
            at = (service.get("namespace"), service.get("name"))
            if not _is_about_pods(hook) or not service or at in served:
                continue
            bad, policy = True, hook.get("failurePolicy") or "Fail"
            ends = "no pod can be created" if policy == "Fail" else "it skips pods in silence"
            name = meta(configuration).get("name")
            kind = configuration.get("kind") or "webhook configuration"
            text = f"webhook {name} asks {at[0]}/{at[1]}, which has no ready endpoint: {ends} ({policy})"
            fix = f"start what serves it, or kubectl delete {kind.lower()} {name}"
            yield Finding(check="webhooks", state=FAIL if policy == "Fail" else WARN, text=text, fix=fix)
    if not bad:
        yield Finding(check="webhooks", state=OK, text="every webhook for pods has somebody who answers; gputile needs none")


def _service(found: Any) -> tuple[str | None, str | None]:
    return meta(found).get("namespace"), (meta(found).get("labels") or {}).get("kubernetes.io/service-name")


def _is_ready(endpoint: Any) -> bool:
    return (endpoint.get("conditions") or {}).get("ready") is not False


def _is_about_pods(hook: Any) -> bool:
    resources = {name for rule in hook.get("rules") or () for name in rule.get("resources") or ()}
    return bool(resources & {"pods", "*", "*/*", "pods/*"})


def api_is_served(facts: Facts) -> Iterable[Finding]:
    """An APIService that does not answer slows down every discovery, and holds up the deletion of namespaces."""
    found = facts.of("api services")
    if isinstance(found, Unseen) or found is None:
        return
    for one in items(found):
        group = (one.get("spec") or {}).get("group")
        if group not in ("metrics.nvidia.com", "nvidia-gpu-scheduler"):
            continue
        state = next((c for c in (one.get("status") or {}).get("conditions") or () if c.get("type") == "Available"), {})
        works = state.get("status") == "True"
        text = f"API {meta(one).get('name')} is {'served' if works else 'registered and not served: '}"
        text += "" if works else str(state.get("message") or "(no word)")
        fix = "" if works else "see `scheduler` and `leader`; or kubectl delete apiservice " + str(meta(one).get("name"))
        yield Finding(check="metrics-api", state=OK if works else FAIL, text=text, fix=fix)


# ---- nodes ----------------------------------------------------------------------------------------------------------


def agents_live(facts: Facts) -> Iterable[Finding]:
    found = facts.of("agents")
    if isinstance(found, Unseen):
        yield unseen("agents", "Leases in gputile-agents", found)
        return
    leases = [msgspec.convert(one, Heartbeat) for one in items(found)]
    names = {node.name for node in facts.seen.nodes}
    silent = {one.name for one in leases if one.name in names and silent_for(one, facts.now) is not None}
    gone = {one.name for one in leases if one.name not in names}
    if silent:
        text = f"{len(silent)} of {len(leases)} agents are silent, their nodes take no new pods: {few(silent)}"
        fix = "kubectl -n kube-system get pods -o wide -l app.kubernetes.io/name=gputile-agent; look at those nodes"
        yield Finding(check="agents", state=FAIL, text=text, fix=fix)
    elif leases:
        yield Finding(check="agents", state=OK, text=f"{len(leases)} agents renew their Leases")
    else:
        text = "no agent of gputile has a Lease: cards are known only where another system's agent tells of them"
        yield Finding(check="agents", state=WARN, text=text, fix="kubectl apply -f deploy/agent.yaml")
    if gone:
        text = f"Leases of nodes that are gone: {few(gone)}"
        yield Finding(check="agents", state=WARN, text=text, fix="kubectl -n gputile-agents delete lease <name>; harmless")


def nodes_tell_their_cards(facts: Facts) -> Iterable[Finding]:
    leases = facts.of("agents")
    with_agent = {meta(one).get("name") for one in ([] if isinstance(leases, Unseen) else items(leases))}
    resources = frozenset().union(*(dialect.resources(facts.settings) for dialect in DIALECTS))
    broken: set[str] = set()
    lost: set[str] = set()
    mute: set[str] = set()
    told = 0
    for found in facts.seen.nodes:
        node = read_node(found, facts.settings)
        fault = node.fault if isinstance(node, Node) else NodeCode.BAD_INVENTORY
        said = [name for name in resources if count_of(found.allocatable, name)]
        has_gpu = said or found.name in with_agent or str(found.labels.get("nvidia.com/gpu.present")) == "true"
        told += isinstance(node, Node) and bool(node.cards)
        if fault == NodeCode.BAD_INVENTORY:
            broken.add(found.name)
        elif fault == NodeCode.PLUGIN_GONE:
            lost.add(found.name)
        elif has_gpu and isinstance(node, Node) and not node.cards and INVENTORY not in found.annotations:
            mute.add(found.name)
    for names, what, fix in (
        (broken, "what it says of its cards cannot be read", "restart the agent there"),
        (lost, "its kubelet has lost the device plugin", "restart the agent there; then look at the kubelet's log"),
        (mute, "it has GPUs and no inventory", "does the agent run there, and does it find the driver's library (NVML)?"),
    ):
        if names:
            yield Finding(check="inventory", state=FAIL, text=f"{len(names)} nodes: {what}: {few(names)}", fix=fix)
    if not broken | lost | mute:
        text = f"{told} of {len(facts.seen.nodes)} nodes tell of cards" if told else "no node tells of any card"
        fix = "" if told else "kubectl apply -f deploy/agent.yaml, or install NVIDIA's GPU feature discovery"
        yield Finding(check="inventory", state=OK if told else FAIL, text=text, fix=fix)


def runtimes_obey(facts: Facts) -> Iterable[Finding]:
    """Where the runtime ignores CDI, or NVIDIA's runtime class is missing, containers see no card, or all."""
    one_by_one = {
        node.name
        for found in facts.seen.nodes
        if isinstance(node := read_node(found, facts.settings), Node) and node.one_at_a_time
    }
    if one_by_one:
        text = f"{len(one_by_one)} nodes start GPU pods one at a time, their runtime does not obey CDI: {few(one_by_one)}"
        yield Finding(check="runtime", state=WARN, text=text, fix="containerd 2, or enable_cdi = true in its config; docs/agent.md")
    agent, classes = facts.of("agent"), facts.of("runtime classes")
    spec = ((((agent or {}) if not isinstance(agent, Unseen) else {}).get("spec") or {}).get("template") or {}).get("spec") or {}
    wanted = spec.get("runtimeClassName")
    if wanted and not isinstance(classes, Unseen) and wanted not in {meta(one).get("name") for one in items(classes)}:
        text = f"the agent wants the runtime class `{wanted}`, and there is none: its pods cannot start"
        fix = "install NVIDIA's container toolkit with its RuntimeClass, or take runtimeClassName out of deploy/agent.yaml"
        yield Finding(check="runtime", state=FAIL, text=text, fix=fix)
    elif not one_by_one:
        yield Finding(check="runtime", state=OK, text="no node is known whose runtime does not do as it is told")


def nobody_else_hands_out(facts: Facts) -> Iterable[Finding]:
    """Two device plugins for one name, two schedulers for one card."""
    found = [facts.of("daemon sets"), facts.of("deployments")]
    if any(isinstance(one, Unseen) for one in found):
        yield unseen("others", "DaemonSets and Deployments", next(one for one in found if isinstance(one, Unseen)))
        return
    everyone = [meta(one).get("name") or "" for one in (*items(found[0]), *items(found[1]))]
    ours = any(name.startswith("gputile-agent") for name in everyone)
    agents = {system for name in everyone for part, system in OTHER_AGENTS.items() if part in name}
    rivals = {system for name in everyone for part, system in OTHER_SCHEDULERS.items() if part in name}
    if rivals:
        text = f"schedulers of {', '.join(sorted(rivals))} run too: two that hand out the same cards sell them twice"
        fix = "stop the old extender once gputile schedules its pods; docs/install.md, coming from another system"
        yield Finding(check="others", state=WARN, text=text, fix=fix)
    if agents and ours:
        text = f"agents of {', '.join(sorted(agents))} run beside ours: of two plugins for one resource a kubelet takes the last"
        fix = "on each node let one of them serve a name: the setting `serve` of gputile's agent, or a nodeSelector"
        yield Finding(check="others", state=WARN, text=text, fix=fix)
    if not rivals and not (agents and ours):
        yield Finding(check="others", state=OK, text="nobody else hands out these cards")


# ---- pods -----------------------------------------------------------------------------------------------------------


def pods_come_by_us(facts: Facts) -> Iterable[Finding]:
    """Pods that another scheduler placed, or that nobody will ever place."""
    served = served_names(facts)
    around: set[str] = set()
    orphans: dict[str, set[str]] = {}
    granted = 0
    for pod in facts.seen.pods:
        if pod.is_over or not isinstance(read_pod(pod, facts.settings), PodRequest):
            continue
        name = (pod.spec and pod.spec.scheduler_name) or "default-scheduler"
        granted += GRANT in pod.annotations
        if pod.node_name and read_grant(pod, (), facts.settings) is None:
            around.add(pod.key)
        elif not pod.node_name and served is not None and name not in served:
            orphans.setdefault(name, set()).add(pod.key)
    if around:
        text = f"{len(around)} pods hold cards without a grant, they came around gputile: {few(around)}"
        fix = "see `leader`: the leader grants them within a second; and let their scheduler ask gputile (docs/install.md, 3)"
        yield Finding(check="pods", state=FAIL, text=text, fix=fix)
    for name, pods in sorted(orphans.items()):
        text = f"{len(pods)} pods wait for the scheduler `{name}`, of which no pod is known: {few(pods)}"
        yield Finding(check="pods", state=WARN, text=text, fix=f"start it, add `{name}` to a scheduler's profiles, or change them")
    if not around and not orphans:
        yield Finding(check="pods", state=OK, text=f"{granted} pods carry grants, none came around gputile")


def served_names(facts: Facts) -> set[str] | None:
    """Scheduler names that somebody serves, as far as configurations can be seen; None when none can."""
    config = facts.of("second scheduler")
    if isinstance(config, Unseen):
        return None
    names = {"default-scheduler"}
    for text in ((config or {}).get("data") or {}).values():
        names |= {str(p.get("schedulerName")) for p in (parsed(str(text)) or {}).get("profiles") or ()}
    return names


CHECKS: tuple[Check, ...] = (
    scheduler_runs,
    images_come,
    somebody_leads,
    policies_are_there,
    webhooks_answer,
    api_is_served,
    agents_live,
    nodes_tell_their_cards,
    runtimes_obey,
    nobody_else_hands_out,
    pods_come_by_us,
)
