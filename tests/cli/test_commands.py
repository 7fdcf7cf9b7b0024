"""What a user types and reads."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from gputile.cli.group import cli
from gputile.cli.main import COMMANDS, help_text
from gputile.testing.builders import node, pod

EXAMPLES = Path(__file__).parents[2] / "examples"
DIALECTS = {"gpushare", "nano", "vcuda", "nvidia", "hami", "vgpu", "gputile"}
POD = "kind: Pod\nmetadata: {name: p}\nspec: {containers: [{name: main, resources: {limits: {%s}}}]}\n"


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli, arguments, input=stdin)


class TestRead:
    def test_the_json_is_a_contract(self) -> None:
        document = json.loads(
            run("read", "-f", "-", "-o", "json", stdin=POD % "nvidia.com/gpu: 2, nvidia.com/gpumem: 3000").output
        )
        assert document == {
            "pods": [
                {
                    "name": "p",
                    "namespace": "default",
                    "kind": "Pod",
                    "replicas": 1,
                    "dialect": "hami",
                    "containers": [
                        {
                            "name": "main",
                            "init": False,
                            "sidecar": False,
                            "cards": 2,
                            "memory_mib": 3000,
                            "memory_percent": None,
                            "cores": 0,
                            "exclusive": False,
                        }
                    ],
                    "constraints": {},
                    "cpu_millicores": 0,
                    "main_memory_mib": 0,
                    "warnings": [],
                    "refusal": None,
                }
            ],
            "passed_over": [],
        }

    def test_a_refusal_has_code_and_message(self) -> None:
        document = json.loads(run("read", "-f", "-", "-o", "json", stdin=POD % "gputile.io/memory: 1").output)
        (pod,) = document["pods"]
        assert pod["refusal"]["code"] == "NoDeviceResource"
        assert "add `gputile.io/gpu: 1`" in pod["refusal"]["message"]
        assert (pod["dialect"], pod["containers"]) == (None, [])

    def test_yaml_equals_json(self) -> None:
        text = POD % "gputile.io/gpu: 1"
        as_json, as_yaml = (run("read", "-f", "-", "-o", form, stdin=text).output for form in ("json", "yaml"))
        assert yaml.safe_load(as_yaml) == json.loads(as_json)

    @pytest.mark.parametrize("dialect", sorted(DIALECTS))
    def test_every_example_is_read_in_its_own_dialect(self, dialect: str) -> None:
        files = [argument for path in (EXAMPLES / dialect).glob("*.yaml") for argument in ("-f", str(path))]
        document = json.loads(run("read", *files, "-o", "json").output)
        assert {pod["dialect"] for pod in document["pods"]} == {dialect}

    @pytest.mark.parametrize(
        ("limits", "line"),
        [
            pytest.param("gputile.io/gpu: 1", "1 whole GPU, exclusive", id="whole"),
            pytest.param("gputile.io/gpu: 4, gputile.io/memory: 3072", "3 GiB of each of 4 GPUs", id="tiles"),
            pytest.param(
                "gputile.io/gpu: 1, gputile.io/cores: 5", "all memory and 5 % of the cores of 1 GPU", id="cores"
            ),
            pytest.param("elasticgpu.io/gpu-core: 5", "no memory and 5 % of the cores of 1 GPU", id="no-memory"),
            pytest.param("nano-gpu/gpu-percent: 5", "5 % of the memory and 5 % of the cores of 1 GPU", id="percent"),
            pytest.param("cpu: 1", "requests no GPU", id="without-gpus"),
            pytest.param("gputile.io/gpu: -1", "refused (Negative)", id="refused"),
            pytest.param("elasticgpu.io/gpu-core: 150", "note: container `main`: `elasticgpu.io", id="warned"),
        ],
    )
    def test_the_text_is_for_people(self, limits: str, line: str) -> None:
        assert line in run("read", "-f", "-", stdin=POD % limits).output

    def test_constraints_are_listed(self) -> None:
        text = (
            "kind: Pod\nmetadata: {name: p, annotations: {nvidia.com/use-gputype: 'T4,V100',"
            " nvidia.com/nouse-gputype: P4, nvidia.com/use-gpuuuid: u1, nvidia.com/nouse-gpuuuid: u2,"
            " nvidia.com/numa-bind: 'true',"
            " nvidia.com/vgpu-mode: mps, hami.io/gpu-scheduler-policy: 'mutex,spread', gputile.io/links: prefer,"
            " nvidia.com/gpu.model: V100}}\n"
            "spec: {containers: [{name: main, resources: {limits: {nvidia.com/gpu: 1}}}]}\n"
        )
        output = run("read", "-f", "-", stdin=text).output
        for line in (
            "only models matching V100",
            "only models matching T4 or V100",
            "no models matching P4",
            "only GPUs u1",
            "not the GPUs u2",
            "only GPUs shared by mps",
            "GPUs of one NUMA node (require)",
            "linked GPUs (prefer)",
            "only idle GPUs",
            "policy: nodes default, GPUs spread",
        ):
            assert line in output
        constraints = json.loads(run("read", "-f", "-", "-o", "json", stdin=text).output)["pods"][0]["constraints"]
        assert (constraints["models"], constraints["and_models"]) == (["V100"], [["T4", "V100"]])

    def test_check_fails_on_a_refusal_only(self) -> None:
        assert run("read", "-f", "-", "--check", stdin=POD % "gputile.io/gpu: 1").exit_code == 0
        assert run("read", "-f", "-", "--check", stdin=POD % "gputile.io/gpu: -1").exit_code == 1
        assert run("read", "-f", "-", stdin=POD % "gputile.io/gpu: -1").exit_code == 0

    def test_a_manifest_without_pods_is_reported(self) -> None:
        assert run("read", "-f", "-", stdin="kind: Service").output == (
            "no pods found\nignored, because they create no pods that gputile knows: Service\n"
        )

    def test_the_gpushare_unit_is_a_flag(self) -> None:
        text = POD % "aliyun.com/gpu-mem: 3000"
        document = json.loads(run("read", "-f", "-", "-o", "json", "--gpushare-unit", "MiB", stdin=text).output)
        assert document["pods"][0]["containers"][0]["memory_mib"] == 3000

    @pytest.mark.parametrize(("per_node", "mebibytes"), [(30218, 3000), (30, 3000 * 1024)], ids=["MiB", "GiB"])
    def test_the_gpushare_unit_is_guessed_from_nodes_beside_the_pods(self, per_node: int, mebibytes: int) -> None:
        allocatable = f"{{aliyun.com/gpu-mem: {per_node}, aliyun.com/gpu-count: 2}}"
        text = POD % "aliyun.com/gpu-mem: 3000" + f"---\nkind: Node\nstatus: {{allocatable: {allocatable}}}\n"
        document = json.loads(run("read", "-f", "-", "-o", "json", "--gpushare-unit", "auto", stdin=text).output)
        pod_read = document["pods"][0]
        assert pod_read["refusal"] or pod_read["containers"][0]["memory_mib"] == mebibytes
        assert bool(pod_read["refusal"]) == (mebibytes > 2**20)  # 3000 GiB is more than any GPU has


def test_a_bad_file_is_one_sentence_and_exit_code_2() -> None:
    command = [sys.executable, "-c", "from gputile.cli.main import main; main()", "read", "-f", "/nowhere.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("gputile: /nowhere.yaml: cannot be read")
    assert "Traceback" not in done.stderr


class TestDemo:
    def test_it_shows_all_dialects_the_table_and_the_pending_pod(self) -> None:
        done = run("demo")
        assert done.exit_code == 0, done.output
        for dialect in DIALECTS:
            assert f"  {dialect} " in done.output
        assert done.output.count("pending, see below") == 1
        reasons = "3 node(s) have fewer GPUs than requested, 1 node(s) have too few GPUs of the requested model."
        assert f"0/4 nodes are available: {reasons}" in " ".join(done.output.split())
        assert "It requests 6 whole GPUs, exclusive; only models matching A100. It stays" in done.output
        assert "best of 4 feasible nodes (tiling)" in done.output
        assert "GPU Memory(GiB)" in done.output
        assert re.search(r"split-over-four -> \S+, GPU [0-9,]{7}: 3 GiB each", done.output)

    def test_it_reads_in_80_columns_but_for_the_wide_table(self) -> None:
        before_table = run("demo").output.partition("The cluster as `kubectl")[0]
        assert max(map(len, before_table.splitlines())) <= 80

    @pytest.mark.parametrize("policy", ["spread", "random", "topology"])
    def test_other_policies_place_the_same_pods(self, policy: str) -> None:
        done = run("demo", "--policy", policy)
        assert done.exit_code == 0, done.output
        assert f"({policy})" in done.output


NODES = "sn,cpu_milli,memory_mib,gpu,model\n" + "".join(f"n{n},64000,262144,4,T4\n" for n in range(4))
PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,scheduled_time,deletion_time\n" + "".join(
    f"p{n},2000,1024,1,{share},0,100\n" for n, share in enumerate([300, 700, 1000, 500] * 3)
)


class TestSimulate:
    @pytest.fixture
    def lists(self, tmp_path: Path) -> tuple[str, ...]:
        (tmp_path / "nodes.csv").write_text(NODES)
        (tmp_path / "pods.csv").write_text(PODS)
        return ("simulate", "--nodes", str(tmp_path / "nodes.csv"), "--pods", str(tmp_path / "pods.csv"), "--jobs", "1")

    def test_a_table_with_a_row_per_policy(self, lists: tuple[str, ...]) -> None:
        done = run(*lists, "--policy", "tiling,binpack", "--seeds", "2")
        assert done.exit_code == 0, done.output
        lines = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
        assert lines[-3:] == ["policy", "tiling", "binpack"]

    def test_json_csv_and_a_plot(self, lists: tuple[str, ...], tmp_path: Path) -> None:
        done = run(*lists, "--policy", "binpack", "--seeds", "2", "-o", "json", "--out", str(tmp_path / "out"))
        (row,) = json.loads(done.stdout[done.stdout.index("{") :])["rows"]
        assert row["seeds"] == [42, 43]
        assert 80 < row["final"]["mean"] <= 100
        assert (tmp_path / "out/runs.csv").read_text().startswith("row,policy,seed,final")
        assert len((tmp_path / "out/curves.csv").read_text().splitlines()) > 50
        assert (tmp_path / "out/packing.png").read_bytes().startswith(b"\x89PNG")

    def test_what_if_stands_beside_the_base(self, lists: tuple[str, ...]) -> None:
        done = run(*lists, "--policy", "binpack", "--seeds", "1", "--what-if", "+2:T4:4x16Gi", "--what-if", "-n0")
        assert done.exit_code == 0, done.output
        assert "binpack +2:T4:4x16Gi" in done.stdout
        assert "binpack -n0" in done.stdout

    def test_pods_that_end_leave_a_steady_state(self, lists: tuple[str, ...], tmp_path: Path) -> None:
        done = run(*lists, "--policy", "binpack", "--seeds", "1", "--leave", "--out", str(tmp_path / "out"))
        assert done.exit_code == 0, done.output
        assert "mean wait min" in done.stdout
        assert (tmp_path / "out/steady.csv").exists()

    def test_an_invalid_pod_is_ignored_and_reported(self, tmp_path: Path) -> None:
        nodes, pods = tmp_path / "nodes.yaml", tmp_path / "pods.yaml"
        nodes.write_text(json.dumps({"kind": "Node", **node("n1").cards(2, "T4", 16000).manifest()}))
        manifests = [pod({"gputile.io/gpu": 1}, name="good"), pod({"gputile.io/memory": 5}, name="bad")]
        pods.write_text(json.dumps({"kind": "List", "items": [{"kind": "Pod", **manifest} for manifest in manifests]}))
        done = run("simulate", "--nodes", str(nodes), "--pods", str(pods), "--seeds", "2")
        assert done.exit_code == 0, done.output
        (line,) = [line for line in done.stderr.splitlines() if "pod ignored" in line]
        assert line.startswith(f"gputile: pod ignored: {pods}: Pod default/bad: ")
        assert "add `gputile.io/gpu: 1`" in line
        assert "BadRequest(" not in done.stderr

    @pytest.mark.parametrize(
        ("arguments", "fragment"),
        [
            pytest.param(("--policy", "tetris"), "there is no such policy", id="policy"),
            pytest.param(("--what-if", "-nobody"), "there is no node 'nobody'", id="what-if"),
            pytest.param(("--what-if", "policy=x"), "there is no such policy", id="what-if-policy"),
            pytest.param(("--pods", "/nowhere.csv"), "cannot be read", id="file"),
            pytest.param(("--ratio", "nan"), "--ratio must be a number", id="ratio"),
            pytest.param(("--what-if", " "), "--what-if must not be empty", id="empty-what-if"),
            pytest.param(("--out", "/proc/nope"), "cannot be created", id="folder"),
        ],
    )
    def test_bad_input_is_rejected_before_any_replay(
        self, lists: tuple[str, ...], arguments: tuple[str, ...], fragment: str
    ) -> None:
        done = run(*lists, *arguments)
        assert fragment in str(done.exception)


def test_the_list_of_commands_is_printed_without_loading_them() -> None:
    script = "import sys; sys.argv = ['gputile', '--help']; from gputile.cli.main import main; main(); "
    script += "assert not {'click', 'numpy', 'msgspec', 'yaml'} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == help_text() == run("--help").output.strip()
    assert max(map(len, help_text().splitlines())) <= 80


def test_help_names_every_command_and_each_has_its_own() -> None:
    listed = run("--help").output
    for name in COMMANDS:
        assert name in listed
        assert run(name, "--help").exit_code == 0


def test_an_unknown_command_is_rejected() -> None:
    assert "No such command" in run("nonsense").output
