"""`gputile agent`: help that teaches, settings that can be shown, and errors that name what is missing."""

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
    output = CliRunner().invoke(command, ["--help"]).output
    for line in ("gputile agent --node", "--show-settings", "GPUTILE_ISOLATION", "docs/agent.md", "SIGTERM"):
        assert line in output


def test_settings_come_from_file_environment_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("isolation: mps\npoll_interval: 9\nserve: [gputile]\n")
    shown = show("--config", str(file), "--serve", "gputile,vcuda", env={"GPUTILE_ISOLATION": "devices"})
    assert (shown["isolation"], shown["poll_interval"], shown["serve"]) == ("devices", 9, ["gputile", "vcuda"])


def test_the_node_is_that_of_the_downward_api_unless_a_flag_names_it() -> None:
    assert show(env={"NODE_NAME": "n1"})["node"] == "n1"
    assert show("--node", "n2", env={"NODE_NAME": "n1"})["node"] == "n2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param([], "write --node NAME", id="no-node"),
        pytest.param(["--set", "isolation=jail"], "isolation", id="an-unknown-isolation"),
        pytest.param(["--serve", "gpushare,hamster"], "hamster", id="an-unknown-dialect"),
        pytest.param(["--set", "heartbeat.duration=4"], "twice", id="a-lease-that-expires-too-soon"),
        pytest.param(["--set", "listen=12346"], "HOST:PORT", id="an-address-without-a-host"),
        pytest.param(["--set", "poll_interval=0"], "poll_interval", id="a-poll-interval-of-zero"),
        pytest.param(["--config", "nowhere.yaml"], "nowhere.yaml", id="no-such-file"),
    ],
)
def test_an_invalid_setting_is_rejected(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        CliRunner(env={"NODE_NAME": None}).invoke(command, arguments, catch_exceptions=False)
    assert message in str(caught.value)


@pytest.mark.parametrize(("failures", "works"), [(0, True), (3, True), (4, False)])
async def test_a_runtime_that_does_not_answer_is_retried(
    failures: int, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([RuntimeUnavailable("the runtime cannot be asked: it starts")] * failures)

    async def ask(socket: Path, folder: str) -> CdiSupport:
        for failure in answers:
            raise failure
        return CdiSupport(True)

    async def no_pause(seconds: float) -> None: ...

    monkeypatch.setattr(agent, "ask", ask)
    monkeypatch.setattr("asyncio.sleep", no_pause)
    support = await agent._cdi(AgentSettings())
    assert (support.works, bool(support.why)) == (works, not works)
