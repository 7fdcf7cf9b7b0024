"""Checks of kube-scheduler: whether it calls gputile's extender, and with the right configuration.

Pure functions. The configuration of a static pod is a file on the control plane, which the API server does not show;
then the pod's command line shows at least whether it has one, and `--scheduler-config` checks the file itself.
"""

import re
from collections.abc import Iterable
from typing import Any

from gputile.cli.checks.facts import FAIL, WARN, ClusterFacts, Finding, fail, items, meta, ok, parsed, unknown, warn
from gputile.cli.source import UnreadableKind
from gputile.dialects.gputile import GRANT

CHECK = "kube-scheduler"
SEE = "compare deploy/kube-scheduler/default-scheduler.yaml"
FILTER_CALLS = re.compile(rb'^gputile_verbs_total\{[^}]*verb="filter"[^}]*\} ([0-9.e+]+)', re.MULTILINE)


def kube_scheduler_calls_gputile(facts: ClusterFacts) -> Iterable[Finding]:
    """The configuration, the calls that were counted, and the release of kube-scheduler."""
    yield from _configurations(facts)
    yield from _calls(facts)
    yield from _versions(facts)


def _configurations(facts: ClusterFacts) -> Iterable[Finding]:
    file, second = facts.of("scheduler config"), facts.of("second scheduler")
    texts = {"the file": str(file)} if file is not None else {}
    if not isinstance(second, UnreadableKind) and second is not None:
        texts |= {f"ConfigMap gpu-scheduler, {key}": str(text) for key, text in (second.get("data") or {}).items()}
    for where, text in texts.items():
        yield from check_configuration(where, text)
    if texts:
        return
    static = facts.of("kube-scheduler pods")
    if isinstance(static, UnreadableKind) or not items(static):
        text = "its pods cannot be read (a managed control plane?), and there is no second scheduler `gpu-scheduler`"
        fix = "kubectl apply -f deploy/kube-scheduler/second-scheduler.yaml; or --scheduler-config FILE to check yours"
        yield unknown(CHECK, text, fix)
        return
    without = [meta(pod).get("name") for pod in items(static) if not _has_config(pod)]
    if without:
        text = f"{', '.join(map(str, without))} runs without --config, so it never calls gputile"
        yield fail(CHECK, text, "docs/install.md, step 3; or the second scheduler")
        return
    text = "it has a --config, which is a file on the control plane and cannot be read from here"
    fix = "on a control-plane node: gputile doctor --scheduler-config /etc/kubernetes/gputile/scheduler.yaml"
    yield unknown(CHECK, text, fix)


def _has_config(pod: Any) -> bool:
    containers = (pod.get("spec") or {}).get("containers") or ()
    words = [word for c in containers for word in (*(c.get("command") or ()), *(c.get("args") or ()))]
    return any(str(word).startswith("--config") for word in words)


def check_configuration(where: str, text: str) -> Iterable[Finding]:
    """One KubeSchedulerConfiguration, and each of its known mistakes."""
    configuration = parsed(text)
    if configuration is None:
        yield fail(CHECK, f"{where}: not a KubeSchedulerConfiguration", SEE)
        return
    extenders = [extender for extender in configuration.get("extenders") or () if isinstance(extender, dict)]
    ours = [extender for extender in extenders if _is_ours(extender)]
    if not ours:
        yield fail(CHECK, f"{where}: it has no extender of gputile", SEE)
        return
    remarks = [*_stanza(ours[-1]), *_extender_list(extenders, ours[-1]), *_whole(configuration)]
    for state, problem, fix in remarks:
        yield Finding(check=CHECK, state=state, text=f"{where}: {problem}", fix=fix)
    if not remarks:
        yield ok(CHECK, f"{where}: calls gputile, and is configured correctly")


def _is_ours(extender: Any) -> bool:
    """By its path or the Service's name; gputile serves gpushare's paths too, so its port counts."""
    url = str(extender.get("urlPrefix") or "")
    return url.rstrip("/").endswith("/gputile") or "gputile" in url or ":12345" in url


Remark = tuple[str, str, str]
"""State, problem and fix."""


