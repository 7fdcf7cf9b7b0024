"""`gputile doctor`: every trap is found, and its fix named; what cannot be seen is never called right."""

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
    found = [{**one.manifest(), "kind": "Node"} for one in nodes or (node("n1").cards(1),)]
    snapshot = ClusterSnapshot(
        nodes=[msgspec.convert(one, ShownNode) for one in found],
        pods=[msgspec.convert(one, PodWithConditions) for one in (LEADER, *pods)],
    )
    said = {key.replace("_", " "): value for key, value in objects.items()}
    return ClusterFacts(snapshot=snapshot, now=NOW, objects={**HEALTHY, **said}, metrics=metrics)


def examined(given: ClusterFacts) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(given)]


def test_a_healthy_installation_is_all_right() -> None:
    assert {finding.state for finding in examined(facts())} == {"ok"}


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
            facts(scheduler={"spec": {"replicas": 2}, "status": {}}), "scheduler", "fail", "0 of 2", id="none-is-ready"
        ),
        pytest.param(facts(our_pods={"items": [NOT_PULLED]}), "images", "fail", "gputile:9", id="an-image-nobody-has"),
        pytest.param(facts(leader=None), "leader", "fail", "ever led", id="nobody-ever-led"),
        pytest.param(facts(leader=lease("x", LONG_AGO)), "leader", "fail", "nobody leads", id="nobody-leads"),
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
            id="a-dead-webhook-that-fails",
        ),
        pytest.param(
            facts(webhooks={"items": [{**HOOK, "webhooks": [{**HOOK["webhooks"][0], "failurePolicy": "Ignore"}]}]}),  # type: ignore[index]
            "webhooks",
            "warn",
            "skips pods in silence",
            id="a-dead-webhook-that-is-ignored",
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
        pytest.param(facts(agents={"items": [lease("n1", LONG_AGO)]}), "agents", "fail", "silent", id="a-silent-agent"),
        pytest.param(facts(agents={"items": []}), "agents", "warn", "no agent", id="no-agent-at-all"),
        pytest.param(
            facts(agents={"items": [lease("n1"), lease("old")]}),
            "agents",
            "warn",
            "nodes that are gone: old",
            id="gone",
        ),
        pytest.param(
            facts(nodes=(node("n1").cards(1), node("n2")), agents={"items": [lease("n2")]}),
            "inventory",
            "ok",
            "1 of 2",
            id="an-agent-on-a-node-without-gpus-is-fine",
        ),
        pytest.param(facts(nodes=(node("n1"),)), "inventory", "fail", "no node tells", id="no-cards-anywhere"),
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
            facts(pod(tile(1000), name="p", on="n1")), "pods", "fail", "came around", id="a-pod-that-came-around"
        ),
        pytest.param(
            facts(
                {**pod(tile(1000), name="p"), "spec": {**pod(tile(1000))["spec"], "schedulerName": "hami-scheduler"}}
            ),
            "pods",
            "warn",
            "`hami-scheduler`",
            id="a-pod-that-waits-for-nobody",
        ),
        pytest.param(facts(metrics=b"x 1\n"), "asked", "warn", "never asked", id="never-asked"),
        pytest.param(
            facts(metrics=UnreadableKind("forbidden")), "asked", "unknown", "cannot be seen", id="asked-unseen"
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
            id="a-control-plane-nobody-sees",
        ),
    ],
)
def test_every_trap_is_found(given: ClusterFacts, check: str, state: str, text: str) -> None:
    found = [finding for finding in examined(given) if finding.check == check]
    hit = [finding for finding in found if finding.state == state and text in finding.text]
    assert hit, found
    assert state == "ok" or all(finding.fix for finding in hit), "with what to do about it"


def test_a_static_kube_scheduler_without_config_never_asks() -> None:
    static = {"metadata": {"name": "kube-scheduler-m1"}, "spec": {"containers": [{"command": ["kube-scheduler"]}]}}
    given = facts(second_scheduler=None)
    given.objects = {**given.objects, "kube-scheduler pods": {"items": [static]}}
    (found,) = [finding for finding in examined(given) if finding.check == "kube-scheduler" and finding.state == "fail"]
    assert "never asks gputile" in found.text


def test_a_webhook_that_answers_is_fine() -> None:
    given = facts(webhooks={"items": [HOOK]}, endpoint_slices={"items": [SERVED]})
    assert {finding.state for finding in examined(given) if finding.check == "webhooks"} == {"ok"}


def test_what_may_not_be_read_is_unknown_and_never_ok() -> None:
    given = facts(metrics=UnreadableKind("forbidden"))
    given.objects = {key: UnreadableKind("forbidden") for key in HEALTHY}
    states = {finding.check: finding.state for finding in examined(given)}
    told_by_nodes_and_pods = {"inventory", "pods"}
    assert {check for check, state in states.items() if state == "ok"} == told_by_nodes_and_pods
    assert set(states.values()) == {"ok", "unknown"}
    assert {"images", "metrics-api", "runtime"} <= states.keys(), "and is not passed over in silence"


