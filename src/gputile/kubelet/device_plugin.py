"""One resource, served to the kubelet.

Room:  the gRPC face of a device plugin: it converts and delegates. A kubelet that starts empties the folder of sockets
       and knows nobody: we see its socket change, make ours anew and register again, for ever.
Door:  `PluginServer(plugin, folder).run()`; `PluginServer.tell` when the devices changed.
"""

import asyncio
import itertools
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import grpc
import msgspec

from gputile.kubelet import messages as wire
from gputile.kubelet.protobuf import Message, decoder, encode
from gputile.model.errors import GputileError

SOCKET = "kubelet.sock"
LOOK = 0.1  # seconds between two looks at the socket; a kubelet that starts fails the pods it meets before we register
PATIENCE = 5.0  # seconds for the kubelet to answer a registration
LARGEST = 16 * 2**20  # bytes of a message that we read; the kubelet itself reads 4 MiB
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
PLAIN_SOCKETS = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", LARGEST)]


class PluginError(GputileError):
    """The plugin will not serve this container now; the kubelet shows the sentence on the pod, and tries again."""


class Device(msgspec.Struct, frozen=True):
    """What the kubelet counts."""

    id: str
    healthy: bool = True
    numa: int = -1  # -1: nobody said


class DevicePlugin(Protocol):
    """What one resource needs to know. All three are asked without a word about the pod."""

    resource: str

    def devices(self) -> tuple[Device, ...]: ...

    async def prefer(self, available: list[str], must_include: list[str], size: int) -> list[str]: ...

    async def allocate(self, ids: list[str]) -> wire.ContainerAllocateResponse:
        """May raise `PluginError`; the kubelet then fails the pod for good."""

    async def start(self, ids: list[str]) -> None:
        """Before a container of these devices is made. May raise `PluginError`."""


