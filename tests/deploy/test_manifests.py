"""The files of deploy/ give what the code needs, and no more. The e2e tests apply them to a real API server."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gputile import __version__
from gputile.cli.commands.scheduler import SETTINGS
from gputile.dialects import registry
from gputile.dialects.settings import DEFAULTS
from gputile.metrics_api.resources import API_SERVICES
from gputile.metrics_api.settings import MetricsApiSettings
from gputile.scheduler import leadership

DEPLOY = Path(__file__).parents[2] / "deploy"
NAME, NAMESPACE = "gputile-scheduler", "kube-system"
AGENTS = "gputile-agents"


def objects(file: str) -> dict[tuple[str, str], Any]:
    """The objects of a file by kind and name."""
    manifests = [each for each in yaml.load_all((DEPLOY / file).read_text(), yaml.CSafeLoader) if each]
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in manifests}
    assert len(by_name) == len(manifests)
    return by_name


def ours(kind: str) -> Any:
    return objects("scheduler.yaml")[kind, NAME]


# ---- rights ---------------------------------------------------------------------------------------------------------

# Every right that the scheduler has. If a change widens this table, state in the review why the new right is needed.
RIGHTS = {
    ("ClusterRole", NAME): {
        ("", "pods", "", "list watch"),
        ("", "pods", "", "get"),
        ("", "nodes", "", "list watch"),
        ("", "pods/binding", "", "create"),
        ("", "pods/status", "", "patch"),
        ("", "pods/eviction", "", "create"),
        ("policy", "poddisruptionbudgets", "", "list"),
        ("", "events", "", "create"),
    },
    ("Role", NAME): {
        ("coordination.k8s.io", "leases", "", "create"),
        ("coordination.k8s.io", "leases", NAME, "get update"),
        ("", "configmaps", "gputile-quota", "list patch watch"),
        ("", "configmaps", "gpuquota", "list patch watch"),
    },
    ("Role", f"{NAME}-agents"): {
        ("coordination.k8s.io", "leases", "", "list watch"),
    },
}
HOMES = {("Role", NAME): NAMESPACE, ("Role", f"{NAME}-agents"): AGENTS, ("ClusterRole", NAME): None}


def rules_of(role: Any) -> set[tuple[str, str, str, str]]:
    return {
        (group, resource, name, " ".join(sorted(rule["verbs"])))
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [""])
    }


@pytest.mark.parametrize("role", list(RIGHTS))
def test_the_scheduler_has_these_rights_and_no_others(role: tuple[str, str]) -> None:
    made = objects("scheduler.yaml")[role]
    assert rules_of(made) == RIGHTS[role]
    assert made["metadata"].get("namespace") == HOMES[role]
    assert all("nonResourceURLs" not in rule for rule in made["rules"])


@pytest.mark.parametrize("role", list(RIGHTS))
def test_the_rights_are_bound_to_the_scheduler_alone(role: tuple[str, str]) -> None:
    kind, name = role
    binding = objects("scheduler.yaml")[f"{kind}Binding", name]
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == role
    assert binding["metadata"].get("namespace") == HOMES[role]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": NAME, "namespace": NAMESPACE}]


def test_there_are_no_other_roles_and_bindings() -> None:
    keys = {key for key in objects("scheduler.yaml") if "Role" in key[0]}
    assert keys == {*RIGHTS, *((f"{kind}Binding", name) for kind, name in RIGHTS)}


def test_the_agents_namespace_is_the_one_that_the_scheduler_looks_at() -> None:
    settings = SETTINGS.compose(yaml.safe_load(ours("ConfigMap")["data"]["settings.yaml"]), {}, {}, "settings.yaml")
    assert ("Namespace", settings.agents.namespace) in objects("scheduler.yaml")
    assert settings.agents.namespace == AGENTS


# ---- the metrics API ------------------------------------------------------------------------------------------------

API = "gputile-metrics-api"
API_RIGHTS = {
    ("ClusterRole", API): {
        ("authorization.k8s.io", "subjectaccessreviews", "", "create"),
        ("apiregistration.k8s.io", "apiservices", "v1alpha1.metrics.nvidia.com", "get patch"),
        ("apiregistration.k8s.io", "apiservices", "v1.nvidia-gpu-scheduler", "get patch"),
    },
    ("Role", API): {("", "secrets", "gputile-metrics-tls", "list patch watch")},
    ("ClusterRole", "gputile-metrics-view"): {
        ("metrics.nvidia.com", "podresources", "", "get list watch"),
        ("metrics.nvidia.com", "gpuinfos", "", "get list watch"),
        ("nvidia-gpu-scheduler", "gpupods", "", "get list watch"),
        ("nvidia-gpu-scheduler", "gpunodes", "", "get list watch"),
    },
    ("ClusterRole", "gputile-metrics-extender"): {
        ("metrics.nvidia.com", "schedule", "", "create"),
        ("nvidia-gpu-scheduler", "schedule", "", "create"),
    },
}


@pytest.mark.parametrize("role", list(API_RIGHTS))
def test_the_metrics_api_has_and_grants_these_rights(role: tuple[str, str]) -> None:
    assert rules_of(objects("metrics-api.yaml")[role]) == API_RIGHTS[role]


def test_the_metrics_api_has_no_other_roles_and_its_rights_go_to_the_scheduler() -> None:
    manifests = objects("metrics-api.yaml")
    assert {key for key in manifests if key[0] in ("Role", "ClusterRole")} == set(API_RIGHTS)
    scheduler = [{"kind": "ServiceAccount", "name": NAME, "namespace": NAMESPACE}]
    for key in (("ClusterRoleBinding", API), ("RoleBinding", API), ("RoleBinding", f"{API}-front-proxy")):
        assert manifests[key]["subjects"] == scheduler
    (extender,) = manifests["ClusterRoleBinding", "gputile-metrics-extender"]["subjects"]
    assert (extender["kind"], extender["name"]) == ("User", "system:kube-scheduler")
    reader = manifests["RoleBinding", f"{API}-front-proxy"]["roleRef"]
    assert (reader["kind"], reader["name"]) == ("Role", "extension-apiserver-authentication-reader")


def test_the_api_services_name_what_the_code_serves() -> None:
    manifests = objects("metrics-api.yaml")
    defaults = MetricsApiSettings()
    services = {name: manifest["spec"] for (kind, name), manifest in manifests.items() if kind == "APIService"}
    assert set(services) == set(API_SERVICES)
    for name, spec in services.items():
        assert name == f"{spec['version']}.{spec['group']}"
        assert spec["service"] == {"name": defaults.service, "namespace": defaults.namespace, "port": 443}
        assert "insecureSkipTLSVerify" not in spec
    service = manifests["Service", defaults.service]["spec"]
    assert service["selector"] == ours("Service")["spec"]["selector"]
    (port,) = service["ports"]
    line = next(line for line in (DEPLOY / "scheduler.yaml").read_text().splitlines() if "# metrics_api:" in line)
    (address,) = re.findall(r"listen: ([0-9.:]+)", line)
    assert address == f"0.0.0.0:{port['targetPort']}"
    assert ("Secret", defaults.secret) in manifests
    assert "data" not in manifests["Secret", defaults.secret]


def test_the_quotas_that_it_may_read_are_the_ones_that_it_watches() -> None:
    settings = SETTINGS.compose(yaml.safe_load(ours("ConfigMap")["data"]["settings.yaml"]), {}, {}, "settings.yaml")
    names = {name for _, resource, name, _ in RIGHTS["Role", NAME] if resource == "configmaps"}
    assert (settings.quota.namespace, {settings.quota.name, settings.quota.old_name}) == (NAMESPACE, names)


# ---- the Deployment -------------------------------------------------------------------------------------------------


def test_the_service_selects_the_leader_among_the_deployments_pods() -> None:
    template, app = ours("Deployment")["spec"]["template"], {"app.kubernetes.io/name": NAME}
    assert template["metadata"]["labels"] == app  # without the leader's label: no pod starts as the leader
    assert ours("Deployment")["spec"]["selector"]["matchLabels"] == app
    assert ours("Service")["spec"]["selector"] == app | {leadership.LABEL: "true"}
    assert ours("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == app


def test_the_settings_are_ones_that_the_scheduler_knows() -> None:
    settings = SETTINGS.compose(yaml.safe_load(ours("ConfigMap")["data"]["settings.yaml"]), {}, {}, "settings.yaml")
    (port,) = ours("Service")["spec"]["ports"]
    (container,) = ours("Deployment")["spec"]["template"]["spec"]["containers"]
    assert settings.host_and_port == ("0.0.0.0", port["port"])
    assert container["ports"] == [{"name": port["targetPort"], "containerPort": port["port"]}]
    assert (settings.leadership.namespace, settings.leadership.name) == (NAMESPACE, NAME)
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    for path in (settings.tls.certificate, settings.tls.key, settings.tls.client_ca, container["args"][2]):
        assert str(Path(path).parent) in mounts


def test_the_schedulers_own_pods_do_not_depend_on_the_scheduler() -> None:
    spec = ours("Deployment")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    requests = {**container["resources"]["requests"], **container["resources"]["limits"]}
    assert spec["schedulerName"] == "default-scheduler"
    assert not resources() & set(requests)


def test_the_images_version_is_ours() -> None:
    assert ours("Deployment")["spec"]["template"]["spec"]["containers"][0]["image"] == f"gputile:{__version__}"
    assert f"-t gputile:{__version__} " in (DEPLOY / "Containerfile").read_text()


# ---- kube-scheduler -------------------------------------------------------------------------------------------------

# One resource of each dialect goes through the kubelet; kube-scheduler counts it too.
CARRIERS = {
    "gputile.io/gpu",
    "aliyun.com/gpu-mem",
    "nano-gpu.io/gpu-core",
    "nano-gpu/gpu-percent",
    "elasticgpu.io/gpu-core",
    "tencent.com/vcuda-core",
    "nvidia.com/vcuda-core",
    "nvidia.com/gpu",
    "nvidia.com/vgpu-number",
}


def resources() -> set[str]:
    """All that some dialect asks with."""
    return {name for dialect in registry.DIALECTS for name in dialect.resources(DEFAULTS)}


def default_scheduler() -> Any:
    return yaml.safe_load((DEPLOY / "kube-scheduler/default-scheduler.yaml").read_text())["extenders"]


def second_scheduler() -> Any:
    config = objects("kube-scheduler/second-scheduler.yaml")["ConfigMap", "gpu-scheduler"]["data"]["config.yaml"]
    return yaml.safe_load(config)["extenders"]


def old_policy() -> Any:
    return json.loads((DEPLOY / "kube-scheduler/policy-before-1.23.json").read_text())["extenders"]


EXTENDERS = pytest.mark.parametrize(
    "extenders",
    [
        pytest.param(default_scheduler(), id="in the default scheduler"),
        pytest.param(second_scheduler(), id="in the second scheduler"),
        pytest.param(old_policy(), id="in the old policy"),
    ],
)


@EXTENDERS
def test_kube_scheduler_sends_every_resource_of_every_dialect_and_counts_device_plugin_resources(
    extenders: Any,
) -> None:
    (extender,) = extenders
    managed = {each["name"]: each["ignoredByScheduler"] for each in extender["managedResources"]}
    assert len(managed) == len(extender["managedResources"])
    assert managed == {name: name not in CARRIERS for name in resources()}


@EXTENDERS
def test_kube_scheduler_is_set_up_for_a_narrow_reply_over_mutual_tls(extenders: Any) -> None:
    (extender,) = extenders
    verbs = {key: value for key, value in extender.items() if key.endswith("Verb")}
    assert verbs == {"filterVerb": "filter", "bindVerb": "bind", "preemptVerb": "preempt"}
    assert re.fullmatch(r"https://[^/]+:12345/gputile", extender["urlPrefix"])
    assert extender["nodeCacheCapable"] is True
    assert extender["ignorable"] is False
    assert extender.get("enableHTTPS", extender.get("enableHttps")) is True
    assert set(extender["tlsConfig"]) == {"serverName", "caFile", "certFile", "keyFile"}  # `insecure` is none of them


def test_the_steering_stanza_blocks_nothing_and_binds_nothing() -> None:
    (extender,) = yaml.safe_load((DEPLOY / "kube-scheduler/steer-cpu-pods.yaml").read_text())["extenders"]
    (gpus,) = default_scheduler()
    assert {key: value for key, value in extender.items() if key.endswith("Verb")} == {"filterVerb": "steer"}
    assert extender["ignorable"] is True
    assert "managedResources" not in extender
    for same in ("urlPrefix", "nodeCacheCapable", "enableHTTPS", "tlsConfig"):
        assert extender[same] == gpus[same]


@pytest.mark.parametrize("file", ["certificates.sh", "cert-manager.yaml"])
def test_both_certificate_scripts_fill_the_secrets_and_name_that_are_used(file: str) -> None:
    text = (DEPLOY / file).read_text().replace("$service", NAME).replace("$namespace", NAMESPACE)
    volumes = (
        *ours("Deployment")["spec"]["template"]["spec"]["volumes"],
        *objects("kube-scheduler/second-scheduler.yaml")["Deployment", "gpu-scheduler"]["spec"]["template"]["spec"][
            "volumes"
        ],
    )
    for secret in [volume["secret"]["secretName"] for volume in volumes if "secret" in volume]:
        assert secret in text
    for (extender,) in (default_scheduler(), second_scheduler(), old_policy()):
        assert extender["tlsConfig"]["serverName"] in text


def test_the_readers_role_only_reads() -> None:
    role = objects("reader.yaml")["ClusterRole", "gputile-reader"]
    for rule in role["rules"]:
        assert set(rule["verbs"]) <= {"get", "list", "watch"}, rule
        assert "secrets" not in rule["resources"]
        assert "*" not in (*rule["resources"], *rule["apiGroups"])
        assert "services/proxy" not in rule["resources"] or rule["resourceNames"] == ["https:gputile-scheduler:https"]