def test_runtime_classes_that_may_not_be_read_are_unknown_only_if_one_is_wanted() -> None:
    wants = {"spec": {"template": {"spec": {"runtimeClassName": "nvidia"}}}}
    for agent, state in ((wants, "unknown"), ({}, "ok")):
        given = facts(agent=agent, runtime_classes=UnreadableKind("forbidden"))
        assert [found.state for found in examined(given) if found.check == "runtime"] == [state]


class TestConfiguration:
    """Each line of a KubeSchedulerConfiguration that people get wrong."""

    def test_ours_is_right(self) -> None:
        assert [one.state for one in check_configuration("it", yaml.safe_dump(STANZA))] == ["ok"]

    @pytest.mark.parametrize(
        ("changes", "state", "text"),
        [
            pytest.param({"ignorable": True}, "fail", "bound blindly", id="ignorable"),
            pytest.param({"tlsConfig": {"serverName": "x"}}, "fail", "not checked at all", id="no-ca"),
            pytest.param({"nodeCacheCapable": False}, "warn", "every node's JSON", id="whole-nodes"),
            pytest.param({"bindVerb": ""}, "warn", "no bindVerb", id="no-bind"),
            pytest.param({"enableHTTPS": False}, "fail", "enableHTTPS is off", id="no-https"),
            pytest.param({"urlPrefix": "https://CLUSTER-IP:12345/gputile"}, "fail", "CLUSTER-IP", id="not-filled-in"),
            pytest.param({"managedResources": []}, "warn", "every pod", id="no-resources"),
            pytest.param(
                {"managedResources": [{"name": "nvidia.com/gpu", "ignoredByScheduler": True}]},
                "warn",
                "cannot check sums",
                id="sums-hidden",
            ),
        ],
    )
    def test_a_stanza(self, changes: dict[str, Any], state: str, text: str) -> None:
        config = {**STANZA, "extenders": [{**STANZA["extenders"][0], **changes}]}
        found = list(check_configuration("it", yaml.safe_dump(config)))
        assert any(one.state == state and text in one.text and one.fix for one in found), found

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            pytest.param({"percentageOfNodesToScore": None}, "only a sample", id="sampling"),
            pytest.param({"extenders": []}, "no extender in it", id="not-there"),
            pytest.param(
                {"extenders": [STANZA["extenders"][0], {"urlPrefix": "http://x", "bindVerb": "bind"}]},
                "not the last",
                id="not-the-last",
            ),
        ],
    )
    def test_a_list(self, changes: dict[str, Any], text: str) -> None:
        found = list(check_configuration("it", yaml.safe_dump({**STANZA, **changes})))
        assert any(one.state != "ok" and text in one.text for one in found), found

    def test_no_configuration(self) -> None:
        assert [one.state for one in check_configuration("it", "a: b: c")] == ["fail"]


class TestCommand:
    def test_a_file_shows_what_is_in_it(self, tmp_path: Path) -> None:
        file = Cluster(node("n1").cards(1, "T4", 16000)).add("p", tile(1000)).write(tmp_path)
        said = CliRunner().invoke(cli, ["doctor", "-f", file, "-o", "json"])
        told = json.loads(said.output)
        assert (said.exit_code, told["healthy"]) == (0, True)
        states = {one["check"]: one["state"] for one in told["findings"]}
        assert (states["inventory"], states["pods"], states["scheduler"]) == ("ok", "ok", "unknown")

    def test_something_wrong_exits_with_1(self, tmp_path: Path) -> None:
        said = CliRunner().invoke(cli, ["doctor", "-f", Cluster(node("cpu-1")).write(tmp_path)], env={"COLUMNS": "80"})
        assert said.exit_code == 1
        assert "FAIL  inventory" in said.output
        assert "fix: " in said.output
        assert max(map(len, said.output.splitlines())) <= 80

    def test_each_finding_has_its_fix_below(self) -> None:
        lines = lines_of([Finding(check="a", state="fail", text="bad", fix="do it")], Terminal(80))
        lines = [bare(line) for line in lines]
        assert lines == ["FAIL  a  bad", "         fix: do it", "", "0 in order, 0 to look at, 1 wrong, 0 unknown"]


@pytest.mark.parametrize(
    "text", ["a: [", "a: !!int ''", "[" * 5000, "- a"], ids=["open", "empty-int", "deep", "a-list"]
)
def test_a_document_that_is_none_is_passed_over(text: str) -> None:
    assert parsed(text) is None
