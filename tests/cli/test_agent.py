"""`gputile agent`: help that teaches, settings that can be seen, and sentences for what is missing."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from gputile.agent.settings import AgentSettings
from gputile.cli.commands import agent
from gputile.cli.commands.agent import command
from gputile.kubelet.cri import CdiSupport, RuntimeUnavailable
from gputile.model.errors import InputError


def show(*arguments: str, env: dict[str, str] | None = None) -> Any:
    done = CliRunner(env=env or {}).invoke(command, [*arguments, "--show-settings"], catch_exceptions=False)
    assert done.exit_code == 0
    return yaml.safe_load(done.output)


def test_help_teaches() -> None:
    said = CliRunner().invoke(command, ["--help"]).output
    for line in ("gputile agent --node", "--show-settings", "GPUTILE_ISOLATION", "docs/agent.md", "SIGTERM"):
        assert line in said


def test_settings_come_from_file_environment_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("isolation: mps\npoll_interval: 9\nserve: [gputile]\n")
    shown = show("--config", str(file), "--serve", "gputile,vcuda", env={"GPUTILE_ISOLATION": "devices"})
    assert (shown["isolation"], shown["poll_interval"], shown["serve"]) == ("devices", 9, ["gputile", "vcuda"])


def test_the_node_is_that_of_the_downward_api_unless_told() -> None:
    assert show(env={"NODE_NAME": "n1"})["node"] == "n1"
    assert show("--node", "n2", env={"NODE_NAME": "n1"})["node"] == "n2"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param([], "write --node NAME", id="no-node"),
        pytest.param(["--set", "isolation=jail"], "isolation", id="an-isolation-that-is-not-known"),
        pytest.param(["--serve", "gpushare,hamster"], "hamster", id="a-dialect-that-is-not-known"),
        pytest.param(["--set", "heartbeat.duration=4"], "twice", id="a-heartbeat-that-is-over-too-soon"),
        pytest.param(["--set", "listen=12346"], "HOST:PORT", id="an-address-without-a-host"),
        pytest.param(["--set", "poll_interval=0"], "poll_interval", id="no-time-between-looks"),
        pytest.param(["--config", "nowhere.yaml"], "nowhere.yaml", id="no-such-file"),
    ],
)
def test_what_cannot_be_is_said(arguments: list[str], says: str) -> None:
    with pytest.raises(InputError) as no:
        CliRunner(env={"NODE_NAME": None}).invoke(command, arguments, catch_exceptions=False)
    assert says in str(no.value)


@pytest.mark.parametrize(("silences", "works"), [(0, True), (3, True), (4, False)])
async def test_a_runtime_that_is_silent_is_asked_again(
    silences: int, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([RuntimeUnavailable("the runtime cannot be asked: it starts")] * silences)

    async def ask(socket: Path, folder: str) -> CdiSupport:
        for silence in answers:
            raise silence
        return CdiSupport(True)

    async def no_pause(seconds: float) -> None: ...

    monkeypatch.setattr(agent, "ask", ask)
    monkeypatch.setattr("asyncio.sleep", no_pause)
    found = await agent._cdi(AgentSettings())
    assert (found.works, bool(found.why)) == (works, not works)
