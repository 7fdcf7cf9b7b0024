"""`gputile top` and `gputile inspect`: the text at different widths, and the JSON."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gputile.cli.group import cli
from gputile.model.errors import InputError
from gputile.testing.builders import node
from tests.cli.clusters import Cluster, tile

GOLDEN = Path(__file__).parent / "golden"
WIDTHS = pytest.mark.parametrize("columns", [80, 160])


def run(*arguments: str, columns: int = 0, color: bool = False, **env: str) -> Result:
    size = {"COLUMNS": str(columns)} if columns else {}
    return CliRunner().invoke(cli, arguments, env={**size, **env}, color=color)


def two_nodes() -> Cluster:
    cluster = Cluster(
        node("a100-1").cards(4, "NVIDIA A100-SXM4-80GB", "80Gi"), node("t4-1").cards(2, "Tesla T4", "15Gi")
    )
    for number in range(3):
        cluster.add(f"web-{number}", tile(8192, cores=25))
    cluster.add("train", {"gputile.io/gpu": 2}, namespace="research")
    return cluster.add("too-large", tile(90000))


@pytest.fixture
def two(tmp_path: Path) -> str:
    return two_nodes().write(tmp_path)


class TestTop:
    @WIDTHS
    def test_two_nodes(self, two: str, columns: int) -> None:
        result = run("top", "-f", two, columns=columns)
        assert result.exit_code == 0, result.output
        assert result.output == (GOLDEN / f"top-{columns}.txt").read_text()

    def test_500_nodes_are_500_lines_that_fit(self, tmp_path: Path) -> None:
        names = [f"a-very-long-name-of-a-pool-of-nodes-{number:03d}" for number in range(500)]
        cluster = Cluster(*(node(name).cards(8, "NVIDIA H100 80GB HBM3", "80Gi") for name in names))
        result = run("top", "-f", cluster.write(tmp_path), columns=80)
        rows = [line for line in result.output.splitlines() if line.startswith("a-very")]
        assert len(rows) == 500
        assert max(map(len, result.output.splitlines())) <= 80
        assert all(row.split()[0].endswith(f"{number:03d}") for number, row in enumerate(rows)), "names end differently"

    def test_a_cluster_without_gpus_names_the_next_step(self, tmp_path: Path) -> None:
        output = run("top", "-f", Cluster(node("cpu-1"), node("cpu-2")).write(tmp_path)).output
        assert output.startswith("No GPUs: none of 2 nodes publishes any.")
        assert "gputile doctor" in output

    def test_gpus_without_a_model_are_unknown(self, tmp_path: Path) -> None:
        output = run("top", "-f", Cluster(node("n1").cards(2, "", "16Gi")).write(tmp_path)).output
        assert "n1    2 x unknown" in output

    def test_a_node_of_another_dialect_counts_too(self, tmp_path: Path) -> None:
        shared = {
            "kind": "Node",
            "metadata": {"name": "shared"},
            "status": {"allocatable": {"aliyun.com/gpu-mem": "30", "aliyun.com/gpu-count": "2"}},
        }
        output = run("top", "-f", Cluster().beside(shared).write(tmp_path), "-o", "wide").output
        assert "1 node with 2 GPUs" in output
        assert "gpushare" in output

    def test_a_gpu_that_is_out_of_use_is_marked(self, tmp_path: Path) -> None:
        built = node("n1").card("T4", "16Gi", healthy=False, reason="XID 79").card("T4", "16Gi")
        output = run("top", "-f", Cluster(built).write(tmp_path)).output
        assert "n1    2 x T4  !·" in output
        assert "1 unhealthy" in output
        assert "1 out of use" in output
        assert "unhealthy: XID 79" in run("top", "n1", "-f", Cluster(built).write(tmp_path)).output

    @pytest.mark.parametrize(
        ("order", "first"),
        [
            pytest.param("name", "a100-1", id="by-name"),
            pytest.param("free", "a100-1", id="most-free-memory-first"),
            pytest.param("used", "t4-1", id="fullest-first"),
            pytest.param("pods", "a100-1", id="most-pods-first"),
        ],
    )
    def test_nodes_are_sorted(self, two: str, order: str, first: str) -> None:
        lines = run("top", "-f", two, "--sort", order).output.splitlines()
        header = next(number for number, line in enumerate(lines) if line.startswith("NODE"))
        assert lines[header + 1].startswith(first)

    @WIDTHS
    def test_one_node_shows_gpus_and_pods(self, two: str, columns: int) -> None:
        output = run("top", "t4-1", "-f", two, columns=columns).output
        assert "GPU 0" in output
        assert "team/web-0" in output
        assert max(map(len, output.splitlines())) <= columns

    def test_an_unknown_node_is_answered_with_the_nearest(self, two: str) -> None:
        result = run("top", "a100-2", "-f", two)
        assert isinstance(result.exception, InputError)
        assert "did you mean a100-1?" in str(result.exception)

    def test_the_json_is_a_contract(self, two: str) -> None:
        document = json.loads(run("top", "-f", two, "-o", "json").output)
        assert document["cluster"] == {
            "nodes": 2,
            "cards": 6,
            "idle": 1,
            "shared": 3,
            "full": 2,
            "out_of_use": 0,
            "memory": 4 * 81920 + 2 * 15360,
            "memory_held": 2 * 81920 + 3 * 8192,
            "cores": 600,
            "cores_held": 275,
            "pods": 4,
        }
        assert [pod["pod"] for pod in document["waiting"]] == ["team/too-large"]
        card = next(c for n in document["nodes"] if n["name"] == "t4-1" for c in n["cards"] if c["pods"])
        assert (card["memory"], card["cores"], card["state"]) == (15360, 100, "ok")
        assert card["pods"][0] == {
            "pod": "team/web-0",
            "memory": 8192,
            "cores": 25,
            "by": "gputile",
            "since": card["pods"][0]["since"],
            "phase": "Running",
            "going": False,
        }


def test_pods_with_an_invalid_request_are_counted_apart(tmp_path: Path) -> None:
    """`audit` and `quota` count the pending ones alone."""
    cluster = Cluster(node("n1").cards(1, "T4", 16000)).add("bad", {"gputile.io/memory": 5})
    assert "1 pod refused:" in run("top", "-f", cluster.write(tmp_path)).output
    file = cluster.add("large", tile(20000)).add("larger", tile(30000)).write(tmp_path)
    assert "2 pods pending, 1 refused:" in run("top", "-f", file).output
    assert "2 pending" in run("audit", "-f", file).output


class TestTerminal:
    def test_a_pipe_is_plain(self, two: str) -> None:
        assert "\x1b" not in run("top", "-f", two).output

    def test_a_terminal_has_colours_and_no_color_removes_them(self, two: str) -> None:
        assert "\x1b[" in run("top", "-f", two, FORCE_COLOR="1").output
        assert "\x1b[" not in run("top", "-f", two, color=True, NO_COLOR="1").output

    def test_without_a_width_nothing_is_cut(self, two: str) -> None:
        assert "4 x A100-SXM4-80GB" in run("top", "-f", two).output
        assert "…" not in run("top", "-f", two).output


class TestInspect:
    def test_every_node_with_its_gpus_and_pods(self, two: str) -> None:
        result = run("inspect", "-f", two)
        assert result.exit_code == 0
        assert result.output.count("GPU ") == 6
        assert "research/train" in result.output

    def test_wide_adds_uuids_and_slots(self, two: str) -> None:
        assert "GPU-t4-1-0, 2 of 10 slots" not in run("inspect", "t4-1", "-f", two).output
        assert "slots" in run("inspect", "t4-1", "-f", two, "-o", "wide").output

    def test_yaml_equals_json(self, two: str) -> None:
        import yaml

        as_json, as_yaml = (run("inspect", "-f", two, "-o", form).output for form in ("json", "yaml"))
        assert yaml.safe_load(as_yaml) == json.loads(as_json)

    def test_a_cluster_without_gpus(self, tmp_path: Path) -> None:
        assert "No GPUs" in run("inspect", "-f", Cluster(node("cpu-1")).write(tmp_path)).output
