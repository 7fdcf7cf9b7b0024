"""A device plugin against a scripted kubelet, over real sockets in a temporary folder."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from gputile.kubelet import messages as wire
from gputile.kubelet.device_plugin import SOCKET, Device, PluginError, PluginServer
from tests.kubelet.kubelet import ScriptedKubelet


class Echo:
    """A plugin that gives what it is told to."""

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


class Turns:
    """What the server said about being registered; `wait` for it."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._news = asyncio.Event()

    def hear(self, resource: str, why: str) -> None:
        self.said.append(why)
        self._news.set()

    async def wait(self, until: Callable[[list[str]], bool]) -> None:
        async with asyncio.timeout(5):
            while not until(self.said):
                self._news.clear()
                await self._news.wait()


async def soon(_: float) -> None:
    await asyncio.sleep(0)


Open = Callable[[Echo], Awaitable[Turns]]


@asynccontextmanager
async def opened(
    plugin: Echo, folder: Path, why_not_register: Callable[[], str] = lambda: ""
) -> AsyncIterator[tuple[PluginServer, Turns]]:
    turns = Turns()
    server = PluginServer(plugin, folder, why_not_register=why_not_register, on_state_change=turns.hear, pause=soon)
    running = asyncio.create_task(server.run())
    try:
        yield server, turns
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_it_registers_with_what_it_can_do(tmp_path: Path) -> None:
    async with ScriptedKubelet(tmp_path) as kubelet, opened(Echo(), tmp_path) as (_, turns):
        await turns.wait(lambda said: said[-1:] == [""])
        (said,) = kubelet.registrations
        assert said == wire.RegisterRequest(
            version="v1beta1",
            endpoint="gputile-gputile-io-gpu-1.sock",
            resource_name="gputile.io/gpu",
            options=wire.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True),
        )
        assert await kubelet.call("GetDevicePluginOptions", wire.Empty(), wire.DevicePluginOptions) == said.options


async def test_a_turn_that_fails_for_whatever_reason_is_tried_again(tmp_path: Path) -> None:
    reasons = iter([KeyError("nobody thought of this")])

    def once() -> str:
        for reason in reasons:
            raise reason
        return ""

    async with ScriptedKubelet(tmp_path), opened(Echo(), tmp_path, once) as (_, turns):
        await turns.wait(lambda said: said[-1:] == [""])
        assert turns.said == ["cannot be served: KeyError: 'nobody thought of this'", ""]


async def test_devices_are_told_and_told_again_when_they_change(tmp_path: Path) -> None:
    plugin = Echo()
    async with ScriptedKubelet(tmp_path) as kubelet, opened(plugin, tmp_path) as (server, turns):
        await turns.wait(lambda said: said[-1:] == [""])
        async with aclosing(kubelet.watch()) as watch:  # type: ignore[type-var]
            first = await anext(watch)
            plugin.has = (Device("a", False),)
            await server.notify_devices_changed()
            second = await anext(watch)
    assert [(one.id, one.health, [n.id for n in one.topology.nodes]) for one in first.devices] == [
        ("a", "Healthy", []),
        ("b", "Unhealthy", [1]),
    ]
    assert [(one.id, one.health) for one in second.devices] == [("a", "Unhealthy")]


async def test_calls_reach_the_plugin(tmp_path: Path) -> None:
    plugin = Echo()
    async with ScriptedKubelet(tmp_path) as kubelet, opened(plugin, tmp_path) as (_, turns):
        await turns.wait(lambda said: said[-1:] == [""])
        asked = wire.ContainerPreferredAllocationRequest(available=["x", "y", "z"], must_include=["z"], size=2)
        preferred = await kubelet.call(
            "GetPreferredAllocation",
            wire.PreferredAllocationRequest(containers=[asked]),
            wire.PreferredAllocationResponse,
        )
        given = await kubelet.call(
            "Allocate", wire.AllocateRequest(containers=[wire.DeviceIds(ids=["a"])]), wire.AllocateResponse
        )
        await kubelet.call("PreStartContainer", wire.DeviceIds(ids=["a"]), wire.Empty)
    assert preferred.containers == [wire.DeviceIds(ids=["z", "x"])]
    assert given.containers == [wire.ContainerAllocateResponse(envs={"IDS": "a"})]
    assert plugin.started == [["a"]]


