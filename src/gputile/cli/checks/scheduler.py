"""Whether kube-scheduler asks us, and asks rightly: its configuration line by line, where it can be seen.

Room:  pure. A static pod's configuration is a file on the control plane, which the API server does not show; then the
       pod's command says at least whether it has one, and `--scheduler-config` looks at the file itself.
Door:  `kube_scheduler_asks`, `configured` for one configuration.
"""

import re
from collections.abc import Iterable
from typing import Any

from gputile.cli.checks.facts import FAIL, WARN, ClusterFacts, Finding, fail, items, meta, ok, parsed, unknown, warn
from gputile.cli.source import UnreadableKind
from gputile.dialects.gputile import GRANT

CHECK = "kube-scheduler"
SEE = "compare deploy/kube-scheduler/default-scheduler.yaml"
ASKED = re.compile(rb'^gputile_verbs_total\{[^}]*verb="filter"[^}]*\} ([0-9.e+]+)', re.MULTILINE)


def kube_scheduler_asks(facts: ClusterFacts) -> Iterable[Finding]:
    yield from _seen_configurations(facts)
    yield from _was_asked(facts)
    yield from _versions(facts)


def _seen_configurations(facts: ClusterFacts) -> Iterable[Finding]:
    file, second = facts.of("scheduler config"), facts.of("second scheduler")
    texts = {"the file": str(file)} if file is not None else {}
    if not isinstance(second, UnreadableKind) and second is not None:
        texts |= {f"ConfigMap gpu-scheduler, {key}": str(text) for key, text in (second.get("data") or {}).items()}
    for where, text in texts.items():
        yield from configured(where, text)
    if texts:
        return
    static = facts.of("kube-scheduler pods")
    if isinstance(static, UnreadableKind) or not items(static):
        text = "its pods cannot be seen (a managed control plane?), and there is no second scheduler `gpu-scheduler`"
        fix = "kubectl apply -f deploy/kube-scheduler/second-scheduler.yaml; or --scheduler-config FILE to check yours"
        yield unknown(CHECK, text, fix)
        return
    without = [meta(pod).get("name") for pod in items(static) if not _has_config(pod)]
    if without:
        text = f"{', '.join(map(str, without))} runs without --config, so it never asks gputile"
        yield fail(CHECK, text, "docs/install.md, step 3; or the second scheduler")
        return
    text = "it has a --config, which is a file on the control plane and cannot be seen from here"
    fix = "on a control-plane node: gputile doctor --scheduler-config /etc/kubernetes/gputile/scheduler.yaml"
    yield unknown(CHECK, text, fix)


def _has_config(pod: Any) -> bool:
    containers = (pod.get("spec") or {}).get("containers") or ()
    words = [word for one in containers for word in (*(one.get("command") or ()), *(one.get("args") or ()))]
    return any(str(word).startswith("--config") for word in words)


def configured(where: str, text: str) -> Iterable[Finding]:
    """One KubeSchedulerConfiguration, and each of its traps."""
    found = parsed(text)
    if found is None:
        yield fail(CHECK, f"{where}: this is no configuration", SEE)
        return
    extenders = [one for one in found.get("extenders") or () if isinstance(one, dict)]
    ours = [one for one in extenders if _is_ours(one)]
    if not ours:
        yield fail(CHECK, f"{where}: no extender in it is gputile's", SEE)
        return
    said = [*_stanza(ours[-1]), *_list(extenders, ours[-1]), *_whole(found)]
    for state, what, fix in said:
        yield Finding(check=CHECK, state=state, text=f"{where}: {what}", fix=fix)
    if not said:
        yield ok(CHECK, f"{where}: asks gputile, and in the right way")


def _is_ours(extender: Any) -> bool:
    """By its path or the Service's name; gpushare's own paths are served by us too, so they count where TLS is on."""
    url = str(extender.get("urlPrefix") or "")
    return url.rstrip("/").endswith("/gputile") or "gputile" in url or ":12345" in url


Remark = tuple[str, str, str]