def _stanza(ours: Any) -> Iterable[Remark]:
    url = str(ours.get("urlPrefix") or "")
    if "CLUSTER-IP" in url:
        yield FAIL, "its urlPrefix still has CLUSTER-IP", "write the Service's address there; docs/install.md, step 3"
    if not ours.get("filterVerb"):
        yield FAIL, "gputile's stanza has no filterVerb", SEE
    if not ours.get("bindVerb"):
        yield WARN, "it has no bindVerb: kube-scheduler binds, and the grant is written later", "add bindVerb: bind"
    if not ours.get("preemptVerb"):
        yield (
            WARN,
            "it has no preemptVerb: kube-scheduler evicts by node totals, not per GPU",
            "add preemptVerb: preempt",
        )
    if ours.get("ignorable"):
        what = "it is ignorable: while gputile is unavailable, GPU pods are bound without a GPU check"
        yield FAIL, what, "ignorable: false"
    if not ours.get("nodeCacheCapable"):
        yield WARN, "nodeCacheCapable is off: every call carries every node's JSON", "nodeCacheCapable: true"
    tls = ours.get("tlsConfig") or {}
    if url.startswith("https:") and not (tls.get("caFile") or tls.get("caData")):
        yield FAIL, "tlsConfig has no CA: the certificate is not verified at all", "add caFile or caData"
    if url.startswith("https:") and not ours.get("enableHTTPS"):
        yield FAIL, "enableHTTPS is off although the URL is https", "enableHTTPS: true"
    managed = [resource for resource in ours.get("managedResources") or () if isinstance(resource, dict)]
    if not managed:
        yield WARN, "it has no managedResources, so it is called for every pod", "list them; " + SEE
    carrying = {"gputile.io/gpu", "aliyun.com/gpu-mem", "nvidia.com/gpu"}
    hidden = sorted(str(r["name"]) for r in managed if r.get("ignoredByScheduler") and r["name"] in carrying)
    if hidden:
        effect = "kube-scheduler cannot check node totals, and calls gputile for nodes that cannot fit"
        what = f"{', '.join(hidden)} is ignoredByScheduler: {effect}"
        yield WARN, what, "ignoredByScheduler: false for resources that carry devices"


def _extender_list(extenders: list[Any], ours: Any) -> Iterable[Remark]:
    if extenders[-1] is not ours:
        yield FAIL, "gputile is not the last extender: it does not see what the others reject", "move it to the end"
    if sum(bool(extender.get("bindVerb")) for extender in extenders) > 1:
        fix = "remove bindVerb from all extenders but gputile's"
        yield FAIL, "two extenders have a bindVerb, and kube-scheduler uses only one", fix


def _whole(configuration: Any) -> Iterable[Remark]:
    share = configuration.get("percentageOfNodesToScore")
    if share != 100:
        what = f"percentageOfNodesToScore is {share or 'unset'}: above 100 nodes gputile gets only a sample"
        yield WARN, what, "percentageOfNodesToScore: 100"


# ---- calls and versions ---------------------------------------------------------------------------------------------


def _calls(facts: ClusterFacts) -> Iterable[Finding]:
    """The scheduler's own count of filter calls, else a grant, which only a bind can have written."""
    check = "asked"
    if isinstance(facts.metrics, bytes):
        calls = sum(float(number) for number in FILTER_CALLS.findall(facts.metrics))
        if calls:
            yield ok(check, f"kube-scheduler has called the leader {calls:,.0f} times")
        else:
            text = "kube-scheduler has never called the leading scheduler since it started"
            fix = "create a pod with GPUs; if it stays pending without an event of gputile, see `kube-scheduler`"
            yield warn(check, text, fix)
        return
    granted = sum(GRANT in pod.annotations for pod in facts.snapshot.pods)
    why = f" ({facts.metrics.why})" if isinstance(facts.metrics, UnreadableKind) else ""
    if granted:
        yield ok(check, f"{granted} pods carry grants; the scheduler's own count cannot be read{why}")
    else:
        text = f"whether kube-scheduler ever called gputile is unknown: no pod carries a grant, no metrics{why}"
        fix = "kubectl apply -f examples/gputile/pod.yaml and read its events; or the right to get services/proxy"
        yield unknown(check, text, fix)


def _versions(facts: ClusterFacts) -> Iterable[Finding]:
    """A second kube-scheduler of another release than the API server."""
    deployment, server = facts.of("second deployment"), facts.of("version")
    if not isinstance(deployment, dict) or not isinstance(server, dict):
        return
    containers = (((deployment.get("spec") or {}).get("template") or {}).get("spec") or {}).get("containers") or ()
    image = str((containers[0] if containers else {}).get("image") or "")
    tag = re.search(r":v?(\d+)\.(\d+)", image)
    minor = re.match(r"\d+", str(server.get("minor") or ""))
    if tag is None or minor is None:
        return
    apart = int(minor[0]) - int(tag[2])
    text = f"gpu-scheduler runs {image}, the API server {server.get('gitVersion')}"
    fix = "write your cluster's own version into deploy/kube-scheduler/second-scheduler.yaml"
    yield ok(CHECK, text) if apart == 0 else (warn if apart == 1 else fail)(CHECK, text, fix)
