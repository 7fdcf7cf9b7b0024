"""A device plugin against a scripted kubelet, over real sockets in a temporary folder."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from gputile.kubelet import messages as wire
from gputile.kubelet.device_plugin import SOCKET, Device, PluginError, PluginServer
from tests.kubelet.kubelet import ScriptedKubelet


class EchoPlugin:
    """A plugin that allocates whatever is requested, except the device b."""

    resource = "gputile.io/gpu"

    def __init__(self) -> None:
        self.has: tuple[Device, ...] = (Device("a"), Device("b", False, 1))
        self.started: list[list[str]] = []

    def devices(self) -> tuple[Device, ...]:
        return self.has

    async def get_preferred_allocation(self, available: list[str], must_include: list[str], size: int) -> list[str]:
        return [*must_include, *available][:size]

    async def allocate(self, ids: list[str]) -> wire.ContainerAllocateResponse:
        if "b" in ids:
            raise PluginError("b is broken")
        return wire.ContainerAllocateResponse(envs={"IDS": ",".join(ids)})

    async def pre_start_container(self, ids: list[str]) -> None:
        if "b" in ids:
            raise PluginError("its pod has no grant")
        self.started.append(ids)


class StateChanges:
    """The state changes of a server, as reasons; "" means registered."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self._changed = asyncio.Event()

    def record(self, resource: str, why: str) -> None:
        self.reasons.append(why)
        self._changed.set()

    async def wait(self, until: Callable[[list[str]], bool]) -> None:
        async with asyncio.timeout(5):
            while not until(self.reasons):
                self._changed.clear()
                await self._changed.wait()


async def soon(_: float) -> None:
    await asyncio.sleep(0)


@asynccontextmanager
async def opened(
    plugin: EchoPlugin, folder: Path, why_not_register: Callable[[], str] = lambda: ""
) -> AsyncIterator[tuple[PluginServer, StateChanges]]:
    changes = StateChanges()
    server = PluginServer(plugin, folder, why_not_register=why_not_register, on_state_change=changes.record, pause=soon)
    running = asyncio.create_task(server.run())
    try:
        yield server, changes
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_it_registers_with_its_options(tmp_path: Path) -> None:
    async with ScriptedKubelet(tmp_path) as kubelet, opened(EchoPlugin(), tmp_path) as (_, changes):
        await changes.wait(lambda reasons: reasons[-1:] == [""])
        (request,) = kubelet.registrations
        assert request == wire.RegisterRequest(
            version="v1beta1",
            endpoint="gputile-gputile-io-gpu-1.sock",
            resource_name="gputile.io/gpu",
            options=wire.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True),
        )
        assert await kubelet.call("GetDevicePluginOptions", wire.Empty(), wire.DevicePluginOptions) == request.options


async def test_an_unexpected_error_is_retried(tmp_path: Path) -> None:
    errors = iter([KeyError("unexpected")])

    def once() -> str:
        for error in errors:
            raise error
        return ""

    async with ScriptedKubelet(tmp_path), opened(EchoPlugin(), tmp_path, once) as (_, changes):
        await changes.wait(lambda reasons: reasons[-1:] == [""])
        assert changes.reasons == ["unexpected error: KeyError: 'unexpected'", ""]


async def test_devices_are_sent_again_when_they_change(tmp_path: Path) -> None:
    plugin = EchoPlugin()
    async with ScriptedKubelet(tmp_path) as kubelet, opened(plugin, tmp_path) as (server, changes):
        await changes.wait(lambda reasons: reasons[-1:] == [""])
        async with aclosing(kubelet.watch()) as watch:  # type: ignore[type-var]
            first = await anext(watch)
            plugin.has = (Device("a", False),)
            await server.notify_devices_changed()
            second = await anext(watch)
    assert [(device.id, device.health, [node.id for node in device.topology.nodes]) for device in first.devices] == [
        ("a", "Healthy", []),
        ("b", "Unhealthy", [1]),
    ]
    assert [(device.id, device.health) for device in second.devices] == [("a", "Unhealthy")]


async def test_calls_reach_the_plugin(tmp_path: Path) -> None:
    plugin = EchoPlugin()
    async with ScriptedKubelet(tmp_path) as kubelet, opened(plugin, tmp_path) as (_, changes):
        await changes.wait(lambda reasons: reasons[-1:] == [""])
        request = wire.ContainerPreferredAllocationRequest(available=["x", "y", "z"], must_include=["z"], size=2)
        preferred = await kubelet.call(
            "GetPreferredAllocation",
            wire.PreferredAllocationRequest(containers=[request]),
            wire.PreferredAllocationResponse,
        )
        allocated = await kubelet.call(
            "Allocate", wire.AllocateRequest(containers=[wire.DeviceIds(ids=["a"])]), wire.AllocateResponse
        )
        await kubelet.call("PreStartContainer", wire.DeviceIds(ids=["a"]), wire.Empty)
    assert preferred.containers == [wire.DeviceIds(ids=["z", "x"])]
    assert allocated.containers == [wire.ContainerAllocateResponse(envs={"IDS": "a"})]
    assert plugin.started == [["a"]]