@pytest.mark.parametrize(
    ("method", "asked", "says"),
    [
        pytest.param(
            "Allocate", wire.AllocateRequest(containers=[wire.DeviceIds(ids=["b"])]), "b is broken", id="allocate"
        ),
        pytest.param("PreStartContainer", wire.DeviceIds(ids=["b"]), "its pod has no grant", id="start"),
    ],
)
async def test_a_refusal_reaches_the_kubelet_as_a_sentence(
    tmp_path: Path, method: str, asked: wire.DeviceIds | wire.AllocateRequest, says: str
) -> None:
    async with ScriptedKubelet(tmp_path) as kubelet, opened(Echo(), tmp_path) as (_, turns):
        await turns.wait(lambda said: said[-1:] == [""])
        with pytest.raises(grpc.aio.AioRpcError) as no:
            await kubelet.call(method, asked, wire.Empty)
    assert (no.value.code(), no.value.details()) == (grpc.StatusCode.FAILED_PRECONDITION, says)


async def test_without_a_kubelet_it_says_so_once_and_waits(tmp_path: Path) -> None:
    async with opened(Echo(), tmp_path) as (_, turns):
        await turns.wait(lambda said: len(said) == 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(turns.said) == 1
        assert SOCKET in turns.said[0]
        async with ScriptedKubelet(tmp_path) as kubelet:
            await turns.wait(lambda said: said[-1] == "")
            assert len(kubelet.registrations) == 1


async def test_a_kubelet_that_was_restarted_hears_of_it_again(tmp_path: Path) -> None:
    """A kubelet that starts removes every socket of its folder."""
    async with opened(Echo(), tmp_path) as (_, turns):
        async with ScriptedKubelet(tmp_path):
            await turns.wait(lambda said: said[-1:] == [""])
        for socket in tmp_path.glob("*.sock"):
            socket.unlink()
        before = len(turns.said)
        async with ScriptedKubelet(tmp_path) as again:
            await turns.wait(lambda said: len(said) > before and said[-1] == "")
            given = await again.call("PreStartContainer", wire.DeviceIds(ids=["a"]), wire.Empty)
    assert given == wire.Empty()


async def test_sockets_that_a_killed_process_left_are_removed_and_others_stay(tmp_path: Path) -> None:
    for name in ("gputile-gputile-io-gpu.sock", "gputile-gputile-io-gpu-7.sock", "gputile-gputile-io-gpux-1.sock"):
        (tmp_path / name).touch()
    async with ScriptedKubelet(tmp_path), opened(Echo(), tmp_path) as (_, turns):
        await turns.wait(lambda said: said[-1:] == [""])
        left = {path.name for path in tmp_path.glob("gputile-*")}
    assert left == {"gputile-gputile-io-gpu-1.sock", "gputile-gputile-io-gpux-1.sock"}


async def test_a_folder_without_room_for_a_socket_is_borne(tmp_path: Path) -> None:
    endpoint = tmp_path / "gputile-gputile-io-gpu-1.sock"
    endpoint.mkdir()  # no socket can be made there
    async with ScriptedKubelet(tmp_path) as kubelet, opened(Echo(), tmp_path) as (_, turns):
        await turns.wait(lambda said: any("cannot serve in" in one for one in said))
        endpoint.rmdir()
        await turns.wait(lambda said: said[-1] == "")
        assert kubelet.registrations


async def test_a_kubelet_that_stopped_listening_hears_of_it_again(tmp_path: Path) -> None:
    turns, now = Turns(), [0.0]
    server = PluginServer(Echo(), tmp_path, on_state_change=turns.hear, pause=soon, clock=lambda: now[0])
    async with ScriptedKubelet(tmp_path) as kubelet:
        running = asyncio.create_task(server.run())
        await turns.wait(lambda said: said[-1:] == [""])
        async with aclosing(kubelet.watch()) as watch:  # type: ignore[type-var]
            await anext(watch)
            now[0] += 100
            await asyncio.sleep(0.02)
            assert turns.said == [""]  # it listens
        while server._streams:
            await asyncio.sleep(0)
        now[0] += 100
        await turns.wait(
            lambda said: said[-2:] == ["the kubelet does not listen to our devices; registering again", ""]
        )
        assert len(kubelet.registrations) == 2
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_name_that_it_may_not_take_is_not_registered_until_it_may(tmp_path: Path) -> None:
    turns, why = Turns(), ["another plugin serves it"]
    server = PluginServer(Echo(), tmp_path, why_not_register=lambda: why[0], on_state_change=turns.hear, pause=soon)
    async with ScriptedKubelet(tmp_path) as kubelet:
        running = asyncio.create_task(server.run())
        await turns.wait(lambda said: said == ["another plugin serves it"])
        assert kubelet.registrations == []
        why[0] = ""
        await turns.wait(lambda said: said[-1] == "")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_nothing_is_left_when_it_ends(tmp_path: Path) -> None:
    async with ScriptedKubelet(tmp_path), opened(Echo(), tmp_path) as (_, turns):
        await turns.wait(lambda said: said[-1:] == [""])
    assert list(tmp_path.iterdir()) == []
