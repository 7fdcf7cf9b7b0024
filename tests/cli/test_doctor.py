"""`gputile doctor`: every known mistake is found, and its fix named; what cannot be read is never `ok`."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner

from gputile.cli.checks.control import POLICIES
from gputile.cli.checks.facts import ClusterFacts, Finding, parsed
from gputile.cli.checks.scheduler import check_configuration
from gputile.cli.commands.doctor import CHECKS, lines_of
from gputile.cli.group import cli
from gputile.cli.pod_conditions import PodWithConditions
from gputile.cli.render.terminal import Terminal
from gputile.cli.source import ClusterSnapshot, ShownNode, UnreadableKind
from gputile.testing.builders import node, pod
from gputile.text.terminal import bare
from tests.cli.clusters import Cluster, tile

DEPLOY = Path(__file__).parents[2] / "deploy"
NOW = 1_800_000_000.0
RENEWED = "2027-01-15T08:00:00.000000Z"  # at NOW
LONG_AGO = "2026-01-01T00:00:00.000000Z"


def lease(name: str, renewed: str = RENEWED, holder: str = "it") -> dict[str, Any]:
    spec = {"holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": renewed}
    return {"metadata": {"name": name}, "spec": spec}


def named(*names: str, **more: Any) -> dict[str, Any]:
    return {"items": [{"metadata": {"name": name}, **more} for name in names]}


STANZA = yaml.safe_load(
    (DEPLOY / "kube-scheduler/default-scheduler.yaml").read_text().replace("CLUSTER-IP", "10.0.0.1")
)

HEALTHY: dict[str, Any] = {
    "scheduler": {"spec": {"replicas": 2}, "status": {"readyReplicas": 2}},
    "agent": {"spec": {"template": {"spec": {"runtimeClassName": "nvidia"}}}},
    "our pods": {"items": []},
    "leader": lease("gputile-scheduler"),
    "agents": {"items": [lease("n1")]},
    "policies": named(*POLICIES),
    "policy bindings": {"items": [{"metadata": {"name": name}, "spec": {"policyName": name}} for name in POLICIES]},
    "webhooks": {"items": []},
    "endpoint slices": {"items": []},
    "api services": {"items": []},
    "runtime classes": named("nvidia"),
    "daemon sets": named("gputile-agent"),
    "deployments": named("gputile-scheduler"),
    "kube-scheduler pods": {"items": []},
    "second scheduler": {"data": {"config.yaml": yaml.safe_dump(STANZA)}},
    "second deployment": {"spec": {"template": {"spec": {"containers": [{"image": "kube-scheduler:v1.36.4"}]}}}},
    "version": {"minor": "36", "gitVersion": "v1.36.4"},
}
LEADER = pod({}, name="gputile-scheduler-1", namespace="kube-system", labels={"gputile.io/leader": "true"})
METRICS = (
    b'gputile_verbs_total{result="fits",verb="filter"} 41.0\ngputile_verbs_total{result="rejected",verb="filter"} 1.0\n'
)


def facts(*pods: dict[str, Any], nodes: tuple[Any, ...] = (), metrics: Any = METRICS, **objects: Any) -> ClusterFacts:
    manifests = [{**built.manifest(), "kind": "Node"} for built in nodes or (node("n1").cards(1),)]
    snapshot = ClusterSnapshot(
        nodes=[msgspec.convert(manifest, ShownNode) for manifest in manifests],
        pods=[msgspec.convert(manifest, PodWithConditions) for manifest in (LEADER, *pods)],
    )
    changed = {key.replace("_", " "): value for key, value in objects.items()}
    return ClusterFacts(snapshot=snapshot, now=NOW, objects={**HEALTHY, **changed}, metrics=metrics)


def examine(given: ClusterFacts) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(given)]


def test_a_healthy_installation_is_ok() -> None:
    assert {finding.state for finding in examine(facts())} == {"ok"}


HOOK = {
    "kind": "MutatingWebhookConfiguration",
    "metadata": {"name": "hami-webhook"},
    "webhooks": [
        {
            "failurePolicy": "Fail",
            "clientConfig": {"service": {"namespace": "kube-system", "name": "hami"}},
            "rules": [{"resources": ["pods"]}],
        }
    ],
}
SERVED = {
    "metadata": {"namespace": "kube-system", "labels": {"kubernetes.io/service-name": "hami"}},
    "endpoints": [{"conditions": {"ready": True}}],
}
NOT_PULLED = {
    "metadata": {"name": "gputile-agent-x"},
    "status": {"containerStatuses": [{"image": "gputile:9", "state": {"waiting": {"reason": "ImagePullBackOff"}}}]},
}
BARE = node("gpu-1").facts()


@pytest.mark.parametrize(
    ("given", "check", "state", "text"),
    [
        pytest.param(facts(scheduler=None), "scheduler", "fail", "no Deployment", id="no-scheduler"),
        pytest.param(
            facts(scheduler={"spec": {"replicas": 2}, "status": {"readyReplicas": 1}}),
            "scheduler",
            "warn",
            "1 of 2 replicas",
            id="a-replica-is-not-ready",
        ),
        pytest.param(
            facts(scheduler={"spec": {"replicas": 2}, "status": {}}),
            "scheduler",
            "fail",
            "0 of 2",
            id="no-replica-is-ready",
        ),
        pytest.param(
            facts(our_pods={"items": [NOT_PULLED]}), "images", "fail", "gputile:9", id="an-image-that-cannot-be-pulled"
        ),
        pytest.param(facts(leader=None), "leader", "fail", "ever been elected", id="no-leader-was-ever-elected"),
        pytest.param(
            facts(leader=lease("x", LONG_AGO)), "leader", "fail", "no leader", id="the-leaders-lease-has-expired"
        ),
        pytest.param(
            facts({**LEADER, "metadata": {**LEADER["metadata"], "name": "b"}}),
            "leader",
            "fail",
            "2 pods carry the label",
            id="two-with-the-leaders-label",
        ),
        pytest.param(facts(policies=named("gputile-records")), "admission", "fail", "missing", id="policies-missing"),
        pytest.param(
            facts(policy_bindings={"items": []}), "admission", "fail", "not bound", id="policies-not-in-force"
        ),
        pytest.param(facts(policies=None, policy_bindings=None), "admission", "warn", "1.30", id="an-old-api-server"),
        pytest.param(
            facts(webhooks={"items": [HOOK]}),
            "webhooks",
            "fail",
            "no pod can be created",
            id="a-webhook-without-endpoint-that-fails",
        ),
        pytest.param(
            facts(webhooks={"items": [{**HOOK, "webhooks": [{**HOOK["webhooks"][0], "failurePolicy": "Ignore"}]}]}),  # type: ignore[index]
            "webhooks",
            "warn",
            "silently skips pods",
            id="a-webhook-without-endpoint-that-is-ignored",
        ),
        pytest.param(
            facts(
                api_services={
                    "items": [
                        {
                            "metadata": {"name": "v1alpha1.metrics.nvidia.com"},
                            "spec": {"group": "metrics.nvidia.com"},
                            "status": {
                                "conditions": [{"type": "Available", "status": "False", "message": "no endpoints"}]
                            },
                        }
                    ]
                }
            ),
            "metrics-api",
            "fail",
            "no endpoints",
            id="an-api-that-is-not-served",
        ),
        pytest.param(facts(agents={"items": [lease("n1", LONG_AGO)]}), "agents", "fail", "stale", id="a-stale-agent"),
        pytest.param(facts(agents={"items": []}), "agents", "warn", "no gputile agent", id="no-agent-at-all"),
        pytest.param(
            facts(agents={"items": [lease("n1"), lease("old")]}),
            "agents",
            "warn",
            "nodes that are gone: old",
            id="the-lease-of-a-node-that-is-gone",
        ),
        pytest.param(
            facts(nodes=(node("n1").cards(1), node("n2")), agents={"items": [lease("n2")]}),
            "inventory",
            "ok",
            "1 of 2",
            id="an-agent-on-a-node-without-gpus-is-fine",
        ),
        pytest.param(facts(nodes=(node("n1"),)), "inventory", "fail", "no node publishes", id="no-gpus-anywhere"),
        pytest.param(facts(runtime_classes=named("other")), "runtime", "fail", "`nvidia`", id="no-such-runtime-class"),
        pytest.param(
            facts(daemon_sets=named("gputile-agent", "nvidia-device-plugin-daemonset")),
            "others",
            "warn",
            "NVIDIA",
            id="two-device-plugins",
        ),
        pytest.param(facts(deployments=named("rel-hami-scheduler")), "others", "warn", "HAMi", id="two-schedulers"),
        pytest.param(
            facts(pod(tile(1000), name="p", on="n1")),
            "pods",
            "fail",
            "bound by another scheduler",
            id="a-pod-that-another-scheduler-bound",
        ),
        pytest.param(
            facts(
                {**pod(tile(1000), name="p"), "spec": {**pod(tile(1000))["spec"], "schedulerName": "hami-scheduler"}}
            ),
            "pods",
            "warn",
            "`hami-scheduler`",
            id="a-pod-of-a-scheduler-that-does-not-run",
        ),
        pytest.param(facts(metrics=b"x 1\n"), "asked", "warn", "never called", id="never-called"),
        pytest.param(
            facts(metrics=UnreadableKind("forbidden")), "asked", "unknown", "is unknown", id="calls-cannot-be-counted"
        ),
        pytest.param(
            facts(version={"minor": "38", "gitVersion": "v1.38.0"}),
            "kube-scheduler",
            "fail",
            "v1.36.4",
            id="another-release",
        ),
        pytest.param(
            facts(second_scheduler=None, kube_scheduler_pods=UnreadableKind("x")),
            "kube-scheduler",
            "unknown",
            "managed control plane",
            id="a-managed-control-plane",
        ),
    ],
)
def test_every_mistake_is_found(given: ClusterFacts, check: str, state: str, text: str) -> None:
    findings = [finding for finding in examine(given) if finding.check == check]
    hits = [finding for finding in findings if finding.state == state and text in finding.text]
    assert hits, findings
    assert state == "ok" or all(finding.fix for finding in hits), "with what to do about it"


def test_a_static_kube_scheduler_without_config_never_calls_gputile() -> None:
    static = {"metadata": {"name": "kube-scheduler-m1"}, "spec": {"containers": [{"command": ["kube-scheduler"]}]}}
    given = facts(second_scheduler=None)
    given.objects = {**given.objects, "kube-scheduler pods": {"items": [static]}}
    (failure,) = [f for f in examine(given) if f.check == "kube-scheduler" and f.state == "fail"]
    assert "never calls gputile" in failure.text


def test_a_webhook_with_an_endpoint_is_ok() -> None:
    given = facts(webhooks={"items": [HOOK]}, endpoint_slices={"items": [SERVED]})
    assert {finding.state for finding in examine(given) if finding.check == "webhooks"} == {"ok"}


def test_what_may_not_be_read_is_unknown_and_never_ok() -> None:
    given = facts(metrics=UnreadableKind("forbidden"))
    given.objects = {key: UnreadableKind("forbidden") for key in HEALTHY}
    states = {finding.check: finding.state for finding in examine(given)}
    read_from_nodes_and_pods = {"inventory", "pods", "leftovers"}
    assert {check for check, state in states.items() if state == "ok"} == read_from_nodes_and_pods
    assert set(states.values()) == {"ok", "unknown"}
    assert {"images", "metrics-api", "runtime"} <= states.keys(), "and is reported"


def test_runtime_classes_that_may_not_be_read_are_unknown_only_if_one_is_wanted() -> None:
    wants = {"spec": {"template": {"spec": {"runtimeClassName": "nvidia"}}}}
    for agent, state in ((wants, "unknown"), ({}, "ok")):
        given = facts(agent=agent, runtime_classes=UnreadableKind("forbidden"))
        assert [finding.state for finding in examine(given) if finding.check == "runtime"] == [state]


class TestLeftovers:
    """Annotations of earlier builds, under keys that nothing reads any more."""

    @staticmethod
    def findings(given: ClusterFacts) -> list[Finding]:
        return [finding for finding in examine(given) if finding.check == "leftovers"]

    def test_a_cluster_without_them_is_ok(self) -> None:
        current = pod({}, name="p", annotations={"gputile.io/nomination": "{}"})
        assert [finding.state for finding in self.findings(facts(current))] == ["ok"]

    def test_pods_with_the_old_nomination_are_named_with_the_command_that_removes_it(self) -> None:
        old = {"gputile.io/promise": "{}"}
        pods = [pod({}, name=name, namespace=space, annotations=old) for space, name in (("b", "y"), ("a", "x"))]
        (finding,) = self.findings(facts(*pods))
        assert finding == Finding(
            check="leftovers",
            state="warn",
            text="annotation `gputile.io/promise` of an earlier build, which is not read, on 2 pods: a/x, b/y",
            fix="kubectl annotate pod -n a x gputile.io/promise-; kubectl annotate pod -n b y gputile.io/promise-",
        )

    def test_pods_of_one_namespace_share_a_command(self) -> None:
        pods = [pod({}, name=name, namespace="a", annotations={"gputile.io/promise": ""}) for name in ("x", "y")]
        assert self.findings(facts(*pods))[0].fix == "kubectl annotate pod -n a x y gputile.io/promise-"

    def test_nodes_with_the_old_orphans_are_named_up_to_five(self) -> None:
        nodes = tuple(node(f"n{number}").cards(1) for number in range(7))
        given = facts(nodes=nodes, agents={"items": [lease(f"n{number}") for number in range(7)]})
        manifests = [annotated(built.manifest(), "gputile.io/lingering") for built in nodes]
        given.snapshot.nodes = [msgspec.convert(manifest, ShownNode) for manifest in manifests]
        (finding,) = self.findings(given)
        assert finding.state == "warn"
        assert finding.text.endswith("on 7 nodes: n0, n1, n2, n3, n4 and 2 more")
        assert finding.fix == "kubectl annotate node n0 n1 n2 n3 n4 gputile.io/lingering-"

    def test_they_do_not_fail_the_installation(self, tmp_path: Path) -> None:
        cluster = Cluster(node("n1").cards(1, "T4", 16000)).add("p", tile(1000))
        cluster.pod("p")["metadata"]["annotations"]["gputile.io/promise"] = "{}"
        result = CliRunner().invoke(cli, ["doctor", "-f", cluster.write(tmp_path)])
        assert result.exit_code == 0
        assert "warn  leftovers" in result.output
        assert "kubectl annotate pod -n team p gputile.io/promise-" in result.output


def annotated(manifest: dict[str, Any], key: str) -> dict[str, Any]:
    """The manifest with one more annotation."""
    annotations = {**(manifest["metadata"].get("annotations") or {}), key: "{}"}
    return {**manifest, "metadata": {**manifest["metadata"], "annotations": annotations}}


class TestConfiguration:
    """Each line of a KubeSchedulerConfiguration that is often wrong."""

    def test_ours_is_ok(self) -> None:
        assert [finding.state for finding in check_configuration("it", yaml.safe_dump(STANZA))] == ["ok"]

    @pytest.mark.parametrize(
        ("changes", "state", "text"),
        [
            pytest.param({"ignorable": True}, "fail", "without a GPU check", id="ignorable"),
            pytest.param({"tlsConfig": {"serverName": "x"}}, "fail", "not verified at all", id="no-ca"),
            pytest.param({"nodeCacheCapable": False}, "warn", "every node's JSON", id="whole-nodes"),
            pytest.param({"bindVerb": ""}, "warn", "no bindVerb", id="no-bind"),
            pytest.param({"enableHTTPS": False}, "fail", "enableHTTPS is off", id="no-https"),
            pytest.param({"urlPrefix": "https://CLUSTER-IP:12345/gputile"}, "fail", "CLUSTER-IP", id="not-filled-in"),
            pytest.param({"managedResources": []}, "warn", "every pod", id="no-resources"),
            pytest.param(
                {"managedResources": [{"name": "nvidia.com/gpu", "ignoredByScheduler": True}]},
                "warn",
                "cannot check node totals",
                id="node-totals-hidden",
            ),
        ],
    )
    def test_a_stanza(self, changes: dict[str, Any], state: str, text: str) -> None:
        config = {**STANZA, "extenders": [{**STANZA["extenders"][0], **changes}]}
        findings = list(check_configuration("it", yaml.safe_dump(config)))
        assert any(f.state == state and text in f.text and f.fix for f in findings), findings

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            pytest.param({"percentageOfNodesToScore": None}, "only a sample", id="sampling"),
            pytest.param({"extenders": []}, "no extender of gputile", id="no-extender"),
            pytest.param(
                {"extenders": [STANZA["extenders"][0], {"urlPrefix": "http://x", "bindVerb": "bind"}]},
                "not the last",
                id="not-the-last",
            ),
        ],
    )
    def test_a_list(self, changes: dict[str, Any], text: str) -> None:
        findings = list(check_configuration("it", yaml.safe_dump({**STANZA, **changes})))
        assert any(f.state != "ok" and text in f.text for f in findings), findings

    def test_text_that_is_no_configuration(self) -> None:
        assert [finding.state for finding in check_configuration("it", "a: b: c")] == ["fail"]


class TestCommand:
    def test_a_file_shows_what_is_in_it(self, tmp_path: Path) -> None:
        file = Cluster(node("n1").cards(1, "T4", 16000)).add("p", tile(1000)).write(tmp_path)
        result = CliRunner().invoke(cli, ["doctor", "-f", file, "-o", "json"])
        document = json.loads(result.output)
        assert (result.exit_code, document["healthy"]) == (0, True)
        states = {finding["check"]: finding["state"] for finding in document["findings"]}
        assert (states["inventory"], states["pods"], states["scheduler"]) == ("ok", "ok", "unknown")

    def test_a_failed_check_exits_with_1(self, tmp_path: Path) -> None:
        result = CliRunner().invoke(
            cli, ["doctor", "-f", Cluster(node("cpu-1")).write(tmp_path)], env={"COLUMNS": "80"}
        )
        assert result.exit_code == 1
        assert "FAIL  inventory" in result.output
        assert "fix: " in result.output
        assert max(map(len, result.output.splitlines())) <= 80

    def test_each_finding_has_its_fix_below(self) -> None:
        lines = lines_of([Finding(check="a", state="fail", text="bad", fix="do it")], Terminal(80))
        lines = [bare(line) for line in lines]
        assert lines == ["FAIL  a  bad", "         fix: do it", "", "0 ok, 0 warnings, 1 failed, 0 unknown"]


@pytest.mark.parametrize(
    "text", ["a: [", "a: !!int ''", "[" * 5000, "- a"], ids=["open", "empty-int", "deep", "a-list"]
)
def test_text_that_is_no_mapping_is_ignored(text: str) -> None:
    assert parsed(text) is None
