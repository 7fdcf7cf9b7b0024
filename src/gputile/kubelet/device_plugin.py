"""Serves one resource to the kubelet over the device-plugin API (v1beta1).

`PluginServer` converts messages and delegates to a `DevicePlugin`, which makes the decisions. A kubelet that starts
removes all plugin sockets and forgets all registrations; the server notices the kubelet's new socket, creates its own
anew and registers again.
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
from gputile.kubelet.grpc_errors import call_problem
from gputile.kubelet.protobuf import Message, decoder, encode
from gputile.model.decode_errors import file_problem
from gputile.model.errors import GputileError

SOCKET = "kubelet.sock"
POLL_INTERVAL = 0.1  # seconds between two checks of the socket; a restarted kubelet fails pods until we register again
KUBELET_TIMEOUT = 5.0  # seconds for the kubelet to answer a registration, and to open the stream of devices
LARGEST = 16 * 2**20  # bytes of a message that we read; the kubelet itself reads 4 MiB
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
PLAIN_SOCKETS = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", LARGEST)]


class PluginError(GputileError):
    """The plugin rejects a call for a container; the kubelet shows the message on the pod."""


class Device(msgspec.Struct, frozen=True):
    """One unit of a resource, as the kubelet counts and allocates it."""

    id: str
    healthy: bool = True
    numa: int = -1  # -1: unknown


class DevicePlugin(Protocol):
    """The decisions behind one resource. The kubelet's calls have device IDs and never name a pod."""

    resource: str

    def devices(self) -> tuple[Device, ...]:
        """The devices that ListAndWatch sends."""

    async def get_preferred_allocation(self, available: list[str], must_include: list[str], size: int) -> list[str]:
        """The `size` device IDs that the kubelet should allocate to the next container."""

    async def allocate(self, ids: list[str]) -> wire.ContainerAllocateResponse:
        """May raise `PluginError`; the kubelet then fails the pod for good."""

    async def pre_start_container(self, ids: list[str]) -> None:
        """Before a container with these devices is created. May raise `PluginError`; the kubelet then retries."""