@pytest.mark.parametrize(
    ("method", "call", "message"),
    [
        pytest.param(
            "Allocate", wire.AllocateRequest(containers=[wire.DeviceIds(ids=["b"])]), "b is broken", id="allocate"
        ),
        pytest.param("PreStartContainer", wire.DeviceIds(ids=["b"]), "its pod has no grant", id="pre-start-container"),
    ],
)
async def test_a_rejection_reaches_the_kubelet_with_its_message(
    tmp_path: Path, method: str, call: wire.DeviceIds | wire.AllocateRequest, message: str
) -> None:
    async with ScriptedKubelet(tmp_path) as kubelet, opened(EchoPlugin(), tmp_path) as (_, changes):
        await changes.wait(lambda reasons: reasons[-1:] == [""])
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await kubelet.call(method, call, wire.Empty)
    assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.FAILED_PRECONDITION, message)


async def test_without_a_kubelet_one_reason_is_reported(tmp_path: Path) -> None:
    async with opened(EchoPlugin(), tmp_path) as (_, changes):
        await changes.wait(lambda reasons: len(reasons) == 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(changes.reasons) == 1
        assert SOCKET in changes.reasons[0]
        async with ScriptedKubelet(tmp_path) as kubelet:
            await changes.wait(lambda reasons: reasons[-1] == "")
            assert len(kubelet.registrations) == 1


async def test_it_registers_again_with_a_restarted_kubelet(tmp_path: Path) -> None:
    """A kubelet that starts removes every socket of its plugin folder."""
    async with opened(EchoPlugin(), tmp_path) as (_, changes):
        async with ScriptedKubelet(tmp_path):
            await changes.wait(lambda reasons: reasons[-1:] == [""])
        for socket in tmp_path.glob("*.sock"):
            socket.unlink()
        before = len(changes.reasons)
        async with ScriptedKubelet(tmp_path) as again:
            await changes.wait(lambda reasons: len(reasons) > before and reasons[-1] == "")
            response = await again.call("PreStartContainer", wire.DeviceIds(ids=["a"]), wire.Empty)
    assert response == wire.Empty()


async def test_sockets_of_a_killed_process_are_removed_and_others_stay(tmp_path: Path) -> None:
    for name in ("gputile-gputile-io-gpu.sock", "gputile-gputile-io-gpu-7.sock", "gputile-gputile-io-gpux-1.sock"):
        (tmp_path / name).touch()
    async with ScriptedKubelet(tmp_path), opened(EchoPlugin(), tmp_path) as (_, changes):
        await changes.wait(lambda reasons: reasons[-1:] == [""])
        left = {path.name for path in tmp_path.glob("gputile-*")}
    assert left == {"gputile-gputile-io-gpu-1.sock", "gputile-gputile-io-gpux-1.sock"}


async def test_a_socket_that_cannot_be_created_is_retried(tmp_path: Path) -> None:
    endpoint = tmp_path / "gputile-gputile-io-gpu-1.sock"
    endpoint.mkdir()  # no socket can be created there
    async with ScriptedKubelet(tmp_path) as kubelet, opened(EchoPlugin(), tmp_path) as (_, changes):
        await changes.wait(lambda reasons: any("cannot create a plugin socket" in reason for reason in reasons))
        endpoint.rmdir()
        await changes.wait(lambda reasons: reasons[-1] == "")
        assert kubelet.registrations


async def test_it_registers_again_when_the_kubelet_closed_the_stream(tmp_path: Path) -> None:
    changes, now = StateChanges(), [0.0]
    server = PluginServer(EchoPlugin(), tmp_path, on_state_change=changes.record, pause=soon, clock=lambda: now[0])
    async with ScriptedKubelet(tmp_path) as kubelet:
        running = asyncio.create_task(server.run())
        await changes.wait(lambda reasons: reasons[-1:] == [""])
        async with aclosing(kubelet.watch()) as watch:  # type: ignore[type-var]
            await anext(watch)
            now[0] += 100
            await asyncio.sleep(0.02)
            assert changes.reasons == [""]  # the stream is open
        while server._streams:
            await asyncio.sleep(0)
        now[0] += 100
        await changes.wait(
            lambda reasons: reasons[-2:] == ["the kubelet has closed the ListAndWatch stream; registering again", ""]
        )
        assert len(kubelet.registrations) == 2
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_it_registers_only_when_there_is_no_reason_against_it(tmp_path: Path) -> None:
    changes, why = StateChanges(), ["another plugin serves it"]
    server = PluginServer(
        EchoPlugin(), tmp_path, why_not_register=lambda: why[0], on_state_change=changes.record, pause=soon
    )
    async with ScriptedKubelet(tmp_path) as kubelet:
        running = asyncio.create_task(server.run())
        await changes.wait(lambda reasons: reasons == ["another plugin serves it"])
        assert kubelet.registrations == []
        why[0] = ""
        await changes.wait(lambda reasons: reasons[-1] == "")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_no_socket_is_left_at_the_end(tmp_path: Path) -> None:
    async with ScriptedKubelet(tmp_path), opened(EchoPlugin(), tmp_path) as (_, changes):
        await changes.wait(lambda reasons: reasons[-1:] == [""])
    assert list(tmp_path.iterdir()) == []
