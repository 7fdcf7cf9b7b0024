"""A scripted container runtime: it supports CDI and lists the given containers."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from gputile.kubelet import messages as wire
from gputile.kubelet.device_plugin import Context
from gputile.kubelet.protobuf import decoder, encode


@asynccontextmanager
async def runtime(socket: Path, *containers: wire.ListedContainer) -> AsyncIterator[None]:
    async def status(request: wire.StatusRequest, context: Context) -> wire.StatusResponse:
        return wire.StatusResponse(info={"config": json.dumps({"enableCDI": True})} if request.verbose else {})

    async def list_containers(request: wire.Empty, context: Context) -> wire.ListContainersResponse:
        return wire.ListContainersResponse(containers=list(containers))

    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Status": grpc.unary_unary_rpc_method_handler(status, decoder(wire.StatusRequest), encode),
        "ListContainers": grpc.unary_unary_rpc_method_handler(list_containers, decoder(wire.Empty), encode),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("runtime.v1.RuntimeService", methods),))
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)