class PluginServer:
    """The gRPC server of one device plugin, kept registered with the kubelet that runs now."""

    def __init__(
        self,
        plugin: DevicePlugin,
        folder: Path,
        *,
        why_not_register: Callable[[], str] = lambda: "",
        on_state_change: Callable[[str, str], None] = lambda resource, why: None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`why_not_register` returns the reason against a registration, or "". `on_state_change` is called with the
        resource and the reason why it is not registered ("": it is registered), whenever that changes."""
        self._plugin, self._folder, self._on_state_change, self._pause = plugin, folder, on_state_change, pause
        self._why_not_register, self._clock = why_not_register, clock
        self._name = f"gputile-{re.sub('[^a-z0-9]+', '-', plugin.resource)}"
        self._endpoint = f"{self._name}.sock"
        self._servers = itertools.count(1)
        self._devices_changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None
        self._streams = 0  # open ListAndWatch streams
        self._streamed_at = 0.0  # when there last was an open stream
        self._kubelet: tuple[int, int] | None = None  # identity of the kubelet's socket that we registered at
        self.is_registered = False

    async def run(self) -> None:
        """Ends only when cancelled."""
        reported: str | None = None
        try:
            while True:
                before, why = self._kubelet, await self._safe_step()
                if why != reported or before != self._kubelet:
                    self._on_state_change(self._plugin.resource, why)
                reported = why
                await self._pause(POLL_INTERVAL)
        finally:
            await self.close()

    async def _safe_step(self) -> str:
        """An unexpected error is a reason too; the next step tries again."""
        try:
            return await self._step()
        except Exception as error:
            return f"unexpected error: {type(error).__name__}: {error}"

    async def _step(self) -> str:
        """Serve, and be registered with the kubelet that runs now; otherwise return the reason why not."""
        kubelet = _identity(self._folder / SOCKET)
        if self._server is not None and self.is_registered and kubelet == self._kubelet and self._has_socket():
            if self._is_watched():
                return ""
            self.is_registered = False
            return "the kubelet has closed the ListAndWatch stream; registering again"
        self.is_registered = False
        if kubelet is None:
            return f"{self._folder / SOCKET}: no such socket; start the kubelet, or set `folders.plugins`"
        why = self._why_not_register()
        if why:
            return why
        try:
            if self._server is None or not self._has_socket():
                await self._serve()
            await self._register()
        except grpc.RpcError as error:
            return f"{self._folder / SOCKET}: the kubelet did not accept the registration: {call_problem(error)}"
        except (OSError, RuntimeError) as error:  # the disk is full, or the folder is gone
            return f"{self._folder}: cannot create a plugin socket: {file_problem(error)}"
        self.is_registered, self._kubelet, self._streamed_at = True, kubelet, self._clock()
        return ""

    def _is_watched(self) -> bool:
        """Whether the kubelet has an open ListAndWatch stream, or still has time to open one."""
        now = self._clock()
        if self._streams:
            self._streamed_at = now
        return now - self._streamed_at < KUBELET_TIMEOUT

    def _has_socket(self) -> bool:
        return (self._folder / self._endpoint).exists()

    async def _serve(self) -> None:
        """On a new socket name each time: gRPC removes the socket of a stopped server some time later."""
        await self.close()
        self._remove_sockets()
        self._endpoint = f"{self._name}-{next(self._servers)}.sock"
        server = grpc.aio.server(options=PLAIN_SOCKETS)
        server.add_generic_rpc_handlers((self._handlers(),))
        server.add_insecure_port(f"unix:{self._folder / self._endpoint}")
        await server.start()
        self._server = server

    def _remove_sockets(self) -> None:
        """Also the sockets of an earlier process that was killed."""
        own = re.compile(rf"{re.escape(self._name)}(-\d+)?\.sock")
        for path in [path for path in self._folder.glob("gputile-*.sock") if own.fullmatch(path.name)]:
            path.unlink(missing_ok=True)

    async def _register(self) -> None:
        options = wire.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)
        request = wire.RegisterRequest(endpoint=self._endpoint, resource_name=self._plugin.resource, options=options)
        async with grpc.aio.insecure_channel(f"unix:{self._folder / SOCKET}", options=PLAIN_SOCKETS) as channel:
            call = channel.unary_unary(
                wire.REGISTER, request_serializer=encode, response_deserializer=decoder(wire.Empty)
            )
            await call(request, timeout=KUBELET_TIMEOUT)

    async def notify_devices_changed(self) -> None:
        """Make all open ListAndWatch streams send the devices again."""
        async with self._devices_changed:
            self._devices_changed.notify_all()

    async def close(self) -> None:
        """Stop serving; the kubelet marks our devices unhealthy."""
        server, self._server, self.is_registered = self._server, None, False
        if server is not None:
            await server.stop(grace=None)
            (self._folder / self._endpoint).unlink(missing_ok=True)

    # ---- the device-plugin API, called by the kubelet ---------------------------------------------------------------

    def _handlers(self) -> grpc.GenericRpcHandler:
        handlers = {
            "GetDevicePluginOptions": _unary(self._get_device_plugin_options, wire.Empty),
            "GetPreferredAllocation": _unary(self._get_preferred_allocation, wire.PreferredAllocationRequest),
            "Allocate": _unary(self._allocate, wire.AllocateRequest),
            "PreStartContainer": _unary(self._pre_start_container, wire.DeviceIds),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                self._list_and_watch, request_deserializer=decoder(wire.Empty), response_serializer=encode
            ),
        }
        return grpc.method_handlers_generic_handler(wire.PLUGIN, handlers)

    async def _get_device_plugin_options(self, request: wire.Empty, context: Context) -> wire.DevicePluginOptions:
        return wire.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)

    async def _list_and_watch(self, request: wire.Empty, context: Context) -> AsyncIterator[wire.ListAndWatchResponse]:
        sent: tuple[Device, ...] | None = None
        self._streams += 1
        try:
            while True:
                devices = self._plugin.devices()
                if devices != sent:
                    yield wire.ListAndWatchResponse(devices=[_advertised(device) for device in devices])
                    sent = devices
                async with self._devices_changed:
                    if self._plugin.devices() == sent:
                        await self._devices_changed.wait()
        finally:
            self._streams -= 1

    async def _get_preferred_allocation(
        self, request: wire.PreferredAllocationRequest, context: Context
    ) -> wire.PreferredAllocationResponse:
        preferred = [
            await self._plugin.get_preferred_allocation(container.available, container.must_include, container.size)
            for container in request.containers
        ]
        return wire.PreferredAllocationResponse(containers=[wire.DeviceIds(ids=ids) for ids in preferred])

    async def _allocate(self, request: wire.AllocateRequest, context: Context) -> wire.AllocateResponse:
        try:
            responses = [await self._plugin.allocate(container.ids) for container in request.containers]
        except PluginError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            raise
        return wire.AllocateResponse(containers=responses)

    async def _pre_start_container(self, request: wire.DeviceIds, context: Context) -> wire.Empty:
        try:
            await self._plugin.pre_start_container(request.ids)
        except PluginError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return wire.Empty()


def _unary(method: Callable[..., Awaitable[Message]], request_type: type[Message]) -> "grpc.RpcMethodHandler[Any, Any]":
    return grpc.unary_unary_rpc_method_handler(
        method, request_deserializer=decoder(request_type), response_serializer=encode
    )


def _advertised(device: Device) -> wire.AdvertisedDevice:
    nodes = [wire.NUMANode(id=device.numa)] if device.numa >= 0 else []
    health = wire.HEALTHY if device.healthy else wire.UNHEALTHY
    return wire.AdvertisedDevice(id=device.id, health=health, topology=wire.TopologyInfo(nodes=nodes))


def _identity(socket: Path) -> tuple[int, int] | None:
    """Inode and change time of the socket: a kubelet that starts creates a new file."""
    try:
        status = os.stat(socket)
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns
