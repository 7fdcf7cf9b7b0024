"""`kubectl inspect gpushare`, byte for byte. The golden files are those of the description of the original."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from gputile.cli.commands.gpushare import command, without_glog
from gputile.cli.render.gpushare import details, gpushare_table, summary
from gputile.cli.source import ShownNode
from gputile.dialects.kube_objects import Pod
from gputile.model.errors import InputError
from gputile.testing.builders import node, pod

GOLDEN = Path(__file__).parent / "golden"


def sharing(name: str, address: str, memory: int, count: int) -> dict[str, Any]:
    return {
        "kind": "Node",
        "metadata": {"name": name},
        "status": {
            "allocatable": {"aliyun.com/gpu-mem": str(memory), "aliyun.com/gpu-count": str(count)},
            "addresses": [{"type": "InternalIP", "address": address}] if address else [],
        },
    }


def allocation(memory: int, on: str, index: int | None, name: str, namespace: str = "default") -> dict[str, Any]:
    annotations = {} if index is None else {"ALIYUN_COM_GPU_MEM_IDX": str(index)}
    limits = {"aliyun.com/gpu-mem": memory}
    return pod(limits, name=name, namespace=namespace, uid=name, on=on, annotations=annotations)


NODES = [sharing("node-b", "10.0.0.12", 23, 1), sharing("node-a", "10.0.0.11", 30, 2)]
PODS = [
    allocation(2, "node-a", 0, "web-1"),
    allocation(4, "node-a", 0, "web-0"),
    allocation(3, "node-b", 0, "api-7c", "prod"),
]
PENDING = allocation(3, "node-a", None, "job-x", "ml")


def table(nodes: list[dict[str, Any]], pods: list[dict[str, Any]], how: Any = summary) -> str:
    shown = [msgspec.convert(manifest, ShownNode) for manifest in nodes]
    return str(how(gpushare_table(shown, [msgspec.convert(manifest, Pod) for manifest in pods])))


@pytest.mark.parametrize(
    ("nodes", "pods", "how", "golden"),
    [
        pytest.param(NODES, PODS, summary, "gpushare-summary", id="two-nodes"),
        pytest.param(
            NODES,
            [*PODS, allocation(2, "node-b", None, "new")],
            summary,
            "gpushare-pending",
            id="a-pod-on-an-unknown-card-is-pending",
        ),
        pytest.param(NODES, [*PODS, PENDING], details, "gpushare-details", id="details"),
        pytest.param([], [], summary, "gpushare-none", id="no-node-shares"),
    ],
)
def test_it_prints_what_the_original_prints(nodes: Any, pods: Any, how: Any, golden: str) -> None:
    assert table(nodes, pods, how) == (GOLDEN / f"{golden}.txt").read_text()


def test_finished_pods_hold_nothing() -> None:
    done = [
        {**allocation(9, "node-a", 1, f"done-{phase}"), "status": {"phase": phase}} for phase in ("Succeeded", "Failed")
    ]
    assert table(NODES, [*PODS, *done]) == (GOLDEN / "gpushare-summary.txt").read_text()


def test_the_newer_annotation_spreads_a_pod_over_cards() -> None:
    spread = pod(
        {"aliyun.com/gpu-mem": 6},
        on="node-a",
        labels={"aliyun.com/gpu-count": "2"},
        annotations={"scheduler.framework.gpushare.allocation": '{"0":{"0":3,"1":3}}'},
    )
    assert "node-a  10.0.0.11  3/15                   3/15                   6/30\n" in table(NODES, [spread])
    assert "web-0        default    3                3                \n" in table(NODES, [spread], details)


def test_many_units_on_a_card_are_read_as_MiB() -> None:  # noqa: N802
    text = table([sharing("n", "10.0.0.1", 30218, 2)], [allocation(3000, "n", 1, "p")])
    assert "GPU Memory(MiB)" in text
    assert "0/15109" in text
    assert "3000/15109" in text


def test_a_node_without_address_is_unknown() -> None:
    assert "n     unknown    0/16" in table([sharing("n", "", 16, 1)], [])


def test_pods_without_a_card_come_last() -> None:
    text = table(NODES, [allocation(1, "node-a", None, "a", "a"), *PODS], details)
    assert [line.split()[0] for line in text.splitlines()[5:8]] == ["web-0", "web-1", "a"]


def test_dashes_of_a_first_node_without_pods_are_ten() -> None:
    text = table([sharing("a", "10.0.0.1", 16, 1)], [], details)
    assert "Total :      16         \n----------\n" in text


# ---- the program ----------------------------------------------------------------------------------------------------


@pytest.fixture
def snapshot(tmp_path: Path) -> str:
    path = tmp_path / "all.json"
    path.write_text(json.dumps({"kind": "List", "items": [*NODES, *PODS, PENDING]}))
    return str(path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


@pytest.mark.parametrize("words", [("-d", "node-b"), ("node-b", "-d")], ids=["before", "after"])
def test_flags_come_before_or_after_the_node(snapshot: str, words: tuple[str, ...]) -> None:
    result = run("-f", snapshot, *words)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("\nNAME:       node-b\nIPADDRESS:  10.0.0.12\n\nNAME         NAMESPACE")
    assert "node-a" not in result.output


def test_the_json_is_that_of_the_extender_with_a_unit(snapshot: str) -> None:
    document = json.loads(run("-f", snapshot, "-o", "json").output)
    assert (document["unit"], document["usedGPU"], document["totalGPU"]) == ("GiB", 12, 53)
    first = document["nodes"][0]
    assert (first["name"], first["usedGPU"], first["totalGPU"]) == ("node-a", 9, 30)
    assert first["devs"][0] == {
        "id": 0,
        "totalGPU": 15,
        "usedGPU": 6,
        "pods": [
            {"name": "web-0", "namespace": "default", "usedGPU": 4},
            {"name": "web-1", "namespace": "default", "usedGPU": 2},
        ],
    }
    assert first["pending"] == [{"name": "job-x", "namespace": "ml", "usedGPU": 3}]


def test_an_unknown_node(snapshot: str) -> None:
    result = run("-f", snapshot, "node-z")
    assert isinstance(result.exception, InputError)
    assert str(result.exception) == 'nodes "node-z" not found'


def test_errors_are_the_originals_on_stdout_without_a_newline(tmp_path: Path) -> None:
    program = [
        sys.executable,
        "-c",
        "from gputile.cli.commands.gpushare import main; main()",
        "-f",
        str(tmp_path / "no"),
    ]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.startswith("Failed due to ")
    assert not done.stdout.endswith("\n")


def test_a_cluster_without_such_nodes_is_pointed_to_top(tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    path.write_text(json.dumps(node("n1").cards(1).manifest()))
    result = run("-f", str(path))
    assert result.stdout == (GOLDEN / "gpushare-none.txt").read_text()
    assert "kubectl gputile top" in result.stderr


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        pytest.param(["-d", "-logtostderr", "n"], ["-d", "n"], id="a-switch"),
        pytest.param(["-v=5", "n"], ["n"], id="with-equals"),
        pytest.param(["-v", "5", "n"], ["n"], id="with-a-word"),
        pytest.param(["--stderrthreshold=2", "-d"], ["-d"], id="two-dashes"),
        pytest.param(["--version"], ["--version"], id="not-glogs"),
    ],
)
def test_glogs_flags_are_ignored(typed: list[str], kept: list[str]) -> None:
    assert without_glog(typed) == kept