class PluginServer:
    """See the module's text."""

    def __init__(
        self,
        plugin: DevicePlugin,
        folder: Path,
        *,
        may_register: Callable[[], str] = lambda: "",
        on_turn: Callable[[str, str], None] = lambda resource, why: None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`may_register` says why it may not, or "". `on_turn` hears the resource, and why it is not registered ("": it
        is), whenever that changes."""
        self._plugin, self._folder, self._on_turn, self._pause = plugin, folder, on_turn, pause
        self._may_register, self._clock = may_register, clock
        self._name = f"gputile-{re.sub('[^a-z0-9]+', '-', plugin.resource)}"
        self._endpoint = f"{self._name}.sock"
        self._servers = itertools.count(1)
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None
        self._listeners = 0  # open streams of devices
        self._heard = 0.0  # when there last was one
        self._known: tuple[int, int] | None = None  # the kubelet's socket that we registered at
        self.is_registered = False

    async def run(self) -> None:
        """Ends only when cancelled."""
        told: str | None = None
        try:
            while True:
                before, why = self._known, await self._safe_step()
                if why != told or before != self._known:
                    self._on_turn(self._plugin.resource, why)
                told = why
                await self._pause(LOOK)
        finally:
            await self.close()

    async def _safe_step(self) -> str:
        """Whatever it is that nobody thought of, we try again."""
        try:
            return await self._step()
        except Exception as bug:
            return f"cannot be served: {type(bug).__name__}: {bug}"

    async def _step(self) -> str:
        """Serve and be registered with the kubelet that runs now; else the reason why not."""
        kubelet = _identity(self._folder / SOCKET)
        if self._server is not None and self.is_registered and kubelet == self._known and self._is_there():
            if self._is_heard():
                return ""
            self.is_registered = False
            return "the kubelet does not listen to our devices; registering again"
        self.is_registered = False
        if kubelet is None:
            return f"there is no {self._folder / SOCKET}: no kubelet runs, or its folder is another"
        no = self._may_register()
        if no:
            return no
        try:
            if self._server is None or not self._is_there():
                await self._serve()
            await self._register()
        except grpc.RpcError as failed:
            return str(_details(failed))
        except (OSError, RuntimeError) as failed:  # no room for a socket, a folder that is gone
            return f"cannot serve in {self._folder}: {failed}"
        self.is_registered, self._known, self._heard = True, kubelet, self._clock()
        return ""

    def _is_heard(self) -> bool:
        """Whether the kubelet follows our devices, or still has time to begin."""
        now = self._clock()
        if self._listeners:
            self._heard = now
        return now - self._heard < PATIENCE

    def _is_there(self) -> bool:
        return (self._folder / self._endpoint).exists()

    async def _serve(self) -> None:
        """At a name of its own each time: gRPC removes a closed server's socket when it gets round to it."""
        await self.close()
        self._remove_sockets()
        self._endpoint = f"{self._name}-{next(self._servers)}.sock"
        server = grpc.aio.server(options=PLAIN_SOCKETS)
        server.add_generic_rpc_handlers((self._handlers(),))
        server.add_insecure_port(f"unix:{self._folder / self._endpoint}")
        await server.start()
        self._server = server

    def _remove_sockets(self) -> None:
        """Also those of a process before us that was killed."""
        mine = re.compile(rf"{re.escape(self._name)}(-\d+)?\.sock")
        for path in [path for path in self._folder.glob("gputile-*.sock") if mine.fullmatch(path.name)]:
            path.unlink(missing_ok=True)

    async def _register(self) -> None:
        options = wire.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)
        said = wire.RegisterRequest(endpoint=self._endpoint, resource_name=self._plugin.resource, options=options)
        async with grpc.aio.insecure_channel(f"unix:{self._folder / SOCKET}", options=PLAIN_SOCKETS) as channel:
            call = channel.unary_unary(
                wire.REGISTER, request_serializer=encode, response_deserializer=decoder(wire.Empty)
            )
            await call(said, timeout=PATIENCE)

    async def tell(self) -> None:
        """The devices changed: say them again to whoever listens."""
        async with self._changed:
            self._changed.notify_all()

    async def close(self) -> None:
        """Leave the kubelet; it calls our devices unhealthy from now on."""
        server, self._server, self.is_registered = self._server, None, False
        if server is not None:
            await server.stop(grace=None)
            (self._folder / self._endpoint).unlink(missing_ok=True)

    # ---- what the kubelet calls -------------------------------------------------------------------------------------

    def _handlers(self) -> grpc.GenericRpcHandler:
        calls = {
            "GetDevicePluginOptions": _unary(self._options, wire.Empty),
            "GetPreferredAllocation": _unary(self._prefer, wire.PreferredAllocationRequest),
            "Allocate": _unary(self._allocate, wire.AllocateRequest),
            "PreStartContainer": _unary(self._start, wire.DeviceIds),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                self._list_and_watch, request_deserializer=decoder(wire.Empty), response_serializer=encode
            ),
        }
        return grpc.method_handlers_generic_handler(wire.PLUGIN, calls)

    async def _options(self, asked: wire.Empty, context: Context) -> wire.DevicePluginOptions:
        return wire.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)

    async def _list_and_watch(self, asked: wire.Empty, context: Context) -> AsyncIterator[wire.ListAndWatchResponse]:
        said: tuple[Device, ...] | None = None
        self._listeners += 1
        try:
            while True:
                now = self._plugin.devices()
                if now != said:
                    yield wire.ListAndWatchResponse(devices=[_said(device) for device in now])
                    said = now
                async with self._changed:
                    if self._plugin.devices() == said:
                        await self._changed.wait()
        finally:
            self._listeners -= 1

    async def _prefer(
        self, asked: wire.PreferredAllocationRequest, context: Context
    ) -> wire.PreferredAllocationResponse:
        chosen = [await self._plugin.prefer(one.available, one.must_include, one.size) for one in asked.containers]
        return wire.PreferredAllocationResponse(containers=[wire.DeviceIds(ids=ids) for ids in chosen])

    async def _allocate(self, asked: wire.AllocateRequest, context: Context) -> wire.AllocateResponse:
        try:
            return wire.AllocateResponse(containers=[await self._plugin.allocate(one.ids) for one in asked.containers])
        except PluginError as no:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(no))
            raise

    async def _start(self, asked: wire.DeviceIds, context: Context) -> wire.Empty:
        try:
            await self._plugin.start(asked.ids)
        except PluginError as no:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(no))
        return wire.Empty()


def _unary(answer: Callable[..., Awaitable[Message]], asked: type[Message]) -> "grpc.RpcMethodHandler[Any, Any]":
    return grpc.unary_unary_rpc_method_handler(answer, request_deserializer=decoder(asked), response_serializer=encode)


def _said(device: Device) -> wire.AdvertisedDevice:
    nodes = [wire.NUMANode(id=device.numa)] if device.numa >= 0 else []
    health = wire.HEALTHY if device.healthy else wire.UNHEALTHY
    return wire.AdvertisedDevice(id=device.id, health=health, topology=wire.TopologyInfo(nodes=nodes))


def _identity(socket: Path) -> tuple[int, int] | None:
    """Of the file: a kubelet that starts makes another."""
    try:
        found = os.stat(socket)
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


def _details(no: grpc.RpcError) -> object:
    return no.details() if isinstance(no, grpc.aio.AioRpcError) else no
