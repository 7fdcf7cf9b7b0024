"""`gputile quota`: what it reads, counts and prints, and how it exits."""

import json
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from gputile.cli.group import cli
from gputile.model.errors import InputError
from gputile.testing.builders import node, pod
from tests.scheduler.test_cluster_state import grant

N1 = node("n1").cards(4, "Tesla T4", 16).manifest()
OURS = """
namespaces:
  team-a:
    limits:
      - {model: T4, cards: 1, memory: 1Gi}
      - {cores: 50}
    pools: [blue]
  team-b: {limits: []}
  "*": {limits: [{cards: 9}]}
"""


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["quota", *arguments], input=stdin)


def config_map(text: str, name: str = "gputile-quota", key: str = "quota.yaml", **annotations: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "kube-system", "uid": "u", "annotations": annotations}
    return {"kind": "ConfigMap", "metadata": metadata, "data": {key: text}}


def holder(name: str, namespace: str = "team-a", index: int = 0, **status: Any) -> dict[str, Any]:
    manifest = pod(
        {"gputile.io/gpu": 1, "gputile.io/memory": 8},
        name=name,
        namespace=namespace,
        uid=f"uid-{name}",
        on="n1",
        annotations=grant(8, index, name=name),
    )
    return {**manifest, "status": status}


PENDING = pod({"gputile.io/gpu": 1}, name="pending", namespace="team-a", uid="uid-pending")
PODS = [
    holder("a"),
    holder("b", index=1),
    holder("ended", index=2, phase="Succeeded"),
    PENDING,
    holder("c", "team-c"),
    pod({}, name="plain", namespace="team-d", uid="uid-plain"),
]


def saved(*objects: dict[str, Any]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [{"kind": "Node", **N1}, *objects]})


def test_a_line_for_every_limit() -> None:
    result = run("-f", "-", stdin=saved(config_map(OURS), *PODS))
    assert result.exit_code == 0
    assert result.output == (
        "NAMESPACE  MODEL               GPUS      MEMORY       CORES        POOLS  PENDING\n"
        "*          any                 up to 9   any          any          any    0\n"
        "team-a     T4                  1 of 1    16Mi of 1Gi  0 %          blue   1\n"
        "team-a     any                 1         16Mi         0 % of 50 %  blue   1\n"
        "team-b     nothing is allowed  -         -            -            any    0\n"
        "team-c     any                 0.5 of 9  8Mi          0 %          any    0\n"
    )


def rows(text: str, *arguments: str) -> list[dict[str, Any]]:
    result = run(*arguments, "-o", "json", "-f", "-", stdin=saved(config_map(text), *PODS))
    quotas: list[dict[str, Any]] = json.loads(result.stdout)["quotas"]
    return quotas


def test_what_is_held_outside_the_limits_has_a_line() -> None:
    text = "namespaces: {team-a: {limits: [{model: A100, cards: 4}]}, team-c: {limits: []}}"
    limits = {(row["namespace"], row["model"]): (row["allowed"], row["cards"]) for row in rows(text)}
    assert limits == {
        ("team-a", "A100"): (True, {"used": 0.0, "limit": 4.0}),
        ("team-a", "Tesla T4"): (False, {"used": 1.0, "limit": 0.0}),
        ("team-c", None): (False, {"used": 0.5, "limit": 0.0}),
    }
    shown = run("-f", "-", stdin=saved(config_map(text), *PODS)).stdout
    assert "team-a     Tesla T4 (not allowed)  1 " in shown
    assert "team-c     nothing is allowed      0.5 " in shown


def test_the_default_quota_is_shown_and_holds_for_a_namespace_without_pods() -> None:
    text = 'namespaces: {"*": {limits: [{cards: 9}]}}'
    assert [row["cards"] for row in rows(text, "empty")] == [{"used": 0.0, "limit": 9.0}]
    assert rows(text)[0]["namespace"] == "*"
    assert rows(text)[0]["cards"] == {"used": None, "limit": 9.0}


def test_yaml_is_read_too() -> None:
    text = saved(config_map(OURS), *PODS)
    as_yaml = yaml.safe_dump(json.loads(text))
    assert run("--objects", "-", stdin=as_yaml).output == run("-f", "-", stdin=text).output


