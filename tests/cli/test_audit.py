"""`gputile audit`: where it reads, what it prints, how it exits."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from gputile.cli.group import cli
from gputile.cli.group import run as run_command
from gputile.model.errors import InputError
from gputile.testing.builders import node
from tests.audit.test_audit import holder

N1 = node("n1").cards(2, "Tesla T4", 16000).manifest()
RIGHT = [holder("a", (0, 9000, 0)), holder("b", (1, 9000, 0))]
WRONG = [holder("a", (0, 9000, 0)), holder("b", (0, 9000, 0))]


def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(cli, ["audit", *arguments], input=stdin)


def listed(*objects: dict[str, Any], kind: str = "List") -> str:
    return json.dumps({"apiVersion": "v1", "kind": kind, "items": list(objects)})


def test_a_cluster_without_problems() -> None:
    result = run("-f", "-", stdin=listed(N1, *RIGHT))
    assert result.exit_code == 0
    assert result.output == (
        "1 nodes with 2 GPUs, 2 pods on them (56 % of the memory allocated), 0 pending: no GPU is double-allocated, "
        "every grant belongs to its pod\n"
    )


def test_a_double_allocated_gpu_is_listed_with_its_pods_and_exits_with_1() -> None:
    result = run("-f", "-", stdin=listed(N1, *WRONG))
    assert result.exit_code == 1
    first, *rest = result.output.splitlines()
    assert first == "wrong: GPU GPU-n1-0 of node n1 is double-allocated: 18000 of 16000 MiB are allocated"
    assert "default/a" in rest[0]
    assert "newest" in rest[1]
    assert "what to do: " in rest[2]
    assert rest[-1].endswith(": 1 problem found")


def test_the_json_is_a_contract() -> None:
    document = json.loads(run("-f", "-", "-o", "json", stdin=listed(N1, *WRONG)).output)
    (finding,) = document.pop("findings")
    gpus = document.pop("gpus")
    assert document == {
        "right": False,
        "nodes": 1,
        "cards": 2,
        "pods": 2,
        "pending": 0,
        "memory_allocated": 18000,
        "memory": 32000,
        "remarks": [],
        "unplaced": [],
    }
    assert [(gpu["node"], gpu["index"], gpu["memory_allocated"], len(gpu["holders"])) for gpu in gpus] == [
        ("n1", 0, 18000, 2),
        ("n1", 1, 0, 0),
    ]
    assert (finding["code"], finding["node"], finding["card"]["uuid"]) == ("double-allocated", "n1", "GPU-n1-0")
    assert [holder["pod"] for holder in finding["holders"]] == ["default/a", "default/b"]
    assert finding["holders"][0]["memory"] == 9000


def test_pods_and_nodes_may_come_in_files_of_their_own_and_as_yaml(tmp_path: Path) -> None:
    pods, nodes = tmp_path / "pods.yaml", tmp_path / "nodes.json"
    nameless = [{key: value for key, value in item.items() if key != "kind"} for item in (RIGHT[0], N1)]
    pods.write_text(yaml.safe_dump({"kind": "PodList", "items": nameless[:1]}))
    nodes.write_text(listed(nameless[1], kind="NodeList"))
    result = run("-f", str(pods), "-f", str(nodes), "-o", "json")
    assert (result.exit_code, json.loads(result.output)["pods"]) == (0, 1), result.output


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param(listed(*RIGHT), "there is no node", id="no-nodes"),
        pytest.param("a: b: c", "invalid YAML", id="invalid-yaml"),
        pytest.param(b"\xff\xfe{", "cannot be read", id="not-utf-8"),
    ],
)
def test_an_unreadable_file_proves_nothing(content: str | bytes, why: str) -> None:
    result = run("-f", "-", stdin=content)
    assert isinstance(result.exception, InputError)
    assert why in str(result.exception)


@pytest.mark.parametrize(
    ("broken", "code"),
    [
        pytest.param({"kind": "Node", "metadata": 5}, "unreadable-node", id="a-node-without-metadata"),
        pytest.param({"kind": "Pod", "spec": {"nodeName": 5}}, "unreadable-pod", id="a-pod-without-metadata"),
        pytest.param(
            {"kind": "Pod", "metadata": {"name": "p"}, "spec": {"nodeName": 5}}, "unreadable-pod", id="a-node-name-of-5"
        ),
    ],
)
def test_an_undecodable_object_is_one_finding(broken: dict[str, Any], code: str) -> None:
    result = run("-f", "-", "-o", "json", stdin=listed(N1, broken, *RIGHT))
    document = json.loads(result.output)
    codes = [finding["code"] for finding in document["findings"]]
    assert (result.exit_code, codes, document["pods"]) == (1, [code], 2)


def test_no_cluster_exits_with_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["gputile", "audit", "--kubeconfig", "/nowhere/at/all"])
    with pytest.raises(SystemExit) as ended:
        run_command()
    assert ended.value.code == 2
    assert "no cluster is configured" in capsys.readouterr().err
