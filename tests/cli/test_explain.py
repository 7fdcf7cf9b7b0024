"""`gputile explain`: the reasons of the scheduler, as text, as JSON, and as an exit code."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from gputile.cli.group import cli
from gputile.dialects.gputile import Nomination, write_nomination
from gputile.model.errors import InputError
from gputile.model.grants import ContainerGrant, Grant, Tile
from gputile.testing.builders import node, pod
from tests.cli.clusters import Cluster, tile

GOLDEN = Path(__file__).parent / "golden"


def run(*arguments: str, columns: int = 80) -> Result:
    return CliRunner().invoke(cli, ["explain", *arguments], env={"COLUMNS": str(columns)})


def full() -> Cluster:
    cluster = Cluster(node("t4-1").cards(2, "Tesla T4", 16000), node("p4-1").cards(1, "Tesla P4", 8000), node("cpu-1"))
    return cluster.add("web-0", tile(12000)).add("web-1", tile(9000, cores=50)).add("late", tile(10000))


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    return full().write(tmp_path)


def explanation_of(file: str, *arguments: str) -> dict[str, Any]:
    explanation: dict[str, Any] = json.loads(run(*arguments, "-f", file, "-o", "json").stdout)
    return explanation


class TestPending:
    def test_the_text_for_a_user(self, cluster: str) -> None:
        result = run("late", "-n", "team", "-f", cluster)
        assert result.exit_code == 1
        first, *rest = result.stdout.splitlines()
        assert first.startswith("team/late is pending for ")
        assert first.endswith(": 0/3 nodes are available")
        assert rest == (GOLDEN / "explain-waits.txt").read_text().splitlines()

    def test_reasons_misses_changes_and_the_pods_in_the_way(self, cluster: str) -> None:
        explanation = explanation_of(cluster, "team/late")
        assert (explanation["state"], explanation["nodes"], explanation["fitting"]) == ("unschedulable", 3, 0)
        assert {r["code"]: (r["nodes"], r["would_fit_when_empty"]) for r in explanation["reasons"]} == {
            "InsufficientCardMemory": (1, 1),
            "CardTooSmall": (1, 0),
            "NoCards": (1, 0),
        }
        assert explanation["misses"][0]["node"] == "t4-1"
        assert explanation["misses"][0]["text"] == "10000 MiB requested on one GPU, the freest has 7000 MiB"
        changes = {change["what"]: change["text"] for change in explanation["changes"]}
        assert changes["memory"].startswith("at most 8000 MiB per GPU instead of 10000 MiB, on p4-1")
        assert changes["pods"] == "as it is, once team/web-0 ends on t4-1"

    def test_an_invalid_request(self, tmp_path: Path) -> None:
        file = Cluster(node("n1").cards(1)).add("bad", {"gputile.io/memory": 5}).write(tmp_path)
        result = run("bad", "-n", "team", "-f", file)
        assert result.exit_code == 1
        assert "cannot be placed on any node" in result.output
        assert "add `gputile.io/gpu: 1`" in result.output.replace("\n" + " " * 17, " ")

    def test_a_pod_that_would_fit_shows_the_message_of_kube_scheduler(self, tmp_path: Path) -> None:
        cluster = Cluster(node("n1").cards(1, "T4", 16000)).add("now", tile(1000))
        placed = cluster.pod("now")
        placed["spec"]["nodeName"] = None
        placed["metadata"]["annotations"] = {}
        message = "0/1 nodes are available: 1 node(s) had untolerated taint {gpu: }."
        placed["status"] = {
            "phase": "Pending",
            "conditions": [{"type": "PodScheduled", "status": "False", "message": message}],
        }
        result = run("now", "-n", "team", "-f", cluster.write(tmp_path))
        assert result.exit_code == 1
        assert "though 1 node would fit now" in result.output
        assert "untolerated taint" in result.output

    def test_a_stale_agent_is_a_reason(self, tmp_path: Path) -> None:
        lease = {
            "kind": "Lease",
            "metadata": {"name": "n1", "namespace": "gputile-agents"},
            "spec": {"holderIdentity": "n1", "leaseDurationSeconds": 40, "renewTime": "2026-01-01T00:00:00.000000Z"},
        }
        cluster = Cluster(node("n1").cards(1, "T4", 16000)).add("big", tile(20000)).beside(lease)
        assert explanation_of(cluster.write(tmp_path), "team/big")["reasons"][0]["code"] == "AgentStale"

    def test_a_nomination_is_shown(self, tmp_path: Path) -> None:
        cluster = full()
        late = cluster.pod("late")
        card = Tile("GPU-t4-1-1", 1, 10000, 0)
        grant = Grant(pod="uid-1", node="t4-1", dialect="gputile", containers=(ContainerGrant("c0", (card,)),))
        late["metadata"]["uid"] = "uid-late"
        grant = Grant(pod="uid-late", node=grant.node, dialect=grant.dialect, containers=grant.containers)
        nomination = write_nomination(Nomination(grant, 2**61, ("x",)), 0)
        late["metadata"]["annotations"] = {"gputile.io/nomination": nomination}
        assert explanation_of(cluster.write(tmp_path), "team/late")["nominated_on"] == "t4-1"

    def test_events_are_shown_and_those_of_an_earlier_pod_are_not(self, tmp_path: Path) -> None:
        def event(uid: str, message: str) -> dict[str, Any]:
            return {
                "kind": "Event",
                "metadata": {"name": uid, "namespace": "team"},
                "involvedObject": {"name": "late", "namespace": "team", "uid": uid},
                "reason": "NoFittingGPU",
                "message": message,
                "lastTimestamp": "2026-11-16T09:00:00Z",
                "reportingComponent": "gputile-scheduler",
            }

        cluster = full()
        uid = cluster.pod("late")["metadata"]["uid"]
        file = cluster.beside(event(uid, "quota: team holds 4 of 4 A100"), event("other", "old")).write(tmp_path)
        explanation = explanation_of(file, "team/late")
        assert [(event["by"], event["message"]) for event in explanation["events"]] == [
            ("gputile-scheduler", "quota: team holds 4 of 4 A100")
        ]
        assert "team holds 4 of 4 A100" in run("team/late", "-f", file).output


class TestPlaced:
    def test_its_node_its_gpus_and_why(self, cluster: str) -> None:
        explanation = explanation_of(cluster, "team/web-0")
        assert (explanation["state"], explanation["node"], explanation["by"], explanation["policy"]) == (
            "placed",
            "t4-1",
            "gputile",
            "tiling",
        )
        assert explanation["tiles"] == [
            {
                "container": "c0",
                "index": 0,
                "uuid": "GPU-t4-1-0",
                "model": "Tesla T4",
                "memory": 12000,
                "cores": 0,
                "neighbours": [],
            }
        ]
        result = run("web-0", "-n", "team", "-f", cluster)
        assert result.exit_code == 0
        assert "no other node would fit now" in result.output

    def test_its_node_is_ranked_among_the_nodes_of_today(self, tmp_path: Path) -> None:
        """Placed again as if the pod were not there: its own tile must not be in its way."""
        twins = [node(name).cards(1, "Tesla T4", 16000) for name in ("n1", "n2")]
        file = Cluster(*twins).add("whole", {"gputile.io/gpu": 1}).write(tmp_path)
        explanation = explanation_of(file, "team/whole", "--policy", "binpack")
        assert (explanation["alternatives"], explanation["rank"]) == (1, "as good as the best")
        assert (
            "1 other node would fit now, and binpack ranks none of them higher"
            in run("team/whole", "--policy", "binpack", "-f", file, columns=160).output
        )

    def test_a_pod_of_another_system_is_read_in_its_own_dialect(self, tmp_path: Path) -> None:
        held = {"hami.io/vgpu-devices-allocated": "GPU-n1-0,NVIDIA,9000,30:;", "hami.io/vgpu-node": "n1"}
        cluster = Cluster(node("n1").cards(1, "T4", 16000)).add("theirs", {"cpu": 1})
        pod = cluster.pod("theirs")
        pod["metadata"]["annotations"] = held
        pod["spec"]["containers"][0]["resources"]["limits"] = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 9000}
        pod["spec"]["nodeName"] = "n1"
        explanation = explanation_of(cluster.write(tmp_path), "team/theirs")
        assert (explanation["state"], explanation["by"], explanation["tiles"][0]["memory"]) == ("placed", "hami", 9000)

    def test_a_pod_bound_by_another_scheduler_has_no_grant(self, tmp_path: Path) -> None:
        cluster = Cluster(node("n1").cards(1, "T4", 16000)).add("bypass", tile(1000))
        cluster.pod("bypass")["metadata"]["annotations"] = {}
        result = run("bypass", "-n", "team", "-f", cluster.write(tmp_path))
        assert "is on n1 without GPUs" in result.output

    def test_a_pod_without_gpus_is_left_to_kube_scheduler(self, tmp_path: Path) -> None:
        result = run("web", "-n", "team", "-f", Cluster(node("n1").cards(1)).add("web", {"cpu": 1}).write(tmp_path))
        assert (result.exit_code, result.stdout.splitlines()[0]) == (0, "team/web requests no GPU")

    def test_a_pod_that_has_ended(self, tmp_path: Path) -> None:
        cluster = full()
        cluster.pod("web-0")["status"] = {"phase": "Succeeded"}
        assert explanation_of(cluster.write(tmp_path), "team/web-0")["state"] == "over"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        pytest.param(("web-0", "-n", "other"), "there is one in team: add -n", id="in-another-namespace"),
        pytest.param(("webb-0", "-n", "team"), "did you mean web-0", id="a-typing-error"),
        pytest.param(("x", "-n", "nowhere"), "(none)", id="an-empty-namespace"),
        pytest.param(("late", "-n", "team", "--policy", "tetris"), "there is no such policy", id="policy"),
    ],
)
def test_an_unknown_name_is_answered_with_a_known_one(cluster: str, arguments: tuple[str, ...], why: str) -> None:
    result = run(*arguments, "-f", cluster)
    assert isinstance(result.exception, InputError)
    assert why in str(result.exception)


QUOTA = {
    "kind": "ConfigMap",
    "metadata": {"name": "gputile-quota", "namespace": "kube-system"},
    "data": {"quota.yaml": json.dumps({"namespaces": {"team": {"limits": [{"model": "T4", "cards": 1}]}}})},
}


def over_quota() -> Cluster:
    """One whole GPU is allowed and held; a second pod is pending."""
    cluster = Cluster(node("n1").cards(4, "Tesla T4", 16000)).add("first", {"gputile.io/gpu": 1})
    cluster.add("second", {"gputile.io/gpu": 1})
    second = cluster.pod("second")
    second["spec"]["nodeName"], second["metadata"]["annotations"] = None, {}
    return cluster.beside(QUOTA)


def test_a_pod_over_quota_names_the_limit(tmp_path: Path) -> None:
    file = over_quota().write(tmp_path)
    explanation = explanation_of(file, "team/second")
    assert explanation["state"] == "unschedulable", explanation
    assert "team holds 1 of 1 T4" in " ".join(explanation["quota"])
    assert "quota        " in run("team/second", "-f", file).output


def test_a_yaml_snapshot_gives_the_same_answer(tmp_path: Path) -> None:
    """Every kind counts there too: quotas, Leases and Events."""
    cluster = over_quota()
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": cluster.objects()}))
    assert explanation_of(str(file), "team/second") == explanation_of(cluster.write(tmp_path), "team/second")


def test_a_snapshot_without_quotas_leases_and_events_is_reported(tmp_path: Path) -> None:
    stderr = run("team/late", "-f", full().write(tmp_path)).stderr
    assert "the file has no Leases, Events, ConfigMaps: answered as if there were none" in stderr
    assert "the file has no Leases, Events: " in run("team/second", "-f", over_quota().write(tmp_path)).stderr


def test_a_quota_that_keeps_a_placed_pod_from_other_nodes_is_named(tmp_path: Path) -> None:
    twins = [node(name).cards(1, "Tesla T4", 16000) for name in ("n1", "n2", "n3")]
    cluster = Cluster(*twins).add("one", {"gputile.io/gpu": 1}).add("two", {"gputile.io/gpu": 1}).beside(QUOTA)
    file = cluster.write(tmp_path)
    explanation = explanation_of(file, "team/one")
    assert (explanation["state"], explanation["alternatives"]) == ("placed", 0)
    assert "team holds 1 of 1 T4" in " ".join(explanation["quota"])
    assert "no other node would fit now, because of quota" in run("team/one", "-f", file).stdout


class TestStockCluster:
    """gputile is not installed: NVIDIA's own plugin serves the node, and pods carry no record."""

    @pytest.fixture
    def stock(self, tmp_path: Path) -> str:
        amounts = {"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": "2"}
        labels = {"nvidia.com/gpu.memory": "15360", "nvidia.com/gpu.product": "Tesla-T4"}
        served = {"metadata": {"name": "n1", "labels": labels}, "status": {"capacity": amounts, "allocatable": amounts}}
        pods = [pod({"nvidia.com/gpu": 1}, name="runs", uid="a", on="n1") | {"status": {"phase": "Running"}}]
        pods += [pod({"nvidia.com/gpu": 2}, name="late", uid="b") | {"status": {"phase": "Pending"}}]
        file = tmp_path / "stock.json"
        file.write_text(json.dumps({"kind": "List", "items": [{"kind": "Node", **served}, *pods]}))
        return str(file)

    def test_a_running_pod_holds_its_number_of_gpus(self, stock: str) -> None:
        explanation = explanation_of(stock, "runs")
        assert (explanation["state"], explanation["unplaced"], explanation["tiles"]) == ("unplaced", 1, [])
        assert "is on n1 and holds 1 GPU of it" in run("runs", "-f", stock).stdout

    def test_a_pending_pod_does_not_get_them(self, stock: str) -> None:
        explanation = explanation_of(stock, "late")
        assert (explanation["state"], explanation["fitting"]) == ("unschedulable", 0)