@pytest.mark.parametrize(
    "annotations",
    [
        pytest.param({}, id="without-last-good-content"),
        pytest.param({"gputile.io/last-good-quota": "namespaces: ["}, id="with-invalid-last-good-content"),
    ],
)
def test_an_unknown_quota_is_not_shown_as_none(annotations: dict[str, str]) -> None:
    result = run("team-a", "-f", "-", stdin=saved(config_map("namespaces: [", **annotations), *PODS))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the quota in force is unknown" in result.stderr


def test_one_namespace_with_its_pods_and_its_config_map() -> None:
    result = run("team-a", "-o", "wide", "-f", "-", stdin=saved(config_map(OURS), *PODS))
    head, first, _ = result.output.splitlines()
    assert head.split()[-2:] == ["PODS", "CONFIGMAP"]
    assert first.endswith("2     ConfigMap kube-system/gputile-quota")


@pytest.mark.parametrize("output", ["json", "yaml"])
def test_the_json_is_a_contract_and_the_yaml_is_the_same(output: str) -> None:
    text = run("team-a", "-o", output, "-f", "-", stdin=saved(config_map(OURS), *PODS)).output
    document = json.loads(text) if output == "json" else yaml.safe_load(text)
    assert document["broken"] == []
    assert document["quotas"][0] == {
        "namespace": "team-a",
        "model": "T4",
        "allowed": True,
        "cards": {"used": 1.0, "limit": 1.0},
        "memory": {"used": 16.0, "limit": 1024.0},
        "cores": {"used": 0.0, "limit": None},
        "pools": ["blue"],
        "pods": 2,
        "waiting": 1,
        "source": "ConfigMap kube-system/gputile-quota",
    }


def test_where_both_name_a_namespace_ours_is_shown() -> None:
    old = config_map('{"team-a": {"quota": {"T4": 7}}, "team-e": {"quota": {"T4": 3}}}', "gpuquota", "gpu_quota")
    quotas = json.loads(run("-o", "json", "-f", "-", stdin=saved(config_map(OURS), old)).output)["quotas"]
    assert {(row["namespace"], row["source"].rpartition("/")[2]) for row in quotas} == {
        ("*", "gputile-quota"),
        ("team-a", "gputile-quota"),
        ("team-b", "gputile-quota"),
        ("team-e", "gpuquota"),
    }


def test_an_invalid_quota_is_reported_and_the_last_good_one_is_shown() -> None:
    last = {"gputile.io/last-good-quota": "namespaces: {team-a: {limits: [{cards: 3}]}}"}
    result = run("-f", "-", stdin=saved(config_map("namespaces: [", **last), *PODS))
    assert result.exit_code == 0
    assert "is invalid YAML" in result.stderr
    assert "1 of 3" in result.stdout


@pytest.mark.parametrize(
    ("words", "want"),
    [
        pytest.param((), "no namespace has a quota: any free GPU may be used; see docs/quota.md", id="none"),
        pytest.param(("team-x",), "namespace team-x has no quota: any free GPU may be used; see docs/quota.md",
                     id="one-namespace"),
    ],
)  # fmt: skip
def test_without_quotas(words: tuple[str, ...], want: str) -> None:
    result = run(*words, "-f", "-", stdin=saved(config_map("{}", "kube-root-ca.crt"), *PODS))
    assert (result.exit_code, result.output) == (0, f"{want}\n")


@pytest.mark.parametrize(
    ("words", "stdin", "message"),
    [
        pytest.param(("-f", "-"), "{", "-, line 2: invalid YAML or JSON", id="no-json"),
        pytest.param(("-f", "-"), saved(*PODS), "has no ConfigMaps, so quotas are unknown", id="no-maps"),
        pytest.param(("-f", "-"), json.dumps(config_map(OURS)), "there is no node", id="no-node"),
        pytest.param(("-f", "none.json"), "", "none.json: cannot be read", id="no-file"),
        pytest.param(("--configmap", "quota"), "", "write NAMESPACE/NAME", id="a-name-without-namespace"),
    ],
)
def test_unreadable_input_is_one_sentence(words: tuple[str, ...], stdin: str, message: str) -> None:
    error = run(*words, stdin=stdin).exception
    assert isinstance(error, InputError)
    assert message in str(error)
