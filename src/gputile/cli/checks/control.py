"""Checks of what runs in the control plane: our scheduler, admission, webhooks, the registered API."""

from collections.abc import Iterable
from typing import Any

import msgspec

from gputile.cli.checks.facts import NAME, ClusterFacts, Finding, fail, few, items, meta, ok, unseen, warn
from gputile.cli.lease_age import seconds_expired
from gputile.cli.source import UnreadableKind
from gputile.kube.api import AgentLease

POLICIES = ("gputile-records", "gputile-scheduler", "gputile-scheduler-objects", "gputile-agents")
BROKEN_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")


def scheduler_runs(facts: ClusterFacts) -> Iterable[Finding]:
    found = facts.of("scheduler")
    if isinstance(found, UnreadableKind):
        yield unseen("scheduler", f"Deployment {NAME}", found)
        return
    if found is None:
        pods = [pod for pod in facts.seen.pods if pod.labels.get("app.kubernetes.io/name") == NAME]
        text = f"there is no Deployment {NAME} in kube-system" + (f", but {len(pods)} pods of that name" * bool(pods))
        yield (warn if pods else fail)("scheduler", text, "kubectl apply -f deploy/scheduler.yaml")
        return
    wanted, ready = (found.get("spec") or {}).get("replicas", 1), (found.get("status") or {}).get("readyReplicas", 0)
    text = f"{ready} of {wanted} replicas of {NAME} are ready"
    if ready >= wanted > 0:
        yield ok("scheduler", text)
    else:
        fix = f"kubectl -n kube-system describe pods -l app.kubernetes.io/name={NAME}"
        yield (warn if ready else fail)("scheduler", text, fix)
    if wanted == 1:
        text = "there is one replica: while it restarts, GPU pods wait"
        yield warn("scheduler", text, f"kubectl -n kube-system scale deployment {NAME} --replicas=2")


def images_come(facts: ClusterFacts) -> Iterable[Finding]:
    """Images that cannot be pulled: the registry that nobody reaches, the tag that does not exist."""
    found = facts.of("our pods")
    if isinstance(found, UnreadableKind):
        yield unseen("images", "the state of our pods", found)
        return
    bad = {
        f"{meta(pod).get('name')} ({state['waiting'].get('reason')}: {status.get('image')})"
        for pod in items(found)
        for status in (pod.get("status") or {}).get("containerStatuses") or ()
        if ((state := status.get("state") or {}).get("waiting") or {}).get("reason") in BROKEN_IMAGE
    }
    if bad:
        fix = "put your registry in front of the image in deploy/*.yaml, and a tag that exists there"
        yield fail("images", f"images cannot be pulled: {few(bad)}", fix)
    else:
        yield ok("images", "no pod of ours waits for its image")


def somebody_leads(facts: ClusterFacts) -> Iterable[Finding]:
    found = facts.of("leader")
    if isinstance(found, UnreadableKind):
        yield unseen("leader", f"Lease {NAME}", found)
        return
    if found is None:
        yield fail("leader", f"there is no Lease {NAME}: no scheduler has ever led", "see `scheduler`")
        return
    silent = seconds_expired(msgspec.convert(found, AgentLease), facts.now)
    holder = (found.get("spec") or {}).get("holderIdentity") or "nobody"
    if silent is not None:
        text = f"the Lease {NAME} was last renewed {silent:.0f} s ago, by {holder}: nobody leads, GPU pods wait"
        yield fail("leader", text, "look at the scheduler's logs; can it reach the API server?")
        return
    labelled = [p for p in facts.seen.pods if p.labels.get("gputile.io/leader") == "true"]
    if len(labelled) != 1:
        label = "the label gputile.io/leader=true, by which the Service finds it"
        text = f"{holder} leads, but {len(labelled)} pods carry {label}"
        fix = "may the scheduler patch pods/status? apply deploy/scheduler.yaml and deploy/admission.yaml again"
        yield fail("leader", text, fix)
        return
    yield ok("leader", f"{labelled[0].name} leads")


def policies_are_there(facts: ClusterFacts) -> Iterable[Finding]:
    found, bound = facts.of("policies"), facts.of("policy bindings")
    if isinstance(found, UnreadableKind) or isinstance(bound, UnreadableKind):
        yield unseen("admission", "admission policies", found if isinstance(found, UnreadableKind) else bound)
        return
    fix = "kubectl apply -f deploy/admission.yaml"
    if found is None:
        text = (
            "this API server has no ValidatingAdmissionPolicy: before 1.30 only RBAC keeps others from writing grants"
        )
        yield warn("admission", text, "upgrade Kubernetes, or watch who may patch pods")
        return
    names = {meta(one).get("name") for one in items(found)}
    in_force = {(one.get("spec") or {}).get("policyName") for one in items(bound)}
    missing = [name for name in POLICIES if name not in names]
    unbound = [name for name in POLICIES if name in names and name not in in_force]
    if missing or unbound:
        said = [f"missing: {', '.join(missing)}"] * bool(missing) + [f"not bound: {', '.join(unbound)}"] * bool(unbound)
        text = f"admission policies {'; '.join(said)}: grants, or nodes, are not protected"
        yield fail("admission", text, fix)
    else:
        yield ok("admission", "only the scheduler may write grants and no more than that, agents only to their nodes")


def webhooks_answer(facts: ClusterFacts) -> Iterable[Finding]:
    """A webhook for pods whose server is gone: with `Fail` nothing starts, with `Ignore` it skips in silence."""
    hooks, slices = facts.of("webhooks"), facts.of("endpoint slices")
    if isinstance(hooks, UnreadableKind) or isinstance(slices, UnreadableKind):
        yield unseen("webhooks", "webhooks or their endpoints", hooks if isinstance(hooks, UnreadableKind) else slices)
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
            yield (fail if policy == "Fail" else warn)("webhooks", text, fix)
    if not bad:
        yield ok("webhooks", "every webhook for pods has somebody who answers; gputile needs none")


def _service(found: Any) -> tuple[str | None, str | None]:
    return meta(found).get("namespace"), (meta(found).get("labels") or {}).get("kubernetes.io/service-name")


def _is_ready(endpoint: Any) -> bool:
    return (endpoint.get("conditions") or {}).get("ready") is not False


def _is_about_pods(hook: Any) -> bool:
    resources = {name for rule in hook.get("rules") or () for name in rule.get("resources") or ()}
    return bool(resources & {"pods", "*", "*/*", "pods/*"})


def api_is_served(facts: ClusterFacts) -> Iterable[Finding]:
    """An APIService that does not answer slows down every discovery, and holds up the deletion of namespaces."""
    found = facts.of("api services")
    if isinstance(found, UnreadableKind):
        yield unseen("metrics-api", "APIServices", found)
        return
    for one in items(found):
        group = (one.get("spec") or {}).get("group")
        if group not in ("metrics.nvidia.com", "nvidia-gpu-scheduler"):
            continue
        name, status = meta(one).get("name"), one.get("status") or {}
        said: Any = next((c for c in status.get("conditions") or () if c.get("type") == "Available"), {})
        if said.get("status") == "True":
            yield ok("metrics-api", f"API {name} is served")
        else:
            text = f"API {name} is registered and not served: {said.get('message') or '(no word)'}"
            yield fail("metrics-api", text, f"see `scheduler` and `leader`; or kubectl delete apiservice {name}")
