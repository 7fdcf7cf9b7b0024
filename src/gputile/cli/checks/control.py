"""Checks of the control plane: gputile's scheduler, admission policies, webhooks, the registered metrics API."""

from collections.abc import Iterable
from typing import Any

import msgspec

from gputile.cli.checks.facts import NAME, ClusterFacts, Finding, fail, few, items, meta, ok, unseen, warn
from gputile.cli.lease_age import seconds_expired
from gputile.cli.source import UnreadableKind
from gputile.kube.api import AgentLease

POLICIES = ("gputile-records", "gputile-scheduler", "gputile-scheduler-objects", "gputile-agents")
BROKEN_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")


def scheduler_is_ready(facts: ClusterFacts) -> Iterable[Finding]:
    """The Deployment exists, and its replicas are ready."""
    deployment = facts.of("scheduler")
    if isinstance(deployment, UnreadableKind):
        yield unseen("scheduler", f"Deployment {NAME}", deployment)
        return
    if deployment is None:
        pods = [pod for pod in facts.snapshot.pods if pod.labels.get("app.kubernetes.io/name") == NAME]
        text = f"there is no Deployment {NAME} in kube-system" + (f", but {len(pods)} pods of that name" * bool(pods))
        yield (warn if pods else fail)("scheduler", text, "kubectl apply -f deploy/scheduler.yaml")
        return
    wanted = (deployment.get("spec") or {}).get("replicas", 1)
    ready = (deployment.get("status") or {}).get("readyReplicas", 0)
    text = f"{ready} of {wanted} replicas of {NAME} are ready"
    if ready >= wanted > 0:
        yield ok("scheduler", text)
    else:
        fix = f"kubectl -n kube-system describe pods -l app.kubernetes.io/name={NAME}"
        yield (warn if ready else fail)("scheduler", text, fix)
    if wanted == 1:
        text = "there is one replica: while it restarts, GPU pods stay pending"
        yield warn("scheduler", text, f"kubectl -n kube-system scale deployment {NAME} --replicas=2")


def images_are_pulled(facts: ClusterFacts) -> Iterable[Finding]:
    """Images that cannot be pulled: an unreachable registry, or a tag that does not exist."""
    pods = facts.of("our pods")
    if isinstance(pods, UnreadableKind):
        yield unseen("images", "the status of gputile's pods", pods)
        return
    broken = {
        f"{meta(pod).get('name')} ({state['waiting'].get('reason')}: {status.get('image')})"
        for pod in items(pods)
        for status in (pod.get("status") or {}).get("containerStatuses") or ()
        if ((state := status.get("state") or {}).get("waiting") or {}).get("reason") in BROKEN_IMAGE
    }
    if broken:
        fix = "put your registry in front of the image in deploy/*.yaml, and a tag that exists there"
        yield fail("images", f"images cannot be pulled: {few(broken)}", fix)
    else:
        yield ok("images", "no image pull of gputile's pods has failed")


def leader_is_elected(facts: ClusterFacts) -> Iterable[Finding]:
    """The leader's Lease is valid, and exactly one pod carries the leader's label."""
    lease = facts.of("leader")
    if isinstance(lease, UnreadableKind):
        yield unseen("leader", f"Lease {NAME}", lease)
        return
    if lease is None:
        text = f"there is no Lease {NAME}: no scheduler has ever been elected leader"
        yield fail("leader", text, "see the check `scheduler`")
        return
    expired = seconds_expired(msgspec.convert(lease, AgentLease), facts.now)
    holder = (lease.get("spec") or {}).get("holderIdentity") or "no holder"
    if expired is not None:
        text = f"the Lease {NAME} was last renewed {expired:.0f} s ago, by {holder}: no leader, GPU pods stay pending"
        yield fail("leader", text, "read the scheduler's logs; can it reach the API server?")
        return
    labelled = [pod for pod in facts.snapshot.pods if pod.labels.get("gputile.io/leader") == "true"]
    if len(labelled) != 1:
        label = "the label gputile.io/leader=true, by which the Service selects the leader"
        text = f"{holder} is the leader, but {len(labelled)} pods carry {label}"
        fix = "may the scheduler patch pods/status? apply deploy/scheduler.yaml and deploy/admission.yaml again"
        yield fail("leader", text, fix)
        return
    yield ok("leader", f"{labelled[0].name} is the leader")