def _stanza(ours: Any) -> Iterable[Remark]:
    url = str(ours.get("urlPrefix") or "")
    if "CLUSTER-IP" in url:
        yield FAIL, "its urlPrefix still says CLUSTER-IP", "write the Service's address there; docs/install.md, step 3"
    if not ours.get("filterVerb"):
        yield FAIL, "gputile's stanza has no filterVerb", SEE
    if not ours.get("bindVerb"):
        yield WARN, "it has no bindVerb: kube-scheduler binds, and the grant comes a moment later", "add bindVerb: bind"
    if not ours.get("preemptVerb"):
        yield WARN, "it has no preemptVerb: kube-scheduler evicts by sums, not by cards", "add preemptVerb: preempt"
    if ours.get("ignorable"):
        yield FAIL, "it is ignorable: whenever gputile does not answer, GPU pods are bound blindly", "ignorable: false"
    if not ours.get("nodeCacheCapable"):
        yield WARN, "nodeCacheCapable is off: every node's JSON goes with every call", "nodeCacheCapable: true"
    tls = ours.get("tlsConfig") or {}
    if url.startswith("https:") and not (tls.get("caFile") or tls.get("caData")):
        yield FAIL, "tlsConfig names no CA: the certificate is not checked at all", "add caFile or caData"
    if url.startswith("https:") and not ours.get("enableHTTPS"):
        yield FAIL, "enableHTTPS is off and the URL says https", "enableHTTPS: true"
    managed = [one for one in ours.get("managedResources") or () if isinstance(one, dict)]
    if not managed:
        yield WARN, "it manages no resources by name, so it is asked about every pod", "list them; " + SEE
    carrying = {"gputile.io/gpu", "aliyun.com/gpu-mem", "nvidia.com/gpu"}
    hidden = sorted(str(one["name"]) for one in managed if one.get("ignoredByScheduler") and one["name"] in carrying)
    if hidden:
        what = f"{', '.join(hidden)} is ignoredByScheduler: it cannot check sums, and asks about nodes that cannot fit"
        yield WARN, what, "ignoredByScheduler: false for resources that carry devices"


def _list(extenders: list[Any], ours: Any) -> Iterable[Remark]:
    if extenders[-1] is not ours:
        yield FAIL, "gputile is not the last extender: it does not see what the others refuse", "move it to the end"
    if sum(bool(one.get("bindVerb")) for one in extenders) > 1:
        yield FAIL, "two extenders have a bindVerb, and kube-scheduler takes only one", "leave gputile's alone"


def _whole(found: Any) -> Iterable[Remark]:
    share = found.get("percentageOfNodesToScore")
    if share != 100:
        what = f"percentageOfNodesToScore is {share or 'unset'}: above 100 nodes it shows us only a sample"
        yield WARN, what, "percentageOfNodesToScore: 100"


# ---- was it ever so -------------------------------------------------------------------------------------------------


def _was_asked(facts: ClusterFacts) -> Iterable[Finding]:
    """The scheduler's own count, else a grant that only a bind can have written."""
    check = "asked"
    if isinstance(facts.metrics, bytes):
        calls = sum(float(number) for number in ASKED.findall(facts.metrics))
        if calls:
            yield ok(check, f"kube-scheduler has asked the leader {calls:,.0f} times")
        else:
            text = "kube-scheduler has never asked the leading scheduler since it started"
            fix = "create a pod with GPUs; if it waits without an event of gputile's, see `kube-scheduler`"
            yield warn(check, text, fix)
        return
    granted = sum(GRANT in pod.annotations for pod in facts.seen.pods)
    why = f" ({facts.metrics.why})" if isinstance(facts.metrics, UnreadableKind) else ""
    if granted:
        yield ok(check, f"{granted} pods carry grants; the scheduler's own count cannot be seen{why}")
    else:
        text = (
            f"whether kube-scheduler ever asked cannot be seen: no pod carries a grant, no metrics are to be had{why}"
        )
        fix = "kubectl apply -f examples/gputile/pod.yaml and see its events; or the right to get services/proxy"
        yield unknown(check, text, fix)


def _versions(facts: ClusterFacts) -> Iterable[Finding]:
    """A second kube-scheduler of another release than the API server."""
    found, server = facts.of("second deployment"), facts.of("version")
    if not isinstance(found, dict) or not isinstance(server, dict):
        return
    containers = (((found.get("spec") or {}).get("template") or {}).get("spec") or {}).get("containers") or ()
    image = str((containers[0] if containers else {}).get("image") or "")
    tag = re.search(r":v?(\d+)\.(\d+)", image)
    minor = re.match(r"\d+", str(server.get("minor") or ""))
    if tag is None or minor is None:
        return
    apart = int(minor[0]) - int(tag[2])
    text = f"gpu-scheduler runs {image}, the API server {server.get('gitVersion')}"
    fix = "write your cluster's own version into deploy/kube-scheduler/second-scheduler.yaml"
    yield ok(CHECK, text) if apart == 0 else (warn if apart == 1 else fail)(CHECK, text, fix)
