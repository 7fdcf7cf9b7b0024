"""A scripted kubelet: it accepts registrations, and calls plugins as a kubelet does."""

from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import grpc

from gputile.kubelet import messages as wire
from gputile.kubelet.device_plugin import SOCKET, Context
from gputile.kubelet.protobuf import Message, decoder, encode

M = TypeVar("M", bound=Message)


class ScriptedKubelet:
    """A kubelet with its socket, inside `async with`. A second one in the same folder is a restarted kubelet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.registrations: list[wire.RegisterRequest] = []

    async def __aenter__(self) -> Self:
        (self._folder / SOCKET).unlink(missing_ok=True)
        self._server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(
            self._register, request_deserializer=decoder(wire.RegisterRequest), response_serializer=encode
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("v1beta1.Registration", {"Register": handler}),)
        )
        self._server.add_insecure_port(f"unix:{self._folder / SOCKET}")
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._server.stop(None)
        (self._folder / SOCKET).unlink(missing_ok=True)

    async def _register(self, request: wire.RegisterRequest, context: Context) -> wire.Empty:
        self.registrations.append(request)
        return wire.Empty()

    # ---- calls to a plugin ------------------------------------------------------------------------------------------

    def _channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(f"unix:{self._folder / self.registrations[-1].endpoint}")

    async def call(self, method: str, request: Message, response_type: type[M]) -> M:
        async with self._channel() as channel:
            call = channel.unary_unary(
                f"/{wire.PLUGIN}/{method}", request_serializer=encode, response_deserializer=decoder(response_type)
            )
            response: M = await call(request, timeout=5)
            return response

    async def watch(self) -> AsyncIterator[wire.ListAndWatchResponse]:
        async with self._channel() as channel:
            call = channel.unary_stream(
                f"/{wire.PLUGIN}/ListAndWatch",
                request_serializer=encode,
                response_deserializer=decoder(wire.ListAndWatchResponse),
            )
            async for response in call(wire.Empty(), timeout=10):
                yield response
