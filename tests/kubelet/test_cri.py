"""What a runtime reports over its CRI socket: whether it supports CDI, and which containers run."""

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
    ("config", "works", "why"),
    [
        pytest.param({"enableCDI": True, "cdiSpecDirs": ["/etc/cdi", "/var/run/cdi"]}, True, "", id="on"),
        pytest.param({"enableCDI": True, "cdiSpecDirs": ["/run/cdi/"]}, True, "", id="the-same-folder-by-another-path"),
        pytest.param({"enableCDI": True}, True, "", id="on-without-folders"),
        pytest.param({"enableCDI": True, "cdiSpecDirs": ["/etc/cdi"]}, False, "`folders.cdi`", id="other-folders"),
        pytest.param({"enableCDI": False}, False, "`enable_cdi`", id="off"),
        pytest.param({}, False, "`enable_cdi`", id="a-runtime-without-the-option"),
        pytest.param(None, False, "`cdi: yes`", id="no-configuration"),
    ],
)
def test_cdi_support_is_read_from_the_configuration(config: object, works: bool, why: str) -> None:
    support = read_config(json.dumps(config) if config is not None else "", OURS)
    assert support.works is works
    assert why in support.why


async def test_a_runtime_is_queried_over_its_socket(tmp_path: Path) -> None:
    socket, labels = tmp_path / "cri.sock", {UID: "uid-a", NAME: "main"}
    containers = (
        wire.ListedContainer(id="runs", state=RUNNING, labels=labels),
        wire.ListedContainer(id="ended", state=2, labels=labels),
        wire.ListedContainer(id="unlabelled", state=RUNNING),
    )
    async with runtime(socket, *containers):
        assert (await ask(socket, OURS)).works
        assert await running(socket) == {
            "runs": RunningContainer("uid-a", "main"),
            "unlabelled": RunningContainer("", ""),
        }


async def test_a_missing_runtime_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(RuntimeUnavailable, match="is unavailable: no program answers on the socket"):
        await ask(tmp_path / "missing.sock", OURS)
    with pytest.raises(RuntimeUnavailable, match="is unavailable"):
        await running(tmp_path / "missing.sock")


def test_a_configuration_of_deep_brackets_is_no_cdi_support() -> None:
    assert not read_config('{"x":' + "[" * 60_000, OURS).works


async def test_a_socket_without_a_name_was_replaced(tmp_path: Path) -> None:
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
