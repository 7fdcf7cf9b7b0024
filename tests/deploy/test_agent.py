"""deploy/agent.yaml gives the agent what its code needs, and no more. The e2e tests run it on real kubelets."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from gputile import __version__
from gputile.agent.settings import ISOLATIONS, AgentSettings, FolderSettings
from gputile.cli.commands.agent import SETTINGS
from tests.deploy.test_manifests import AGENTS, DEPLOY, NAMESPACE, objects

NAME = "gputile-agent"

# Every right that the agent has. If a change widens this table, state in the review why the new right is needed.
RIGHTS = {
    ("ClusterRole", NAME): {
        ("", "pods", "list watch"),
        ("", "nodes", "list patch watch"),
        ("", "nodes/status", "patch"),
        ("", "events", "create"),
    },
    ("Role", NAME): {("coordination.k8s.io", "leases", "create get update")},
}
HOMES = {"ClusterRole": None, "Role": AGENTS}


def ours(kind: str) -> Any:
    return objects("agent.yaml")[kind, NAME]


def pod_spec() -> Any:
    return ours("DaemonSet")["spec"]["template"]["spec"]


def settings() -> AgentSettings:
    return SETTINGS.compose(yaml.safe_load(ours("ConfigMap")["data"]["settings.yaml"]), {}, {}, "settings.yaml")


@pytest.mark.parametrize("role", list(RIGHTS))
def test_the_agent_has_these_rights_and_no_others(role: tuple[str, str]) -> None:
    made = objects("agent.yaml")[role]
    rights = {
        (group, resource, " ".join(sorted(rule["verbs"])))
        for rule in made["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert rights == RIGHTS[role]
    assert made["metadata"].get("namespace") == HOMES[role[0]]


@pytest.mark.parametrize("role", list(RIGHTS))
def test_the_rights_are_bound_to_the_agent_alone(role: tuple[str, str]) -> None:
    kind, name = role
    binding = objects("agent.yaml")[f"{kind}Binding", name]
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == role
    assert binding["metadata"].get("namespace") == HOMES[kind]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": NAME, "namespace": NAMESPACE}]


def test_there_are_no_other_roles_and_bindings() -> None:
    keys = {key for key in objects("agent.yaml") if "Role" in key[0]}
    assert keys == {*RIGHTS, *((f"{kind}Binding", name) for kind, name in RIGHTS)}


def test_it_runs_without_privileges() -> None:
    spec = pod_spec()
    (container,) = spec["containers"]
    assert not {"hostPID", "hostNetwork", "hostIPC"} & set(spec)
    context = container["securityContext"]
    assert "privileged" not in context
    assert (context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (False, True)
    assert context["capabilities"] == {"drop": ["ALL"]}


def test_it_is_given_the_folders_that_its_settings_name() -> None:
    (container,) = pod_spec()["containers"]
    writable = {mount["mountPath"]: not mount.get("readOnly", False) for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod_spec()["volumes"]}
    folders, runtime = settings().folders, settings().runtime
    assert writable == {
        folders.plugins: True,
        folders.cdi: True,
        runtime: False,  # only the socket: its directory also has the sockets of containerd and of every shim
        str(Path(container["args"][2]).parent): False,
    }
    assert (
        volumes["runtime"]["hostPath"]["type"] == "Socket"
    )  # with any other type a missing socket would become a directory
    for mount in container["volumeMounts"]:  # a slot's spec and a device's path mean the same on both sides
        path = volumes[mount["name"]].get("hostPath", {}).get("path", mount["mountPath"])
        assert path == mount["mountPath"]


def test_the_commented_lines_for_isolations_name_the_folders() -> None:
    """They are commented out, so no API server checks them."""
    text, folders = (DEPLOY / "agent.yaml").read_text(), FolderSettings()
    for path in (folders.nvidia_cdi[0], folders.driver, folders.mps, str(Path(folders.preload).parent)):
        assert f"mountPath: {path}, readOnly: true" in text
        assert f"hostPath: {{path: {path}, type: Directory}}" in text


def test_the_probes_and_ports_match_the_settings() -> None:
    (container,) = pod_spec()["containers"]
    host, port = settings().host_and_port
    assert (host, container["ports"]) == ("0.0.0.0", [{"name": "http", "containerPort": port}])
    assert {container[probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")} == {
        "/healthz",
        "/readyz",
    }


def test_it_withdraws_before_it_is_killed_and_serves_nodes_of_every_kind() -> None:
    assert pod_spec()["terminationGracePeriodSeconds"] > 5  # three seconds for the Lease, and some to close
    assert {"operator": "Exists"} in pod_spec()["tolerations"]
    assert settings().isolation in ISOLATIONS
    assert settings().heartbeat.namespace == AGENTS


def test_the_images_version_is_ours() -> None:
    assert pod_spec()["containers"][0]["image"] == f"gputile:{__version__}"
