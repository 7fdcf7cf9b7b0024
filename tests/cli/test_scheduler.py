"""`gputile scheduler`: help that teaches, settings that can be shown, and a cluster in memory to try it on."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from gputile.cli.commands import scheduler
from gputile.cli.commands.scheduler import SETTINGS, command
from gputile.kube.api import ApiRejected
from gputile.kube.fake import MemoryApi
from gputile.model.errors import InputError
from gputile.scheduler.settings import Settings
from gputile.sim.manifests import load_file
from gputile.testing.builders import node, pod


@pytest.fixture(autouse=True)
def _no_log_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sends all log lines of the process to its standard error; here the process is pytest."""
    monkeypatch.setattr("gputile.telemetry.logs.start", lambda level: None)


def show(*arguments: str, env: dict[str, str] | None = None) -> Any:
    done = CliRunner(env=env or {}).invoke(command, [*arguments, "--show-settings"], catch_exceptions=False)
    assert done.exit_code == 0
    return yaml.safe_load(done.output)


def refusal(*arguments: str, env: dict[str, str] | None = None) -> str:
    with pytest.raises(InputError) as caught:
        CliRunner(env=env or {}).invoke(command, arguments, catch_exceptions=False)
    return str(caught.value)


def test_help_teaches() -> None:
    output = CliRunner().invoke(command, ["--help"]).output
    for line in (
        "gputile scheduler --cluster memory ",
        "kubectl get nodes,pods -A -o yaml",
        "--objects",
        "--show-settings",
        "GPUTILE_FILTER_KEEP",
        "docs/scheduler.md",
        "SIGTERM",
    ):
        assert line in output


def test_every_setting_is_shown_with_its_value() -> None:
    shown = show()
    for name in SETTINGS.names():
        inner: Any = shown
        for part in name.split("."):
            inner = inner[part]
    assert shown["policy"] == Settings().policy


def test_file_then_environment_then_flags(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("policy: spread\nfilter: {keep: 2, slack: 0.5}\n")
    env = {"GPUTILE_FILTER_KEEP": "3", "GPUTILE_POLICY": "binpack"}
    shown = show("--config", str(file), "--set", "filter.keep=4", env=env)
    assert (shown["policy"], shown["filter"]) == ("binpack", {"keep": 4, "slack": 0.5, "narrow": True})
    assert show("--listen", "0.0.0.0:1", "--policy", "random")["listen"] == "0.0.0.0:1"


def test_an_empty_file_is_no_settings(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    assert show("--config", str(tmp_path / "empty.yaml"))["policy"] == Settings().policy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(("--objects", "all.yaml"), "add --cluster memory", id="objects-need-the-cluster-in-memory"),
        pytest.param(("--set", "filter.keep"), "write NAME=VALUE", id="a-set-without-a-value"),
        pytest.param(("--set", "filter.kep=4"), "did you mean `filter.keep`", id="a-set-of-an-unknown-name"),
        pytest.param(
            ("--set", "filter.keep=x"),
            'setting `filter.keep`: expected a whole number, got "x"; `gputile scheduler --show-settings`',
            id="a-set-of-the-wrong-kind",
        ),
        pytest.param(
            ("--set", "log_level=loud"),
            'setting `log_level`: expected one of debug, info, warning, error, got "loud"; ',
            id="a-set-of-an-unknown-word",
        ),
        pytest.param(("--listen", "nowhere"), "write HOST:PORT", id="an-address-without-a-port"),
        pytest.param(
            ("--set", "bogus=1"),
            "`bogus`; `gputile scheduler --show-settings` lists",
            id="a-set-of-a-name-like-no-other",
        ),
        pytest.param(("--policy", "tilling"), "did you mean tiling", id="a-policy-misspelt"),
        pytest.param(("--config", "/nonexistent.yaml"), "name a YAML file", id="no-such-file"),
        pytest.param(("--cluster", "memory", "--objects", "/nonexistent.yaml"), "nonexistent", id="no-such-objects"),
    ],
)
def test_an_invalid_argument_is_one_sentence(arguments: tuple[str, ...], message: str) -> None:
    assert message in refusal(*arguments)


