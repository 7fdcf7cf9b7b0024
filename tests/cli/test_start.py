"""Quick starts, completion, versions and exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
from click.testing import CliRunner, Result

from gputile import __version__
from gputile.cli.commands.completion import proposals
from gputile.cli.group import cli
from gputile.cli.main import COMMANDS, GROUPS
from gputile.cli.usage import usage_by_pod_and_card
from gputile.model.errors import InputError
from gputile.testing.builders import node
from tests.cli.clusters import Cluster, tile

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **env: str) -> Result:
    return CliRunner().invoke(cli, arguments, env=env)


@pytest.mark.parametrize(
    ("program", "arguments", "heavy"),
    [
        pytest.param("main", ("top", "-f"), {"numpy", "grpc", "yaml", "asyncio", "ssl", "pathlib"}, id="top"),
        pytest.param("main", ("inspect", "-f"), {"numpy", "grpc", "yaml", "asyncio", "ssl"}, id="inspect"),
        pytest.param("main", ("audit", "-f"), {"numpy", "grpc", "yaml", "asyncio", "ssl"}, id="audit"),
        pytest.param("main", ("doctor", "-f"), {"numpy", "grpc"}, id="doctor"),
        pytest.param("commands.gpushare", ("-f",), {"numpy", "grpc", "yaml", "asyncio", "ssl"}, id="inspect-gpushare"),
        pytest.param("main", ("explain", "--help"), {"numpy", "grpc", "yaml", "asyncio"}, id="help-of-explain"),
        pytest.param("main", ("version", "--client"), {"numpy", "grpc", "asyncio"}, id="version"),
    ],
)
def test_a_command_loads_only_what_it_needs(
    tmp_path: Path, program: str, arguments: tuple[str, ...], heavy: set[str]
) -> None:
    file = Cluster(node("n1").cards(1, "T4", 16000)).add("p", tile(1000)).write(tmp_path)
    words = [*arguments, *([file] if arguments[-1] == "-f" else [])]
    script = (
        f"import sys; sys.argv = ['gputile', *{words!r}]; from gputile.cli.{program} import main\n"
        f"try: main()\nexcept SystemExit as end: assert not end.code, end\n"
        f"loaded = {heavy!r} & sys.modules.keys(); assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class TestStandardOutput:
    """Standard output may close before the command has ended."""

    EVERY = pytest.mark.parametrize(
        "words", ["--help", "--version", "top --help", "top -f FILE", "explain team/p -f FILE", "audit -f FILE"]
    )

    @EVERY
    def test_a_pipe_that_is_closed(self, tmp_path: Path, words: str) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "wb") as pipe:
            done = self.run_into(pipe, tmp_path, words)
        assert done.returncode == 141
        assert "Broken" not in done.stderr

    @EVERY
    def test_a_full_disk(self, tmp_path: Path, words: str) -> None:
        with open("/dev/full", "wb") as full:
            done = self.run_into(full, tmp_path, words)
        assert done.returncode == 2
        *_, last = done.stderr.splitlines()
        assert last.startswith("gputile: standard output: cannot be written: No space left on device; ")

    @staticmethod
    def run_into(sink: IO[bytes], folder: Path, words: str) -> "subprocess.CompletedProcess[str]":
        file = Cluster(node("n1").cards(1, "T4", 16000)).add("p", tile(1000)).write(folder)
        script = "from gputile.cli.main import main; main()"
        argv = [sys.executable, "-c", script, *words.replace("FILE", file).split()]
        return subprocess.run(argv, stdout=sink, stderr=subprocess.PIPE, text=True, check=False)


def test_a_file_cannot_be_watched(tmp_path: Path) -> None:
    result = run("top", "-w", "-f", Cluster(node("n1").cards(1)).write(tmp_path))
    assert isinstance(result.exception, InputError)
    assert "a file cannot be watched" in str(result.exception)


class TestCompletion:
    def test_commands_are_proposed_from_the_list_alone(self) -> None:
        assert proposals([], "") == [*(f"{name}\t{line}" for name, line in COMMANDS.items()), ":4"]

    def test_options_and_their_values(self) -> None:
        assert "--sort\tOrder of nodes." in proposals(["top"], "--")
        assert proposals(["top", "--sort"], "f") == ["free", ":4"]

    def test_files_are_left_to_the_shell(self) -> None:
        assert proposals(["top", "-f"], "") == [":0"]

    def test_without_a_cluster_there_is_nothing_to_propose(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KUBECONFIG", "/nowhere/at/all")
        assert proposals(["explain"], "") == [":4"]

    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    def test_a_script_for_each_shell(self, shell: str) -> None:
        result = run("completion", shell)
        assert result.exit_code == 0
        assert "_GPUTILE_COMPLETE" in result.output

    def test_a_shell_gets_its_completions(self) -> None:
        env = {**os.environ, "_GPUTILE_COMPLETE": "bash_complete", "COMP_WORDS": "gputile ex", "COMP_CWORD": "1"}
        script = "import sys; sys.argv = ['gputile']; from gputile.cli.main import main; main()"
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
        assert done.stdout == "plain,explain\n"


class TestVersion:
    def test_of_this_program(self) -> None:
        assert run("version", "--client").output == f"gputile  {__version__}\n"

    def test_without_a_cluster_the_rest_is_unknown_and_reported(self) -> None:
        result = run("version", "-o", "json", KUBECONFIG="/nowhere/at/all")
        assert result.exit_code == 0
        assert json.loads(result.stdout) == {"gputile": __version__, "scheduler": None, "kubernetes": None}
        assert "no cluster was contacted" in result.stderr


class TestHelp:
    @pytest.mark.parametrize("name", list(COMMANDS))
    def test_every_command_has_examples(self, name: str) -> None:
        assert "Examples:" in run(name, "--help").output

    def test_a_typing_error_is_answered_with_the_nearest_name(self) -> None:
        result = run("tpo")
        assert result.exit_code == 2
        assert "Did you mean 'top'?" in result.output

    def test_the_page_names_every_command_and_every_exit_code(self) -> None:
        page = (ROOT / "docs/cli.md").read_text()
        for name in COMMANDS:
            assert f"gputile {name}" in page, name
        for code in (0, 1, 2, 130, 141):
            assert f"| {code} |" in page

    def test_no_command_is_in_two_groups(self) -> None:
        assert sum(map(len, GROUPS.values())) == len(COMMANDS)


def test_use_adds_up_and_an_unknown_value_is_absent() -> None:
    def item(*uses: dict[str, int] | None) -> dict[str, object]:
        held = [{"device_info": [{"device_id": "g"} | ({"use": use} if use else {})]} for use in uses]
        return {"spec": {"pod_name": "p", "pod_namespace": "n", "containers_device": held}}

    both = {"memory": 100, "cores": 20}
    assert usage_by_pod_and_card([item(both, both)]) == {("n/p", "g"): {"memory": 200, "cores": 40}}
    assert usage_by_pod_and_card([item(both, {"memory": 1})]) == {("n/p", "g"): {"memory": 101}}
    assert usage_by_pod_and_card([item(both, None)]) == {("n/p", "g"): {}}
