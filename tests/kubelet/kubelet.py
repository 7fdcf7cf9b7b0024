"""A scripted kubelet: it takes registrations, and calls plugins as a kubelet does."""

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
    """With `async with`: its socket is there. A second one in the same folder is a kubelet that was restarted."""

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
        self, kind: type[BaseException] | None, wrong: BaseException | None, where: TracebackType | None
    ) -> None:
        await self._server.stop(None)
        (self._folder / SOCKET).unlink(missing_ok=True)

    async def _register(self, said: wire.RegisterRequest, context: Context) -> wire.Empty:
        self.registrations.append(said)
        return wire.Empty()

    # ---- calls to a plugin ------------------------------------------------------------------------------------------

    def _channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(f"unix:{self._folder / self.registrations[-1].endpoint}")

    async def call(self, method: str, asked: Message, answer: type[M]) -> M:
        async with self._channel() as channel:
            call = channel.unary_unary(
                f"/{wire.PLUGIN}/{method}", request_serializer=encode, response_deserializer=decoder(answer)
            )
            said: M = await call(asked, timeout=5)
            return said

    async def watch(self) -> AsyncIterator[wire.ListAndWatchResponse]:
        async with self._channel() as channel:
            call = channel.unary_stream(
                f"/{wire.PLUGIN}/ListAndWatch",
                request_serializer=encode,
                response_deserializer=decoder(wire.ListAndWatchResponse),
            )
            async for said in call(wire.Empty(), timeout=10):
                yield said