def admission_policies_are_bound(facts: ClusterFacts) -> Iterable[Finding]:
    """The admission policies that protect grants exist and are bound."""
    policies, bindings = facts.of("policies"), facts.of("policy bindings")
    if isinstance(policies, UnreadableKind) or isinstance(bindings, UnreadableKind):
        unreadable = policies if isinstance(policies, UnreadableKind) else bindings
        yield unseen("admission", "admission policies", unreadable)
        return
    if policies is None:
        text = (
            "this API server has no ValidatingAdmissionPolicy: before 1.30 only RBAC keeps others from writing grants"
        )
        yield warn("admission", text, "upgrade Kubernetes, or restrict the accounts that may patch pods")
        return
    names = {meta(policy).get("name") for policy in items(policies)}
    in_force = {(binding.get("spec") or {}).get("policyName") for binding in items(bindings)}
    missing = [name for name in POLICIES if name not in names]
    unbound = [name for name in POLICIES if name in names and name not in in_force]
    if missing or unbound:
        parts = [f"missing: {', '.join(missing)}"] * bool(missing)
        parts += [f"not bound: {', '.join(unbound)}"] * bool(unbound)
        text = f"admission policies {'; '.join(parts)}: grants, or nodes, are not protected"
        yield fail("admission", text, "kubectl apply -f deploy/admission.yaml")
    else:
        yield ok("admission", "only the scheduler may write grants, and each agent only its own node")


def webhooks_have_endpoints(facts: ClusterFacts) -> Iterable[Finding]:
    """A webhook for pods without a ready endpoint: with `Fail` no pod starts, with `Ignore` it silently skips pods."""
    hooks, slices = facts.of("webhooks"), facts.of("endpoint slices")
    if isinstance(hooks, UnreadableKind) or isinstance(slices, UnreadableKind):
        unreadable = hooks if isinstance(hooks, UnreadableKind) else slices
        yield unseen("webhooks", "webhooks or their endpoints", unreadable)
        return
    served = {_service(entry) for entry in items(slices) if any(_is_ready(e) for e in entry.get("endpoints") or ())}
    broken = False
    for configuration in items(hooks):
        for hook in configuration.get("webhooks") or ():
            service = (hook.get("clientConfig") or {}).get("service") or {}
            at = (service.get("namespace"), service.get("name"))
            if not _is_about_pods(hook) or not service or at in served:
                continue
            broken, policy = True, hook.get("failurePolicy") or "Fail"
            effect = "no pod can be created" if policy == "Fail" else "it silently skips pods"
            name = meta(configuration).get("name")
            kind = configuration.get("kind") or "webhook configuration"
            text = f"webhook {name} calls {at[0]}/{at[1]}, which has no ready endpoint: {effect} ({policy})"
            fix = f"start the server behind it, or kubectl delete {kind.lower()} {name}"
            yield (fail if policy == "Fail" else warn)("webhooks", text, fix)
    if not broken:
        yield ok("webhooks", "every webhook for pods has a ready endpoint; gputile needs no webhook")


def _service(endpoint_slice: Any) -> tuple[str | None, str | None]:
    metadata = meta(endpoint_slice)
    return metadata.get("namespace"), (metadata.get("labels") or {}).get("kubernetes.io/service-name")


def _is_ready(endpoint: Any) -> bool:
    return (endpoint.get("conditions") or {}).get("ready") is not False


def _is_about_pods(hook: Any) -> bool:
    resources = {name for rule in hook.get("rules") or () for name in rule.get("resources") or ()}
    return bool(resources & {"pods", "*", "*/*", "pods/*"})


def metrics_api_is_served(facts: ClusterFacts) -> Iterable[Finding]:
    """An APIService without a server slows down every discovery, and blocks the deletion of namespaces."""
    services = facts.of("api services")
    if isinstance(services, UnreadableKind):
        yield unseen("metrics-api", "APIServices", services)
        return
    for service in items(services):
        group = (service.get("spec") or {}).get("group")
        if group not in ("metrics.nvidia.com", "nvidia-gpu-scheduler"):
            continue
        name, status = meta(service).get("name"), service.get("status") or {}
        available: Any = next((c for c in status.get("conditions") or () if c.get("type") == "Available"), {})
        if available.get("status") == "True":
            yield ok("metrics-api", f"API {name} is served")
        else:
            text = f"API {name} is registered and not served: {available.get('message') or '(no message)'}"
            fix = f"see the checks `scheduler` and `leader`; or kubectl delete apiservice {name}"
            yield fail("metrics-api", text, fix)
