"""What the container runtime says runs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from gputile.kubelet import messages as wire
from gputile.kubelet.plugin import Context
from gputile.kubelet.protobuf import decoder, encode
from gputile.kubelet.runtime import NAME, RUNNING, UID, Runs, Silent, running

EXITED = 2


@asynccontextmanager
async def runtime(socket: Path, *containers: wire.ContainerSaid) -> AsyncIterator[None]:
    async def answer(asked: wire.Nothing, context: Context) -> wire.ContainersSaid:
        return wire.ContainersSaid(containers=list(containers))

    _, service, method = wire.CONTAINERS.split("/")
    handler = grpc.unary_unary_rpc_method_handler(
        answer, request_deserializer=decoder(wire.Nothing), response_serializer=encode
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


async def test_those_that_run_with_pod_and_name(tmp_path: Path) -> None:
    socket = tmp_path / "cri.sock"
    said = (
        wire.ContainerSaid(id="one", state=RUNNING, labels={UID: "uid-a", NAME: "main"}),
        wire.ContainerSaid(id="two", state=EXITED, labels={UID: "uid-a", NAME: "init"}),
        wire.ContainerSaid(id="three", state=RUNNING),
    )
    async with runtime(socket, *said):
        assert await running(socket) == {"one": Runs("uid-a", "main"), "three": Runs("", "")}


async def test_one_that_is_not_there_is_no_idle_one(tmp_path: Path) -> None:
    with pytest.raises(Silent, match="cannot be asked"):
        await running(tmp_path / "cri.sock")
