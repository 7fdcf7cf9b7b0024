"""What a runtime says over its CRI socket: whether it obeys CDI, and what runs."""

import json
import os
import socket
from pathlib import Path

import pytest

from gputile.kubelet import messages as wire
from gputile.kubelet.cri import (
    NAME,
    RUNNING,
    UID,
    RunningContainer,
    RuntimeUnavailable,
    SocketReplaced,
    ask,
    read_config,
    running,
)
from tests.kubelet.runtime import runtime

OURS = "/var/run/cdi"


@pytest.mark.parametrize(
    ("config", "works", "says"),
    [
        pytest.param({"enableCDI": True, "cdiSpecDirs": ["/etc/cdi", "/var/run/cdi"]}, True, "", id="on"),
        pytest.param(
            {"enableCDI": True, "cdiSpecDirs": ["/run/cdi/"]}, True, "", id="the-same-folder-by-its-other-name"
        ),
        pytest.param({"enableCDI": True}, True, "", id="on-and-no-word-about-folders"),
        pytest.param({"enableCDI": True, "cdiSpecDirs": ["/etc/cdi"]}, False, "`folders.cdi`", id="it-looks-elsewhere"),
        pytest.param({"enableCDI": False}, False, "`enable_cdi`", id="off"),
        pytest.param({}, False, "`enable_cdi`", id="a-runtime-that-knows-nothing-of-it"),
        pytest.param(None, False, "`cdi: yes`", id="no-configuration-shown"),
    ],
)
def test_whether_it_obeys_cdi_is_what_its_configuration_says(config: object, works: bool, says: str) -> None:
    found = read_config(json.dumps(config) if config is not None else "", OURS)
    assert found.works is works
    assert says in found.why


async def test_a_runtime_is_asked_over_its_socket(tmp_path: Path) -> None:
    socket, labels = tmp_path / "cri.sock", {UID: "uid-a", NAME: "main"}
    said = (
        wire.ListedContainer(id="runs", state=RUNNING, labels=labels),
        wire.ListedContainer(id="ended", state=2, labels=labels),
        wire.ListedContainer(id="nobodys", state=RUNNING),
    )
    async with runtime(socket, *said):
        assert (await ask(socket, OURS)).works
        assert await running(socket) == {"runs": RunningContainer("uid-a", "main"), "nobodys": RunningContainer("", "")}


async def test_one_that_is_not_there_is_silent(tmp_path: Path) -> None:
    with pytest.raises(RuntimeUnavailable, match="cannot be asked"):
        await ask(tmp_path / "nobody.sock", OURS)
    with pytest.raises(RuntimeUnavailable, match="cannot be asked"):
        await running(tmp_path / "nobody.sock")


def test_a_configuration_of_deep_brackets_proves_nothing() -> None:
    assert not read_config('{"x":' + "[" * 60_000, OURS).works


async def test_a_socket_that_lost_its_name_was_replaced_and_is_not_just_silent(tmp_path: Path) -> None:
    path = tmp_path / "cri.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        mounted = os.open(path, os.O_PATH)
    with pytest.raises(RuntimeUnavailable):
        await running(Path(f"/proc/self/fd/{mounted}"))
    path.unlink()
    with pytest.raises(SocketReplaced):
        await running(Path(f"/proc/self/fd/{mounted}"))
    os.close(mounted)
