"""What a runtime says over its CRI socket: whether it obeys CDI, and what runs."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from gputile.kubelet import messages as wire
from gputile.kubelet.plugin import Context
from gputile.kubelet.protobuf import decoder, encode
from gputile.kubelet.runtime import NAME, RUNNING, UID, Runs, Silent, ask, read_config, running

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


@asynccontextmanager
async def runtime(folder: Path) -> AsyncIterator[Path]:
    """A runtime with a container that runs, one that has ended, and one that is no pod's."""

    async def status(asked: wire.StatusAsked, context: Context) -> wire.StatusSaid:
        return wire.StatusSaid(info={"config": json.dumps({"enableCDI": asked.verbose})})

    async def containers(asked: wire.Nothing, context: Context) -> wire.ContainersSaid:
        labels = {UID: "uid-a", NAME: "main"}
        return wire.ContainersSaid(
            containers=[
                wire.ContainerSaid(id="runs", state=RUNNING, labels=labels),
                wire.ContainerSaid(id="ended", state=2, labels=labels),
                wire.ContainerSaid(id="nobodys", state=RUNNING),
            ]
        )

    server = grpc.aio.server()
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Status": grpc.unary_unary_rpc_method_handler(status, decoder(wire.StatusAsked), encode),
        "ListContainers": grpc.unary_unary_rpc_method_handler(containers, decoder(wire.Nothing), encode),
    }
    handler = grpc.method_handlers_generic_handler("runtime.v1.RuntimeService", methods)
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(f"unix:{folder / 'runtime.sock'}")
    await server.start()
    yield folder / "runtime.sock"
    await server.stop(None)


async def test_a_runtime_is_asked_over_its_socket(tmp_path: Path) -> None:
    async with runtime(tmp_path) as socket:
        assert (await ask(socket, OURS)).works
        assert await running(socket) == {"runs": Runs("uid-a", "main"), "nobodys": Runs("", "")}


async def test_one_that_is_not_there_is_silent(tmp_path: Path) -> None:
    with pytest.raises(Silent, match="cannot be asked"):
        await ask(tmp_path / "nobody.sock", OURS)