def test_an_unknown_variable_is_one_sentence() -> None:
    assert "did you mean `GPUTILE_FILTER_KEEP`?" in refusal(env={"GPUTILE_FILTER_KEPT": "1"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("filter: {keep: x}", 'setting `filter.keep`: expected a whole number, got "x"; ', id="a-number"),
        pytest.param("filter: 5", "setting `filter`: expected a mapping, got 5; ", id="a-section"),
        pytest.param("tell: {nudge: [1]}", "setting `tell.nudge`: expected true or false, got [1]; ", id="a-switch"),
        pytest.param("listen: null", "setting `listen`: expected text, got null; ", id="nothing"),
        pytest.param("tls: {client_names: [a, {}]}", "setting `tls.client_names[1]`: expected text, ", id="in-a-list"),
        pytest.param("- x", "settings are a YAML mapping such as `log_level: debug`, not a list", id="a-list"),
        pytest.param("5", "settings are a YAML mapping such as `log_level: debug`, not the value 5", id="a-value"),
    ],
)
def test_a_file_with_a_wrong_value_names_file_and_setting(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    refused = refusal("--config", str(file), "--set", "policy=spread")
    assert refused.startswith(f"{file}: {message}")
    assert "$" not in refused


@pytest.mark.parametrize("content", ["{", "a: b: c", "- x: [", "\x00"])
def test_a_file_that_is_no_yaml(tmp_path: Path, content: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    message = refusal("--config", str(file))
    assert "invalid YAML" in message
    assert "\n" not in message


def test_objects_without_a_node(tmp_path: Path) -> None:
    file = tmp_path / "all.yaml"
    file.write_text(json.dumps(pod()))
    assert "there is no node in it" in refusal("--cluster", "memory", "--objects", str(file))


def test_a_snapshot_is_taken_as_it_is(tmp_path: Path) -> None:
    """What `kubectl get nodes,pods -A -o json` prints: a List."""
    items = [node("n1").card().manifest(), pod(name="a", namespace="ml", uid="u-a", on="n1"), pod(name="b", uid="u-b")]
    file = tmp_path / "all.json"
    file.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    api = scheduler._memory(file)
    assert isinstance(api, MemoryApi)
    assert set(api.nodes) == {"n1"}
    assert set(api.pods) == {"ml/a", "default/b"}
    assert api.pods["ml/a"]["metadata"]["uid"] == "u-a"
    assert api.pods["ml/a"]["spec"]["nodeName"] == "n1"


def test_without_objects_it_is_the_example_cluster() -> None:
    api = scheduler._memory(None)
    assert isinstance(api, MemoryApi)
    assert set(api.nodes) == {str(manifest["metadata"]["name"]) for manifest in _example_nodes()}
    assert len(api.pods) > 5


def _example_nodes() -> list[dict[str, Any]]:
    return list(load_file(Path(__file__).parents[2] / "examples" / "cluster.yaml").nodes)


def test_it_starts_answers_and_stops_on_sigterm() -> None:
    script = "from gputile.cli.main import main; main()"
    line = [sys.executable, "-c", script, "scheduler", "--cluster", "memory", "--listen", "127.0.0.1:0"]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GPUTILE_")}
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean) as running:
        try:
            assert running.stdout is not None
            greeting = running.stdout.readline()
            match = re.search(r"A cluster in memory at (http://127\.0\.0\.1:\d+): (\d+) nodes", greeting)
            assert match is not None, greeting
            assert _get(match[1] + "/readyz") == "ok"
            assert len(json.loads(_get(match[1] + "/gpushare-scheduler/inspect"))["nodes"]) > 0
            commands = "".join(running.stdout.readline() for _ in range(6))
            assert f"curl -s {match[1]}/metrics" in commands
            begun = time.monotonic()
            running.send_signal(signal.SIGTERM)
            rest, errors = running.communicate(timeout=10)
            assert running.returncode == 0, errors
            assert time.monotonic() - begun < 3
            assert "Traceback" not in rest + errors
        finally:
            if running.poll() is None:
                running.kill()


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in refusal("--cluster", "memory", "--listen", f"127.0.0.1:{port}")


def test_a_missing_certificate_is_one_sentence() -> None:
    files = ("--set", "tls.certificate=/no.crt", "--set", "tls.key=/no.key")
    assert "/no.crt" in refusal("--cluster", "memory", "--listen", "127.0.0.1:0", *files)


class Labels:
    """A client with the only call that the labellers make."""

    def __init__(self, *answers: Exception) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[str, str, dict[str, str | None]]] = []

    async def label_pod(self, namespace: str, name: str, labels: dict[str, str | None]) -> None:
        self.asked.append((namespace, name, labels))
        if self._answers:
            raise self._answers.pop(0)


@pytest.mark.parametrize(
    ("identity", "touched"),
    [
        pytest.param("gputile-b_12ab", ["gputile-b"], id="another-replica"),
        pytest.param("gputile-a_12ab", [], id="a-process-before-us-in-our-own-pod"),
        pytest.param("", [], id="no-holder"),
    ],
)
async def test_the_label_of_a_lost_leader_is_removed(
    monkeypatch: pytest.MonkeyPatch, identity: str, touched: list[str]
) -> None:
    monkeypatch.setenv("POD_NAME", "gputile-a")
    monkeypatch.setenv("POD_NAMESPACE", "kube-system")
    client = Labels()
    await scheduler._taker(client)(identity)  # type: ignore[arg-type]
    assert client.asked == [("kube-system", name, {"gputile.io/leader": None}) for name in touched]


async def test_a_pod_that_is_gone_has_no_label_to_remove(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_NAME", "gputile-a")
    monkeypatch.setenv("POD_NAMESPACE", "kube-system")
    client = Labels(ApiRejected(404, "NotFound", "no such pod"), ApiRejected(403, "Forbidden", "no"))
    take = scheduler._taker(client)  # type: ignore[arg-type]
    await take("gputile-b_12ab")
    with pytest.raises(ApiRejected):
        await take("gputile-b_12ab")
