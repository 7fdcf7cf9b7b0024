"""Hostile files: each command answers with one sentence, and the terminal stays as it was."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

import gputile.cli
from gputile.cli.commands.gpushare import command as inspect_gpushare
from gputile.cli.group import cli
from gputile.model.errors import GputileError
from gputile.testing.builders import node, pod
from tests.text.test_documents import LAUGHS, MERGES

EVIL = "\x1b[2J\x1b]0;t\x07\x9b5m\u202egnp\rx\nn2: all is well"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
OURS = re.compile(r"\x1b\[[0-9;]*m")


def run(*arguments: str, **env: str) -> Result:
    command = inspect_gpushare if arguments[0] == "gpushare" else cli
    words = arguments[1:] if arguments[0] == "gpushare" else arguments
    return CliRunner().invoke(command, words, env=env, color=bool(env))


LOOKS = [
    pytest.param(("read", "-f"), id="read"),
    pytest.param(("top", "-f"), id="top"),
    pytest.param(("inspect", "-f"), id="inspect"),
    pytest.param(("explain", "web-0", "-f"), id="explain"),
    pytest.param(("audit", "-f"), id="audit"),
    pytest.param(("quota", "-f"), id="quota"),
    pytest.param(("doctor", "-f"), id="doctor"),
    pytest.param(("gpushare", "-f"), id="inspect-gpushare"),
    pytest.param(("simulate", "--pods", "/dev/null", "--nodes"), id="simulate"),
    pytest.param(("scheduler", "--cluster", "memory", "--listen", "127.0.0.1:0", "--objects"), id="scheduler-objects"),
    pytest.param(("scheduler", "--show-settings", "--config"), id="scheduler-settings"),
    pytest.param(("agent", "--show-settings", "--config"), id="agent-settings"),
    pytest.param(("top", "--kubeconfig"), id="kubeconfig"),
]


@pytest.mark.parametrize("words", LOOKS)
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(LAUGHS, id="aliases-that-double"),
        pytest.param(MERGES, id="merge-keys-that-double"),
        pytest.param("kind: List\nitems: &a [*a]", id="a-list-that-holds-itself"),
        pytest.param('{"kind": "List", "x": ' + "[" * 100_000, id="brackets"),
        pytest.param("kind: !!python/object:os.system {}", id="an-object-of-python"),
        pytest.param("kind: " + "9" * 5000, id="a-number-of-5000-digits"),
        pytest.param(f"'{EVIL}': [", id="control-characters-and-half-a-list"),
    ],
)
def test_a_hostile_file_is_one_sentence(tmp_path: Path, words: tuple[str, ...], text: str) -> None:
    file = tmp_path / "evil.yaml"
    file.write_text(text)
    done = run(*words, str(file))
    assert isinstance(done.exception, GputileError), done.exception
    assert len(str(done.exception)) < 1000


LIBRARIES = re.compile(r"Expected `|\$[.\[]|\[Errno|codec|Invalid |byte 0x")
FILES = [param for param in LOOKS if param.id != "kubeconfig"]  # kubeconfigs have tests of their own


@pytest.mark.parametrize("words", FILES)
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        pytest.param(None, "no such file or directory", id="no-such-file"),
        pytest.param(b"\xff\xfe{", "it is not UTF-8 text", id="not-utf-8"),
    ],
)
def test_why_a_file_cannot_be_read_is_our_own_sentence(
    tmp_path: Path, words: tuple[str, ...], content: bytes | None, problem: str
) -> None:
    file = tmp_path / "all.yaml"
    if content is not None:
        file.write_bytes(content)
    message = str(run(*words, str(file)).exception)
    assert f"{file}: cannot be read: {problem}; " in message
    assert not LIBRARIES.search(message)


@pytest.mark.parametrize("command", ["top", "inspect", "quota", "doctor", "gpushare"])
@pytest.mark.parametrize(
    ("item", "problem"),
    [
        pytest.param(
            {"kind": "Node", "metadata": 5}, "a Node cannot be read: `metadata`: expected a mapping", id="node"
        ),
        pytest.param(
            {"kind": "Pod", "metadata": {"name": [1]}}, "a Pod cannot be read: `metadata.name`: expected text", id="pod"
        ),
        pytest.param(
            {"kind": "Lease", "metadata": {"labels": {"a": 1}}}, "a Lease cannot be read: `metadata.labels", id="lease"
        ),
    ],
)
def test_an_object_of_the_wrong_shape_is_our_own_sentence(
    tmp_path: Path, command: str, item: dict[str, Any], problem: str
) -> None:
    file = tmp_path / "all.json"
    file.write_text(json.dumps({"kind": "List", "items": [node().cards(1).manifest(), item]}))
    message = str(run(command, "-f", str(file)).exception)
    assert message.startswith(problem)
    assert message.endswith("; write the file with kubectl")
    assert not LIBRARIES.search(message)


def test_a_kube_scheduler_configuration_with_doubling_aliases_is_rejected(tmp_path: Path) -> None:
    cluster, config = tmp_path / "all.json", tmp_path / "scheduler.yaml"
    cluster.write_text(json.dumps({"kind": "List", "items": [node().cards(1).manifest()]}))
    config.write_text(LAUGHS)
    done = run("doctor", "-f", str(cluster), "--scheduler-config", str(config))
    assert "kube-scheduler" in done.output
    assert isinstance(done.exception, SystemExit)


@pytest.mark.parametrize(
    "malformed",
    [
        pytest.param({"kind": "Deployment", "spec": "none", "status": "none"}, id="a-deployment"),
        pytest.param(
            {"kind": "Deployment", "spec": {"template": {"spec": {"containers": "none"}}}}, id="its-containers"
        ),
        pytest.param({"kind": "Lease", "spec": ["none"]}, id="a-lease"),
        pytest.param({"kind": "MutatingWebhookConfiguration", "webhooks": [7]}, id="a-webhook"),
        pytest.param({"kind": "ValidatingWebhookConfiguration", "webhooks": {"a": 1}}, id="webhooks"),
        pytest.param({"kind": "APIService", "status": {"conditions": [7]}}, id="an-api-service"),
    ],
)
def test_a_malformed_object_costs_the_doctor_one_check(tmp_path: Path, malformed: dict[str, Any]) -> None:
    named = {"metadata": {"name": "gputile-scheduler", "namespace": "kube-system"}, **malformed}
    file = tmp_path / "all.json"
    file.write_text(json.dumps({"kind": "List", "items": [node().cards(1).manifest(), named]}))
    done = run("doctor", "-f", str(file), "-o", "json")
    assert isinstance(done.exception, SystemExit | None), done.exception
    assert len(json.loads(done.stdout)["findings"]) >= 13


# ---- what reaches the terminal --------------------------------------------------------------------------------------


def objects() -> list[dict[str, Any]]:
    """A cluster in which whatever may be text is hostile."""
    there = node("n1" + EVIL).card(f"T4{EVIL}", "16Gi", healthy=False, reason=EVIL).cards(1, "A100").manifest(EVIL)
    there["metadata"]["labels"] = {"gputile.io/pool": EVIL}
    annotations = {"gputile.io/model": EVIL, f"gputile.io/{EVIL}": "", "gputile.io/not-uuid": EVIL}
    pending = pod({"gputile.io/gpu": 1, "gputile.io/memory": 10}, name="web-0", uid="u1", annotations=annotations)
    pending["spec"]["containers"][0]["name"] = f"c0{EVIL}"
    pending["spec"]["schedulerName"] = EVIL
    invalid = pod({"gputile.io/gpu": EVIL}, name=f"wrong{EVIL}", uid="u2", namespace=EVIL)
    runs = pod({"gputile.io/gpu": 1}, name=f"runs{EVIL}", uid="u3", on=f"n1{EVIL}")
    shares = pod({"aliyun.com/gpu-mem": 1}, name="shares\u202egnp", uid="u4", on=f"n1{EVIL}")
    there["status"]["allocatable"] |= {"aliyun.com/gpu-mem": 32, "aliyun.com/gpu-count": 2}
    event = {
        "kind": "Event",
        "metadata": {"name": EVIL, "namespace": "default"},
        "involvedObject": {"name": "web-0", "uid": "u1"},
        "reason": EVIL,
        "message": EVIL,
        "source": {"component": EVIL},
    }
    quota = {"namespaces": {EVIL: {"limits": [{"model": f"T4{EVIL}", "cards": 1}]}}}
    config = {
        "kind": "ConfigMap",
        "metadata": {"name": "gputile-quota", "namespace": "kube-system"},
        "data": {"quota.yaml": json.dumps(quota)},
    }
    image = {"template": {"spec": {"containers": [{"name": EVIL, "image": EVIL}], "runtimeClassName": EVIL}}}
    runner = {"kind": "DaemonSet", "metadata": {"name": "gputile-agent", "namespace": "kube-system"}, "spec": image}
    return [there, pending, invalid, runs, shares, event, config, runner, {"kind": EVIL, "metadata": {"name": EVIL}}]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "all.json"
    path.write_text(json.dumps({"kind": "List", "items": objects()}))
    return str(path)


COMMANDS = [
    pytest.param(("read",), id="read"),
    pytest.param(("top",), id="top"),
    pytest.param(("top", "n1" + EVIL), id="top-of-a-node"),
    pytest.param(("inspect",), id="inspect"),
    pytest.param(("explain", "web-0"), id="explain-a-pending-pod"),
    pytest.param(("explain", f"wrong{EVIL}", "-n", EVIL), id="explain-an-invalid-pod"),
    pytest.param(("explain", f"runs{EVIL}"), id="explain-a-running-pod"),
    pytest.param(("audit",), id="audit"),
    pytest.param(("doctor",), id="doctor"),
    pytest.param(("quota",), id="quota"),
    pytest.param(("gpushare",), id="inspect-gpushare"),
    pytest.param(("gpushare", "-d"), id="inspect-gpushare-with-pods"),
]


@pytest.mark.parametrize("colours", [pytest.param({}, id="pipe"), pytest.param({"FORCE_COLOR": "1"}, id="terminal")])
@pytest.mark.parametrize("form", ["text", "wide", "json", "yaml"])
@pytest.mark.parametrize("words", COMMANDS)
def test_control_characters_never_reach_the_terminal(
    file: str, words: tuple[str, ...], form: str, colours: dict[str, str]
) -> None:
    done = run(*words, "-f", file, "-o", form, **colours)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.output
    assert not OBEYED.search(OURS.sub("", done.output) if colours else done.output)
    if form == "json":
        json.loads(done.stdout)
    if form == "yaml":
        yaml.safe_load(done.stdout)


def test_the_printed_name_decodes_to_the_original(file: str) -> None:
    """The escapes are JSON's own, and YAML's: a program reads the very name."""
    for form, load in (("json", json.loads), ("yaml", yaml.safe_load)):
        document = load(run("read", "-f", file, "-o", form).stdout)
        assert [pod["name"] for pod in document["pods"]][1:4] == [f"wrong{EVIL}", f"runs{EVIL}", "shares\u202egnp"]


def test_an_error_is_printed_without_control_characters(tmp_path: Path) -> None:
    file = tmp_path / "evil\x1b[2J.yaml"
    file.write_text("kind: [")
    words = [sys.executable, "-c", "from gputile.cli.main import main; main()", "read", "-f", str(file)]
    done = subprocess.run(words, capture_output=True, check=False, env={**os.environ, "FORCE_COLOR": "1"})
    assert done.returncode == 2
    assert b"\x1b" not in done.stderr
    assert b"evil\\u001b[2J.yaml" in done.stderr


@pytest.mark.parametrize("words", COMMANDS)
def test_a_line_end_in_a_name_makes_no_line_of_its_own(file: str, words: tuple[str, ...]) -> None:
    lines = run(*words, "-f", file).output.splitlines()
    assert not any(line.startswith("n2: all is well") for line in lines)


PRINTS = re.compile(r"click\.(?:echo|secho|style|unstyle)\(|(?<![\w.])print\(|sys\.std(?:out|err)\.write")


def test_every_command_prints_through_the_module_that_cleans() -> None:
    """`main` prints constants before anything is loaded; `live_view` moves the cursor, around cleaned lines."""
    folder = Path(next(iter(gputile.cli.__path__)))
    printing = {path.name for path in folder.rglob("*.py") if PRINTS.search(path.read_text())}
    assert printing == {"output.py", "main.py", "live_view.py"}
